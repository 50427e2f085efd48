"""Profiles of accelerators: named ones from the folder `profiles` of the backends, a YAML file, or
a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from octavo.core.contracts.provider import Options
from octavo.core.errors import ConfigError, nearest

PROFILES = "octavo.backends.profiles"
PATH = "executor.kind.accelerator"


class Accelerator(Options):
    """Facts of a device, and what of them kernels reach."""

    summary: str = Field(default="", description="What it is.")
    device: Literal["cuda", "cpu"] = Field(description="The device type that it stands for.")
    capability: tuple[int, int] | None = Field(default=None, description="CUDA compute capability.")
    memory_bytes: int = Field(gt=0, description="Memory.")
    memory_bandwidth: float = Field(gt=0, description="Bytes a second from and to its memory.")
    host_bandwidth: float = Field(
        gt=0, description="Bytes a second between device and host, one way."
    )
    flops: dict[str, float] = Field(
        description="Dense operations a second by type; multiply and add are two."
    )
    compute_efficiency: float = Field(
        default=0.65, gt=0, le=1, description="Fraction of `flops` that linear layers reach."
    )
    attention_efficiency: float = Field(
        default=0.5, gt=0, le=1, description="Fraction of `flops` that attention reaches."
    )
    bandwidth_efficiency: float = Field(
        default=0.8, gt=0, le=1, description="Fraction of `memory_bandwidth` that is reached."
    )
    step_overhead: float = Field(
        default=0.0015, ge=0, description="Seconds a step that no kernel explains."
    )

    def flops_of(self, dtype: str) -> float:
        """Operations a second in a type; a device without it computes in the next wider one."""
        wider = {"fp8": "bfloat16", "int8": "bfloat16", "bfloat16": "float16", "float16": "float32"}
        name = dtype
        while name not in self.flops:
            if name not in wider:
                raise ConfigError(f"flops: no entry for {dtype} or a wider type", path=PATH)
            name = wider[name]
        return self.flops[name]


def names() -> list[str]:
    """The named profiles."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in files(PROFILES).iterdir()
        if entry.name.endswith(".yaml")
    )


def load(given: str | Mapping[str, Any]) -> Accelerator:
    """A profile by name or file, or as a mapping, whose `base` names another one that it changes.
    Raises `ConfigError` for what is unknown or does not validate."""
    if isinstance(given, str):
        return _validated(_read(given), given)
    values = dict(given)
    base = values.pop("base", None)
    if base is not None:
        values = {**_read(str(base)), **values}
    return _validated(values, "the mapping")


def _read(name: str) -> dict[str, Any]:
    if name in names():
        text = files(PROFILES).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    else:
        if not name.endswith((".yaml", ".yml", ".json")):
            raise ConfigError(
                f"expected a profile or a YAML file, got '{name}'; {nearest(name, names())}",
                path=PATH,
            )
        try:
            text = Path(name).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"cannot read '{name}': {exc}", path=PATH) from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ConfigError(f"'{name}' is not valid YAML: {exc}", path=PATH) from None
    if not isinstance(values, dict):
        raise ConfigError(f"'{name}': expected a mapping", path=PATH)
    return values


def _validated(values: dict[str, Any], name: str) -> Accelerator:
    try:
        return Accelerator.model_validate(values)
    except ValidationError as exc:
        first = exc.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{name}: {key}: {first['msg']}", path=PATH) from None
