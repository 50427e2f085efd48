"""Built-in scheduler policies. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

_HERE = "octavo.plugins.scheduler_policies"

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="fcfs",
        factory=f"{_HERE}.fcfs:FcfsPolicy",
        summary="first come, first served",
    ),
    Provider(
        name="priority",
        factory=f"{_HERE}.priority:PriorityPolicy",
        options=f"{_HERE}.priority:PriorityOptions",
        summary="lower `priority` numbers first, with ageing; may preempt a lower class",
    ),
    Provider(
        name="sjf",
        factory=f"{_HERE}.sjf:SjfPolicy",
        options=f"{_HERE}.sjf:SjfOptions",
        summary="shortest remaining prefill first, with ageing",
    ),
    Provider(
        name="fair",
        factory=f"{_HERE}.fair:FairPolicy",
        options=f"{_HERE}.fair:FairOptions",
        summary="tokens shared among users by weight (virtual token counter)",
    ),
    Provider(
        name="deadline",
        factory=f"{_HERE}.deadline:DeadlinePolicy",
        options=f"{_HERE}.deadline:DeadlineOptions",
        summary="earliest deadline first, chunks cut to keep inter-token targets",
    ),
    Provider(
        name="composed",
        factory=f"{_HERE}.composed:ComposedPolicy",
        options=f"{_HERE}.composed:ComposedOptions",
        rank=-1,
        summary="policies in policies, written as a list: `policy: [priority, fair]`",
    ),
]
