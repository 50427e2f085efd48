"""`ChatRenderers`: which processes render a chat."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.contracts.tokenizer import ChatSource
from octavo.frontend.async_llm import AsyncLLM
from octavo.server.config import ServerConfig
from octavo.server.templates.renderer import ChatRenderer

PROCESSES = 4
"""Chats rendered at once with the model's template."""

PROCESSES_FOR_REQUESTS = 2
"""Chats rendered at once with a template from the request. They have processes of their own, so
that a bad template delays only others of its kind."""

CHARACTERS = 2
"""Longest prompt, in characters a byte of the largest request."""


class ChatRenderers:
    """Renders chats in processes that can be killed where the tokenizer says how
    (`Tokenizer.chat_source`), else in a thread of this one."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self._llm, self._config = llm, config
        self._own: ChatRenderer | None = None
        self._requests: ChatRenderer | None = None
        self._preparing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Make the renderers; the tokenizer must be loaded."""
        source = self._llm.tokenizer.chat_source()
        if source is not None:
            self._own = self._renderer(source, PROCESSES)
            self._requests = self._renderer(source, PROCESSES_FOR_REQUESTS)
            self._preparing = asyncio.create_task(self._prepare(self._own))

    @staticmethod
    async def _prepare(renderer: ChatRenderer) -> None:
        with contextlib.suppress(Exception):  # the first chat meets the same error and reports it
            await renderer.prepare()

    def _renderer(self, source: ChatSource, processes: int) -> ChatRenderer:
        config = self._config
        return ChatRenderer(
            source,
            timeout_s=config.chat_template_timeout_s,
            memory=config.chat_template_memory_bytes,
            longest=CHARACTERS * config.max_body_bytes,
            processes=processes,
        )

    async def render(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> str:
        """The text of the prompt. arguments: of `AsyncLLM.chat_text`. Raises `RequestError`."""
        template = arguments.get("chat_template")
        renderer = self._own if template is None else self._requests
        if renderer is None:
            return await self._llm.chat_text(messages, **arguments)
        return await renderer.render(
            messages,
            tools=arguments["tools"],
            add_generation_prompt=arguments["add_generation_prompt"],
            continue_final_message=arguments["continue_final_message"],
            template=template,
            kwargs=arguments["chat_template_kwargs"],
        )

    async def close(self) -> None:
        """End the processes."""
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.gather(self._preparing, return_exceptions=True)
        for renderer in (self._own, self._requests):
            if renderer is not None:
                await renderer.close()
