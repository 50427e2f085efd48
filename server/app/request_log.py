"""`observability.log_requests`: a line a request, with the prompt only where that is wanted too."""

from __future__ import annotations

import logging
from typing import Any

from octavo.server.config import ServerObservabilityConfig
from octavo.server.openai.generation import Generation
from octavo.server.openai.protocol.common import shown

logger = logging.getLogger("octavo.server.requests")


def log_request(config: ServerObservabilityConfig, generation: Generation[Any]) -> None:
    """Log a request that was accepted. What clients wrote is quoted, so that it stays on its
    line."""
    if not config.log_requests:
        return
    prompts, body = generation.prompts, generation.body
    params, lengths = prompts[0].sampling, [len(prompt.token_ids) for prompt in prompts]
    facts = {
        "key": generation.key_name,
        "prompts": len(lengths),
        "prompt_tokens": sum(lengths),
        "n": params.n,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,
        "priority": body.priority,
        "stream": body.stream,
    }
    listed = " ".join(f"{name}={value}" for name, value in facts.items() if value is not None)
    if config.log_prompts:
        texts = [prompt.prompt or prompt.token_ids for prompt in prompts]
        listed += f" text={texts!r}"
    logger.info("request %s: %s", shown(generation.answer_id), listed)
