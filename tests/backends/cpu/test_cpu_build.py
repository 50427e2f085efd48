"""Compiling on first use: cached, private, safe with several processes, clear when it fails."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.backends.cpu import build, native
from octavo.core.contracts import Platform, ProbeContext
from octavo.core.errors import ConfigError, PluginUnavailable

_SMALL = {"small.c": b"int octavo_small(void) { return 7; }\n"}


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and no memory of the compiler found before."""
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    build.toolchain.cache_clear()
    yield tmp_path / "cache" / "kernels"
    build.toolchain.cache_clear()


def _small(extra: tuple[str, ...] = ()) -> Path:
    return build._build("small", _SMALL, build.toolchain(), "native", extra)


def test_the_second_time_compiles_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _small()
    monkeypatch.setattr(build, "_compile", lambda *args: pytest.fail("compiled again"))
    assert _small() == first
    assert [path.name for path in fresh.iterdir()] == [first.name], "nothing else is left behind"


def test_flags_and_content_are_part_of_the_name() -> None:
    assert _small() != _small(("-DOTHER",))
    other = build._build("small", {"small.c": b"int x;\n"}, build.toolchain())
    assert other != _small()


def test_the_folder_is_private(fresh: Path) -> None:
    fresh.mkdir(parents=True, mode=0o755)
    fresh.chmod(0o777)
    library = _small()
    assert fresh.stat().st_mode & 0o777 == 0o700
    assert library.stat().st_mode & 0o077 == 0


def test_several_processes_build_once(fresh: Path) -> None:
    code = (
        "from octavo.backends.cpu import build\n"
        f"print(build._build('small', {_SMALL!r}, build.toolchain()))\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = {process.communicate(timeout=120)[0] for process in running}
    assert all(process.returncode == 0 for process in running)
    assert len(answers) == 1
    assert len(list(fresh.glob("*.so"))) == 1


def test_no_compiler_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    answer = build.probe(ProbeContext(Platform("cpu")))
    assert not answer
    assert "`no-such-compiler` is not in PATH" in answer.reason
    assert "apt install gcc" in answer.reason


def test_the_compilers_own_message_is_shown() -> None:
    with pytest.raises(PluginUnavailable, match="unknown_thing"):
        build._build(
            "broken", {"broken.c": b"int f(void) { return unknown_thing; }\n"}, build.toolchain()
        )


def test_a_failed_build_leaves_nothing(fresh: Path) -> None:
    with pytest.raises(PluginUnavailable):
        build._build("broken", {"broken.c": b"#error no\n"}, build.toolchain())
    assert list(fresh.iterdir()) == []


def test_a_compiler_without_openmp_still_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = tmp_path / "plain-cc"
    wrapper.write_text(
        "#!/bin/sh\n"
        'for a in "$@"; do [ "$a" = -fopenmp ] && echo "error: no OpenMP" && exit 1; done\n'
        f'exec {shutil.which("cc")} "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CC", str(wrapper))
    assert _small().exists()


def test_instruction_sets_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`OCTAVO_CPU_ISA` decides what the kernels are built for, and a typo is told."""
    seen = []
    monkeypatch.setattr(build, "_build", lambda *args: seen.append(args[3]))
    monkeypatch.setenv("OCTAVO_CPU_ISA", "avx2")
    native._kernels.cache_clear()
    monkeypatch.setattr(native, "open_library", lambda path: "opened")
    assert native.kernels() == "opened"
    assert build.probe(ProbeContext(Platform("cpu")))
    assert seen == ["avx2", "avx2"]
    monkeypatch.setenv("OCTAVO_CPU_ISA", "avx3")
    with pytest.raises(ConfigError, match="OCTAVO_CPU_ISA: expected one of native, avx2, generic"):
        native.kernels()
    native._kernels.cache_clear()


def test_another_device_is_refused() -> None:
    answer = build.probe(ProbeContext(Platform("cuda", (9, 0))))
    assert not answer
    assert "cuda" in answer.reason


def test_probing_needs_no_torch(fresh: Path) -> None:
    code = (
        "import sys\n"
        "from octavo.backends.cpu.build import probe\n"
        "from octavo.core.contracts import ProbeContext\n"
        "assert probe(ProbeContext()), probe(ProbeContext()).reason\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _cross_compiler() -> list[str] | None:
    """A command that compiles for 64-bit ARM, when this machine has one."""
    found = shutil.which("aarch64-linux-gnu-gcc")
    if found is not None:
        return [found]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu"]
    return None


@pytest.mark.slow
def test_neon_compiles(tmp_path: Path) -> None:
    command = _cross_compiler()
    if command is None:
        pytest.skip("no compiler for 64-bit ARM: gcc-aarch64-linux-gnu, or the package ziglang")
    for name, text in build.sources().items():
        (tmp_path / name).write_bytes(text)
    for name in sorted(tmp_path.glob("*.c")):
        done = subprocess.run(
            [*command, *build._FLAGS, "-c", name.name, "-o", "out.o"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_the_kernels_share_torchs_threads() -> None:
    """Linked to torch's own OpenMP where torch brings one."""
    openmp = build.toolchain().openmp
    if openmp == "-fopenmp":
        pytest.skip("torch brings no libgomp here")
    assert os.path.exists(openmp)
    assert "torch" in openmp
