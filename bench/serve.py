"""`octavo bench serve`: load on a running server, with vLLM's option names and result keys."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench.arguments import fraction, natural, positive, positive_float, rate
from octavo.bench.load.answers import Answer
from octavo.bench.load.http import HttpClient, HttpError
from octavo.bench.load.openai import (
    CHAT,
    COMPLETIONS,
    Target,
    probe_vocabulary,
    run_calls,
    served_model,
    wait_ready,
)
from octavo.bench.result_file import write_json
from octavo.bench.serve_report import lines, vllm_result
from octavo.bench.slo import Slo
from octavo.bench.workloads.arrivals import arrivals
from octavo.bench.workloads.calls import Call
from octavo.bench.workloads.spec import WorkloadSpec
from octavo.core.errors import ConfigError

BACKENDS = {
    "openai": COMPLETIONS,
    "vllm": COMPLETIONS,
    "octavo": COMPLETIONS,
    "openai-chat": CHAT,
}
METRICS = ("ttft", "tpot", "itl", "e2el")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    _server_arguments(parser.add_argument_group("server"))
    _load_arguments(parser.add_argument_group("load"))
    _data_arguments(parser.add_argument_group("data"))
    _result_arguments(parser.add_argument_group("results"))


def _server_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--base-url", "--url", metavar="URL", help="server URL (http://127.0.0.1:8000)")
    add("--host", default="127.0.0.1", help="host, if --base-url is not given")
    add("--port", type=positive, default=8000, help="port, if --base-url is not given (8000)")
    add("--backend", choices=[*BACKENDS], default="openai", help="API to use: completions or chat")
    add("--endpoint", metavar="PATH", help="API path (default: depends on --backend)")
    add("--model", metavar="NAME", help="model name (default: the first one the server lists)")
    add("--served-model-name", metavar="NAME", help="model name to send, if different from --model")
    add("--api-key", metavar="KEY", help="API key, sent as a bearer token")
    add(
        "--header",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="extra HTTP header; repeatable",
    )
    add("--insecure", action="store_true", help="skip certificate verification")
    add(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        help="seconds to wait until the server is ready (0)",
    )
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="extra request fields")


def _load_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-prompts", type=positive, default=1000, help="number of requests (1000)")
    add("--request-rate", type=rate, default=math.inf, help="requests per second (inf)")
    add(
        "--burstiness", type=positive_float, default=1.0, help="1 is Poisson; lower is burstier (1)"
    )
    add("--max-concurrency", type=positive, help="maximum concurrent requests")
    add("--ramp-up-strategy", choices=["linear", "exponential"], help="ramp the request rate")
    add("--ramp-up-start-rps", type=positive_float, help="request rate at the start of the ramp")
    add("--ramp-up-end-rps", type=positive_float, help="request rate at the end of the ramp")
    add("--num-warmups", type=natural, default=0, help="requests that are not counted (0)")
    add("--temperature", type=float, default=0.0, help="(0: greedy)")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, help="default: for random prompts")
    add("--seed", type=natural, default=0, help="of prompts and times (0)")


def _data_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dataset-name", choices=["random", "sharegpt", "custom"], default="random")
    add("--dataset-path", metavar="FILE", help="JSON lines with prompts, or ShareGPT's JSON")
    add("--random-input-len", "--input-len", type=positive, default=1024, help="tokens (1024)")
    add("--random-output-len", "--output-len", type=positive, default=128, help="tokens (128)")
    add("--random-range-ratio", type=fraction, default=0.0, help="lengths vary so much (0)")
    add("--random-prefix-len", type=natural, default=0, help="tokens that all share (0)")
    add("--sharegpt-output-len", type=positive, help="output length (default: 128)")
    add(
        "--custom-output-len",
        type=positive,
        help="output length (default: from the file, else 128)",
    )
    add(
        "--prompt-form",
        choices=["auto", "tokens", "text"],
        default="auto",
        help="random prompts as token ids, or as text for servers that take only text",
    )
    add(
        "--vocab-size",
        type=positive,
        help="vocabulary size to draw token ids from (default: probed)",
    )


def _result_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        help=f"metrics to report percentiles for: {','.join(METRICS)}",
    )
    add("--metric-percentiles", default="99", help="percentiles, such as 25,50,99 (99)")
    add("--goodput", nargs="+", metavar="KEY:MS", help="latency targets in ms: ttft, tpot, e2el")
    add("--save-result", action="store_true", help="save the results as JSON")
    add("--save-detailed", action="store_true", help="include the times and text of each request")
    add("--result-dir", metavar="FOLDER", help="directory for results (.)")
    add("--result-filename", metavar="FILE", help="file name (default: from rate, model and time)")
    add("--label", help="label of the results (default: the backend)")
    add("--metadata", nargs="+", metavar="KEY=VALUE", help="metadata to store with the results")
    add("--disable-tqdm", action="store_true", help="hide the progress bar")


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 1 when no request was answered."""
    settings = _checked(args)
    answers, seconds, model = asyncio.run(_run(args))
    good = [a for a in answers if a.good]
    result = vllm_result(args, settings, answers, seconds, model)
    print("\n".join(lines(result, settings)))
    for message, count in _errors(answers).items():
        print(f"octavo: {count} requests failed: {message}", file=sys.stderr)
    if args.save_result or args.save_detailed:
        file = _result_file(args, model)
        write_json(file, result)
        print(f"written to {file}")
    return 0 if good else 1


