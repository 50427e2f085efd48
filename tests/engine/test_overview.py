"""What people are shown of a running engine, against its state."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.contracts.kv_cache_manager import BlockState, KVCacheManager
from octavo.plugins.extensions.overview import MOST_REQUESTS, block_map
from octavo.testing.fake_engine import Collector, make_fake_engine, request

PREFIX = list(range(10, 34))


@pytest.mark.parametrize("manager", ["paged", "radix", "none"])
def test_block_states_are_what_tables_and_statistics_say(manager):
    engine = make_fake_engine(manager=manager, num_blocks=60, max_num_seqs=4)
    kv = engine.scheduler.kv
    collector = Collector(engine)
    seen = set()
    for handle in range(9):
        engine.add(request(handle, [*PREFIX, 40 + handle], 12, ignore_eos=True))
    while engine.has_work():
        collector.step()
        states = kv.block_states()
        assert states.dtype == np.uint8
        held = [
            kv.block_tables[0, slot, : kv.num_slot_blocks[slot]]
            for slot in range(len(kv.num_slot_blocks))
        ]
        users = np.bincount(np.concatenate(held), minlength=60)[1:]
        assert ((states == BlockState.USED) == (users == 1)).all()
        assert ((states == BlockState.SHARED) == (users > 1)).all()
        stats = kv.stats()
        assert (states == BlockState.CACHED).sum() == stats.num_evictable
        assert (states == BlockState.FREE).sum() == stats.num_free
        seen |= set(states.tolist())
    assert seen == ({0, 1} if manager == "none" else {0, 1, 2, 3})


def test_large_pools_are_added_up_cell_by_cell():
    engine = make_fake_engine(num_blocks=1001)
    for handle in range(5):
        engine.add(request(handle, [*PREFIX, 40 + handle], 12, ignore_eos=True))
    collector = Collector(engine)
    for _ in range(8):
        collector.step()
    kv = engine.scheduler.kv
    single = block_map(kv.block_states(), 1000)
    assert single["per_cell"] == 1
    assert len(single["cells"]) == 1000
    assert [single["cells"].count(digit) for digit in "0123"] == single["counts"]
    many = block_map(kv.block_states(), 300)
    assert many["per_cell"] == 4
    assert many["counts"] == single["counts"]
    cells = np.reshape(many["cells"], (-1, 4))
    assert len(cells) == 250
    assert cells.sum(0).tolist() == single["counts"]
    assert (cells.sum(1) == 4).all()
    first = [single["cells"][:4].count(digit) for digit in "0123"]
    assert cells[0].tolist() == first


def test_a_manager_that_does_not_tell():
    class Silent:
        block_states = KVCacheManager.block_states

    assert block_map(Silent().block_states(), 10) is None


def test_requests_by_state_and_the_last_that_ended():
    engine = make_fake_engine(max_num_seqs=2, budget=8, max_model_len=96)
    engine.add(request(1, [11, 12, 13], 5, ignore_eos=True))
    engine.add(request(2, list(range(10, 40)), 5, ignore_eos=True))
    engine.add(request(3, [11, 12, 13], 5, ignore_eos=True))
    collector = Collector(engine)
    collector.step()
    seen = engine.query("overview")
    assert [(one["request_id"], one["state"]) for one in seen["live"]] == [
        ("r1", "decode"),
        ("r2", "prefill"),
        ("r3", "waiting"),
    ]
    assert seen["live"][0]["num_output"] == 1
    assert seen["live"][1]["num_computed"] == 5
    assert seen["live"][1]["num_prompt"] == 30
    assert all(one["age"] > 0 for one in seen["live"])
    assert seen["recent"] == []
    assert len(engine.query("overview", 1024, 1)["live"]) == 1
    collector.run()
    seen = engine.query("overview", 1024, 2)
    assert seen["live"] == []
    assert len(seen["recent"]) == 2
    assert seen["recent"][0]["finish_reason"] == "length"
    assert seen["recent"][0]["num_output"] == 5
    for handle in range(10, 10 + MOST_REQUESTS + 5):
        engine.add(request(handle, [11], 1))
    collector.run()
    recent = engine.query("overview", 1024, 1000)["recent"]
    assert len(recent) == MOST_REQUESTS
    assert recent[0]["finished"] >= recent[-1]["finished"]
