"""The command line: what it prints, how it fails, and what it does not import."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

import octavo
from octavo.frontend.config import load_config
from octavo.server.command_line import main as cli


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs a command line in this process: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("logging.basicConfig", lambda **kwargs: None)

    def run(*argv):
        try:
            status = cli.main(list(argv))
        except SystemExit as exc:
            status = exc.code
        out, err = capsys.readouterr()
        return status, out, err

    return run


def write(path, text):
    path.write_text(textwrap.dedent(text))
    return str(path)


# ---- what is not imported -----------------------------------------------------------------------


LIGHT = [
    ["--help"],
    ["--version"],
    ["serve", "--help"],
    ["run-batch", "--help"],
    ["plugins", "--set", "executor.device=cpu"],
    ["config", "validate", "engine.yaml"],
    ["config", "schema"],
    ["config", "show", "engine.yaml"],
]


def test_torch_is_not_imported(tmp_path):
    write(tmp_path / "engine.yaml", "scheduler: {policy: fcfs}\nexecutor: {device: cpu}\n")
    code = f"""
        import sys
        from octavo.server.command_line.main import main

        for argv in {LIGHT}:
            try:
                status = main(argv)
            except SystemExit as exc:
                status = exc.code
            assert status == 0, argv
            heavy = {{'torch', 'transformers', 'triton'}} & set(sys.modules)
            assert not heavy, (argv, heavy)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert done.returncode == 0, done.stderr


def python_path() -> str:
    """The path entry that `octavo` was imported from, made absolute."""
    return os.pathsep.join(os.path.abspath(part) for part in sys.path if part)


def test_python_m_octavo():
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "--version"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert done.stdout == f"octavo {octavo.__version__}\n"


# ---- help and errors ----------------------------------------------------------------------------


def test_help_comes_from_the_fields(run):
    status, out, _ = run("serve", "--help")
    text = " ".join(out.split())
    assert status == 0
    assert (
        "Maximum sequence length (prompt and output), in tokens. Default: the model's own limit."
        in text
    )
    assert "[model.max_model_len]" in text
    assert "--no-enable-prefix-caching" in text


def test_unknown_commands_and_flags(run):
    status, _, err = run("sreve")
    assert status == 2
    assert "invalid choice: 'sreve'" in err
    status, _, err = run("config", "validate", "--max-model-length", "3")
    assert status == 2
    assert err == "octavo: unknown flag '--max-model-length'; did you mean '--max-model-len'?\n"
    status, _, err = run("config", "schema", "extra")
    assert (status, err) == (2, "octavo: unexpected argument 'extra'\n")


ERRORS = [
    (
        ["serve"],
        "model.source: no model given; expected MODEL, or a file with one in --config FILE",
    ),
    (["config", "validate", "none.yaml"], "none.yaml: no such file"),
    (
        ["config", "validate", "--set", "scheduler.policy=fcsf"],
        "--set: scheduler.policy: there is no scheduler_policy 'fcsf'; did you mean 'fcfs'?",
    ),
    (
        ["config", "validate", "--set", "scheduler.policy={name: fcfs, a: 3}"],
        "--set: scheduler.policy.a: unknown option; there are none "
        "[options of scheduler_policy 'fcfs']",
    ),
    (
        ["config", "validate", "--max_num_seqs=x"],
        "argument max_num_seqs: scheduler.max_num_seqs: expected an integer, got 'x'",
    ),
    (
        ["config", "validate", "-tp", "2"],
        "tensor_parallel_size: tensor parallelism is not supported yet (got 2)",
    ),
    (
        ["config", "show", "a.yaml", "--config", "b.yaml"],
        "configuration file given twice: 'a.yaml' and --config 'b.yaml'",
    ),
    (
        ["plugins", "--set", "plugins.load=[./none.py]"],
        "plugins.load: there is no file 'none.py'",
    ),
    *(
        (["config", command, "--set", "executor.device=cpu", "--set", setting], message)
        for command in ("validate", "show")
        for setting, message in (
            (
                "scheduler.policy=[fcfs, priority]",
                "--set: scheduler.policy: 'fcfs' orders single requests and has no classes: "
                "expected it last, or a policy with classes (priority, fair, deadline) in its "
                "place",
            ),
            (
                "server.api_keys={a: ''}",
                "server.api_keys: the key named 'a' must be ASCII text without spaces, and not "
                "empty or masked",
            ),
            (
                "server.api_keys_file=/dev/null",
                "server.api_keys_file: expected a line `name: key`, there is none in '/dev/null'",
            ),
            (
                "server.ssl_certfile=none.pem",
                "server.ssl_certfile: cannot read 'none.pem'",
            ),
        )
    ),
]


@pytest.mark.parametrize(("argv", "message"), ERRORS)
def test_errors_are_one_line(run, argv, message):
    assert run(*argv) == (2, "", f"octavo: {message}\n")


def test_a_bad_environment_variable(run, monkeypatch):
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "loud")
    status, _, err = run("plugins")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("octavo: environment variable OCTAVO_LOG_LEVEL: expected one of debug")


