"""Binding, readiness, signals and exit statuses: `serve` as a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from octavo.core.errors import ConfigError
from octavo.core.registry import Registry
from octavo.server.config import ServerConfig, ServiceConfig
from octavo.server.process.listen import address_of, bind, bind_problem, check_certificate
from octavo.server.process.serve import run

PROGRAM = """
import faulthandler, importlib.util, sys
faulthandler.dump_traceback_later(200, exit=True)  # tells where it hangs
spec = importlib.util.spec_from_file_location("octavo_test_fake_llm", sys.argv[1])
fake = importlib.util.module_from_spec(spec)
sys.modules["octavo_test_fake_llm"] = fake
spec.loader.exec_module(fake)
from octavo.server.config import ServiceConfig
from octavo.core.errors import ModelNotFound
from octavo.server.process import listen, serve
options = {options}
config = ServiceConfig.model_validate({{"server": {{"port": 0, **options["server"]}}}})
llm = fake.FakeAsyncLLM(max_model_len=100000, start_delay=options["start_delay"])
if options["fail"]:
    llm.start_error = ModelNotFound("no model at /nowhere")
with listen.bind(config.server) as sock:
    sys.exit(serve.serve(llm, config, sock))
"""


class Process:
    """A server process; its output lines as they come."""

    def __init__(self, **options) -> None:
        options = {"server": {}, "start_delay": 0.0, "fail": False} | options
        program = PROGRAM.format(options=options)
        fake = Path(__file__).parent / "fake_llm.py"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(fake)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait_line(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + 60
        while True:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            assert time.monotonic() < deadline, self.lines
            assert self._reader.is_alive() or self.lines, self.lines
            time.sleep(0.01)

    def ended(self) -> int:
        status = self.process.wait(220)
        self._reader.join(60)
        assert not any("Timeout" in line for line in self.lines), self.lines
        return status


@contextmanager
def serving(**options):
    server = Process(**options)
    try:
        yield server
    finally:
        server.process.kill()
        server.ended()
        server.process.stdout.close()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_start_serve_stop(stop):
    with serving() as server:
        url = server.wait_line(r"^Octavo is ready on (http://127.0.0.1:\d+)$")[1]
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "say:x"}, timeout=60).json()
        assert answer["choices"][0]["text"] == "x"
        server.process.send_signal(stop)
        assert server.ended() == 0
        assert server.lines[-1] == "stopped"
        assert not any("Traceback" in line for line in server.lines)


def test_health_is_503_while_the_engine_loads():
    with serving(start_delay=3600.0) as server:
        url = server.wait_line(r"^listening on (http://127.0.0.1:\d+)")[1]
        deadline = time.monotonic() + 60
        while True:
            try:
                response = httpx.get(f"{url}/health", timeout=60)
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_loading"
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0, "also while it loads"


def test_engine_that_does_not_start():
    with serving(fail=True) as server:
        assert server.ended() == 1
        errors = [line for line in server.lines if "error" in line]
        assert errors == ["error: the engine did not start: no model at /nowhere"]


def test_running_requests_finish_before_the_end():
    """One goes on until all has been seen; another finishes meanwhile."""
    with serving(server={"shutdown_timeout_s": 120}) as server:
        url = server.wait_line(r"ready on (\S+)$")[1]
        body = {"prompt": "slow", "stream": True, "max_tokens": 300}
        endless = body | {"max_tokens": 90_000}
        with (
            httpx.Client(base_url=url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=endless) as held,
        ):
            next(held.iter_lines())
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                server.wait_line("requests may finish")
                for method, path in (("GET", "/health"), ("POST", "/v1/completions")):
                    late = client.request(method, path, json=body)
                    assert late.status_code == 503
                    assert late.json()["error"]["code"] == "server_stopping"
                    assert late.headers["retry-after"]
                assert [line for line in lines if line][-1] == "data: [DONE]"
            assert server.process.poll() is None
        assert server.ended() == 0


@pytest.mark.parametrize("streaming", [True, False])
def test_requests_that_take_too_long_are_told(streaming):
    with serving(server={"shutdown_timeout_s": 0.2}) as server:
        url = server.wait_line(r"ready on (\S+)$")[1]
        body = {"prompt": "slow", "stream": streaming, "max_tokens": 90000}

        def stop_once_it_runs():
            while httpx.get(f"{url}/load", timeout=60).json() != {"server_load": 1}:
                time.sleep(0.02)
            server.process.send_signal(signal.SIGTERM)

        stopper = threading.Thread(target=stop_once_it_runs)
        stopper.start()
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        stopper.join(60)
        if streaming:
            last = response.text.strip().split("\n\n")[-1]
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            assert response.status_code == 503
            error = response.json()["error"]
        assert error["code"] == "server_stopping"
        assert server.ended() == 0


def test_bind_picks_a_free_port_and_explains_a_taken_one():
    with bind(ServerConfig(port=0)) as sock:
        port = sock.getsockname()[1]
        assert port > 0
        assert address_of(sock) == f"http://127.0.0.1:{port}"
        sock.listen()
        config = ServerConfig(port=port)
        with pytest.raises(OSError) as taken:  # noqa: PT011
            bind(config)
        assert "--port" in bind_problem(taken.value, config)
        assert str(port) in bind_problem(taken.value, config)


def test_unknown_host_is_explained(monkeypatch):
    config = ServerConfig(host="no.such.host.invalid")

    def fail(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(socket.gaierror) as error:
        bind(config)
    assert "no.such.host.invalid" in bind_problem(error.value, config)


def test_ipv6_address():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        sock = bind(ServerConfig(host="::1", port=0))
    except OSError:
        pytest.skip("no IPv6 here")
    with sock:
        assert address_of(sock) == f"http://[::1]:{sock.getsockname()[1]}"


def test_unix_socket(tmp_path):
    path = str(tmp_path / "octavo.sock")
    with bind(ServerConfig(uds=path)):
        pass
    assert os.path.exists(path), "left behind by a server that died"
    with serving(server={"uds": path}) as server:
        server.wait_line(f"^Octavo is ready on unix:{re.escape(path)}$")
        transport = httpx.HTTPTransport(uds=path)
        with httpx.Client(transport=transport, base_url="http://octavo") as client:
            assert client.get("/health").status_code == 200
        config = ServerConfig(uds=path)
        with pytest.raises(OSError) as taken:  # noqa: PT011
            bind(config)
        assert path in bind_problem(taken.value, config)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
    assert not os.path.exists(path)


def test_a_file_is_not_taken_for_a_socket(tmp_path):
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(OSError, match="in use"):
        bind(ServerConfig(uds=str(path)))
    assert path.read_text() == "precious"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    command += " -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    command += f" -keyout {key} -out {cert}"
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    return str(cert), str(key)


def test_https(certificate):
    cert, key = certificate
    with serving(server={"ssl_certfile": cert, "ssl_keyfile": key}) as server:
        url = server.wait_line(r"^Octavo is ready on (https://127.0.0.1:\d+)$")[1]
        with httpx.Client(verify=ssl.create_default_context(cafile=cert)) as client:
            assert client.get(f"{url}/health").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0


def test_bad_certificates_are_explained(certificate, tmp_path):
    cert, key = certificate
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("not a certificate")
    check_certificate(ServerConfig())
    check_certificate(ServerConfig(ssl_certfile=cert, ssl_keyfile=key))
    for given, words in (
        ({"ssl_certfile": cert}, "go together"),
        ({"ssl_certfile": cert, "ssl_keyfile": "/nowhere"}, "cannot read '/nowhere'"),
        ({"ssl_certfile": str(garbage), "ssl_keyfile": key}, "PEM"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_certificate(ServerConfig.model_validate(given))


def test_run_explains_what_it_cannot_bind(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ServiceConfig.model_validate({"model": {"source": "x"}, "server": {"port": port}})
        assert run(config, Registry.discover(only=[])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: cannot listen on 127.0.0.1:")


def test_run_explains_a_missing_model(capsys):
    config = ServiceConfig.model_validate({"model": {"source": "./nowhere"}, "server": {"port": 0}})
    assert run(config, Registry.discover(only=[])) == 1
    assert "error: " in capsys.readouterr().err.splitlines()[-1]
