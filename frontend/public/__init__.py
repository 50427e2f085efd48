"""Octavo: an LLM inference and serving engine whose parts are plugins.

Everything here is imported lazily, so that `import octavo` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "LLM": "octavo.frontend.llm",
    "AsyncLLM": "octavo.frontend.async_llm",
    "SamplingParams": "octavo.frontend.vllm.differences",  # where it learns vLLM's parameters
    "StructuredOutputsParams": "octavo.core.structured_outputs",
    "TextPrompt": "octavo.frontend.text.inputs",
    "TokensPrompt": "octavo.frontend.text.inputs",
    "RequestOutput": "octavo.frontend.outputs",
    "CompletionOutput": "octavo.frontend.outputs",
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
    from octavo.core.contracts import Provider, hookimpl
    from octavo.core.errors import OctavoError, RequestError
    from octavo.core.sampling_params import SamplingParams
    from octavo.core.structured_outputs import StructuredOutputsParams
    from octavo.frontend.async_llm import AsyncLLM
    from octavo.frontend.llm import LLM
    from octavo.frontend.outputs import CompletionOutput, RequestOutput
    from octavo.frontend.text.inputs import TextPrompt, TokensPrompt


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'octavo' has no attribute '{name}'")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
