"""Octavo: an LLM inference and serving engine whose parts are plugins.

Everything here is imported lazily, so that `import octavo` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "LLM": "octavo.core.llm",
    "AsyncLLM": "octavo.core.async_llm",
    "SamplingParams": "octavo.core.sampling_params",
    "StructuredOutputsParams": "octavo.core.structured_outputs",
    "TextPrompt": "octavo.core.text.inputs",
    "TokensPrompt": "octavo.core.text.inputs",
    "RequestOutput": "octavo.core.outputs",
    "CompletionOutput": "octavo.core.outputs",
    "hookimpl": "octavo.core.contracts",
    "Provider": "octavo.core.contracts",
    "OctavoError": "octavo.core.errors",
    "RequestError": "octavo.core.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "OctavoError",
    "Provider",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "hookimpl",
]

if TYPE_CHECKING:
    from octavo.core.async_llm import AsyncLLM
    from octavo.core.contracts import Provider, hookimpl
    from octavo.core.errors import OctavoError, RequestError
    from octavo.core.llm import LLM
    from octavo.core.outputs import CompletionOutput, RequestOutput
    from octavo.core.sampling_params import SamplingParams
    from octavo.core.structured_outputs import StructuredOutputsParams
    from octavo.core.text.inputs import TextPrompt, TokensPrompt


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'octavo' has no attribute '{name}'")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
