"""What every engine extension promises."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np

from octavo.core.contracts.engine_extension import EngineExtension
from octavo.core.messages import EngineOutputs, StepPlan
from octavo.engine.core import EngineCore
from octavo.engine.observers import overrides
from octavo.kernels.codec import Codec
from octavo.testing.conformance.base import ConformanceSuite, NotApplicable, executed_lines
from octavo.testing.conformance.workload import SITUATIONS, run_situation
from octavo.testing.fake_engine import Collector, assert_clean, make_fake_engine, request

_GATE = ("admit", "poll", "abort")
_OTHERS = (
    "on_queued",
    "on_plan",
    "on_commit",
    "on_finished",
    "host_processors",
    "queries",
    "metrics",
)


def _plan() -> StepPlan:
    """A decode in slot 0 and a chunk of three tokens in slot 1."""
    return StepPlan(
        step=1,
        slots=np.array([0, 1], np.int32),
        counts=np.array([1, 3], np.int32),
        num_decodes=1,
        sample_rows=np.array([0], np.int32),
        layout=1,
        released=np.empty(0, np.int32),
        appended=np.empty((4, 0), np.int32),
        copies=np.empty((5, 0), np.int32),
    )


def _outputs() -> EngineOutputs:
    return EngineOutputs(
        step=1, handles=np.array([1], np.int64), token_ids=np.array([[5]], np.int32)
    )


class EngineExtensionSuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (an `EngineExtension` for the context).
    config: what the extension sees of the engine's configuration."""

    kind = "engine_extension"
    config: ClassVar[Mapping[str, Any]] = {}

    def engine(self, **settings: Any) -> tuple[EngineCore, EngineExtension]:
        """A fake engine with the extension under test."""
        engine = make_fake_engine(extensions=[self.make], config=self.config, **settings)
        (extension,) = engine.extensions.all
        assert isinstance(extension, EngineExtension), f"make returned {type(extension).__name__}"
        return engine, extension

    def test_it_does_something(self) -> None:
        """At least one method is overridden."""
        engine, extension = self.engine()
        engine.close()
        methods = [name for name in (*_GATE, *_OTHERS) if _has(extension, name)]
        assert methods, f"it overrides none of {', '.join((*_GATE, *_OTHERS))}"

    def test_a_gate_is_complete(self) -> None:
        """Of admit, poll and abort it overrides all or, where it only refuses, admit alone."""
        engine, extension = self.engine()
        engine.close()
        found = {name for name in _GATE if _has(extension, name)}
        assert found in (set(), {"admit"}, set(_GATE)), f"it overrides only {', '.join(found)}"
        if found == {"admit"}:
            for handle in range(1, 9):
                engine.extensions.admit(request(handle, [1, 2], user="a"))
            assert not engine.extensions.held, "it holds a request, and has no poll"

    def test_held_requests_run_or_are_aborted(self) -> None:
        """A request that it holds is returned by poll, or by abort and then never again."""
        engine, _ = self.engine()
        for handle in range(1, 9):
            engine.add(request(handle, [handle, 2], 6, ignore_eos=True, user="a"))
        held = sorted(engine.extensions.held)
        if not held:
            engine.close()
            raise NotApplicable("it held none of eight requests of one user")
        engine.abort(held[:1])
        collector = Collector(engine).run()
        engine.close()
        reasons = {handle: collector.reasons[handle] for handle in range(1, 9)}
        expected = {handle: "abort" if handle == held[0] else "length" for handle in reasons}
        assert reasons == expected, f"requests ended by {reasons}, expected {expected}"
        assert_clean(engine)

    def test_plans_and_outputs_are_left_alone(self) -> None:
        """on_plan and on_commit change nothing of what they are given."""
        engine, extension = self.engine()
        plan, outputs = _plan(), _outputs()
        plan_before = Codec(StepPlan).encode(plan)
        outputs_before = Codec(EngineOutputs).encode(outputs)
        extension.on_plan(plan)
        extension.on_plan(None)
        extension.on_commit(outputs)
        engine.close()
        assert Codec(StepPlan).encode(plan) == plan_before, "on_plan changed the plan"
        assert Codec(EngineOutputs).encode(outputs) == outputs_before, "on_commit changed outputs"

    def test_answers_are_plain_values(self) -> None:
        """metrics, and queries that need no argument, return what can be sent to another
        process."""
        engine, extension = self.engine()
        engine.add(request(1, [1, 2], 4))
        engine.step()
        answers = {"metrics": extension.metrics()}
        for name, query in extension.queries().items():
            parameters = inspect.signature(query).parameters.values()
            if all(each.default is not each.empty for each in parameters):
                answers[f"query {name}"] = query()
        engine.close()
        for name, answer in answers.items():
            try:
                msgspec.msgpack.encode(answer)
            except (TypeError, ValueError, OverflowError) as error:
                raise AssertionError(f"{name}: {error}") from None

    def test_it_can_be_closed_at_any_time(self) -> None:
        """close works before the first request, and a second time."""
        engine, extension = self.engine()
        engine.close()
        extension.close()

    def test_a_step_costs_the_same_after_many_requests(self) -> None:
        """A decode step executes no more Python after 400 requests than after ten."""
        engine, _ = self.engine(max_num_seqs=1)
        cost, handle = {}, 0
        for until in (10, 400):
            while handle < until:
                handle += 1
                engine.add(request(handle, [1, 2], 2, ignore_eos=True))
                Collector(engine).run()
            engine.add(request(1000 + until, [1, 2], 8, ignore_eos=True))
            for _ in range(3):
                engine.step()
            cost[until] = executed_lines(engine.step)
            Collector(engine).run()
        engine.close()
        assert cost[400] <= 1.5 * cost[10] + 50, f"lines executed by a step: {cost}"

    def test_engine_with_it_works_as_without(self) -> None:
        """Every request gets the tokens it would have alone, whatever is short."""
        for where in SITUATIONS:
            engine = run_situation(where, 1, extensions=[self.make], config=self.config)
            engine.close()


def _has(extension: EngineExtension, method: str) -> bool:
    return overrides(extension, EngineExtension, method)
