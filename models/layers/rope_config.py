"""What config.json says of a rotary position embedding. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.core.errors import ModelError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding of all layers."""

    kind: str
    """One of `ROPE_TYPES`."""
    theta: float
    """Base of the wavelengths."""
    dim: int
    """Rotated dimensions of a head."""
    max_positions: int
    """`max_position_embeddings`."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """What is particular to a kind."""

    def number(self, name: str, default: float | None = None) -> float:
        """A numeric parameter; `ModelError` when it is needed and absent, or no number."""
        value = self.parameters.get(name)
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(
                f"config.json: rope of type '{self.kind}' needs the number '{name}', got {value!r}"
            )
        return float(value)
