"""No run repeats, with room for all and chunked and preempted, and with the openings of a prompt."""

import pytest

from octavo import SamplingParams
from octavo.testing.tiny_model import generate, make_requests
from octavo_no_repeat_ngram import PROVIDERS

TIGHT = {
    "kv_cache": {"num_blocks": 14, "block_size": 8},
    "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 16},
}


def runs(tokens, size):
    return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("config", [{}, TIGHT])
def test_no_run_repeats(octavo_engine, config, size):
    plugin = ("logits_processor", PROVIDERS[0])
    allowed = [20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130]
    params = SamplingParams(extra_args={"no_repeat_ngram": size}, allowed_token_ids=allowed)
    engine = octavo_engine({**config, "logits_processors": ["no_repeat_ngram"]}, [plugin])
    for tokens in generate(engine, make_requests(6, [params])):
        found = runs(tokens, size)
        assert len(set(found)) == len(found), tokens


def test_without_it_runs_do_repeat(octavo_engine):
    params = SamplingParams(allowed_token_ids=[20, 30])
    answers = generate(octavo_engine(), make_requests(6, [params]))
    assert any(len(set(runs(tokens, 2))) < 9 for tokens in answers)
