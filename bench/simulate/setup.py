"""From a configuration to an engine whose executor is simulated and whose clock is virtual."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from octavo.core.clock import VirtualClock
from octavo.core.contracts import Platform
from octavo.core.errors import ConfigError
from octavo.core.registry import Registry
from octavo.engine import model_facts
from octavo.engine.builder import build_engine
from octavo.engine.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.resolve import Resolved, resolve

if TYPE_CHECKING:
    from octavo.plugins.executors.simulated import SimulatedExecutor, SimulatedOptions


class SimulatedEngine:
    """core, executor and the clock that both live by."""

    def __init__(self, core: EngineCore, clock: VirtualClock) -> None:
        self.core, self.clock = core, clock
        self.executor = cast("SimulatedExecutor", core.executor)

    @property
    def limits(self) -> Any:
        return self.core.scheduler.limits


def simulated_engine(config: EngineConfig, registry: Registry) -> SimulatedEngine:
    """Raises `ConfigError` when the configuration names another executor or lacks facts."""
    clock = VirtualClock()
    resolved = simulated_resolution(config, registry)
    return SimulatedEngine(build_engine(resolved, registry, clock=clock), clock)


def simulated_resolution(config: EngineConfig, registry: Registry) -> Resolved:
    """As `resolve`, with the facts of the model and the device that are simulated."""
    from octavo.plugins.executors import accelerators
    from octavo.plugins.executors.simulated import model_facts as facts_of_options

    options = _options(config, registry)
    facts = facts_of_options(options)
    device = None
    if options.accelerator is not None:
        device = accelerators.load(options.accelerator)
    if config.model.source:
        resolved = resolve(config, registry)
        facts = facts or resolved.model_config
    else:
        if not facts:
            raise ConfigError(
                "expected keys of a config.json, or its path; or give model.source",
                path="executor.kind.model",
            )
        resolved = resolve(_with_model(config, facts), registry, need_model=False)
    resolved.model_config = dict(facts)
    if device is not None and device.device == "cuda":
        resolved.platform = Platform("cuda", device.capability)
    wanted: str = config.model.dtype
    if wanted == "auto":
        wanted = _dtype(facts, resolved.platform.device)
    kv_dtype = wanted if config.kv_cache.dtype == "auto" else config.kv_cache.dtype
    given = resolved.config
    resolved.config = given.model_copy(
        update={
            "model": given.model.model_copy(update={"dtype": wanted}),
            "kv_cache": given.kv_cache.model_copy(update={"dtype": kv_dtype}),
        }
    )
    return resolved


def _options(config: EngineConfig, registry: Registry) -> SimulatedOptions:
    kind = config.executor.kind
    if kind.name != "simulated":
        raise ConfigError(
            f"expected {{name: simulated, accelerator: ...}}, got '{kind.name}'",
            path="executor.kind",
        )
    registry.check("executor", kind, origin=config.origin)
    from octavo.plugins.executors.simulated import SimulatedOptions

    return SimulatedOptions.model_validate(kind.options)


def _with_model(config: EngineConfig, facts: dict[str, Any]) -> EngineConfig:
    """Settle what `resolve` reads from a model otherwise: the longest sequence."""
    known = model_facts.model_length(facts)
    wanted = config.model.max_model_len or (known[0] if known else None)
    if wanted is None:
        raise ConfigError(
            "required: config.json does not specify a context length (max_position_embeddings)",
            path="model.max_model_len",
        )
    model = config.model.model_copy(update={"max_model_len": wanted})
    return config.model_copy(update={"model": model})


def _dtype(facts: dict[str, Any], device: str) -> str:
    if device == "cpu":
        return "float32"
    return model_facts.checkpoint_dtype(facts) or "bfloat16"