@pytest.mark.parametrize("command", ["validate", "show"])
def test_a_bad_environment_variable_of_the_engine(run, monkeypatch, command):
    monkeypatch.setenv("OCTAVO_CPU_ISA", "avx3")
    status, out, err = run("config", command, "--set", "executor.device=cpu")
    assert (status, out) == (2, "")
    assert err == (
        "octavo: environment variable OCTAVO_CPU_ISA: expected one of native, avx2, generic, got "
        "'avx3'\n"
    )


def test_no_more_files_can_be_opened(run, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(cli, "config_from_args", full)
    message = "octavo: [Errno 24] Too many open files; raise the limit of open files (ulimit -n)\n"
    assert run("config", "show") == (2, "", message)


# ---- serve --------------------------------------------------------------------------------------


def test_serve_needs_some_open_files(run, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (16, 16))
    status, out, err = run("serve", "somewhere")
    assert status == 2
    assert "error: this process may open 16 files, expected at least 64" in out + err


def test_serve_hands_over_configuration_and_plugins(run, monkeypatch, tmp_path):
    import types

    got = []
    module = types.ModuleType("octavo.server.process.serve")
    module.run = lambda config, registry: got.append((config, registry)) or 0
    monkeypatch.setitem(sys.modules, "octavo.server.process.serve", module)
    write(tmp_path / "engine.yaml", "model: {source: a}\nscheduler: {max_num_seqs: 3}\n")
    assert run("serve", "b", "--config", "engine.yaml", "--port", "0")[0] == 0
    ((config, registry),) = got
    assert (config.model.source, config.scheduler.max_num_seqs, config.server.port) == ("b", 3, 0)
    assert "fcfs" in registry.providers("scheduler_policy")


# ---- plugins ------------------------------------------------------------------------------------


MINE = """
    from octavo.core.contracts import Provider, Requirement, hookimpl

    @hookimpl
    def octavo_samplers():
        needs = (Requirement(package="no_such_package", extra="flashinfer"),)
        return [Provider(name="mine", factory="x:Y", requires=needs)]

    @hookimpl
    def octavo_observers():
        return []
"""


def distribution(folder: Path, name: str, module: str) -> None:
    info = folder / f"{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[octavo]\n{name} = {module}\n")


def test_plugins(run, tmp_path, monkeypatch):
    write(tmp_path / "mine_module.py", MINE)
    distribution(tmp_path, "acme", "mine_module")
    distribution(tmp_path, "broken", "no_such_module_at_all")
    distribution(tmp_path, "twin", "twin_module")
    write(tmp_path / "twin_module.py", MINE)
    monkeypatch.syspath_prepend(tmp_path)
    status, out, _ = run("plugins", "--set", "executor.device=cpu")
    assert status == 0
    rows = [line.split(None, 4) for line in out.splitlines()]
    assert rows[0] == ["KIND", "NAME", "PACKAGE", "VERSION", "AVAILABLE"]
    assert ["scheduler_policy", "fcfs", "octavo", octavo.__version__, "yes"] in rows
    why = "no: package 'no_such_package' is not installed (pip install 'octavo[flashinfer]')"
    assert ["sampler", "mine", "acme", "1.5", why] in rows
    assert (
        "not loaded: entry point 'broken' of distribution 'broken' 1.5 cannot be imported: module "
        "'no_such_module_at_all' is not installed or not on the path"
    ) in out
    assert (
        "conflict: sampler 'mine' is offered by entry point 'acme' of distribution 'acme' 1.5 and "
        "entry point 'twin' of distribution 'twin' 1.5"
    ) in out
    status, out, _ = run("plugins", "--json", "--set", "plugins.disable=[twin]")
    report = json.loads(out)
    assert report["conflicts"] == []
    assert [f["where"] for f in report["failures"]] == [
        "entry point 'broken' of distribution 'broken' 1.5"
    ]
    mine = next(item for item in report["plugins"] if item["name"] == "mine")
    assert (mine["kind"], mine["package"], mine["available"]) == ("sampler", "acme", False)


# ---- config -------------------------------------------------------------------------------------


def test_config_validate(run, tmp_path):
    write(tmp_path / "engine.yaml", "model: {source: ./none}\nattention: {backend: torch}\n")
    assert run("config", "validate", "engine.yaml") == (0, "engine.yaml: valid\n", "")


def test_config_show_without_a_model(run, tmp_path):
    write(tmp_path / "engine.yaml", "executor: {device: cpu}\n")
    status, out, _ = run("config", "show", "engine.yaml", "--max-num-seqs", "4")
    assert status == 0
    assert "  max_model_len: null  # needs a model\n" in out
    assert "  dtype: float32  # the default on a CPU\n" in out
    assert "  max_num_seqs: 4\n" in out
    shown = load_config(write(tmp_path / "shown.yaml", out))
    assert shown.executor.device == "cpu"


