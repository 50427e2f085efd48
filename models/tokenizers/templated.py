"""What every tokenizer with the model's own chat templates shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.contracts.tokenizer import ChatSource, Tokenizer, TokenizerContext
from octavo.models.tokenizers.chat import ChatTemplates
from octavo.models.tokenizers.files import DEFAULT_TEMPLATE, chat_templates, given_template


class TemplatedTokenizer(Tokenizer):
    """Renders chats by the templates of the model's folder, or by the one that was given."""

    _chat: ChatTemplates
    _source: ChatSource

    def _set_templates(self, context: TokenizerContext, tokens: Mapping[str, str]) -> None:
        """tokens: texts of the special tokens by name (`bos_token`, ...)."""
        templates = chat_templates(context.folder)
        if context.chat_template is not None:
            templates = {DEFAULT_TEMPLATE: given_template(context.chat_template)}
        arguments: dict[str, Any] = {
            "templates": templates,
            "special_tokens": dict(tokens),
            "content_format": context.content_format,
        }
        self._chat = ChatTemplates(**arguments)
        self._source = ChatSource("octavo.models.tokenizers.chat:ChatTemplates", arguments)

    def chat_source(self) -> ChatSource:
        return self._source

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        return self._chat.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template=template,
            kwargs=kwargs,
        )
