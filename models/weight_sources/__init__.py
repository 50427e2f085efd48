"""Built-in weight sources. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

_HERE = "octavo.models.weight_sources"

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="folder",
        factory=f"{_HERE}.folder:Folder",
        probe=f"{_HERE}.source_forms:probe_folder",
        rank=400,
        summary="a folder with config.json and safetensors, sharded or not",
    ),
    Provider(
        name="gguf",
        factory=f"{_HERE}.gguf_file:GGUFFile",
        probe=f"{_HERE}.source_forms:probe_gguf",
        rank=300,
        summary="a .gguf file, converted once and cached",
    ),
    Provider(
        name="package",
        factory=f"{_HERE}.package:package_source",
        probe=f"{_HERE}.source_forms:probe_package",
        rank=200,
        summary="package:NAME[/FILE], weights inside an installed Python package",
    ),
    Provider(
        name="hub",
        factory=f"{_HERE}.hub:Hub",
        probe=f"{_HERE}.source_forms:probe_hub",
        rank=100,
        summary="a model of the Hugging Face hub, downloaded once",
    ),
    Provider(
        name="dummy",
        factory=f"{_HERE}.dummy:Dummy",
        options=f"{_HERE}.dummy:DummyOptions",
        rank=-1,
        summary="random weights for a real configuration, for tests and benchmarks",
    ),
]
