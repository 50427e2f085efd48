"""One step's outputs, split by the front end that a sequence belongs to.

Front ends number their sequences as they like. Inside the engine a handle carries the number of its
front end in the upper bits.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.core.messages import EngineOutputs, EngineRequest, Logprobs

SHIFT = 40
LOCAL = (1 << SHIFT) - 1


def globally(handle: int, client: int) -> int:
    """A front end's handle as the engine knows it."""
    return (client << SHIFT) | handle


def adopt(request: EngineRequest, client: int) -> None:
    """Rename a request's handles to the engine's."""
    request.handle = globally(request.handle, client)
    if request.parent is not None:
        request.parent = globally(request.parent, client)


def split(outputs: EngineOutputs) -> dict[int, EngineOutputs]:
    """By client, with the client's own handles."""
    owners = outputs.handles >> SHIFT
    clients = set(np.unique(owners).tolist())
    clients.update(finish.handle >> SHIFT for finish in outputs.finished)
    clients.update(handle >> SHIFT for handle in outputs.cached)
    clients.update(part.handle >> SHIFT for part in outputs.prompt_logprobs)
    if len(clients) == 1:
        (client,) = clients
        return {client: _localized(outputs)}
    return {client: _localized(_part(outputs, client, owners)) for client in sorted(clients)}


def _part(outputs: EngineOutputs, client: int, owners: NDArray[np.int64]) -> EngineOutputs:
    rows = np.flatnonzero(owners == client)
    return EngineOutputs(
        step=outputs.step,
        handles=outputs.handles[rows],
        token_ids=outputs.token_ids[rows],
        counts=None if outputs.counts is None else outputs.counts[rows],
        finished=[finish for finish in outputs.finished if finish.handle >> SHIFT == client],
        cached={h: count for h, count in outputs.cached.items() if h >> SHIFT == client},
        logprobs=None if outputs.logprobs is None else _logprobs(outputs.logprobs, rows),
        prompt_logprobs=[p for p in outputs.prompt_logprobs if p.handle >> SHIFT == client],
    )


def _logprobs(columns: Logprobs, rows: NDArray[np.intp]) -> Logprobs | None:
    """Those of these rows of the outputs, which are renumbered."""
    kept = np.flatnonzero(np.isin(columns.rows, rows))
    if not kept.size:
        return None
    return Logprobs(
        rows=np.searchsorted(rows, columns.rows[kept]).astype(np.int32),
        token_ids=columns.token_ids[kept],
        values=columns.values[kept],
        ranks=columns.ranks[kept],
        num=columns.num[kept],
    )


def _localized(outputs: EngineOutputs) -> EngineOutputs:
    """With the front end's own handles. The engine keeps what it gave: nothing is changed in
    place."""
    return msgspec.structs.replace(
        outputs,
        handles=outputs.handles & LOCAL,
        finished=[msgspec.structs.replace(f, handle=f.handle & LOCAL) for f in outputs.finished],
        cached={handle & LOCAL: count for handle, count in outputs.cached.items()},
        prompt_logprobs=[
            msgspec.structs.replace(p, handle=p.handle & LOCAL) for p in outputs.prompt_logprobs
        ],
    )
