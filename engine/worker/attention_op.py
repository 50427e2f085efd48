"""Attention as a model's module calls it: rope, then the backend, for the batch of this step.

Eager code calls Python directly. Under torch.compile the call is the opaque operator
`octavo::attention`, which takes tensors and numbers only; a handle leads from it to the layer
through one table. The handle is a tensor on the CPU, because compiled code is made anew for each
value of a number, and one piece of code shall serve all layers.
Legend: T tokens, H query heads, K KV heads, D head size, Dv value head size, L longest sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from octavo.core.contracts.attention_backend import AttentionBackend, AttentionBatch, AttentionLayer
from octavo.core.contracts.model import AttentionFn, AttentionSpec
from octavo.engine.worker.kv_pool import LayerCache
from octavo.kernels import RopeTable, apply_rope

RopeKey = tuple[int, bool]
"""Address of a table, and whether pairs are interleaved."""


@dataclass(slots=True)
class _Layer:
    """A registered layer. The backend is known once the model is, the cache once it is sized. rope:
    the key of its table in the core's form, None without one."""

    layer: int
    spec: AttentionSpec
    cos_sin: torch.Tensor | None
    rope: RopeKey | None
    handle: int
    backend: AttentionBackend | None = None
    cache: AttentionLayer | None = None


@dataclass(slots=True)
class _Step:
    """Rows of the rope tables at this step's positions, by table."""

    positions: torch.Tensor | None = None
    rows: dict[RopeKey, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


_handles = itertools.count()
_table: dict[int, tuple[AttentionOp, _Layer]] = {}


class AttentionOp:
    """All attention layers of one model runner. `register` is `ModelContext.attention`."""

    def __init__(self) -> None:
        self.layers: dict[int, _Layer] = {}
        self._backends: list[tuple[int, AttentionBackend]] = []
        self._bound: tuple[tuple[AttentionBackend, AttentionLayer], ...] = ()
        self._tables: dict[RopeKey, RopeTable] = {}
        self._step = _Step()

    @property
    def specs(self) -> dict[int, AttentionSpec]:
        """Spec of every registered layer."""
        return {layer.layer: layer.spec for layer in self.layers.values()}

    def register(
        self, layer: int, spec: AttentionSpec, cos_sin: torch.Tensor | None
    ) -> AttentionFn:
        """Make the function that a layer's module calls."""
        if layer in self.layers:
            raise ValueError(f"attention layer {layer} is registered twice")
        rope = None
        if spec.rope_dim and cos_sin is not None:
            rope = (cos_sin.data_ptr(), spec.rope_interleaved)
        entry = _Layer(layer, spec, cos_sin, rope, next(_handles))
        self.layers[layer] = entry
        _table[entry.handle] = (self, entry)
        handle, width = torch.tensor(entry.handle), spec.num_heads * spec.value_head_size

        def attention(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
        ) -> torch.Tensor:
            if torch.compiler.is_compiling():
                out: torch.Tensor = torch.ops.octavo.attention(q, k, v, positions, handle, width)
                return out
            return self._run(entry, q, k, v, positions)

        return attention

    def bind(
        self, caches: Sequence[LayerCache], backends: Sequence[tuple[int, AttentionBackend]]
    ) -> None:
        """Give every layer its cache and the backend of its group; `backends` are (group, backend)
        in group order. Called again when the pool is allocated anew."""
        by_group = dict(backends)
        self._backends = list(backends)
        for cache in caches:
            entry = self.layers[cache.spec.layer]
            entry.backend = by_group[cache.spec.group]
            entry.cache = AttentionLayer(entry.layer, entry.spec, cache.k, cache.v, entry.cos_sin)
        self._bound = tuple(
            (entry.backend, entry.cache)
            for _, entry in sorted(self.layers.items())
            if entry.backend is not None and entry.cache is not None
        )

    def bound(self) -> tuple[tuple[AttentionBackend, AttentionLayer], ...]:
        """Backend and cache of every layer, in layer order; a new tuple after each `bind`."""
        return self._bound

    def unbind(self) -> None:
        """Let go of the caches, so that their memory is free before another pool is made."""
        for entry in self.layers.values():
            entry.backend = entry.cache = None
        self._bound = ()

    def plan(self, groups: Sequence[AttentionBatch]) -> None:
        """Prepare all backends for a batch."""
        self._step.positions = None
        self._step.rows.clear()
        for group, backend in self._backends:
            backend.plan(groups[group])

    def close(self) -> None:
        """Forget the layers; what they hold can be freed, though the model is kept."""
        self.unbind()
        for entry in self.layers.values():
            _table.pop(entry.handle, None)
        self.layers.clear()
        self._backends.clear()
        self._tables.clear()
        self._step = _Step()

    def _run(
        self,
        entry: _Layer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        backend, cache, spec = entry.backend, entry.cache, entry.spec
        assert backend is not None, "attention ran before the KV pool was allocated"
        assert cache is not None, "attention ran before the KV pool was allocated"
        if entry.rope is not None and not backend.fuses_rope:
            cos, sin = self._rope_rows(entry, entry.rope, positions)
            q = apply_rope(q, cos, sin, interleaved=spec.rope_interleaved)
            k = apply_rope(k, cos, sin, interleaved=spec.rope_interleaved)
        out = q.new_empty(q.shape[0], spec.num_heads, spec.value_head_size)
        backend.run(cache, q, k, v, out)
        return out.view(q.shape[0], spec.num_heads * spec.value_head_size)

    def _rope_rows(
        self, entry: _Layer, key: RopeKey, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = self._step
        if step.positions is not positions:
            step.positions = positions
            step.rows.clear()
        rows = step.rows.get(key)
        if rows is None:
            rows = step.rows[key] = self._rope_table(entry, key).rows(positions)
        return rows

    def _rope_table(self, entry: _Layer, key: RopeKey) -> RopeTable:
        """Made when it is first needed: twice the model's own, which suffices for a backend that
        fuses rope. Layers nearly always share one."""
        table = self._tables.get(key)
        if table is None:
            assert entry.cos_sin is not None, "a layer with a key has a table"
            table = self._tables[key] = RopeTable(entry.cos_sin, key[1])
        return table


_library = torch.library.Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "attention(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor layer, int width) -> Tensor"
)


def _attention(  # noqa: PLR0917 (called by position)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    layer: torch.Tensor,
    width: int,
) -> torch.Tensor:
    op, entry = _table[int(layer)]
    return op._run(entry, q, k, v, positions)


def _attention_fake(  # noqa: PLR0917 (called by position)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    layer: torch.Tensor,
    width: int,
) -> torch.Tensor:
    return q.new_empty(q.shape[0], width)


_library.impl(  # type: ignore[no-untyped-call]
    "attention", _attention, "CompositeExplicitAutograd"
)
torch.library.register_fake("octavo::attention", _attention_fake, lib=_library)
