"""The base of every configuration: sections, and the choice of an implementation."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from octavo.core.config.origin import Origin
from octavo.core.plain_values import plain_value


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        return plain_value(value, cls.model_fields[str(info.field_name)].annotation)


class ImplementationConfig(BaseModel):
    """A plugin's name and its options. Written as `name`, or as `{name: ..., option: ...}`."""

    model_config = ConfigDict(frozen=True)

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, value: Any) -> Any:
        if isinstance(value, ImplementationConfig):
            return value
        if isinstance(value, str):
            return {"name": value, "options": {}}
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            if set(value) == {"name", "options"} and isinstance(value["options"], dict):
                return value
            return {
                "name": value["name"],
                "options": {key: item for key, item in value.items() if key != "name"},
            }
        raise ValueError(
            "expected an implementation's name, or a mapping with `name` and its options"
        )


AUTO = ImplementationConfig(name="auto")
COMPOSED = "composed"
"""The scheduler policy that a list of policies stands for."""


def _once(value: list[ImplementationConfig]) -> list[ImplementationConfig]:
    """No implementation twice with the same options."""
    for index, choice in enumerate(value):
        if choice in value[:index]:
            raise ValueError(
                f"'{choice.name}' is listed twice with the same options (items "
                f"{value.index(choice)} and {index})"
            )
    return value


Once = Annotated[list[ImplementationConfig], AfterValidator(_once)]


class PluginsConfig(Section):
    """Which plugins are known."""

    load: list[str] = Field(
        default_factory=list,
        description="Modules (`my_package.my_plugin`) or files (`./my.py`, `./my.py:Policy`) to "
        "load in addition to installed plugins.",
    )
    disable: list[str] = Field(
        default_factory=list, description="Distributions or entry points that are not loaded."
    )
    only: list[str] | None = Field(
        default=None,
        description="If set, only these third-party distributions or entry points are loaded.",
    )


class BaseConfig(Section):
    """A whole configuration; subclasses add sections."""

    _origin: Origin = PrivateAttr(default_factory=Origin)

    @property
    def origin(self) -> Origin:
        """The file and line that each value came from."""
        return self._origin


def plain(value: Any) -> Any:
    """A configuration, or a value of one, as YAML holds it: secrets are hidden, and an
    implementation without options is its name."""
    if isinstance(value, ImplementationConfig):
        if value.name == COMPOSED:
            return [
                plain(ImplementationConfig.model_validate(item))
                for item in value.options["policies"]
            ]
        return {"name": value.name, **value.options} if value.options else value.name
    if isinstance(value, BaseModel):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, SecretStr):
        return "**********"
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
