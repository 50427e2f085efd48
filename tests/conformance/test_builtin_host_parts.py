"""The built-in parts that run without a device keep their contracts."""

from __future__ import annotations

from octavo.core.testing.conformance.base import registry
from octavo.core.testing.conformance.eviction_policy import EvictionPolicySuite
from octavo.core.testing.conformance.kv_cache_manager import KVCacheManagerSuite
from octavo.core.testing.conformance.preemption_policy import PreemptionPolicySuite
from octavo.core.testing.conformance.scheduler_policy import SchedulerPolicySuite


def entry(kind, name):
    return registry().providers(kind)[name]


class TestFcfs(SchedulerPolicySuite):
    entry = entry("scheduler_policy", "fcfs")


class TestPriority(SchedulerPolicySuite):
    entry = entry("scheduler_policy", "priority")
    options = {"ageing_s": 20}


class TestSjf(SchedulerPolicySuite):
    entry = entry("scheduler_policy", "sjf")
    options = {"tokens_per_s": 0.5}


class TestFair(SchedulerPolicySuite):
    entry = entry("scheduler_policy", "fair")
    options = {"weights": {"a": 3}}


class TestDeadline(SchedulerPolicySuite):
    entry = entry("scheduler_policy", "deadline")
    options = {"classes": {0: {"ttft_s": 5, "itl_s": 3}, 1: {"ttft_s": 90}}, "min_chunk": 1}


class TestComposed(SchedulerPolicySuite):
    entry = entry("scheduler_policy", "composed")
    options = {"policies": [{"name": "priority", "ageing_s": 20}, "fair"]}


class TestPaged(KVCacheManagerSuite):
    entry = entry("kv_cache_manager", "paged")


class TestRadix(KVCacheManagerSuite):
    entry = entry("kv_cache_manager", "radix")


class TestUnshared(KVCacheManagerSuite):
    entry = entry("kv_cache_manager", "none")


class TestLru(EvictionPolicySuite):
    entry = entry("eviction_policy", "lru")


class TestLfu(EvictionPolicySuite):
    entry = entry("eviction_policy", "lfu")


class TestPrefixAware(EvictionPolicySuite):
    entry = entry("eviction_policy", "prefix_aware")


class TestRecompute(PreemptionPolicySuite):
    entry = entry("preemption_policy", "recompute")


class TestSwap(PreemptionPolicySuite):
    entry = entry("preemption_policy", "swap")


class TestCostModel(PreemptionPolicySuite):
    entry = entry("preemption_policy", "cost_model")
