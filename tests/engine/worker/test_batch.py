"""Batches against a reference that goes row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.messages import AdmittedRow, StepPlan
from octavo.core.sampling_params import SamplingParams
from octavo.engine.worker.batch import BatchBuilder
from octavo.engine.worker.mirror import Mirror, odd_lines

SLOTS, LONGEST = 7, 50


class Reference:
    """Each slot as plain lists."""

    def __init__(self, block_size, num_groups):
        self.block_size, self.num_groups = block_size, num_groups
        self.tokens, self.computed, self.blocks = {}, {}, {}

    def check(self, batch, slots, counts, padded=0):
        """padded: rows of one token in block 0 that stand behind the others."""
        token_ids, positions, starts = [], [], [0]
        mappings = [[] for _ in range(self.num_groups)]
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            total = self.computed[slot] + count
            for position in range(self.computed[slot], total):
                token_ids.append(self.tokens[slot][position])
                positions.append(position)
                for group, mapping in enumerate(mappings):
                    block = self.blocks[slot][group][position // self.block_size]
                    mapping.append(block * self.block_size + position % self.block_size)
            starts.append(len(token_ids))
            for group in batch.groups:
                assert group.seq_lens[row] == group.seq_lens_cpu[row] == total
        assert batch.last.tolist() == [start - 1 for start in starts[1:]]
        for row in range(len(slots), len(slots) + padded):
            token_ids.append(0)
            positions.append(0)
            starts.append(len(token_ids))
            for mapping, group in zip(mappings, batch.groups, strict=True):
                mapping.append(0)
                assert group.seq_lens[row] == group.seq_lens_cpu[row] == 1
                assert not group.block_table[row].any()
        assert batch.token_ids.tolist() == token_ids
        assert batch.positions.tolist() == positions
        assert batch.num_tokens == len(token_ids)
        for number, group in enumerate(batch.groups):
            assert group.query_start_loc.tolist() == group.query_start_loc_cpu.tolist() == starts
            assert group.slot_mapping.tolist() == mappings[number]
            assert group.positions.tolist() == positions
            assert group.max_seq_len == max(group.seq_lens_cpu)
            assert group.max_query_len == max(counts)
            assert (group.num_tokens, group.num_rows) == (len(token_ids), len(slots) + padded)
            assert torch.equal(group.block_table, torch.from_numpy(group.block_table_cpu))
            for row, slot in enumerate(slots):
                blocks = self.blocks[slot][number]
                assert group.block_table[row, : len(blocks)].tolist() == blocks
                assert not group.block_table[row, len(blocks) :].any()


@st.composite
def steps(draw):
    """A script: for every step which slots are renewed, and how many tokens each row computes."""
    return [
        (
            draw(st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=3)),
            draw(st.booleans()),
            draw(st.lists(st.integers(1, 9), min_size=SLOTS, max_size=SLOTS)),
            draw(st.permutations(range(SLOTS))),
        )
        for _ in range(draw(st.integers(1, 6)))
    ]


@given(
    script=steps(),
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_groups=st.integers(1, 3),
    seed=st.integers(0, 99),
    multiple=st.sampled_from([1, 1, 2, 4]),
)
def test_batches_equal_a_row_by_row_reference(script, block_size, num_groups, seed, multiple):
    random = np.random.default_rng(seed)
    mirror = Mirror(
        num_slots=SLOTS, max_model_len=LONGEST, block_size=block_size, num_groups=num_groups
    )
    builder = BatchBuilder(mirror, max_tokens=4, device=torch.device("cpu"))
    if multiple > 1:
        builder.pad = lambda rows: min(SLOTS, -(-rows // multiple) * multiple)
    reference = Reference(block_size, num_groups)
    layout, last = 0, []
    for renewed, only_decodes, wanted, order in script:
        released = [slot for slot in renewed if slot in reference.tokens]
        admitted = []
        for slot in renewed:
            length = int(random.integers(1, 20))
            tokens = random.integers(0, 1000, length).astype(np.int32)
            first = random.integers(1, 500, (num_groups, 1)).astype(np.int32)
            reference.tokens[slot] = tokens.tolist()
            reference.computed[slot] = 0
            reference.blocks[slot] = first.tolist()
            admitted.append(
                AdmittedRow(
                    slot=slot,
                    handle=slot,
                    token_ids=tokens,
                    num_prompt=length,
                    num_computed=0,
                    blocks=first,
                    sampling=SamplingParams(),
                    seed=0,
                )
            )
        counts = {}
        for slot in order:
            if slot not in reference.tokens:
                continue
            left = len(reference.tokens[slot]) - reference.computed[slot]
            if left == 1 or (left > 1 and not only_decodes):
                counts[slot] = min(left, wanted[slot])
        if not counts and not admitted:
            continue
        if not counts:  # every slot was renewed with a longer prompt: compute one of them
            slot = admitted[0].slot
            counts = {slot: len(reference.tokens[slot])}
        decodes = [s for s in counts if len(reference.tokens[s]) - reference.computed[s] == 1]
        slots = decodes + [s for s in counts if s not in decodes]
        if only_decodes and set(slots) == set(last):
            slots = last  # the same layout, whatever was computed
        decodes = [s for s in slots if len(reference.tokens[s]) - reference.computed[s] == 1]
        if slots != last:
            layout, last = layout + 1, slots
        appended = []
        for slot in slots:
            for group in range(num_groups):
                blocks = reference.blocks[slot][group]
                while len(blocks) * block_size < reference.computed[slot] + counts[slot]:
                    appended.append((group, slot, len(blocks), int(random.integers(1, 500))))
                    blocks.append(appended[-1][3])
        plan = StepPlan(
            step=0,
            slots=np.asarray(slots, np.int32),
            counts=np.asarray([counts[s] for s in slots], np.int32),
            num_decodes=len(decodes),
            sample_rows=np.zeros(0, np.int32),
            layout=layout,
            released=np.asarray(released, np.int32),
            appended=np.asarray(appended, np.int32).reshape(-1, 4).T,
            copies=np.zeros((5, 0), np.int32),
            admitted=admitted,
        )
        mirror.apply(plan)
        padded = builder.pad(len(slots)) - len(slots) if builder.pad else 0
        if len(decodes) < len(slots):
            padded = 0
        reference.check(builder.build(plan), slots, [counts[s] for s in slots], padded)
        mirror.advance(np.asarray(slots, np.intp), plan.counts)
        done = []
        for slot in slots:
            reference.computed[slot] += counts[slot]
            if reference.computed[slot] == len(reference.tokens[slot]) < LONGEST:
                done.append(slot)
                reference.tokens[slot].append(int(random.integers(0, 1000)))
        new = np.asarray([reference.tokens[slot][-1] for slot in done], np.int32)
        mirror.append(np.asarray(done, np.intp), new)


def plan_of(slots, blocks, layout):
    """A decode of each slot, which gets these blocks and as many tokens."""
    admitted = [
        AdmittedRow(
            slot=slot,
            handle=slot,
            token_ids=np.arange(len(blocks), dtype=np.int32),
            num_prompt=len(blocks),
            num_computed=len(blocks) - 1,
            blocks=np.asarray([blocks], np.int32),
            sampling=SamplingParams(),
            seed=0,
        )
        for slot in slots
    ]
    return StepPlan(
        step=0,
        slots=np.asarray(slots, np.int32),
        counts=np.ones(len(slots), np.int32),
        num_decodes=len(slots),
        sample_rows=np.zeros(0, np.int32),
        layout=layout,
        released=np.zeros(0, np.int32),
        appended=np.zeros((4, 0), np.int32),
        copies=np.zeros((5, 0), np.int32),
        admitted=admitted,
    )


def test_tables_hold_nothing_of_what_was_longer_once():
    """Neither where only the columns in use are copied."""
    mirror = Mirror(num_slots=SLOTS, max_model_len=LONGEST, block_size=1)
    builder = BatchBuilder(mirror, max_tokens=4, device=torch.device("cpu"))
    for layout, count in enumerate((40, 3, 11, 2)):
        blocks = list(range(1, count + 1))
        plan = plan_of([4, 2], blocks, layout)
        mirror.apply(plan)
        assert mirror.num_columns == count
        (group,) = builder.build(plan).groups
        assert group.block_table[:, :count].tolist() == [blocks] * 2
        assert not group.block_table[:, count:].any()
        mirror.clear()
    assert mirror.num_columns == 0


def test_a_decode_step_of_the_same_layout_reuses_its_views():
    mirror = Mirror(num_slots=4, max_model_len=32, block_size=4)
    builder = BatchBuilder(mirror, max_tokens=8, device=torch.device("cpu"))
    mirror.num_tokens[:] = 5
    mirror.num_computed[:] = 4
    mirror.block_tables[0, :, :2] = np.arange(8).reshape(4, 2) + 1
    nothing = np.zeros(0, np.int32)

    def plan():
        return StepPlan(
            step=0,
            slots=np.arange(4, dtype=np.int32),
            counts=np.ones(4, np.int32),
            num_decodes=4,
            sample_rows=np.arange(4, dtype=np.int32),
            layout=1,
            released=nothing,
            appended=np.zeros((4, 0), np.int32),
            copies=np.zeros((5, 0), np.int32),
        )

    first = builder.build(plan())
    assert first.groups[0].block_table.data_ptr() == mirror.block_tables.ctypes.data
    mirror.append(np.arange(4), np.asarray([11, 12, 13, 14], np.int32))
    mirror.advance(np.arange(4), np.ones(4, np.int32))
    second = builder.build(plan())
    assert second is first
    assert second.token_ids.tolist() == [11, 12, 13, 14]
    assert second.groups[0].seq_lens.tolist() == [6] * 4


@pytest.mark.parametrize("length", [1, 16, 100, 2048, 8192])
def test_row_strides_are_an_odd_number_of_cache_lines(length):
    assert odd_lines(length) >= length
    assert odd_lines(length) % 32 == 16


def test_a_sequence_longer_than_the_model_is_refused():
    mirror = Mirror(num_slots=2, max_model_len=8, block_size=4)
    row = AdmittedRow(
        slot=1,
        handle=5,
        token_ids=np.zeros(9, np.int32),
        num_prompt=9,
        num_computed=0,
        blocks=np.ones((1, 3), np.int32),
        sampling=SamplingParams(),
        seed=0,
    )
    plan = StepPlan(
        step=0,
        slots=np.asarray([1], np.int32),
        counts=np.asarray([9], np.int32),
        num_decodes=0,
        sample_rows=np.zeros(1, np.int32),
        layout=0,
        released=np.zeros(0, np.int32),
        appended=np.zeros((4, 0), np.int32),
        copies=np.zeros((5, 0), np.int32),
        admitted=[row],
    )
    with pytest.raises(ValueError, match=r"slot 1 was given 9 tokens, the longest sequence has 8"):
        mirror.apply(plan)
