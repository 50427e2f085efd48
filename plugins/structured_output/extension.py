"""Engine extension `structured_output`: holds requests until their grammar is compiled, and keeps
their output to it. Nothing heavy happens before it is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from octavo.core.contracts.engine_extension import EngineExtension, EngineExtensionContext
from octavo.core.contracts.grammar_engine import GrammarEngine, GrammarEngineContext
from octavo.core.contracts.observer import RequestRecord
from octavo.core.contracts.provider import Options
from octavo.core.errors import PluginError, RequestError
from octavo.core.messages import EngineRequest
from octavo.plugins.structured_output import wire
from octavo.plugins.structured_output.compiler import GrammarCompiler, Tools
from octavo.plugins.structured_output.grammars import Grammars
from octavo.plugins.structured_output.processor import GrammarProcessor
from octavo.plugins.structured_output.vocabulary import make_vocabulary

if TYPE_CHECKING:
    from octavo.core.registry import Selection

NONE = "none"


class StructuredOutput(EngineExtension):
    """See the module. vocab_size: rows of the model's head."""

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        self.grammars = grammars
        self._processor = GrammarProcessor(grammars.of, vocab_size)

    def admit(self, request: EngineRequest) -> bool:
        if request.sampling.structured_outputs is None:
            return True
        self.grammars.add(request)
        return False

    def poll(self, wait_s: float) -> Iterable[tuple[EngineRequest, RequestError | None]]:
        return self.grammars.take(wait_s)

    def abort(self, handles: Sequence[int]) -> Iterable[int]:
        return self.grammars.abort(handles)

    def on_finished(self, record: RequestRecord) -> None:
        self.grammars.forget(record.handle)

    def host_processors(self) -> Sequence[GrammarProcessor]:
        return (self._processor,)

    def close(self) -> None:
        self.grammars.close()


def make_structured_output(options: Options, context: EngineExtensionContext) -> StructuredOutput:
    """The extension for an engine, by the configuration's section `structured_outputs`."""
    return StructuredOutput(_make_grammars(context), context.vocab_size)


def _make_grammars(context: EngineExtensionContext) -> Grammars:
    selection: Selection | None = context.selections.get("grammar_engine")
    create = context.create
    if selection is None or create is None:
        return Grammars(None)
    if selection.name == NONE:
        return Grammars(None, refusal=_refusal(selection))
    settings = context.config["structured_outputs"]

    def make_tools() -> Tools:
        vocabulary = make_vocabulary(context.make_tokenizer(), context.vocab_size)
        engine: GrammarEngine = create(selection, GrammarEngineContext(vocabulary))
        if not engine.isolated:
            return Tools(engine, None)
        plugins = context.config["plugins"]
        start = wire.Start(
            load=[*plugins["load"], *_handed_over(selection, engine)],
            disable=plugins["disable"],
            only=plugins["only"],
            name=selection.name,
            options=selection.options.model_dump(mode="json"),
            tokens=list(vocabulary.tokens),
            end_token_ids=list(vocabulary.end_token_ids),
            timeout_s=settings["compile_timeout_s"],
            memory_bytes=settings["compile_memory_bytes"],
            processes=settings["compile_processes"],
            max_bytes=settings["max_grammar_bytes"],
        )
        return Tools(engine, start)

    grammars = Grammars(GrammarCompiler(make_tools), cache_bytes=settings["cache_bytes"])
    if settings["preload"] is True:
        grammars.preload()
    return grammars


def _refusal(selection: Selection) -> str:
    reasons = [f"{name}: {why}" for name, why in selection.rejected]
    why = "; ".join(reasons) or "structured_outputs.engine is none"
    return f"structured output is not available: no grammar engine is in use ({why})"


def _handed_over(selection: Selection, engine: GrammarEngine) -> list[str]:
    """How another process finds an engine that was given as an object or file."""
    if not selection.registered.source.preferred:
        return []
    cls: type[Any] = type(engine)
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if "<locals>" in cls.__qualname__ or file is None:
        raise PluginError(
            f"grammar_engine '{selection.name}' compiles in a process of its own, so its class "
            f"must be importable by name; {cls.__module__}.{cls.__qualname__} is not (or set "
            "isolated = False)",
            kind="grammar_engine",
            name=selection.name,
        )
    importable = cls.__module__ != "__main__" and not cls.__module__.startswith("octavo_file_")
    return [f"{cls.__module__ if importable else file}:{cls.__qualname__}"]
