"""A double of FlashInfer: every call is bound to the installed package's own signature, recorded,
and answered in plain torch from the page table that was planned."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

real = pytest.importorskip("flashinfer", exc_type=ImportError)


def bind(function, *args, **kwargs):
    """Arguments by name, as the real function would get them."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


class Recorder:
    def __init__(self):
        self.calls = []

    def add(self, name, arguments):
        self.calls.append((name, arguments))

    def named(self, name):
        return [arguments for found, arguments in self.calls if found == name]


class Wrapper:
    """What the paged wrappers have in common. `self.rows`: (token places, queries) a row."""

    def __init__(self, recorder, kind, real_class, *args, **kwargs):
        self.recorder, self.kind, self.real = recorder, kind, real_class
        self.made = bind(real_class.__init__, self, *args, **kwargs)
        recorder.add(f"{kind}.__init__", self.made)
        self.planned = None

    def reset_workspace_buffer(self, *args, **kwargs):
        arguments = bind(self.real.reset_workspace_buffer, self, *args, **kwargs)
        self.recorder.add(f"{self.kind}.reset_workspace_buffer", arguments)

    def plan(self, *args, **kwargs):
        plan = self.real.plan
        if self.kind == "decode":  # whose public `plan` passes keywords on
            bind(plan, self, *args, **kwargs)
            plan = self.real._plan_impl
        self.planned = bind(plan, self, *args, **kwargs)
        self.recorder.add(f"{self.kind}.plan", self.planned)
        p = self.planned
        if self.made["use_cuda_graph"]:
            indptr = p["indptr"]
            assert len(indptr) == len(self.made["paged_kv_indptr_buffer"])
            assert len(p["indices"]) <= len(self.made["paged_kv_indices_buffer"])

    def run(self, q, cache, *args, **kwargs):
        arguments = bind(self.real.run, self, q, cache, *args, **kwargs)
        self.recorder.add(f"{self.kind}.run", arguments)
        out, lse = self.attend(q, cache)
        if arguments["out"] is not None:
            arguments["out"].copy_(out)
            out = arguments["out"]
        return (out, lse) if arguments["return_lse"] else out

    def tables(self):
        p = self.planned
        if self.kind == "decode":
            return p["indptr"], p["indices"], p["last_page_len"]
        return p["paged_kv_indptr"], p["paged_kv_indices"], p["paged_kv_last_page_len"]

    def attend(self, q, cache):
        """(out, lse in base 2) by the plan alone, one query at a time."""
        p = self.planned
        indptr, indices, last = self.tables()
        size = p["page_size"]
        starts = p["qo_indptr"] if self.kind == "prefill" else torch.arange(len(indptr))
        causal = p["causal"] if self.kind == "prefill" else True
        group = p["num_qo_heads"] // p["num_kv_heads"]
        out = torch.zeros_like(q, dtype=torch.float64)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
        assert int(starts[-1]) == len(q)
        for row in range(len(indptr) - 1):
            pages = indices[int(indptr[row]) : int(indptr[row + 1])].long()
            length = (len(pages) - 1) * size + int(last[row]) if len(pages) else 0
            keys, values = (
                c[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for c in cache
            )
            count = int(starts[row + 1] - starts[row])
            for number in range(count):
                at = int(starts[row]) + number
                last_seen = length - count + number if causal else length - 1
                low = max(0, last_seen - p["window_left"]) if p["window_left"] >= 0 else 0
                seen = slice(low, last_seen + 1)
                logits = p["sm_scale"] * torch.einsum("hd,shd->hs", q[at].double(), keys[seen])
                if p["logits_soft_cap"]:
                    logits = p["logits_soft_cap"] * torch.tanh(logits / p["logits_soft_cap"])
                out[at] = torch.einsum("hs,shd->hd", logits.softmax(-1), values[seen])
                lse[at] = logits.logsumexp(-1) / 0.6931471805599453
        return out.to(q.dtype), lse


class Cascade:
    """Two levels of the double's prefill wrapper, merged by their sums of exponentials."""

    def __init__(self, recorder, *args, **kwargs):
        self.real = real.MultiLevelCascadeAttentionWrapper
        made = bind(self.real.__init__, self, *args, **kwargs)
        recorder.add("cascade.__init__", made)
        self.recorder, self.num_levels = recorder, made["num_levels"]
        paged = real.BatchPrefillWithPagedKVCacheWrapper
        self.levels = [
            Wrapper(recorder, "prefill", paged, made["float_workspace_buffer"], made["kv_layout"])
            for _ in range(self.num_levels)
        ]

    def plan(self, *args, **kwargs):
        p = bind(self.real.plan, self, *args, **kwargs)
        self.recorder.add("cascade.plan", p)
        by_level = (
            p["qo_indptr_arr"],
            p["paged_kv_indptr_arr"],
            p["paged_kv_indices_arr"],
            p["paged_kv_last_page_len"],
        )
        for number, (level, *tables) in enumerate(zip(self.levels, *by_level, strict=True)):
            level.plan(
                *tables,
                p["num_qo_heads"],
                p["num_kv_heads"],
                p["head_dim"],
                p["page_size"],
                causal=p["causal"] and number == self.num_levels - 1,
                sm_scale=p["sm_scale"],
                window_left=p["window_left"],
                logits_soft_cap=p["logits_soft_cap"],
            )

    def run(self, q, cache):
        bind(self.real.run, self, q, cache)
        self.recorder.add("cascade.run", {"q": q})
        parts = [level.attend(q, cache) for level in self.levels]
        weight = torch.stack([lse for _, lse in parts]) * 0.6931471805599453
        weight = weight.softmax(0).unsqueeze(-1)
        return (torch.stack([out.double() for out, _ in parts]) * weight).sum(0).to(q.dtype)


def append(recorder, *args, **kwargs):
    """By the library's own meaning of its page table, not by the slot mapping."""
    a = bind(real.append_paged_kv_cache, *args, **kwargs)
    recorder.add("append_paged_kv_cache", a)
    assert a["kv_layout"] == "NHD"
    size = a["paged_kv_cache"][0].shape[1]
    for token, (row, position) in enumerate(
        zip(a["batch_indices"].tolist(), a["positions"].tolist(), strict=True)
    ):
        start, stop = a["kv_indptr"][row : row + 2].tolist()
        assert position < (stop - start - 1) * size + int(a["kv_last_page_len"][row])
        page = int(a["kv_indices"][start + position // size])
        for cache, new in zip(
            a["paged_kv_cache"], (a["append_key"], a["append_value"]), strict=True
        ):
            assert new.dtype == cache.dtype
            cache[page, position % size] = new[token]


@pytest.fixture
def library(monkeypatch):
    """The double in place of the library in the backend's modules; its recorder."""
    from octavo.backends.flashinfer import attention, filters, sampler, wrappers

    recorder = Recorder()

    def top_k_mask_logits(*args, **kwargs):
        a = bind(real.sampling.top_k_mask_logits, *args, **kwargs)
        recorder.add("top_k_mask_logits", a)
        assert a["top_k"].dtype == torch.int32
        logits = a["logits"]
        ordered = logits.sort(dim=1, descending=True).values
        least = ordered.gather(1, a["top_k"].long().unsqueeze(1) - 1)
        return logits.masked_fill(logits < least, -torch.inf)

    def top_p_renorm_probs(*args, **kwargs):
        a = bind(real.sampling.top_p_renorm_probs, *args, **kwargs)
        recorder.add("top_p_renorm_probs", a)
        probs = a["probs"]
        assert probs.dtype == a["top_p"].dtype == torch.float32
        ordered = probs.sort(dim=1, descending=True).values
        reached = (ordered.cumsum(dim=1) < a["top_p"].unsqueeze(1)).sum(dim=1, keepdim=True)
        place = (reached + recorder.error).clamp(0, probs.shape[1] - 1)
        kept = probs.masked_fill(probs < ordered.gather(1, place), 0)
        return kept / kept.sum(dim=1, keepdim=True)

    def loading(module, *args, **kwargs):
        bind(module, *args, **kwargs)
        if recorder.missing:
            raise RuntimeError(recorder.missing)

    recorder.error, recorder.missing = 0, ""
    paged = {"prefill": "BatchPrefillWithPagedKVCacheWrapper"}
    paged["decode"] = "BatchDecodeWithPagedKVCacheWrapper"
    double = SimpleNamespace(
        MultiLevelCascadeAttentionWrapper=lambda *a, **k: Cascade(recorder, *a, **k),
        append_paged_kv_cache=lambda *a, **k: append(recorder, *a, **k),
        page=SimpleNamespace(get_page_module=lambda: loading(real.page.get_page_module)),
        sampling=SimpleNamespace(
            top_k_mask_logits=top_k_mask_logits,
            top_p_renorm_probs=top_p_renorm_probs,
            get_sampling_module=lambda: loading(real.sampling.get_sampling_module),
        ),
        **{
            name: lambda *a, kind=kind, name=name, **k: Wrapper(
                recorder, kind, getattr(real, name), *a, **k
            )
            for kind, name in paged.items()
        },
    )
    for module in (attention, filters, sampler, wrappers):
        monkeypatch.setattr(module, "flashinfer", double)
    return recorder
