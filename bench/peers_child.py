"""One engine that `octavo bench peers` measures, in a process of its own.

Reads JSON lines from stdin, answers each with a JSON line on stdout (and nothing else there): first
the model and how it runs, then a shape a line. It is idle in between, while others are measured.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from octavo.bench.workload import Shape, random_prompts, requests
from octavo.core.errors import OctavoError

Runner = Callable[[Shape, int], dict[str, float]]
"""(shape, seed) to seconds: elapsed_s, and decode_s, what of it came after all first tokens."""


def octavo(settings: dict[str, Any]) -> tuple[Runner, dict[str, Any]]:
    """An engine of the given configuration."""
    from octavo.bench.throughput import run_requests
    from octavo.core.registry import Registry
    from octavo.engine.builder import build_engine
    from octavo.engine.resolve import resolve
    from octavo.frontend.config import load_config

    registry = Registry.discover()
    config = load_config(mapping=settings["config"])
    engine = build_engine(resolve(config, registry), registry)
    vocab_size = engine.scheduler.limits.vocab_size
    handles = count(0, 2**16)

    def run(shape: Shape, seed: int) -> dict[str, float]:
        prompts = random_prompts(shape, vocab_size, seed)
        batch = list(requests(prompts, shape.output_len, first_handle=next(handles)))
        elapsed, times = run_requests(engine, batch)
        wrong = times.check(shape.output_len)
        if wrong is not None:
            raise RuntimeError(f"octavo: {wrong}")
        return {"elapsed_s": elapsed, "decode_s": elapsed - times.all_started_s()}

    return run, engine.report.as_dict()


def transformers(settings: dict[str, Any]) -> tuple[Runner, dict[str, Any]]:
    """`generate` of Hugging Face transformers with its static batch."""
    import torch
    from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

    torch.set_num_threads(settings["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.float32)
    model.eval()

    class FirstToken(LogitsProcessor):  # type: ignore[misc]
        """Notes when the logits of the first token are there."""

        seen: float | None = None

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.seen = self.seen or time.perf_counter()
            return scores

    def run(shape: Shape, seed: int) -> dict[str, float]:
        prompts = random_prompts(shape, model.config.vocab_size, seed)
        ids, first = torch.from_numpy(prompts).long(), FirstToken()
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=shape.output_len,
                max_new_tokens=shape.output_len,
                do_sample=False,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([first]),
            )
        end = time.perf_counter()
        if out.shape[1] != shape.input_len + shape.output_len:
            raise RuntimeError(f"transformers made {out.shape[1] - shape.input_len} tokens")
        return {"elapsed_s": end - start, "decode_s": end - (first.seen or start)}

    return run, {}


ENGINES = {"octavo": octavo, "transformers": transformers}


def main() -> int:
    """Answer until stdin ends."""
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        settings = json.loads(sys.stdin.readline())
        try:
            run, about = ENGINES[settings["engine"]](settings)
        except OctavoError as exc:
            print(f"octavo: {exc}", file=sys.stderr)
            return 1
        print(json.dumps(about), file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            result = run(Shape(*asked["shape"]), asked["seed"])
            print(json.dumps(result), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