def _errors(answers: list[Answer]) -> dict[str, int]:
    found: dict[str, int] = {}
    for answer in answers:
        if answer.error is not None:
            found[answer.error] = found.get(answer.error, 0) + 1
    return found


def _checked(args: argparse.Namespace) -> dict[str, Any]:
    """What the arguments mean, checked before anything is sent."""
    metrics = [name.strip() for name in args.percentile_metrics.split(",") if name.strip()]
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        raise ConfigError(f"--percentile-metrics: expected {', '.join(METRICS)}, got {unknown[0]}")
    try:
        percentiles = [float(part) for part in args.metric_percentiles.split(",")]
    except ValueError:
        percentiles = [-1.0]
    if not all(0 <= p <= 100 for p in percentiles):
        raise ConfigError(
            f"--metric-percentiles: expected numbers from 0 to 100, got {args.metric_percentiles}"
        )
    if args.dataset_name != "random" and args.dataset_path is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path")
    ramp = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    if (args.ramp_up_strategy is not None) != all(ramp) or any(ramp) != all(ramp):
        raise ConfigError(
            "a ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps together"
        )
    if args.ramp_up_strategy is not None and not math.isinf(args.request_rate):
        raise ConfigError("--request-rate cannot be combined with a ramp")
    if not isinstance(args.extra_body, dict):
        raise ConfigError("--extra-body: expected a JSON object")
    folder = Path(args.result_dir or ".")
    if (args.save_result or args.save_detailed) and not folder.is_dir():
        raise ConfigError(f"--result-dir: '{folder}' is not a directory")
    return {"metrics": metrics, "percentiles": percentiles, "slo": goodput(args.goodput)}


def goodput(pairs: list[str] | None) -> Slo:
    """`ttft:200 tpot:50 e2el:3000`, in milliseconds. Raises `ConfigError`."""
    names = {"ttft": "ttft", "tpot": "itl", "e2el": "e2e"}
    found: dict[str, float] = {}
    for pair in pairs or ():
        name, _, value = pair.partition(":")
        try:
            limit = float(value) / 1e3
        except ValueError:
            limit = -1.0
        if name not in names or not limit > 0:
            raise ConfigError(f"--goodput: expected ttft:MS, tpot:MS or e2el:MS, got '{pair}'")
        found[names[name]] = limit
    return Slo(**found)


