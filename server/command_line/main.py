"""The command line, `octavo`. Imports no torch by itself."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import octavo
from octavo.core import envvars
from octavo.core.errors import ConfigError, OctavoError, nearest
from octavo.frontend.vllm.keywords import KEYWORDS
from octavo.server.command_line.config import (
    add_config_arguments,
    add_config_sources,
    config_from_args,
    registry_from_config,
)
from octavo.server.command_line.dotted_json import join_mappings
from octavo.server.config import ServiceConfig

__all__ = ["add_config_arguments", "config_from_args", "main", "registry_from_config"]

Command = Callable[[argparse.Namespace], int]

LOG_LEVEL = envvars.EnvVar(
    "OCTAVO_LOG_LEVEL",
    "debug, info, warning or error",
    "info",
    "Lowest level of log messages that the command line prints.",
    envvars.one_of("debug", "info", "warning", "error", default="info"),
)


class _Parser(argparse.ArgumentParser):
    """Adds its arguments when it is used, so that only the command that runs is imported."""

    populate: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        populate, self.populate = self.populate, None
        if populate is not None:
            populate(self)
        return super().parse_known_args(args, namespace)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. Returns the exit status: 0, 2 for a user error (one line on stderr), 130
    when interrupted."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("octavo").setLevel(LOG_LEVEL.get().upper())
        given = [_dashes(item) for item in join_mappings(given)]
        args, unknown = _parser().parse_known_args(given)
        if unknown:
            raise _unknown_argument(unknown[0])
        command: Command = args.command
        return command(args)
    except OctavoError as exc:
        print(error_line(exc), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output went away; leave nothing to be flushed into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as exc:
        if exc.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        print(f"octavo: {exc}; raise the limit of open files (ulimit -n)", file=sys.stderr)
        return 2


def error_line(error: OctavoError) -> str:
    """An error as the command line prints it."""
    return f"octavo: {' '.join(str(error).split())}"


def _dashes(item: str) -> str:
    """`--max_model_len` is `--max-model-len`, as in vLLM."""
    if not item.startswith("--"):
        return item
    name, equals, value = item.partition("=")
    return name.replace("_", "-") + equals + value


def _unknown_argument(item: str) -> ConfigError:
    name = item.partition("=")[0]
    if not name.startswith("-"):
        return ConfigError(f"unexpected argument '{item}'")
    hint = nearest(name, [f"--{known.replace('_', '-')}" for known in (*KEYWORDS, "config", "set")])
    return ConfigError(f"unknown flag '{name}'" + (f"; {hint}" if hint.startswith("did") else ""))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="octavo",
        description="A plugin-based LLM inference and serving engine.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"octavo {octavo.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _command(
        commands, "serve", "serve a model with an OpenAI-compatible API", serve, _serve_arguments
    )
    _module(
        commands,
        "run-batch",
        "process a file of requests in OpenAI's batch format",
        "octavo.server.command_line.run_batch",
    )
    _module(
        commands,
        "plugins",
        "list implementations; show, check or create one",
        "octavo.server.command_line.plugins",
    )
    config = commands.add_parser(
        "config", help="show or validate a configuration, or print its schema"
    )
    parts = config.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _command(parts, "show", "print the resolved configuration, with reasons", show, _show_arguments)
    _command(parts, "validate", "validate a configuration", validate, _file_arguments)
    _command(
        parts,
        "schema",
        "print the JSON Schema of the configuration, for editors",
        schema,
        add_config_sources,
    )
    _module(
        commands,
        "simulate",
        "replay a trace against a configuration, without a model",
        "octavo.bench.simulate.command",
    )
    _module(
        commands,
        "compare",
        "compare configurations or servers, with confidence intervals",
        "octavo.bench.compare.command",
    )
    _module(
        commands,
        "sweep",
        "run a workload with combinations of settings, on the engine or simulated",
        "octavo.bench.sweep.command",
    )
    _module(
        commands,
        "tune",
        "recommend a configuration for a workload, with reasons",
        "octavo.bench.sweep.tune",
    )
    _module(
        commands,
        "plan",
        "estimate memory and speed of a model on a device, without loading it",
        "octavo.bench.plan.command",
    )
    _module(
        commands,
        "doctor",
        "check this machine: hardware, available implementations, a self-test",
        "octavo.server.command_line.doctor.command",
    )
    bench = commands.add_parser("bench", help="run a benchmark")
    kinds = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    _bench(kinds, "throughput", "tokens per second with many concurrent requests")
    _bench(kinds, "latency", "latency of one batch of requests")
    _bench(kinds, "serve", "load-test a running server, with vLLM's options")
    _bench(kinds, "startup", "time until the engine answers, cold and warm")
    _bench(kinds, "peers", "CPU speed compared with other engines and with the hardware limit")
    _module(
        kinds,
        "gpu",
        "GPU suite in seven minutes: decode against memory bandwidth, prefill, overlap",
        "octavo.bench.gpu.command",
    )
    _bench(kinds, "scheduler", "cost of scheduling alone, without a model")
    _bench(kinds, "http-overhead", "cost of the server and its processes, without a model")
    return parser


def _command(
    commands: Any,
    name: str,
    text: str,
    run: Command,
    populate: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.populate = populate
    parser.set_defaults(command=run)


def _bench(kinds: Any, name: str, text: str) -> None:
    _module(kinds, name, text, f"octavo.bench.{name.replace('-', '_')}")


def _module(commands: Any, name: str, text: str, path: str) -> None:
    """A command whose module brings `add_arguments` and `main`."""

    def module() -> Any:
        import importlib

        return importlib.import_module(path)

    _command(
        commands,
        name,
        text,
        lambda args: int(module().main(args)),
        lambda parser: module().add_arguments(parser),
    )


# ---- serve --------------------------------------------------------------------------------------


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)


def serve(args: argparse.Namespace) -> int:
    """`octavo serve`."""
    config, registry = config_from_args(args)
    if not config.model.source:
        raise ConfigError(
            "no model given; expected MODEL, or a file with one in --config FILE",
            path="model.source",
        )
    from octavo.server.process.serve import run

    return run(config, registry) or 0


# ---- config -------------------------------------------------------------------------------------


def _file_arguments(parser: argparse.ArgumentParser) -> None:
    text = "YAML file, or a model as for `octavo serve`"
    add_config_arguments(parser, source=("FILE|MODEL", text))


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    _file_arguments(parser)
    parser.add_argument(
        "--given", action="store_true", help="print only the settings given, unresolved"
    )


def _with_file(args: argparse.Namespace) -> argparse.Namespace:
    """Treat MODEL as the configuration file where it is one."""
    file = args.model_source
    if file is not None and _is_yaml(file):
        if args.config is not None:
            raise ConfigError(
                f"configuration file given twice: '{file}' and --config '{args.config}'"
            )
        args.config, args.model_source = file, None
    return args


def _is_yaml(name: str) -> bool:
    path = Path(name)
    return path.suffix in (".yaml", ".yml", ".json") or (
        path.is_file() and path.suffix not in (".gguf", ".safetensors")
    )


def show(args: argparse.Namespace) -> int:
    """`octavo config show`."""
    from octavo.engine.resolve import resolve
    from octavo.server.command_line.config_yaml import config_yaml, given_yaml

    config, registry = config_from_args(_with_file(args))
    if args.given:
        print(given_yaml(config), end="")
        return 0
    resolved = resolve(config, registry, need_model=False)
    for error in _server_errors(config):
        raise error
    print(config_yaml(resolved), end="")
    return 0


def _server_errors(config: ServiceConfig) -> Iterator[ConfigError]:
    """Errors of the server's keys and certificate, which `octavo serve` reports at startup."""
    from octavo.server.http.security import load_keys
    from octavo.server.process.listen import check_certificate

    for check in (load_keys, check_certificate):
        try:
            check(config.server)
        except ConfigError as error:
            yield error


def validate(args: argparse.Namespace) -> int:
    """`octavo config validate`: keys, types, implementations and options, API keys, certificate and
    environment variables, one error per line. Nothing is loaded."""
    from octavo.engine.choices import choice_errors

    found: list[ConfigError] = []
    config, registry = config_from_args(_with_file(args), errors=found)
    envvars.check()
    errors = [*found, *choice_errors(config, registry), *_server_errors(config)]
    for error in errors:
        print(error_line(error), file=sys.stderr)
    if errors:
        return 2
    model = f"the configuration of model '{args.model_source}' (the model itself was not checked)"
    print(f"{args.config or (model if args.model_source else 'configuration')}: valid")
    return 0


def schema(args: argparse.Namespace) -> int:
    """`octavo config schema`."""
    import json

    from octavo.server.command_line.config_schema import config_schema

    _, registry = config_from_args(args)
    print(json.dumps(config_schema(registry), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
