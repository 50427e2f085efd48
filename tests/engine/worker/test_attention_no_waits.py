"""Attention backends and block copies send what a step needs without waiting for the device."""

from __future__ import annotations

from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from octavo.core.contracts import NoOptions
from octavo.core.contracts.attention_backend import (
    AttentionBackendContext,
    AttentionBatch,
    AttentionLayer,
    KVLayout,
)
from octavo.core.contracts.model import KVSpec
from octavo.engine.worker.kv_pool import DEVICE_COPY, TO_DEVICE, TO_HOST, KVPool
from octavo.kernels.transfer import upload
from octavo.testing.conformance.device import asynchronous_device
from octavo.testing.device_attention import attention_spec

SIZE, ROWS, MOST = 16, 6, 64
SPECS = (attention_spec(4, 2, 64), attention_spec(4, 2, 64, window=24, soft_cap=30.0))
STEPS = {
    "decodes": [(33, 1), (5, 1), (700, 1)],
    "mixed": [(33, 1), (5, 1), (0, 7), (40, 20)],
    "beyond the limits": [(0, 40), (3, 90), (0, 200)],
}


def context(device, **changes) -> AttentionBackendContext:
    return AttentionBackendContext(
        SPECS, torch.float16, torch.float16, device, SIZE, ROWS, MOST, 1024, **changes
    )


def batch(rows, device) -> AttentionBatch:
    counts, lengths = np.array([n for _, n in rows]), np.array([sum(row) for row in rows])
    starts = np.concatenate(([0], counts.cumsum())).astype(np.int32)
    table = np.arange(len(rows) * 64, dtype=np.int32).reshape(len(rows), 64)
    positions = np.concatenate([np.arange(first, first + n) for first, n in rows])
    return AttentionBatch(
        num_tokens=int(starts[-1]),
        num_rows=len(rows),
        num_decodes=sum(n == 1 for n in counts),
        max_query_len=int(counts.max()),
        max_seq_len=int(lengths.max()),
        query_start_loc=upload(starts, device),
        seq_lens=upload(lengths.astype(np.int32), device),
        block_table=upload(table, device),
        slot_mapping=upload(positions, device),
        positions=upload(positions, device),
        query_start_loc_cpu=starts,
        seq_lens_cpu=lengths.astype(np.int32),
        block_table_cpu=table,
    )


def step(backend, rows, device):
    planned = batch(rows, device)
    backend.plan(planned)
    for number, spec in enumerate(SPECS):
        cache = torch.zeros(2, 512, SIZE, 2, 64, dtype=torch.float16, device=device)
        layer = AttentionLayer(number, spec, cache[0], cache[1])
        q, k, v = (
            torch.zeros(planned.num_tokens, heads, 64, dtype=torch.float16, device=device)
            for heads in (4, 2, 2)
        )
        backend.run(layer, q, k, v, torch.empty_like(q))


@pytest.mark.parametrize("rows", list(STEPS))
def test_torch(rows):
    from octavo.backends.attention.torch_attention import TorchAttention

    with asynchronous_device() as device:
        step(TorchAttention(NoOptions(), context(device)), STEPS[rows], device)


@pytest.mark.parametrize("rows", list(STEPS))
def test_triton(monkeypatch, rows):
    pytest.importorskip("triton")
    from octavo.backends.triton import attention
    from octavo.backends.triton.options import TritonAttentionOptions

    launches = {name: MagicMock() for name in ("write_kv", "paged_decode", "paged_prefill")}
    for name, launch in launches.items():
        monkeypatch.setattr(attention, name, launch)
    with asynchronous_device() as device:
        backend = attention.TritonAttention(TritonAttentionOptions(), context(device))
        for _ in range(2):
            step(backend, STEPS[rows], device)
    assert launches["paged_decode"].called == any(n == 1 for _, n in STEPS[rows])
    assert launches["paged_prefill"].called == any(n > 1 for _, n in STEPS[rows])


def uploading(device):
    """A library that copies what its plans get to the device, as FlashInfer does."""
    library = MagicMock()

    def plan(*args, **kwargs):
        for arg in (*args, *kwargs.values()):
            for item in arg if isinstance(arg, list) else [arg]:
                if isinstance(item, torch.Tensor):
                    item.to(device, non_blocking=True)

    for name in (
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
    ):
        getattr(library, name).return_value.plan.side_effect = plan
    return library


@pytest.mark.parametrize("rows", list(STEPS))
def test_flashinfer(monkeypatch, rows):
    pytest.importorskip("flashinfer", exc_type=ImportError)
    from octavo.backends.flashinfer import attention, wrappers
    from octavo.backends.flashinfer.options import FlashInferOptions

    with asynchronous_device() as device:
        library = uploading(device)
        for module in (attention, wrappers):
            monkeypatch.setattr(module, "flashinfer", library)
        options = FlashInferOptions(workspace_bytes=2**20)
        backend = attention.FlashInferAttention(options, context(device, graph_batch_sizes=(3,)))
        for _ in range(2):
            step(backend, STEPS[rows], device)


def test_flashinfer_with_a_shared_prefix(monkeypatch):
    pytest.importorskip("flashinfer", exc_type=ImportError)
    from octavo.backends.flashinfer import attention, wrappers
    from octavo.backends.flashinfer.options import FlashInferOptions

    with asynchronous_device() as device:
        library = uploading(device)
        for module in (attention, wrappers):
            monkeypatch.setattr(module, "flashinfer", library)
        options = FlashInferOptions(
            workspace_bytes=2**20, cascade_min_rows=2, cascade_min_tokens=SIZE
        )
        limits = context(device)
        specs = SPECS[:1]  # a window would forbid it
        backend = attention.FlashInferAttention(
            options, AttentionBackendContext(specs, *_fields(limits)[1:])
        )
        planned = batch([(33, 1), (40, 1), (90, 1)], device)
        planned.block_table_cpu[1, :2] = planned.block_table_cpu[0, :2]
        backend.plan(planned)
    assert library.MultiLevelCascadeAttentionWrapper.return_value.plan.called


def _fields(limits: AttentionBackendContext):
    return [getattr(limits, name) for name in limits.__dataclass_fields__]


def test_copies_of_blocks():
    with asynchronous_device() as device:
        pool = KVPool(
            [KVSpec(0, "full", 2, 8, 8)],
            [KVLayout(("kv", "block", "token", "head", "dim"))],
            num_blocks=8,
            block_size=SIZE,
            dtype=torch.float16,
            device=device,
            num_host_blocks=4,
        )
        pool.copy(np.array([[DEVICE_COPY] * 2, [0] * 2, [1, 2], [3, 4], [16, 5]], np.int32))
        pool.copy(np.array([[TO_HOST] * 2, [0] * 2, [1, 2], [3, 1], [16, 5]], np.int32))
        pool.copy(np.array([[TO_DEVICE], [0], [1], [6], [9]], np.int32))


def test_block_copier(monkeypatch):
    pytest.importorskip("triton")
    from octavo.backends.triton import block_copy

    kernel = MagicMock()
    monkeypatch.setattr(block_copy, "block_copy_kernel", kernel)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: id(tensor))  # noqa: PLW0108
    with asynchronous_device() as device:
        pools = [torch.zeros(4, SIZE, 2, 8, dtype=torch.float16, device=device) for _ in range(2)]
        ones = np.ones(2, np.int32)
        block_copy.BlockCopier(device).copy(pools, ones, ones + 1, ones)
    assert kernel.__getitem__.called
