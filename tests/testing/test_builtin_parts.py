"""The built-in implementations keep their contracts."""

from __future__ import annotations

import pytest

from octavo.server.testing import builtin_suites as server_suites
from octavo.server.testing.builtin_suites import *  # noqa: F403
from octavo.testing import builtin_suites
from octavo.testing.builtin_suites import *  # noqa: F403
from octavo.testing.conformance.base import ConformanceSuite, registry

pytestmark = pytest.mark.slow

ELSEWHERE = {
    ("graph_runner", "cuda_graph"),  # tests/engine/worker, through a double; tests/gpu for real
    ("weight_source", "gguf"),  # tests/models: needs a file that only the demo model brings
    ("weight_source", "package"),
    ("weight_source", "hub"),
    ("attention_backend", "flex"),  # tests/engine/worker/test_flex_attention.py
    # tests/backends, tests/gpu: need a GPU, Triton's interpreter or a double
    ("attention_backend", "triton"),
    ("attention_backend", "flashinfer"),
    ("sampler", "triton"),
    ("sampler", "flashinfer"),
    ("graph_runner", "triton"),
}


def test_every_built_in_implementation_is_checked():
    suites = [
        item
        for item in {**vars(builtin_suites), **vars(server_suites)}.values()
        if isinstance(item, type)
    ]
    checked = {
        (suite.kind, suite.entry.name)
        for suite in suites
        if issubclass(suite, ConformanceSuite) and suite.entry is not None
    }
    known = {
        (kind, entry.name)
        for kind in registry().kinds
        for entry in registry().entries(kind)
        if entry.source.built_in
    }
    assert known - checked - ELSEWHERE == set()
