"""The startup report: what runs, with how much room, chosen why, and how long the start took."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.core.byte_sizes import size
from octavo.core.contracts.executor import DeviceMemory, WorkerChoice, WorkerReport
from octavo.engine.capacity import breakdown

if TYPE_CHECKING:
    from octavo.engine.resolve import Resolved


@dataclass(frozen=True)
class PluginChoice:
    """One plugin in use. rejected: (name, why not) of those that `auto` passed over."""

    kind: str
    name: str
    reason: str
    distribution: str = ""
    rejected: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class StartupReport:
    """Sizes are bytes unless named otherwise; phases are seconds. max_sequence_tokens: most tokens
    of one sequence, by max_model_len and by the KV pool. num_graphs: captured passes, which took
    graph_bytes, as measured; graph_bytes_estimated were left for them. memory: see
    `WorkerReport`."""

    source: str
    architecture: str
    dtype: str
    device: str
    num_threads: int | None
    num_parameters: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_sequence_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    budget_reason: str
    pool_reason: str
    plugins: tuple[PluginChoice, ...]
    num_swap_blocks: int = 0
    num_host_cache_blocks: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    num_graphs: int = 0
    graph_bytes: int = 0
    graph_bytes_estimated: int = 0
    memory: DeviceMemory | None = None

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.num_blocks * self.block_size

    @property
    def concurrency(self) -> float:
        """Sequences of `max_model_len` tokens that fit at once."""
        return self.num_blocks / -(-self.max_model_len // self.block_size)

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "kv_tokens": self.kv_tokens, "concurrency": self.concurrency}

    def _host_lines(self) -> list[str]:
        bytes_each = self.kv_bytes / self.num_blocks if self.num_blocks else 0
        pools = [
            f"{what} {count:,} blocks, {size(count * bytes_each)}"
            for what, count in (
                ("swap space", self.num_swap_blocks),
                ("evicted prefixes", self.num_host_cache_blocks),
            )
            if count
        ]
        return [f"host       {'; '.join(pools)}"] if pools else []

    def _device_lines(self) -> list[str]:
        out = []
        if self.memory is not None:
            out.append(f"memory     {breakdown(self.memory)}")
        if self.num_graphs or self.graph_bytes_estimated:
            out.append(
                f"graphs     {self.num_graphs} captured, {size(self.graph_bytes)}"
                f" (estimated {size(self.graph_bytes_estimated)})"
            )
        return out

    def lines(self) -> list[str]:
        """For people."""
        threads = f", {self.num_threads} threads" if self.num_threads else ""
        out = [
            f"model      {self.source} ({self.architecture}), {self.dtype} on {self.device}"
            f"{threads}",
            f"weights    {self.num_parameters / 1e6:,.1f} M parameters, {size(self.weight_bytes)};"
            f" activations {size(self.activation_bytes)}",
            f"KV cache   {self.num_blocks:,} blocks of {self.block_size} ="
            f" {self.kv_tokens:,} tokens, {size(self.kv_bytes)};"
            f" {self.concurrency:.1f} sequences of max_model_len {self.max_model_len} at once"
            f" ({self.pool_reason})",
            *self._host_lines(),
            *self._device_lines(),
            f"budgets    max_num_seqs {self.max_num_seqs}, max_num_batched_tokens"
            f" {self.max_num_batched_tokens} ({self.budget_reason})",
        ]
        width = max((len(choice.kind) for choice in self.plugins), default=0)
        for choice in self.plugins:
            out.append(f"{choice.kind:<{width}}  {choice.name}: {choice.reason}")
            out.extend(f"{'':<{width}}    not {name}: {why}" for name, why in choice.rejected)
        spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases.items())
        out.append(f"start      {spent}")
        out.extend(f"note       {note}" for note in self.notes)
        return out


def plugin_choices(resolved: Resolved, worker: WorkerReport) -> tuple[PluginChoice, ...]:
    """Every plugin in use, with what the worker decided in place of what was planned."""
    listed = [
        (selection.registered.declared.config_path, selection)
        for selection in resolved.selections.values()
    ]
    if resolved.prefill_attention is not None:
        # `selections` has the one for decodes.
        listed = [item for item in listed if item[1].kind != "attention_backend"]
        listed += [
            ("attention.prefill", resolved.prefill_attention),
            ("attention.decode", resolved.selections["attention_backend"]),
        ]
    for key, selections in (
        ("logits_processors", resolved.logits_processors),
        ("observers", resolved.observers),
        ("extensions", resolved.extensions),
    ):
        listed += [(f"{key}[{index}]", selection) for index, selection in enumerate(selections)]
    choices = []
    for path, selection in listed:
        kind = selection.kind
        if path in ("attention.prefill", "attention.decode"):
            kind = f"{kind} ({path.partition('.')[2]})"
        used = worker.choices.get(kind) or WorkerChoice(
            name=selection.name,
            reason=resolved.reasons.get(path, selection.reason),
            distribution=selection.registered.distribution or "",
        )
        name = used.name
        if hasattr(selection.options, "choices"):
            parts = ", ".join(choice.name for choice in selection.options.choices())
            name = f"{name} [{parts}]"
        others = [item for item in selection.rejected if item[0] != used.name]
        choices.append(
            PluginChoice(
                kind=kind,
                name=name,
                reason=used.reason,
                distribution=used.distribution,
                rejected=(*used.refused, *others),
            )
        )
    return tuple(choices)
