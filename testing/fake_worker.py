"""A worker without a model, for tests of everything around it.

Its "KV cache" stores token ids by block and offset, and the next token of a row is a function of
the tokens read back through the block table. A lost, shared or overwritten block therefore changes
the output, and reading anything but the sequence's own tokens raises at once.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.executor import Executor, Ticket, WarmUp, Worker, WorkerReport
from octavo.core.contracts.kv_cache_manager import CopyKind
from octavo.core.contracts.model import KVSpec
from octavo.core.messages import LogitMasks, StepPlan, StepResult


@dataclass
class _Row:
    tokens: list[int]
    num_computed: int
    blocks: list[int]
    seed: int
    index: int


@dataclass
class FakeWorker(Worker):
    """next_token(tokens, seed, index): what follows; by default a checksum of all three."""

    block_size: int = 16
    vocab_size: int = 97
    rows: dict[int, _Row] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)
    num_copies: list[int] = field(default_factory=lambda: [0, 0, 0])

    def load(self) -> WorkerReport:
        return WorkerReport(
            kv_specs=(KVSpec(0, "full", 1, 1, 1),),
            num_parameters=0,
            weight_bytes=0,
            activation_bytes=0,
            block_bytes=8 * self.block_size,
            kv_budget=1 << 20,
            vocab_size=self.vocab_size,
            dtype="float32",
        )

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> WarmUp | None:
        self.pool = np.full((num_blocks, self.block_size), -1, np.int64)
        self.host = np.full((num_host_blocks, self.block_size), -1, np.int64)
        return None

    def next_token(self, tokens: list[int], seed: int, index: int) -> int:
        data = np.asarray([*tokens, index, seed & 0xFFFF], np.int32).tobytes()
        return int(zlib.crc32(data) % self.vocab_size)

    def forward(self, plan: StepPlan) -> None:
        for slot in plan.released.tolist():
            del self.rows[slot]
        for new in plan.admitted:
            assert new.slot not in self.rows, f"slot {new.slot} was admitted while in use"
            self.rows[new.slot] = _Row(
                new.token_ids.tolist(),
                new.num_computed,
                new.blocks[0].tolist(),
                new.seed,
                new.index,
            )
        for group, slot, index, block in plan.appended.T.tolist():
            assert group == 0, "the fake worker has one KV group"
            assert index == len(self.rows[slot].blocks), f"slot {slot}: block out of order"
            self.rows[slot].blocks.append(block)
        for kind, _, source, target, count in plan.copies.T.tolist():
            reads = self.host if kind == CopyKind.TO_DEVICE else self.pool
            writes = self.host if kind == CopyKind.TO_HOST else self.pool
            assert target > 0 or kind == CopyKind.TO_HOST, "the null block was written"
            values = reads[source, :count].copy()
            assert (values >= 0).all(), "a copy reads what was never written"
            writes[target] = -1  # whatever is not copied is lost
            writes[target, :count] = values
            self.num_copies[kind] += 1
        self._write(plan)
        self._plan = plan

    def _write(self, plan: StepPlan) -> None:
        written: set[int] = set()
        for slot, count in zip(plan.slots.tolist(), plan.counts.tolist(), strict=True):
            row = self.rows[slot]
            for position in range(row.num_computed, row.num_computed + count):
                block = row.blocks[position // self.block_size]
                assert block > 0, "the null block was written"
                where = block * self.block_size + position % self.block_size
                assert where not in written, "two rows write one place in a step"
                written.add(where)
                self.pool[block, position % self.block_size] = row.tokens[position]
            row.num_computed += count
        self.steps.append((len(plan.slots), int(plan.counts.sum())))

    def _read(self, row: _Row) -> list[int]:
        full: list[int] = self.pool[row.blocks].reshape(-1)[: row.num_computed].tolist()
        assert full == row.tokens[: row.num_computed], "the KV cache holds other tokens"
        return full

    def sample(self, masks: LogitMasks | None) -> StepResult:
        plan = self._plan
        tokens = np.zeros((len(plan.sample_rows), 1), np.int32)
        for i, slot in enumerate(plan.slots[plan.sample_rows].tolist()):
            row = self.rows[slot]
            assert row.num_computed == len(row.tokens), f"slot {slot} samples too early"
            token = self.next_token(self._read(row), row.seed, row.index)
            if masks is not None:
                token = _allowed(token, i, masks, self.vocab_size)
            row.tokens.append(token)
            tokens[i, 0] = token
        for slot in np.setdiff1d(plan.slots, plan.slots[plan.sample_rows]).tolist():
            row = self.rows[slot]
            assert row.num_computed < len(row.tokens), f"slot {slot} should have sampled"
        return StepResult(step=plan.step, token_ids=tokens)


def _allowed(token: int, row: int, masks: LogitMasks, vocab_size: int) -> int:
    """The first allowed token from `token` on, cyclically."""
    where: NDArray[np.intp] = np.flatnonzero(masks.rows == row)
    if not where.size:
        return token
    words = masks.bitmask[where[0]].astype(np.int64) & 0xFFFFFFFF
    candidates: list[int] = [*range(token, vocab_size), *range(token)]
    for candidate in candidates:
        if words[candidate // 32] >> (candidate % 32) & 1:
            return candidate
    raise AssertionError("no token is allowed")


class FakeExecutor(Executor):
    """Runs a worker at `collect`, so that up to `max_in_flight` plans are truly outstanding."""

    def __init__(self, worker: Worker, max_in_flight: int = 1) -> None:
        self.worker, self.max_in_flight = worker, max_in_flight
        self._plans: dict[int, StepPlan] = {}
        self._masks: dict[int, LogitMasks | None] = {}

    def start(self) -> WorkerReport:
        return self.worker.load()

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> WarmUp | None:
        return self.worker.allocate_kv(num_blocks, num_host_blocks)

    def submit(self, plan: StepPlan) -> Ticket:
        assert len(self._plans) < self.max_in_flight, "too many plans in flight"
        assert self._plans.keys() == self._masks.keys(), "a step before this one has not sampled"
        self._plans[plan.step] = plan
        return Ticket(plan.step)

    def sample(self, ticket: Ticket, masks: LogitMasks | None) -> None:
        assert ticket in self._plans, f"sample of unknown ticket {ticket}"
        assert ticket not in self._masks, f"second sample of ticket {ticket}"
        self._masks[ticket] = masks

    def collect(self, ticket: Ticket) -> StepResult:
        assert ticket == min(self._plans), "collect out of order"
        self.worker.forward(self._plans.pop(ticket))
        return self.worker.sample(self._masks.pop(ticket))
