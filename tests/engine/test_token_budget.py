"""How many tokens a step may have where the configuration leaves it open."""

from __future__ import annotations

import pytest

from octavo.core.registry import Registry
from octavo.engine.builder import build_engine
from octavo.engine.resolve import resolve
from octavo.frontend.config import load_config
from octavo.testing.model_folder import write_model_folder


def limits(tmp_path, **scheduler):
    """Of an engine whose worker has measured 2048 tokens in half a second."""
    folder = write_model_folder(tmp_path / "model", 4096)
    config = load_config(
        mapping={
            "model": {"source": str(folder), "weight_source": "dummy"},
            "plugins": {"load": ["octavo.testing.instant_executor"]},
            "executor": {"kind": "instant"},
            "kv_cache": {"num_blocks": 8},
            "scheduler": scheduler,
        }
    )
    registry = Registry.discover(load=config.plugins.load)
    engine = build_engine(resolve(config, registry), registry)
    found = engine.scheduler.limits
    engine.close()
    return found.max_num_seqs, found.max_num_batched_tokens


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ({}, (256, 2048)),
        ({"max_num_seqs": 3000}, (3000, 3000)),  # as asked, whatever was measured
        ({"max_num_seqs": 3000, "max_num_batched_tokens": 1000}, (1000, 1000)),
        ({"chunked_prefill": False}, (256, 4096)),  # a whole prompt fits
        ({"max_num_batched_tokens": 64}, (64, 64)),
    ],
)
def test_what_is_asked_for_is_not_cut_by_what_is_measured(tmp_path, scheduler, expected):
    assert limits(tmp_path, **scheduler) == expected
