"""`octavo plan`: the command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.bench.arguments import positive, writable
from octavo.bench.plan.capacity import (
    Capacity,
    PlanRequest,
    capacity,
    decode_shape,
    least_devices,
    prefill_shape,
    step_floor,
)
from octavo.bench.result_file import write_json
from octavo.core import envvars
from octavo.core.config.models import AUTO
from octavo.core.contracts import Platform, ProbeContext
from octavo.core.contracts.weight_source import WeightSource, WeightSourceContext
from octavo.core.errors import ConfigError, ModelNotFound, PluginUnavailable
from octavo.core.registry import Registry
from octavo.engine import model_facts
from octavo.engine.capacity import size
from octavo.plugins.executors.accelerators import Accelerator, load, names

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "fp8", "int8")
QUANTIZATIONS = ("auto", "none", "packed", "int8", "int4", "fp8")
BATCHES = (1, 8, 32, 128)
CPU = "cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """vLLM's names where they exist."""
    parser.add_argument(
        "model", metavar="MODEL", help="folder, config.json, hub id, .gguf file or package:NAME"
    )
    add = parser.add_argument
    add(
        "--device",
        default="h100",
        metavar="NAME[:N]",
        help=f"{', '.join(names())}, cpu (this machine), or a YAML file; N of them (h100)",
    )
    add("--max-model-len", type=positive, help="context length (default: the model's)")
    add("--max-num-seqs", type=positive, default=256, help="concurrent sequences (256)")
    add("--max-num-batched-tokens", type=positive, help="tokens per step (default: by device)")
    add("--dtype", choices=DTYPES, default="auto", help="dtype of weights and activations")
    add(
        "--quantization",
        choices=QUANTIZATIONS,
        default="auto",
        help="quantization of linear layers",
    )
    add("--kv-cache-dtype", choices=KV_DTYPES, default="auto", help="dtype of the KV cache")
    add("--block-size", type=positive, default=16, help="tokens per KV block (16)")
    add(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        help="fraction of device memory to use (0.9)",
    )
    add("--revision", help="hub revision")
    add("--json", metavar="FILE", type=writable, help="write the results as JSON")


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 1 when the model does not fit."""
    if not 0 < args.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization: expected (0, 1], got {args.gpu_memory_utilization}"
        )
    config = model_config(args.model, args.revision)
    name, count, device = named_device(args.device)
    request = settle(config, args, device, count)
    kind = CPU if device is None else device.device
    memory, pool = _memory(device, config, request)
    found = capacity(config, request, memory, kind, pool)
    result = as_dict(args.model, name, request, found, memory)
    if device is not None:
        result["floors"] = floors(found, device, request)
        if not found.fits:
            result["devices_needed"] = least_devices(config, request, memory, kind)
    # A length that is the model's own stops no start.
    roomy = args.max_model_len is None and found.blocks > 0 and found.undivided is None
    result["starts"] = found.fits or roomy
    print("\n".join(lines(result)))
    if args.json is not None:
        write_json(args.json, result)
    return 0 if found.fits else 1


def model_config(source: str, revision: str | None = None) -> dict[str, Any]:
    """config.json of a model; of its weights nothing is read or downloaded."""
    path = Path(source).expanduser()
    if path.name.endswith(".json"):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValueError) as exc:
            raise ModelNotFound(f"cannot read '{source}': {exc}") from None
        if not isinstance(found, dict):
            raise ModelNotFound(f"'{source}': expected a JSON object")
        return found
    registry = Registry.discover()
    context = ProbeContext(Platform(), {"source": source, "revision": revision})
    try:
        selection = registry.select("weight_source", AUTO, context)
    except PluginUnavailable as exc:
        raise ModelNotFound(f"nothing can read '{source}': {exc}") from None
    made: WeightSource = registry.create(
        selection,
        WeightSourceContext(
            source=source,
            revision=revision,
            download_dir=None,
            cache_dir=envvars.CACHE_DIR.get(),
        ),
    )
    return dict(made.config())


def named_device(text: str) -> tuple[str, int, Accelerator | None]:
    """`h100:2`: name, number, and its profile; None for this machine's CPU."""
    name, colon, number = text.rpartition(":")
    if not colon:
        name, number = text, "1"
    if not number.isdigit() or not int(number):
        raise ConfigError(f"--device: expected NAME or NAME:NUMBER, got '{text}'")
    if name == CPU:
        if int(number) != 1:
            raise ConfigError("--device cpu takes no number")
        return name, 1, None
    try:
        return name, int(number), load(name)
    except ConfigError as exc:
        raise ConfigError(f"--device: {str(exc).partition(': ')[2] or exc}") from None


def settle(
    config: Mapping[str, Any], args: argparse.Namespace, device: Accelerator | None, count: int
) -> PlanRequest:
    """Every `auto`, by the rules of serving."""
    on_cpu = device is None or device.device == CPU
    dtype = args.dtype
    if dtype == "auto":
        dtype = "float32" if on_cpu else model_facts.checkpoint_dtype(config) or "bfloat16"
    known = model_facts.model_length(config)
    length = args.max_model_len or (known[0] if known else None)
    if length is None:
        raise ConfigError(
            "required: --max-model-len (config.json does not specify a context length)"
        )
    if known and length > known[0]:
        raise ConfigError(
            f"--max-model-len: the model is made for at most {known[0]} tokens, got {length}"
        )
    quantization = args.quantization
    if quantization == "auto":
        quantization = "none" if device is not None else _chosen_here(config, dtype)
    return PlanRequest(
        dtype=dtype,
        kv_dtype=dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype,
        quantization=quantization,
        max_model_len=length,
        max_num_seqs=args.max_num_seqs,
        block_size=args.block_size,
        utilization=args.gpu_memory_utilization,
        devices=count,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )


