"""Weights and quotas hold in an engine."""

from octavo.testing.fake_engine import Collector, request
from octavo_class_quotas.scheduler_policy import ClassQuotasOptions, ClassQuotasPolicy


def policy(classes):
    return ClassQuotasPolicy(ClassQuotasOptions.model_validate({"classes": classes}), None)


def test_admissions_follow_the_weights(octavo_fake_engine, octavo_step_log):
    engine = octavo_fake_engine(
        policy=policy({0: {"weight": 3}, 1: {"weight": 1}}),
        max_num_seqs=1,
        observers=[("log", octavo_step_log)],
    )
    for handle in range(1, 41):
        engine.add(request(handle, [10, 11, 12, 13], 2, priority=handle % 2, ignore_eos=True))
    Collector(engine).run()
    first = [record.handle % 2 for record in octavo_step_log.requests[:16]]
    assert first.count(0) == 12
    assert first.count(1) == 4


def test_a_class_never_runs_more_than_its_quota(octavo_fake_engine):
    engine = octavo_fake_engine(policy=policy({2: {"max_running": 2}}), max_num_seqs=6)
    for handle in range(1, 21):
        engine.add(request(handle, [10, 11], 6, priority=2 * (handle % 2), ignore_eos=True))
    collector, most = Collector(engine), 0
    while engine.has_work():
        collector.step()
        running = [s for s in engine.scheduler.sequences.values() if s.slot >= 0]
        most = max(most, sum(s.request.priority == 2 for s in running))
    assert most == 2
    assert len(collector.reasons) == 20


def test_a_class_over_its_quota_runs_when_nothing_else_does(octavo_fake_engine):
    engine = octavo_fake_engine(policy=policy({0: {"max_running": 1}}), max_num_seqs=4)
    for handle in range(1, 6):
        engine.add(request(handle, [10, 11], 3))
    assert len(Collector(engine).run().reasons) == 5
