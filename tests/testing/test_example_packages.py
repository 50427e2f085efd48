"""The example packages are installed by pip, checked, tested, and used through YAML."""

from __future__ import annotations

import json
import shutil

import pytest

from octavo.testing.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

NAMES = (
    "class-quotas",
    "no-repeat-ngram",
    "alibi-sdpa",
    "segmented-lru",
    "otel-spans",
    "perplexity",
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory, repository, isolated):
    """A venv with all examples installed, that sees what is installed here beside them."""
    pytest.importorskip("opentelemetry.sdk", reason="otel-spans needs opentelemetry-sdk")
    folder = tmp_path_factory.mktemp("examples")
    made = isolated(folder)
    packages = []
    for name in NAMES:  # pip builds in the folder: leave the checkout alone
        packages.append(folder / f"octavo-{name}")
        source = repository / "docs" / "examples" / "plugins" / packages[-1].name
        shutil.copytree(source, packages[-1])
    made.install(packages)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_every_example_passes_check(environment, name):
    checked = environment.octavo("plugins", "--json", "check", f"octavo-{name}")
    assert checked.returncode == 0, checked.stdout[-2000:] + checked.stderr
    (found,) = json.loads(checked.stdout)["checked"]
    assert not found["skipped"]
    assert sum(v["outcome"] == "kept" for v in found["verdicts"]) >= 8


def test_the_examples_own_tests_pass(environment):
    plugin = ("-p", "octavo.testing.pytest_plugin", "-p", "no:cacheprovider")
    for name in NAMES:
        suites = f"--ignore=octavo-{name}/tests/test_conformance.py"  # these run in `check`
        done = environment.run("-m", "pytest", "-q", "-x", *plugin, f"octavo-{name}", suites)
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
    done = environment.octavo("config", "show", "octavo.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in ("class_quotas", "segmented_lru", "alibi_sdpa", "no_repeat_ngram", "otel_spans"):
        assert text in done.stdout
    done = environment.run("-c", GENERATE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "wrong.yaml").write_text(
        "scheduler: {policy: {name: class_quotas, classes: {0: {wieght: 6}}}}"
    )
    done = environment.octavo("config", "validate", "wrong.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "wieght" in done.stderr
