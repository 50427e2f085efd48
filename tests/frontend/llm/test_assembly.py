from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import ConfigError, PluginError
from octavo.engine.config import EngineConfig
from octavo.frontend import assembly
from octavo.frontend.llm import LLM
from octavo.plugins.scheduler_policies.fcfs import FcfsPolicy


def test_keywords_win_over_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text("model: {source: ./a, max_model_len: 64}\nscheduler: {max_num_seqs: 8}\n")
    for config in (
        file,
        {"model": {"source": "./a", "max_model_len": 64}, "scheduler": {"max_num_seqs": 8}},
    ):
        settings, _ = assembly.configure(
            "./b", config=config, tokenizer="./t", keywords={"max_model_len": 32}
        )
        assert settings.model.source == "./b"
        assert settings.model.tokenizer == "./t"
        assert settings.model.max_model_len == 32
        assert settings.scheduler.max_num_seqs == 8


def test_a_configuration_object_is_taken_as_it_is() -> None:
    given = EngineConfig.model_validate(
        {"model": {"source": "./a"}, "scheduler": {"policy": {"name": "fcfs"}}}
    )
    settings, _ = assembly.configure(config=given)
    assert settings.model_dump(exclude_unset=True) == given.model_dump(exclude_unset=True)


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"max_modellen.*did you mean 'max_model_len'"):
        LLM("./a", max_modellen=3)
    with pytest.raises(ConfigError, match=r"model\.source"):
        LLM()


@pytest.mark.parametrize("plugins", ["./my.py", 5, FcfsPolicy])
def test_plugins_that_are_no_list_are_refused(plugins: Any) -> None:
    with pytest.raises(PluginError, match="plugins must be a list of classes, instances"):
        assembly.configure("./a", plugins=plugins)


def test_a_configuration_of_a_wrong_type_is_named() -> None:
    with pytest.raises(ConfigError, match=r"config must be the path of a YAML file.* got int"):
        assembly.configure("./a", config=5)  # type: ignore[arg-type]


def test_engine_seeds_go_by_order_of_arrival() -> None:
    assert assembly.seed_source(None) is None
    first, again, other = (assembly.seed_source(seed) for seed in (7, 7, 8))
    assert first is not None
    assert again is not None
    assert other is not None
    seeds = [first() for _ in range(4)]
    assert len(set(seeds)) == 4
    assert [again() for _ in range(4)] == seeds
    assert other() not in seeds


def test_prompts_are_prepared_without_torch(demo_model: str) -> None:
    code = f"""
import sys
from octavo.engine.tokenizer import make_tokenizer
from octavo.frontend import assembly
from octavo.engine.resolve import resolve
settings, registry = assembly.configure({demo_model!r}, keywords={{"max_model_len": 64}})
resolved = resolve(settings, registry)
inputs = assembly.make_inputs(resolved, make_tokenizer(resolved, registry))
assert inputs.prepare("Hello", request_id="r").requests[0].token_ids.size == 1
assert inputs.max_model_len == 64
assert inputs.vocab_size == 49152
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