def test_config_show_prints_what_a_command_line_stands_for(run, tmp_path):
    argv = ["org/name", "--max_num_seqs", "4", "--api-key", "secret", "-tp", "1", "--seed", "1"]
    status, out, _ = run("config", "show", "--given", *argv, "--no-enable-prefix-caching")
    assert status == 0
    assert yaml.safe_load(out) == {
        "model": {"source": "org/name", "seed": 1},
        "scheduler": {"max_num_seqs": 4},
        "kv_cache": {"prefix_caching": False},
        "server": {"api_keys": {"key1": "**********"}},
    }
    shown = load_config(write(tmp_path / "shown.yaml", out))
    assert (shown.model.source, shown.kv_cache.prefix_caching) == ("org/name", False)
    assert run("config", "show", "--given") == (0, "{}\n", "")


def test_mappings_key_by_key(run):
    argv = ["--hf-overrides.rope.factor", "4", "--hf_overrides.max_len=x", "--seed", "1"]
    argv += ["--hf-overrides.list+", "1", "--hf-overrides.list+", "true"]
    status, out, _ = run("config", "show", "--given", "org/name", *argv)
    assert status == 0
    overrides = yaml.safe_load(out)["model"]["hf_overrides"]
    assert overrides == {"rope": {"factor": 4}, "max_len": "x", "list": [1, True]}
    for wrong, message in (
        (["--hf-overrides.a"], "--hf-overrides.a: expected a value"),
        (
            ["--hf-overrides.a=1", "--hf-overrides.a.b=1"],
            "--hf-overrides.a.b: 'a' already has a value",
        ),
        (["--hf-overrides", "{}", "--hf-overrides.a=1"], "--hf-overrides: use either one JSON"),
        (["--seed.a=1"], "unknown flag '--seed.a'"),
        (["--speculative-config.method", "ngram"], "speculative_config: speculative decoding is"),
    ):
        status, _, err = run("config", "show", *wrong)
        assert status == 2
        assert err.startswith(f"octavo: {message}"), err


def test_config_validate_shows_every_error(run, tmp_path):
    write(
        tmp_path / "engine.yaml",
        """
        model: {source: 3}
        scheduler:
          policy: fcsf
          max_num_seq: 4
        kv_cache: {block_size: -1, manager: {name: paged, blocks: 3}}
        """,
    )
    status, out, err = run("config", "validate", "engine.yaml")
    assert (status, out) == (2, "")
    assert err.splitlines() == [
        "octavo: engine.yaml:2: model.source: expected a string, got 3",
        "octavo: engine.yaml:5: scheduler.max_num_seq: unknown key; did you mean 'max_num_seqs'?",
        "octavo: engine.yaml:6: kv_cache.block_size: expected a number > 0 or 'auto', got -1",
        "octavo: engine.yaml:4: scheduler.policy: there is no scheduler_policy 'fcsf'; did you "
        "mean 'fcfs'?",
        "octavo: engine.yaml:6: kv_cache.manager.blocks: unknown option; there are none "
        "[options of kv_cache_manager 'paged']",
    ]


def test_config_schema(run):
    status, out, _ = run("config", "schema")
    schema = json.loads(out)
    assert status == 0
    assert schema["additionalProperties"] is False
    scheduler = schema["$defs"]["SchedulerConfig"]["properties"]
    assert scheduler["max_num_seqs"]["exclusiveMinimum"] == 0
    assert scheduler["policy"]["$ref"] == "#/$defs/scheduler_policy"
    assert scheduler["policy"]["default"] == "fcfs"
    policy = schema["$defs"]["scheduler_policy"]["anyOf"]
    assert "fcfs" in policy[0]["enum"]
    by_name = {v["properties"]["name"]["const"]: v for v in policy if v.get("type") == "object"}
    assert by_name["fcfs"]["additionalProperties"] is False
    assert schema["properties"]["observers"]["items"] == {"$ref": "#/$defs/observer"}
    dummy = next(
        v
        for v in schema["$defs"]["weight_source"]["anyOf"]
        if v.get("properties", {}).get("name") == {"const": "dummy"}
    )
    assert dummy["properties"]["seed"]["type"] == "integer"
    for reference in references(schema):
        assert reference.removeprefix("#/$defs/") in schema["$defs"]


def references(part):
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"]
        for value in part.values():
            yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


# ---- bench --------------------------------------------------------------------------------------


def test_bench_is_dispatched(run, monkeypatch):
    import types

    module = types.ModuleType("octavo.bench.scheduler")
    module.add_arguments = lambda parser: parser.add_argument("--running", type=int)
    module.main = lambda args: args.running
    monkeypatch.setitem(sys.modules, "octavo.bench.scheduler", module)
    assert run("bench", "scheduler", "--running", "7")[0] == 7


def test_trace_steps_adds_an_observer(tmp_path):
    from argparse import ArgumentParser

    from octavo.server.command_line.config import add_config_arguments, config_from_args

    parser = ArgumentParser()
    add_config_arguments(parser)
    config, _ = config_from_args(parser.parse_args(["--trace-steps", str(tmp_path / "t.json")]))
    (observer,) = config.observers
    assert (observer.name, observer.options) == ("step_trace", {"path": str(tmp_path / "t.json")})
