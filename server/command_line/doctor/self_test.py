"""A tiny model through the whole engine, in a process of its own: what crashes or hangs there is
reported and nothing more."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT_S = 180
PROMPTS = ("the quick brown fox", "jumps over", "the")
TOKENS = 12


def self_test(limit_s: float = LIMIT_S) -> dict[str, Any]:
    """`ok`, `seconds`, `parts` (one entry an attention backend that can be used here) and, where
    it failed, `error`."""
    began = time.monotonic()
    command = [sys.executable, "-m", "octavo.server.command_line.doctor.self_test"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"ok": False, "parts": [], "seconds": limit_s, "error": f"not within {limit_s:g} s"}
    seconds = time.monotonic() - began
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        last = " ".join(done.stderr.strip().splitlines()[-2:])
        found = {"ok": False, "parts": [], "error": last or f"exit status {done.returncode}"}
    return found | {"seconds": seconds}


def run_all() -> dict[str, Any]:
    """In the process: greedy outputs with every attention backend that can be used here, and with
    what `auto` takes. All have to agree."""
    from octavo.testing.model_folder import write_model_folder

    parts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name) / "model", max_model_len=256)
        for backend in ("auto", *_backends()):
            parts.append(_run(folder, backend))
    outputs = [part["tokens"] for part in parts if part["ok"]]
    for part in parts:
        if part["ok"] and part["tokens"] != outputs[0]:
            part |= {"ok": False, "error": "its greedy output is not that of the others"}
    for part in parts:
        part.pop("tokens", None)
    return {"ok": all(part["ok"] for part in parts), "parts": parts}


def _backends() -> list[str]:
    """Attention backends that can be used here."""
    from octavo.core.contracts import ProbeContext
    from octavo.core.registry import Registry
    from octavo.core.registry.checks import availability
    from octavo.engine.device import detect_platform

    platform, _ = detect_platform("auto")
    registry = Registry.discover(only=[])
    facts = {"dtype": "float32", "kv_dtype": "float32", "block_size": 16}
    context = ProbeContext(platform, facts)
    found = registry.providers("attention_backend")
    return [name for name, entry in sorted(found.items()) if availability(entry, context)]


def _run(folder: Path, backend: str) -> dict[str, Any]:
    from octavo.core.errors import OctavoError
    from octavo.core.sampling_params import SamplingParams
    from octavo.frontend.llm import LLM

    config = {
        "model": {
            "source": str(folder),
            "dtype": "float32",
            "weight_source": {"name": "dummy", "std": 0.3},
        },
        "attention": {"backend": backend},
        "kv_cache": {"num_blocks": 64},
        "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
        "plugins": {"only": []},
    }
    began = time.perf_counter()
    try:
        with LLM(config=config) as llm:
            greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
            results = llm.generate(list(PROMPTS), greedy, use_tqdm=False)
            tokens = [list(result.outputs[0].token_ids) for result in results]
            chosen = {c.kind: c.name for c in llm.report.plugins}
    except OctavoError as error:
        return {"backend": backend, "ok": False, "error": " ".join(str(error).split())}
    except Exception as error:  # what broke is what the command is asked for
        return {"backend": backend, "ok": False, "error": f"{type(error).__name__}: {error}"}
    names = ("attention_backend", "graph_runner", "quantization", "sampler")
    return {
        "backend": backend,
        "ok": True,
        "seconds": time.perf_counter() - began,
        "chosen": {name: chosen.get(name) for name in names},
        "tokens": tokens,
    }


if __name__ == "__main__":
    print(json.dumps(run_all()))