async def _run(args: argparse.Namespace) -> tuple[list[Answer], float, str]:
    client = _client(args)
    try:
        if args.ready_check_timeout_sec > 0:
            await wait_ready(client, args.ready_check_timeout_sec)
        model = args.served_model_name or args.model or await served_model(client)
        target, vocab_size = await _target(args, client, model)
        calls = make_calls(args, vocab_size)
        if args.num_warmups:
            warm = [replace(call, arrival=0.0) for call in calls[: args.num_warmups]]
            await run_calls(target, warm, args.max_concurrency)
        with _bar(args, len(calls)) as bar:
            answers, seconds = await run_calls(
                target, calls, args.max_concurrency, on_end=lambda _: bar.update(1)
            )
    except HttpError as error:
        raise ConfigError(str(error)) from None
    finally:
        await client.close()
    return answers, seconds, model


def _client(args: argparse.Namespace) -> HttpClient:
    headers = []
    for given in args.header:
        key, equals, value = given.partition("=")
        if not equals or not key:
            raise ConfigError(f"--header: expected KEY=VALUE, got '{given}'")
        headers.append((key.strip(), value.strip()))
    return HttpClient(
        args.base_url or f"http://{args.host}:{args.port}",
        api_key=args.api_key,
        headers=headers,
        verify=not args.insecure,
    )


async def _target(args: argparse.Namespace, client: HttpClient, model: str) -> tuple[Target, int]:
    """How to ask the server, and from how many token ids prompts are drawn."""
    path = args.endpoint or BACKENDS[args.backend]
    random = args.dataset_name == "random"
    vocab_size = args.vocab_size
    tokens = random and args.prompt_form != "text" and path != CHAT
    if tokens and vocab_size is None:
        vocab_size = await probe_vocabulary(client, model)
        if vocab_size is None and args.prompt_form == "tokens":
            raise ConfigError(
                f"{client.url} does not accept token ids as prompts: use --prompt-form text"
            )
        tokens = vocab_size is not None
    eos = random if args.ignore_eos is None else args.ignore_eos
    target = Target(client, model, path, tokens, args.temperature, eos, args.extra_body)
    return target, vocab_size or 32_000


def make_calls(args: argparse.Namespace, vocab_size: int) -> list[Call]:
    """The requests that the arguments ask for."""
    spec = WorkloadSpec(
        num_requests=args.num_prompts,
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        range_ratio=args.random_range_ratio,
        seed=args.seed,
    )
    if args.dataset_name != "random":
        length = args.sharegpt_output_len or args.custom_output_len or 128
        spec = replace(spec, kind="prompts", file=args.dataset_path, output_len=length)
        fixed = args.sharegpt_output_len or args.custom_output_len
        calls = [replace(c, max_tokens=fixed or c.max_tokens) for c in spec.calls(vocab_size)]
    elif args.random_prefix_len:
        shared = replace(
            spec, kind="shared-prefix", prefix_len=args.random_prefix_len, num_prefixes=1
        )
        calls = shared.calls(vocab_size)
    else:
        calls = spec.calls(vocab_size)
    times = arrivals(
        len(calls),
        args.ramp_up_start_rps or args.request_rate,
        np.random.RandomState([args.seed, 7]),
        burstiness=args.burstiness,
        ramp_to=args.ramp_up_end_rps,
        exponential=args.ramp_up_strategy == "exponential",
    )
    return [replace(c, arrival=t) for c, t in zip(calls, times.tolist(), strict=True)]


def _bar(args: argparse.Namespace, total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="req", disable=True if args.disable_tqdm else None)


def _result_file(args: argparse.Namespace, model: str) -> Path:
    name: str | None = args.result_filename
    if name is None:
        moment = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        limit = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
        stem = model.rstrip("/").rpartition("/")[2]
        name = f"{args.label or args.backend}-{args.request_rate}qps{limit}-{stem}-{moment}.json"
    return Path(args.result_dir or ".") / name
