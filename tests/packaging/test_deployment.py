"""Dockerfile, .dockerignore and systemd unit, as far as they can be checked without a start."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from octavo.frontend.config import load_config
from octavo.server.command_line import main as cli
from octavo.server.config import ServerConfig
from octavo.server.process.notify import READY, notify


def run(*command, **options):
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, **options
    )


@pytest.fixture(scope="module")
def dockerfile(repository: Path) -> str:
    return (repository / "Dockerfile").read_text().replace("\\\n", " ")


@pytest.fixture(scope="module")
def unit(repository: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(repository / "deploy" / "octavo.service")
    return parser


# ---- Dockerfile ----------------------------------------------------------------------------------


def test_the_dockerfile_is_clean(repository):
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if linter is None:
        pytest.skip("hadolint is not installed (it comes with the extra `dev`)")
    done = run(linter, "--failure-threshold", "style", str(repository / "Dockerfile"))
    assert (done.returncode, done.stdout) == (0, "")


def test_targets_and_user(dockerfile):
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", dockerfile, re.M)
    assert {"cpu", "cuda"} <= {name for _, name in stages}
    known = set()
    for source, name in stages:
        assert source in known or source.startswith("python:3."), source
        known.add(name)
    for source in re.findall(r"(?:--from=|from=)([\w-]+)", dockerfile):
        assert source in known
    (user,) = re.findall(r"^USER (\S+)$", dockerfile, re.M)
    assert int(user) > 0
    assert f"--uid {user}" in dockerfile


def test_nothing_secret_goes_into_the_image(dockerfile, repository):
    assert not re.search(r"(?i)(api_?keys?|token|password|secret)\S*=", dockerfile)
    rules = [
        line
        for line in (repository / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert rules[0] == "*", "everything is left out but what is named"
    named = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.M)
    needed = {item for line in copied for item in line.split()}
    assert needed - {"deploy/requirements.py"} == named - {"deploy/requirements.py"}
    assert all((repository / name).exists() for name in needed)
    assert {file.parent.name for file in repository.glob("*/__init__.py")} <= needed
    assert {"**/.env*", "**/*.pem", "**/*.key"} <= set(rules)


def test_requirements_are_those_of_the_package(dockerfile, repository):
    commands = re.findall(r"python (deploy/requirements\.py[^>]*)>", dockerfile)
    assert len(commands) == 3
    printed = [run(sys.executable, *line.split(), cwd=repository) for line in commands]
    assert all(done.returncode == 0 for done in printed)
    cpu, torch, cuda = (done.stdout.splitlines() for done in printed)
    assert "torch>=2.11" in cpu
    assert any(line.startswith("xgrammar") for line in cpu)
    assert set(cuda) > set(cpu)
    assert any(line.startswith("triton") for line in cuda)
    assert re.fullmatch(r"torch==[\d.]+\+cpu", torch[0])


def health_command(dockerfile):
    (text,) = re.findall(r'HEALTHCHECK .*CMD \["python", "-c", "(.+)"\]', dockerfile)
    return text


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (None, False)])
def test_the_health_check(dockerfile, status, healthy):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.path == "/health"
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            """Nothing is said."""

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        code = health_command(dockerfile).replace(":8000", f":{server.server_port}")
        if status is None:
            server.server_close()
            assert run(sys.executable, "-c", code).returncode != 0
            return
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert (run(sys.executable, "-c", code).returncode == 0) is healthy
        thread.join(60)


def arguments(text, tmp_path):
    """A command line that a deployment file has, with a configuration that is there."""
    config = tmp_path / "config.yaml"
    config.write_text("model: {source: somewhere}\n")
    return text.replace("/etc/octavo/config.yaml", str(config)).split()


def test_the_images_command_is_understood(dockerfile, tmp_path, capsys):
    (text,) = re.findall(r"^CMD \[(.+)\]$", dockerfile, re.M)
    command = arguments(text.replace('"', "").replace(",", ""), tmp_path)
    assert command.pop(0) == "serve"
    assert cli.main(["config", "show", "--given", *command]) == 0
    assert "host: 0.0.0.0" in capsys.readouterr().out


# ---- systemd -------------------------------------------------------------------------------------


@pytest.fixture
def checked_unit(repository, tmp_path) -> str:
    """The unit, with a program that exists."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (repository / "deploy" / "octavo.service").read_text()
    path = tmp_path / "octavo.service"
    path.write_text(text.replace("/opt/octavo/bin/octavo", sys.executable))
    return str(path)


def test_systemd_understands_the_unit(checked_unit):
    done = run("systemd-analyze", "verify", checked_unit)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_is_hardened(checked_unit):
    done = run("systemd-analyze", "security", "--offline=true", "--threshold=25", checked_unit)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot rate a file")
    assert done.returncode == 0, done.stdout[-300:]


def test_the_unit_leaves_time_to_finish(unit):
    service = unit["Service"]
    assert int(service["TimeoutStopSec"]) >= ServerConfig().shutdown_timeout_s + 15
    assert (service["KillSignal"], service["KillMode"]) == ("SIGTERM", "mixed")
    assert service["RestartPreventExitStatus"] == "2"


def test_the_units_command_is_understood(unit, tmp_path, capsys):
    program, verb, *rest = arguments(unit["Service"]["ExecStart"], tmp_path)
    assert (program, verb) == ("/opt/octavo/bin/octavo", "serve")
    assert cli.main(["config", "show", "--given", *rest]) == 0
    assert load_config(rest[1]).model.source == "somewhere"


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told(unit, monkeypatch, tmp_path, abstract):
    assert unit["Service"]["Type"] == "notify"
    # Abstract names are the machine's.
    name = f"octavo-test-{os.getpid()}-{tmp_path.name}" if abstract else str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name if abstract else name)
        manager.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if abstract else name)
        notify(READY)
        assert manager.recv(100) == b"READY=1"
    notify(READY)  # nobody listens any more
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify(READY)
