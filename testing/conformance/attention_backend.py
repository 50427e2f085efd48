"""What every attention backend promises, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.core.contracts import Platform
from octavo.core.contracts.attention_backend import AttentionBackend, KVLayout
from octavo.core.contracts.model import AttentionSpec
from octavo.testing.conformance import engine_run
from octavo.testing.conformance.base import ConformanceSuite, NotApplicable, registry

if TYPE_CHECKING:
    from octavo.testing.attention_case import AttentionCase

DIMS = ("kv", "block", "token", "head", "dim")
MIXED = [(9, 1), (0, 1), (30, 1), (5, 6), (0, 13), (3, 2)]


def spec(heads: int = 4, kv_heads: int = 2, size: int = 64, **more: Any) -> AttentionSpec:
    """A layer with the usual scale."""
    more.setdefault("value_head_size", size)
    return AttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_size=size, scale=1 / math.sqrt(size), **more
    )


SPECS: dict[str, AttentionSpec] = {
    "grouped queries": spec(),
    "multi-query": spec(6, 1),
    "no groups": spec(3, 3),
    "head size 32": spec(4, 2, 32),
    "head size 80": spec(4, 2, 80),
    "head size 128": spec(2, 1, 128),
    "values of another size": spec(4, 2, 64, value_head_size=32),
    "sliding window": spec(window=7),
    "soft cap": spec(soft_cap=2.0),
    "rope": spec(rope_dim=64),
    "partial rope": spec(rope_dim=32),
    "interleaved rope": spec(rope_dim=64, rope_interleaved=True),
    "ALiBi": spec(alibi=True),
}


class AttentionBackendSuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` and `backend_class`.

    Layers that `supports` refuses are left out. tolerance: relative, in float32.
    """

    kind = "attention_backend"
    tolerance: ClassVar[float] = 2e-5
    platform: ClassVar[Platform] = Platform("cpu")

    def backend_class(self) -> type[AttentionBackend]:
        """The class, whose static methods are asked before it is made."""
        factory: type[AttentionBackend] = registry().factory(self.selection())
        return factory

    def specs(self) -> Iterator[tuple[str, AttentionSpec, KVLayout]]:
        """What the backend supports of `SPECS`, with its best layout that holds float32."""
        cls, found = self.backend_class(), 0
        for name, item in SPECS.items():
            if cls.supports(item, self.platform) is not None:
                continue
            for layout in cls.kv_layouts(item):
                if "float32" in layout.dtypes:
                    found += 1
                    yield name, item, layout
                    break
        if not found:
            raise NotApplicable("it supports no layer of the suite in float32 on the CPU")

    def plainest(self) -> tuple[AttentionSpec, KVLayout]:
        """The first of `specs`."""
        _, item, layout = next(self.specs())
        return item, layout

    def case(
        self, item: AttentionSpec, layout: KVLayout, rows: Any, seed: int = 0, **more: Any
    ) -> AttentionCase:
        """A batch in blocks of 16, or the smallest that the layout allows."""
        from octavo.testing.attention_case import AttentionCase

        sizes = layout.block_sizes
        block_size = more.pop("block_size", 16 if not sizes or 16 in sizes else min(sizes))
        return AttentionCase(
            self.make, layout, item, rows, block_size=block_size, seed=seed, **more
        )

    # ---- what it says -----------------------------------------------------------------------

    def test_supports_answers_for_every_layer(self) -> None:
        """supports gives None or the reason as text, for every layer and device."""
        cls = self.backend_class()
        odd = [replace(spec(), sinks=True), replace(spec(), latent=True), spec(5, 2), spec(1, 1, 7)]
        for item in (*SPECS.values(), *odd):
            for platform in (self.platform, Platform("cuda", (9, 0))):
                reason = cls.supports(item, platform)
                assert reason is None or (isinstance(reason, str) and reason), (
                    f"supports gave {reason!r} for {item}"
                )

    def test_layouts_are_complete(self) -> None:
        """Every layout names the five dimensions once, and dtypes that torch knows."""
        import torch

        for name, item, _ in self.specs():
            for layout in self.backend_class().kv_layouts(item):
                assert sorted(layout.dims) == sorted(DIMS), (
                    f"{name}: dims are {layout.dims}, expected {DIMS} in some order"
                )
                assert layout.dtypes, f"{name}: a layout without dtypes"
                for dtype in layout.dtypes:
                    assert isinstance(getattr(torch, dtype, None), torch.dtype), (
                        f"{name}: torch has no dtype '{dtype}'"
                    )
                assert all(size > 0 for size in layout.block_sizes), f"{layout.block_sizes}"

    # ---- results ----------------------------------------------------------------------------

    def test_every_layer_equals_float64(self) -> None:
        """Decodes and prefill chunks in one batch give what loops in float64 give, for every layer
        that is supported."""
        for name, item, layout in self.specs():
            self._check(self.case(item, layout, MIXED, 1), name)

    def test_every_block_size_equals_float64(self) -> None:
        """The same in every allowed block size from 1 to 128."""
        item, layout = self.plainest()
        for size in layout.block_sizes or (1, 4, 8, 32, 128):
            self._check(self.case(item, layout, MIXED, 2, block_size=size), f"blocks of {size}")

    def test_every_pool_dtype_is_close(self) -> None:
        """The same for every dtype of the pool that a layout names."""
        import torch

        item, layout = self.plainest()
        for name in layout.dtypes:
            if name == "int8":
                continue  # needs scales, which are the backend's own
            dtype = getattr(torch, name)
            loose = 1e-2 if dtype.itemsize == 1 else 2e-3
            case = self.case(item, layout, MIXED, 3, kv_dtype=dtype)
            self._check(case, f"a pool of {name}", loose if name != "float32" else None)

    def test_edges(self) -> None:
        """One token, many rows of one token, a chunk that ends at a block, contexts of very
        different lengths."""
        item, layout = self.plainest()
        for rows in (
            [(0, 1)],
            [(0, 1)] * 9,
            [(15, 1), (16, 1), (17, 1), (31, 1)],
            [(16, 16)],
            [(0, 32), (32, 1)][::-1],
            [(500, 1), (0, 1), (3, 1), (130, 1)],
            [(100, 40)],
        ):
            self._check(self.case(item, layout, rows, 4), f"rows {rows}")

    def test_chunks_do_not_matter(self) -> None:
        """A prompt in chunks gives what it gives at once."""
        item, layout = self.plainest()
        whole = self.case(item, layout, [(0, 37)], 5).run()
        case = self.case(item, layout, [(0, 37)], 5)
        import torch

        borders = [0, 1, 2, 15, 16, 30, 37]
        parts = [case.step([(0, a, b)]) for a, b in pairwise(borders)]
        error = float((torch.cat(parts) - whole).abs().max())
        assert error <= self.tolerance * 10, f"chunks differ by {error:.3g} from the whole"

    def test_two_layers_share_a_plan(self) -> None:
        """run may be called several times after one plan, and gives the same."""
        item, layout = self.plainest()
        case = self.case(item, layout, MIXED, 6)
        case.step(case.contexts())
        batch, parts = case.batch(case.this_step()), case.this_step()
        case.backend.plan(batch)
        first, second = case.attention(batch, parts), case.attention(batch, parts)
        assert first.equal(second), "the second layer of a plan got other results"

    def test_a_new_plan_forgets_the_old_one(self) -> None:
        """Batches of different shapes one after another do not disturb each other."""
        item, layout = self.plainest()
        rows, others = [(20, 1), (40, 1), (0, 9)], [(0, 19, 20), (1, 39, 40), (2, 0, 9)]
        fresh = self.case(item, layout, rows, 7)
        fresh.step(fresh.contexts())
        wanted_others = fresh.step(others)
        case = self.case(item, layout, rows, 7)
        case.step(case.contexts())
        wanted = case.step(case.this_step())
        for parts, expected in (
            (others, wanted_others),
            ([(1, 0, 40)], None),
            ([(0, 19, 20)], None),
            (case.this_step(), wanted),
        ):
            got = case.step(parts)
            if expected is not None:
                error = float((got - expected).abs().max())
                assert error <= self.tolerance * 10, f"after others it differs by {error:.3g}"

    def test_neighbours_do_not_leak(self) -> None:
        """A row whose values are NaN spoils no other row."""
        item, layout = self.plainest()
        case = self.case(item, layout, [(9, 1), (12, 1), (4, 5)], 8)
        case.v[1][:] = math.nan
        out = case.run()
        assert not out[0].isnan().any(), "NaN of a neighbour reached the row before it"
        assert not out[2:].isnan().any(), "NaN of a neighbour reached the row behind it"

    def test_only_its_own_places_are_written(self) -> None:
        """A step writes its tokens' places in the pool and nothing else, least of all the null
        block."""
        import torch

        item, layout = self.plainest()
        case = self.case(item, layout, MIXED, 9)
        case.step(case.contexts())
        batch = case.batch(case.this_step())
        before = [case.layer.k_cache.clone(), case.layer.v_cache.clone()]
        case.step(case.this_step())
        mine = torch.zeros(before[0].shape[0] * before[0].shape[1], dtype=torch.bool)
        mine[batch.slot_mapping] = True
        for old, new in zip(before, (case.layer.k_cache, case.layer.v_cache), strict=True):
            same = (old == new) | (old.isnan() & new.isnan())
            changed = ~same.flatten(2).all(-1).flatten()
            assert not (changed & ~mine).any(), "places of other tokens were written"
            assert not new[0].any(), "the null block was written"

    def test_equal_inputs_give_equal_bits(self) -> None:
        """The same batch twice gives the same bits."""
        item, layout = self.plainest()
        first = self.case(item, layout, MIXED, 10).run()
        second = self.case(item, layout, MIXED, 10).run()
        assert first.equal(second), "two equal runs differ"

    def test_captured_batches_never_wait_for_the_device(self) -> None:
        """A backend that says its batches can be captured in a graph reads no value back to the
        host in `run`."""
        from octavo.testing.conformance.device import synchronisations

        if self.backend_class().graph_support == "none":
            raise NotApplicable("graph_support is 'none'")
        item, layout = self.plainest()
        case = self.case(item, layout, [(9, 1), (30, 1)], 11)
        case.step(case.contexts())
        batch, parts = case.batch(case.this_step()), case.this_step()
        case.backend.plan(batch)
        waits = synchronisations(lambda: case.attention(batch, parts))
        assert not waits, f"run reads values back to the host: {', '.join(sorted(waits))}"

    def test_engine_gives_the_tokens_of_torch(self) -> None:
        """A real engine gives the tokens that it gives with the reference backend `torch`."""
        engine_run.compare_engines(self, {}, {"attention": {"backend": "torch"}})

    def _check(self, case: AttentionCase, where: str, tolerance: float | None = None) -> None:
        try:
            case.check(tolerance or self.tolerance)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error
