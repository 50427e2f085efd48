"""Conversations to prompts: where their templates are rendered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.contracts.tokenizer import ChatSource
from octavo.server.config import ServerConfig
from octavo.server.process.engine import Engine
from octavo.server.templates.renderer import ChatRenderer

PROCESSES = 4
"""Most chats that are rendered at once, apart from those that bring a template."""

PROCESSES_FOR_REQUESTS = 2
"""Likewise of those that bring one: they have processes of their own, so that a bad one delays
only its like."""

CHARACTERS = 2
"""Longest prompt, in characters a byte of the largest request."""


class Chats:
    """Renders in processes that can be killed, where the tokenizer can tell how
    (`Tokenizer.chat_source`), else in a thread of this one."""

    def __init__(self, llm: Engine, config: ServerConfig) -> None:
        self._llm, self._config = llm, config
        self._own: ChatRenderer | None = None
        self._requests: ChatRenderer | None = None
        self._preparing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """The tokenizer is there."""
        source = self._llm.tokenizer.chat_source()
        if source is not None:
            self._own = self._renderer(source, PROCESSES)
            self._requests = self._renderer(source, PROCESSES_FOR_REQUESTS)
            self._preparing = asyncio.create_task(self._prepare(self._own))

    @staticmethod
    async def _prepare(renderer: ChatRenderer) -> None:
        with contextlib.suppress(Exception):  # the first chat will meet it again, and tell
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
        """The text of the prompt. arguments: of `Engine.chat_text`. Raises `RequestError`."""
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
