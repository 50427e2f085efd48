"""`LLM`: an engine in the calling thread, for batches and scripts."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.errors import EngineDeadError, GenerationError, RequestError, failure
from octavo.core.sampling_params import SamplingParams
from octavo.frontend.caller_thread import DelayedInterrupt, Turns
from octavo.frontend.client import Engine, InlineClient
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.progress import Progress
from octavo.frontend.text.chat import Conversation, render_chat
from octavo.frontend.text.detokenizer import TokenTable
from octavo.frontend.text.inputs import InputProcessor, PreparedRequest, Prompt
from octavo.frontend.text.output_processor import OutputMode, OutputProcessor
from octavo.frontend.vllm.differences import ARGUMENTS, METHODS

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.frontend.assembly import ConfigSource

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """Generates text for lists of prompts, with vLLM's names and result shapes.

    model: folder, hub id, .gguf file or `package:NAME`. config: a YAML file's path, or a mapping of
    the same form. plugins: objects or paths to register beside the installed ones. tokenizer: where
    it comes from when it is not the model's own, or a `Tokenizer`. Other keywords are vLLM's
    (`dtype`, `max_model_len`, `gpu_memory_utilization`, ...) and win over `config`.

    Any thread may call, and the engine runs in the one that does. Calls of other threads wait
    until it has returned; a stream has its turn item by item, so that other calls, of its own
    thread too, may come between. For many callers at once, `AsyncLLM` batches their requests.
    Close it, or use it as a context manager.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: ConfigSource | EngineConfig | None = None,
        plugins: Iterable[Any] = (),
        tokenizer: str | Tokenizer | None = None,
        progress: Callable[[str], None] | None = None,
        **keywords: Any,
    ) -> None:
        from octavo.engine.resolve import resolve
        from octavo.engine.tokenizer import make_tokenizer
        from octavo.frontend import assembly

        named = tokenizer if isinstance(tokenizer, str) else None
        settings, registry = assembly.configure(
            model, config=config, plugins=plugins, tokenizer=named, keywords=keywords
        )
        resolved = resolve(settings, registry)
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = make_tokenizer(resolved, registry)
        inputs = assembly.make_inputs(resolved, tokenizer)
        self._set_up(assembly.build(resolved, registry, progress, tokenizer), inputs)

    @classmethod
    def from_engine(cls, engine: Engine, inputs: InputProcessor) -> Self:
        """An `LLM` around an engine that was built by hand."""
        self = cls.__new__(cls)
        self._set_up(engine, inputs)
        return self

    def _set_up(self, engine: Engine, inputs: InputProcessor) -> None:
        self._client = InlineClient(engine)
        self._inputs = inputs
        self._processor = OutputProcessor(TokenTable(inputs.tokenizer), self._client.abort)
        if engine.report is not None:
            inputs.max_sequence_tokens = engine.report.max_sequence_tokens
        self._results: dict[str, RequestOutput | None] = {}  # live requests and their last output
        self._ids = itertools.count()
        self._turns = Turns()
        self._left: deque[str] = deque()  # requests of streams whose reader has gone

    def __getattr__(self, name: str) -> Any:
        """Called for missing attributes only: says what to do instead of a method of vLLM's."""
        if name in METHODS:
            raise AttributeError(f"LLM.{name}: {METHODS[name].message}")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    # ---- generation ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        lora_request: None = None,
        prompt_token_ids: None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; results come in the order of the prompts.

        sampling_params: one for all, or one a prompt; None: the model's defaults. A prompt that is
        invalid raises `RequestError` before anything runs. Requests that fail while they run raise
        `GenerationError` after all others have finished.
        """
        if lora_request is not None:
            raise RequestError(ARGUMENTS["lora_request"].message, param="lora_request")
        if prompt_token_ids is not None:
            raise RequestError(ARGUMENTS["prompt_token_ids"].message, param="prompt_token_ids")
        if prompts is None:
            raise RequestError("expected a prompt or a list of prompts, got None", param="prompts")
        many = _is_batch(prompts)
        batch: Sequence[Prompt] = prompts if many else [prompts]  # type: ignore[assignment,list-item]
        with self._turns:
            return self._run(batch, sampling_params, use_tqdm, priority=priority, many=many)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, rendered with the model's chat template.
        continue_final_message: the last message is left open, and the answer continues it."""
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if many else [messages]
        prompts: list[Prompt] = []
        with self._turns:
            for place, conversation in enumerate(conversations):
                try:
                    prompts.append(
                        render_chat(
                            self._inputs,
                            conversation,
                            template=chat_template,
                            add_generation_prompt=add_generation_prompt,
                            continue_final_message=continue_final_message,
                            tools=tools,
                            kwargs=chat_template_kwargs,
                        )
                    )
                except RequestError as error:
                    raise _placed(error, place if many else None) from None
            return self._run(prompts, sampling_params, use_tqdm, many=many)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt; every output holds only what is new. Leaving the loop early aborts
        the request."""
        with self._turns:
            prepared = self._prepare(prompt, sampling_params)
        return self._stream(prepared)

    def _stream(self, prepared: PreparedRequest) -> Iterator[RequestOutput]:
        try:
            with self._turns:
                self._submit([prepared], "delta")
            finished = False
            while not finished:
                with self._turns:
                    update = self._next(prepared)
                finished = update.finished
                yield update
        finally:
            self._leave(prepared.request_id)

    def _next(self, prepared: PreparedRequest) -> RequestOutput:
        """What is new of a stream. Another call may have stepped the engine meanwhile."""
        request_id = prepared.request_id
        while self._results[request_id] is None:
            self._advance()
        update, self._results[request_id] = self._results[request_id], None
        assert update is not None, "looked for just now"
        if update.error is not None:
            raise failure(update.error, update.error_param, update.error_code)
        self._add_timeline(prepared, update)
        return update

    def _leave(self, request_id: str) -> None:
        """A stream has ended, or its reader has gone. While another call runs, that call aborts the
        request."""
        self._left.append(request_id)
        if self._turns.try_enter():
            try:
                self._forget_left()
            finally:
                self._turns.__exit__()

    def _forget_left(self) -> None:
        while self._left:
            self._abort([self._left.popleft()])

    # ---- the rest --------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine, for inspection; it advances only while a method of this class runs."""
        return self._client.engine

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self._inputs.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` means for this model."""
        return self._inputs.default_sampling_params()

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output, in tokens."""
        return self._inputs.max_model_len

    @property
    def report(self) -> Any:
        """The startup report."""
        return self._client.engine.report

    def metrics(self) -> dict[str, Any]:
        """Times of the phases of a step, and the scheduler's state."""
        with self._turns:
            metrics: dict[str, Any] = self._client.call("metrics").result()
        return metrics

    def reset_prefix_cache(self) -> bool:
        """Forget cached prompts; False while requests run."""
        with self._turns:
            self._forget_left()
            return bool(self._client.call("reset_prefix_cache").result())

    def close(self) -> None:
        """Stop the engine and free its memory."""
        with self._turns:
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- the loop --------------------------------------------------------------------------------

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params,
        use_tqdm: bool,
        *,
        many: bool,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        params = _one_each("sampling_params", sampling_params, len(prompts))
        priorities = _one_each("priority", priority, len(prompts))
        prepared = []
        for place, (prompt, each, rank) in enumerate(zip(prompts, params, priorities, strict=True)):
            try:
                prepared.append(self._prepare(prompt, each, priority=rank))
            except RequestError as error:
                raise _placed(error, place if many else None) from None
        ids = [each.request_id for each in prepared]
        try:
            self._submit(prepared, "final", many)
            self._finish(ids, use_tqdm)
            results = [self._results[request_id] for request_id in ids]
            for each, result in zip(prepared, results, strict=True):
                self._add_timeline(each, result)
        finally:
            self._abort(ids)
        return _checked([result for result in results if result is not None], many)

    def _add_timeline(self, prepared: PreparedRequest, output: RequestOutput | None) -> None:
        if output is not None and output.finished and prepared.sampling.timeline:
            output.timeline = self._client.call("query", "timeline", prepared.request_id).result()

    def _prepare(
        self, prompt: Prompt, sampling: SamplingParams | None, priority: int = 0
    ) -> PreparedRequest:
        self._client.check_alive()
        return self._inputs.prepare(
            prompt, sampling, request_id=str(next(self._ids)), priority=priority
        )

    def _submit(
        self, prepared: Sequence[PreparedRequest], mode: OutputMode, many: bool = False
    ) -> None:
        for place, each in enumerate(prepared):
            self._processor.add(each, mode)
            self._results[each.request_id] = None
            try:
                self._client.add(each.requests)
            except RequestError as error:
                raise _placed(error, place if many else None) from None

    def _finish(self, ids: Sequence[str], use_tqdm: bool) -> None:
        waiting = set(ids)
        with Progress(len(ids), shown=use_tqdm) as progress:
            while waiting:
                for update in self._advance():
                    if update.finished and update.request_id in waiting:
                        waiting.discard(update.request_id)
                        progress.add(update)

    def _advance(self) -> list[RequestOutput]:
        """Run one step. Updates are also kept in `_results`, for the calls that wait for them."""
        self._forget_left()
        if not self._client.has_work():
            self._client.check_alive()
            raise EngineDeadError(f"the engine lost requests {self._processor.request_ids}")
        with DelayedInterrupt():
            outputs = self._client.step()
        if outputs is None:
            return []
        updates = self._processor.process(outputs)
        for update in updates:
            earlier = self._results.get(update.request_id)
            if earlier is not None:  # a delta that its reader has not taken yet
                earlier.extend(update)
            elif update.request_id in self._results:
                self._results[update.request_id] = update
        return updates

    def _abort(self, ids: Sequence[str]) -> None:
        """Forget these requests and abort those that still run."""
        for request_id in ids:
            self._results.pop(request_id, None)
            self._processor.abort(request_id)


def _is_batch(prompts: Any) -> bool:
    """Whether this is a list of prompts: not a text, a mapping or one list of token ids."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        return False
    return not (prompts and isinstance(prompts[0], Integral))


def _one_each(name: str, value: Any, count: int) -> Sequence[Any]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} items for {count} prompts", param=name)
    return value


def _placed(error: RequestError, place: int | None) -> RequestError:
    """The same error, naming which of several prompts it is about."""
    if place is None:
        return error
    return type(error)(f"prompts[{place}]: {error.message}", param=error.param, code=error.code)


def _checked(results: list[RequestOutput], many: bool) -> list[RequestOutput]:
    failed = [(place, result.error) for place, result in enumerate(results) if result.error]
    if not failed:
        return results
    where = "; ".join(
        f"prompts[{place}]: {error}" if many else str(error) for place, error in failed
    )
    raise GenerationError(where, results)
