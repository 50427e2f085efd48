"""From the configuration to what compiles grammars. Nothing heavy happens before it is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octavo.core.contracts.grammar_engine import GrammarEngine, GrammarEngineContext
from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.errors import PluginError
from octavo.plugins.structured_output import wire
from octavo.plugins.structured_output.compiler import GrammarCompiler, Tools
from octavo.plugins.structured_output.grammars import Grammars
from octavo.plugins.structured_output.vocabulary import make_vocabulary

if TYPE_CHECKING:
    from octavo.core.config.resolve import Resolved
    from octavo.core.registry import Registry, Selection

NONE = "none"


def make_grammars(
    resolved: Resolved,
    registry: Registry,
    vocab_size: int,
    make_tokenizer: Callable[[], Tokenizer],
) -> Grammars:
    """What the engine asks for grammars. vocab_size: rows of the model's head. make_tokenizer:
    called on another thread, when the first grammar is needed."""
    selection = resolved.selections["grammar_engine"]
    settings = resolved.config.structured_outputs
    if selection.name == NONE:
        return Grammars(None, refusal=_refusal(selection))

    def make_tools() -> Tools:
        vocabulary = make_vocabulary(make_tokenizer(), vocab_size)
        engine: GrammarEngine = registry.create(selection, GrammarEngineContext(vocabulary))
        if not engine.isolated:
            return Tools(engine, None)
        plugins = resolved.config.plugins
        start = wire.Start(
            load=[*plugins.load, *_handed_over(selection, engine)],
            disable=plugins.disable,
            only=plugins.only,
            name=selection.name,
            options=selection.options.model_dump(mode="json"),
            tokens=list(vocabulary.tokens),
            end_token_ids=list(vocabulary.end_token_ids),
            timeout_s=settings.compile_timeout_s,
            memory_bytes=settings.compile_memory_bytes,
            processes=settings.compile_processes,
            max_bytes=settings.max_grammar_bytes,
        )
        return Tools(engine, start)

    grammars = Grammars(GrammarCompiler(make_tools), cache_bytes=settings.cache_bytes)
    if settings.preload is True:
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
