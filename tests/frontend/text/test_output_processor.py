from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.sampling_params import SamplingParams
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.text.detokenizer import TokenTable
from octavo.frontend.text.inputs import InputProcessor, PreparedRequest
from octavo.frontend.text.output_processor import OutputMode, OutputProcessor
from octavo.testing.byte_tokenizer import ByteTokenizer
from octavo.testing.scripted_engine import ScriptedEngine

TOKENIZER = ByteTokenizer()
TABLE = TokenTable(TOKENIZER)
END = TOKENIZER.id_of("<|end|>")


class Front:
    """An engine, an output processor, and every update by request."""

    def __init__(self, reply: str | list[int] = "", **engine: object) -> None:
        tokens = TOKENIZER.encode(reply) if isinstance(reply, str) else reply
        self.engine = ScriptedEngine(lambda request: tokens, **engine)  # type: ignore[arg-type]
        self.inputs = InputProcessor(TOKENIZER, max_model_len=500)
        self.processor = OutputProcessor(TABLE, self.engine.abort)
        self.updates: dict[str, list[RequestOutput]] = {}

    def add(self, mode: OutputMode = "final", name: str = "r", **params: object) -> PreparedRequest:
        params.setdefault("max_tokens", 100)
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        prepared = self.inputs.prepare("Hello", sampling, request_id=name)
        self.processor.add(prepared, mode)
        for request in prepared.requests:
            self.engine.add(request)
        return prepared

    def step(self) -> None:
        outputs = self.engine.step()
        assert outputs is not None
        for update in self.processor.process(outputs):
            self.updates.setdefault(update.request_id, []).append(update)

    def run(self, mode: OutputMode = "final", **params: object) -> RequestOutput:
        """The last output of one request."""
        self.add(mode, **params)
        while self.engine.has_work():
            self.step()
        assert len(self.processor) == 0
        last = self.updates["r"][-1]
        assert last.finished
        return last


TOKENS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=40)


