"""The example packages are installed by pip, checked, tested, and used through YAML."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from octavo.core.testing.tiny_model import write_tiny_model

NAMES = (
    "class-quotas",
    "no-repeat-ngram",
    "alibi-sdpa",
    "segmented-lru",
    "otel-spans",
    "perplexity",
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory, repository):
    """A venv with all examples installed, that sees what is installed here beside them."""
    pytest.importorskip("opentelemetry.sdk", reason="otel-spans needs opentelemetry-sdk")
    folder = tmp_path_factory.mktemp("examples")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    (site,) = folder.glob("venv/lib/python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})" for path in sys.path if "-packages" in path]
    (site / "here.pth").write_text("\n".join(lines) + "\n")
    import octavo

    env = {**os.environ, "PYTHONPATH": str(Path(octavo.__file__).parent.parent)}

    def run(*args, cwd=folder):
        return subprocess.run(
            [python, *args], capture_output=True, text=True, env=env, cwd=cwd, check=False
        )

    packages = []
    for name in NAMES:  # pip builds in the folder: leave the checkout alone
        target = folder / f"octavo-{name}"
        source = repository / "docs" / "examples" / "plugins" / target.name
        subprocess.run(["cp", "-r", source, target], check=True)
        packages.append(str(target))
    quiet = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation")
    done = run("-m", "pip", "--disable-pip-version-check", "install", *quiet, *packages)
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_example_passes_check(environment, name):
    checked = environment("-m", "octavo", "plugins", "--json", "check", f"octavo-{name}")
    assert checked.returncode == 0, checked.stdout[-2000:] + checked.stderr
    (found,) = json.loads(checked.stdout)["checked"]
    assert not found["skipped"]
    assert sum(v["outcome"] == "kept" for v in found["verdicts"]) >= 8


def test_the_examples_own_tests_pass(environment):
    plugin = ("-p", "octavo.core.testing.pytest_plugin", "-p", "no:cacheprovider")
    for name in NAMES:
        suites = f"--ignore=octavo-{name}/tests/test_conformance.py"  # these run in `check`
        done = environment("-m", "pytest", "-q", "-x", *plugin, f"octavo-{name}", suites)
        assert done.returncode == 0, f"{name}\n{done.stdout[-3000:]}"


GENERATE = """
from octavo import LLM, SamplingParams

llm = LLM(config="octavo.yaml")
params = SamplingParams(
    max_tokens=12, temperature=0, ignore_eos=True, extra_args={"no_repeat_ngram": 1}
)
for answer in llm.generate(["the quick", "brown fox"], params, use_tqdm=False):
    tokens = answer.outputs[0].token_ids
    assert len(set(tokens)) == 12, tokens
print("the engine says", *(line for line in llm.report.lines() if "octavo-" in line))
"""


def test_they_work_through_yaml(environment, tmp_path):
    write_tiny_model(tmp_path / "tiny")
    (tmp_path / "octavo.yaml").write_text(
        """
model: {source: ./tiny}
scheduler: {policy: {name: class_quotas, classes: {0: {weight: 6}, 2: {max_running: 8}}}}
kv_cache: {eviction: segmented_lru}
attention: {backend: alibi_sdpa}
logits_processors: [no_repeat_ngram]
observers: [otel_spans]
routes: [perplexity]
"""
    )
    done = environment("-m", "octavo", "config", "show", "octavo.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in ("class_quotas", "segmented_lru", "alibi_sdpa", "no_repeat_ngram", "otel_spans"):
        assert text in done.stdout
    done = environment("-c", GENERATE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "wrong.yaml").write_text(
        "scheduler: {policy: {name: class_quotas, classes: {0: {wieght: 6}}}}"
    )
    done = environment("-m", "octavo", "config", "validate", "wrong.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "wieght" in done.stderr
