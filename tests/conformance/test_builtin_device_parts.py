"""The built-in parts that run on a device keep their contracts."""

from __future__ import annotations

from octavo.core.testing.conformance.attention_backend import AttentionBackendSuite
from octavo.core.testing.conformance.base import registry
from octavo.core.testing.conformance.sampler import SamplerSuite


def entry(kind, name):
    return registry().providers(kind)[name]


class TestTorchAttention(AttentionBackendSuite):
    entry = entry("attention_backend", "torch")


class TestCpuAttention(AttentionBackendSuite):
    entry = entry("attention_backend", "cpu")


class TestTorchSampler(SamplerSuite):
    entry = entry("sampler", "torch")
