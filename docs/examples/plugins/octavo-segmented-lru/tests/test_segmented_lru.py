"""A flood of prompts that nobody repeats leaves what was hit alone."""

from octavo.testing.fake_engine import Collector, request
from octavo_segmented_lru.eviction_policy import SegmentedLruEviction, SegmentedLruOptions


class Context:
    num_blocks = 40


def hits(octavo_fake_engine, eviction):
    """Tokens found in the cache by the last of three equal prompts, after a flood."""
    engine = octavo_fake_engine(eviction=eviction, num_blocks=40)
    handle = 0

    def run(tokens):
        nonlocal handle
        handle += 1
        engine.add(request(handle, tokens, 1))
        Collector(engine).run()

    shared = list(range(10, 42))
    run(shared)
    run(shared)
    for number in range(12):
        run([50 + number] * 20)
    before = engine.scheduler.kv.stats().prefix_hits
    run(shared)
    return engine.scheduler.kv.stats().prefix_hits - before


def test_a_flood_passes_by(octavo_fake_engine):
    policy = SegmentedLruEviction(SegmentedLruOptions(), Context)
    assert hits(octavo_fake_engine, policy) >= 28
    assert hits(octavo_fake_engine, "lru") == 0


def test_the_protected_segment_has_a_limit():
    policy = SegmentedLruEviction(SegmentedLruOptions(protected=0.1), Context)
    for block in (1, 2, 3, 4, 5, 6):
        policy.reuse([block])
        policy.retire([block])
    assert policy.evict(2) == [1, 2]
    assert len(policy) == 4