def _chosen_here(config: Mapping[str, Any], dtype: str) -> str:
    """What `model.quantization: auto` takes on this machine's CPU."""
    facts = {
        "config": dict(config),
        "architecture": model_facts.architecture(config),
        "attention_specs": model_facts.attention_specs(config),
        "dtype": dtype,
        "kv_dtype": dtype,
    }
    known = {key: value for key, value in facts.items() if value is not None}
    registry = Registry.discover()
    try:
        return registry.select("quantization", AUTO, ProbeContext(Platform(), known)).name
    except PluginUnavailable:
        return "none"


def _memory(
    device: Accelerator | None, config: Mapping[str, Any], request: PlanRequest
) -> tuple[int, int | None]:
    """Memory of one device, and the pool's bytes where they follow a CPU's rules."""
    if device is not None:
        return device.memory_bytes, None
    from octavo.engine.worker.memory import free_host_memory
    from octavo.engine.worker.profile import kv_budget_cpu

    empty = capacity(config, request, 0, CPU, 0)
    blocks = request.max_num_seqs * -(-request.max_model_len // request.block_size) + 1
    free = free_host_memory()
    pool = kv_budget_cpu(blocks * empty.kv_per_token * request.block_size)
    return free, min(pool, max(0, free - empty.weights - empty.activations))


def floors(found: Capacity, device: Accelerator, request: PlanRequest) -> dict[str, Any]:
    """Least seconds of a decode step by batch, at half the context, and of a whole prompt."""
    context = max(1, request.max_model_len // 2)
    decode = {}
    for batch in BATCHES:
        if batch <= request.max_num_seqs and batch * context <= found.tokens:
            seconds = step_floor(found.size, device, request, decode_shape(batch, context))
            decode[str(batch)] = {"seconds": seconds, "tokens_per_s": batch / seconds}
    alone = step_floor(found.size, device, request, decode_shape(1, 1))
    prompt = step_floor(found.size, device, request, prefill_shape(request.max_model_len))
    return {"context": context, "decode": decode, "decode_alone_s": alone, "prefill_s": prompt}


def as_dict(
    model: str, device: str, request: PlanRequest, found: Capacity, memory: int
) -> dict[str, Any]:
    """As plain data; bytes are of one device."""
    return {
        "model": model,
        "device": device,
        **vars(request),
        "memory_bytes": memory,
        "num_parameters": found.params,
        "parameters_exact": found.exact,
        "weight_bytes": found.weights,
        "activation_bytes": found.activations,
        "table_bytes": found.tables,
        "kv_bytes_per_token": found.kv_per_token,
        "kv_bytes": found.pool,
        "num_blocks": found.blocks,
        "kv_tokens": found.tokens,
        "concurrency": found.concurrency,
        "longest_context": found.longest,
        "fits": found.fits,
        "problem": found.problem(request),
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """For people."""
    each = " a device" if result["devices"] > 1 else ""
    many = f"{result['devices']} x " if result["devices"] > 1 else ""
    tables = []
    if result["table_bytes"]:
        tables = [
            f"  tables        {size(result['table_bytes'])}{each} (penalties, allowed tokens)"
        ]
    about = "" if result["parameters_exact"] else "about "
    out = [
        f"{result['model']} on {many}{result['device']}, {size(result['memory_bytes'])}{each}",
        f"  weights       {about}{result['num_parameters'] / 1e6:,.1f} M parameters, "
        f"{size(result['weight_bytes'])}{each} ({result['dtype']}"
        + (f", {result['quantization']}" if result["quantization"] != "none" else "")
        + ")",
        f"  activations   about {size(result['activation_bytes'])}{each}",
        *tables,
        f"  KV cache      {result['kv_bytes_per_token']:,} bytes a token{each} "
        f"({result['kv_dtype']}); {result['num_blocks']:,} blocks of {result['block_size']} = "
        f"{result['kv_tokens']:,} tokens, {size(result['kv_bytes'])}{each}",
        f"  concurrency   {result['concurrency']:.1f} sequences of {result['max_model_len']:,} "
        f"tokens (at most {result['max_num_seqs']} run at once)",
        f"  longest       {result['longest_context']:,} tokens of context",
    ]
    if result["devices"] > 1:
        out.append(
            f"  assumed       tensor parallelism: heads, MLP and vocabulary divided by "
            f"{result['devices']}; communication takes no time"
        )
    if not result["fits"]:
        needed = result.get("devices_needed")
        hint = f"; {needed} device{'s' if needed > 1 else ''} would do" if needed else ""
        out.append(f"  does not fit: {result['problem']}{hint}")
        if result["starts"]:
            out.append("  an engine starts all the same, and serves what fits")
    found = result.get("floors")
    if found is not None and result["fits"]:
        out.append("  no faster than (memory and arithmetic at their full rates):")
        out.append(f"    prompt of {result['max_model_len']:,} tokens  {_time(found['prefill_s'])}")
        for batch, row in found["decode"].items():
            out.append(
                f"    decode step, {batch:>3} x {found['context']:,} tokens  "
                f"{_time(row['seconds'])}, {row['tokens_per_s']:,.0f} tokens/s"
            )
    return out


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