@given(
    reply=TOKENS,
    width=st.integers(2, 6),
    stop=st.sampled_from([None, ["a"], ["é", "of"], ["<|tool|>"], ["\n\n"]]),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
)
def test_steps_of_any_width_give_the_same_output(
    reply: list[int], width: int, stop: list[str] | None, include: bool, min_tokens: int
) -> None:
    params = {"stop": stop, "include_stop_str_in_output": include, "min_tokens": min_tokens}
    one = Front(reply).run(**params).outputs[0]
    wide = Front(reply, width=width).run(**params).outputs[0]
    seen = [(o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in (one, wide)]
    assert seen[0] == seen[1]


@given(reply=TOKENS, stop=st.sampled_from([None, ["a", "ab"], [" the"]]), width=st.integers(1, 3))
def test_deltas_join_to_the_whole(reply: list[int], stop: list[str] | None, width: int) -> None:
    whole = Front(reply, width=width).run("final", stop=stop, logprobs=1)
    front = Front(reply, width=width)
    front.run("delta", stop=stop, logprobs=1)
    first, *rest = front.updates["r"]
    for later in rest:
        first.extend(later)
    got, expected = first.outputs[0], whole.outputs[0]
    assert got.text == expected.text
    assert got.token_ids == expected.token_ids
    assert got.logprobs == expected.logprobs
    assert got.cumulative_logprob == expected.cumulative_logprob
    assert (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert first.finished


def test_cumulative_outputs_keep_what_they_were_when_read_late() -> None:
    front = Front("The capital of France")
    front.run("cumulative", logprobs=0)
    updates = front.updates["r"]
    texts = [update.outputs[0].text for update in updates]
    assert texts[-1] == "The capital of France"
    for count, update in enumerate(updates, 1):
        output = update.outputs[0]
        assert output.token_ids == TOKENIZER.encode("The capital of France")[:count]
        assert output.logprobs is not None
        assert len(output.logprobs) == count
        assert output.text == TOKENIZER.decode(output.token_ids)
    assert pickle.loads(pickle.dumps(updates[2])).outputs[0].text == texts[2]
    with pytest.raises(AttributeError, match="no attribute 'txt'"):
        updates[0].outputs[0].txt  # type: ignore[attr-defined]  # noqa: B018


def test_final_mode_says_nothing_before_the_end() -> None:
    front = Front("abc")
    front.run("final")
    assert len(front.updates["r"]) == 1


def test_an_end_token_is_a_token_but_not_text() -> None:
    reply = [*TOKENIZER.encode("Yes"), END, *TOKENIZER.encode("no")]
    output = Front(reply).run(skip_special_tokens=False).outputs[0]
    assert (output.text, output.token_ids[-1]) == ("Yes", END)
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    kept = Front(reply).run(skip_special_tokens=False, include_stop_str_in_output=True).outputs[0]
    assert kept.text == "Yes<|end|>"
    ignored = Front(reply).run(ignore_eos=True).outputs[0]
    assert (ignored.text, ignored.finish_reason) == ("Yesno", "length")


def test_a_stop_token_is_the_stop_reason() -> None:
    output = Front("abc").run(stop_token_ids=[ord("b")]).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", ord("b"))
    assert output.token_ids == [ord("a"), ord("b")]


def test_a_stop_string_aborts_and_drops_what_follows() -> None:
    front = Front("One. Two. Three", width=4)
    output = front.run(stop=["wo"], logprobs=0).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("One. T", "stop", "wo")
    assert output.token_ids == TOKENIZER.encode("One. Two")
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    assert front.engine.aborted == [front.engine.seen[0].handle]


def test_a_stop_string_counts_where_the_engine_ends_in_the_same_step() -> None:
    front = Front("ab", width=2)
    output = front.run(stop=["a"], max_tokens=2).outputs[0]
    assert (output.text, output.token_ids, output.finish_reason) == ("", [ord("a")], "stop")
    assert front.engine.aborted == []


def test_text_held_for_a_stop_string_comes_at_the_end() -> None:
    front = Front("abc<")
    front.run("delta", stop=["<|stop|>"])
    assert [u.outputs[0].text for u in front.updates["r"]] == ["a", "b", "c", "<"]
    front = Front("abc<d")
    front.run("delta", stop=["<|stop|>"])
    assert [u.outputs[0].text for u in front.updates["r"]] == ["a", "b", "c", "", "<d"]


def test_a_character_cut_by_the_length_limit_is_replaced() -> None:
    output = Front(list("é€".encode())).run(max_tokens=3).outputs[0]
    assert (output.text, output.finish_reason) == ("é\ufffd", "length")


def test_no_text_without_detokenization() -> None:
    output = Front("abc").run(detokenize=False).outputs[0]
    assert (output.text, output.token_ids) == ("", [97, 98, 99])


def test_max_tokens_zero_gives_the_prompt_only() -> None:
    last = Front("abc").run(max_tokens=0, prompt_logprobs=0, logprobs=0)
    output = last.outputs[0]
    assert (output.text, output.token_ids, output.logprobs) == ("", [], [])
    assert output.finish_reason == "length"
    assert last.prompt_logprobs is not None
    assert len(last.prompt_logprobs) == 5


def test_logprobs_are_dicts_with_the_sampled_token_first() -> None:
    output = Front("c").run(logprobs=2).outputs[0]
    assert output.logprobs is not None
    (position,) = output.logprobs
    assert list(position) == [ord("c"), 0, 1]
    sampled = position[ord("c")]
    assert sampled.logprob == pytest.approx(-0.99)
    assert (sampled.rank, sampled.decoded_token) == (100, "c")
    assert [position[t].rank for t in (0, 1)] == [1, 2]
    assert output.cumulative_logprob == pytest.approx(-0.99)
    assert Front("c").run().outputs[0].logprobs is None


def test_a_sampled_token_among_the_alternatives_is_not_repeated() -> None:
    output = Front([1]).run(logprobs=3).outputs[0]
    assert output.logprobs is not None
    assert list(output.logprobs[0]) == [1, 0, 2]
    assert output.logprobs[0][1].rank == 2


def test_prompt_logprobs_have_none_first() -> None:
    front = Front("ab")
    front.run("delta", prompt_logprobs=1)
    first, second = front.updates["r"]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    tokens = [next(iter(position)) for position in first.prompt_logprobs[1:] if position]
    assert tokens == TOKENIZER.encode("Hello")[1:]
    assert second.prompt_logprobs is None


def test_choices_are_collected_by_request() -> None:
    front = Front()
    front.engine.reply = lambda request: TOKENIZER.encode("abcdef")[: 2 + request.index]
    last = front.run(n=3)
    assert [(o.index, o.text) for o in last.outputs] == [(0, "ab"), (1, "abc"), (2, "abcd")]
    front = Front()
    front.engine.reply = lambda request: TOKENIZER.encode("abcdef")[: 2 + request.index]
    front.run("delta", n=3)
    seen = [[o.index for o in update.outputs] for update in front.updates["r"]]
    assert seen == [[0, 1, 2], [0, 1, 2], [1, 2], [2]]
    assert [update.finished for update in front.updates["r"]] == [False, False, False, True]


def test_an_error_of_one_choice_ends_its_request_alone() -> None:
    def fail(request: object) -> str | None:
        bad = request.index == 1 and request.request_id == "bad"  # type: ignore[attr-defined]
        return "every token is masked" if bad else None

    front = Front("abc", fail=fail)
    front.add(name="good")
    front.add(name="bad", n=3)
    while front.engine.has_work():
        front.step()
    (bad,), (good,) = front.updates["bad"], front.updates["good"]
    assert bad.error == "every token is masked"
    assert {o.finish_reason for o in bad.outputs} == {"error"}
    assert bad.finished
    assert good.error is None
    assert good.outputs[0].text == "abc"
    assert len(front.engine.aborted) == 2


def test_an_aborted_request_has_a_last_output() -> None:
    front = Front("abcdef")
    prepared = front.add("cumulative", n=2)
    front.step()
    last = front.processor.abort("r")
    assert front.engine.aborted == [request.handle for request in prepared.requests]
    assert last is not None
    assert last.finished
    assert [(o.text, o.finish_reason) for o in last.outputs] == [("a", "abort")] * 2
    assert front.processor.abort("r") is None
    assert len(front.engine.aborted) == 2
    front.step()  # tokens that were on their way
    assert len(front.updates["r"]) == 1


def test_metrics_and_cache_hits_are_reported() -> None:
    last = Front("abc").run()
    assert last.num_cached_tokens == 0
    assert last.metrics is not None
    assert last.metrics.num_generation_tokens == 3
    times = (
        last.metrics.arrival_time,
        last.metrics.first_token_time,
        last.metrics.last_token_time,
        last.metrics.finished_time,
    )
    assert list(times) == sorted(t for t in times if t is not None)
