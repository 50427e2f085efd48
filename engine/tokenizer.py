"""Makes the configured tokenizer: for the text side, and for extensions of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.contracts.tokenizer import Tokenizer, TokenizerContext
from octavo.core.errors import ModelNotFound

if TYPE_CHECKING:
    from octavo.core.registry import Registry
    from octavo.engine.resolve import Resolved


def make_tokenizer(resolved: Resolved, registry: Registry) -> Tokenizer:
    """The tokenizer that the configuration selects."""
    folder = resolved.tokenizer_dir
    if folder is None:
        raise ModelNotFound(
            f"'{resolved.config.model.source}' comes without tokenizer files: set model.tokenizer"
        )
    context = TokenizerContext(
        folder=folder,
        config=resolved.model_config,
        generation_config=resolved.generation_config,
        trust_remote_code=resolved.config.model.trust_remote_code,
        chat_template=resolved.config.model.chat_template,
        content_format=resolved.config.model.chat_template_content_format,
    )
    tokenizer = registry.create(resolved.selections["tokenizer"], context)
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer
