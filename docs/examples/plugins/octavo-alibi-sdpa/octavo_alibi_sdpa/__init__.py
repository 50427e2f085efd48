"""What this package offers to Octavo. Importing it imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo import Provider, hookimpl

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="alibi_sdpa",
        factory="octavo_alibi_sdpa.attention_backend:AlibiSdpaAttention",
        options="octavo_alibi_sdpa.attention_backend:AlibiSdpaOptions",
        contract_version="1",
        rank=-1,  # only when named; give it a rank from 0 on to let `auto` choose it
        summary="PyTorch's attention over gathered pages, with ALiBi",
    ),
]


@hookimpl
def octavo_attention_backends() -> list[Provider[Any]]:
    return PROVIDERS
