"""What every graph runner promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from octavo.core.contracts import Provider
from octavo.core.contracts.graph_runner import (
    Captured,
    ForwardFn,
    GraphRunner,
    GraphRunnerContext,
)
from octavo.core.errors import OctavoError
from octavo.testing.conformance import engine_run
from octavo.testing.conformance.base import ConformanceSuite, NotApplicable
from octavo.testing.tiny_model import generate, make_engine, make_requests

if TYPE_CHECKING:
    import torch


class _Plain(GraphRunner):
    """Calls the model every time."""

    def __init__(self, forward: ForwardFn) -> None:
        self._forward = forward

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, num_decodes: int
    ) -> torch.Tensor:
        return self._forward(token_ids, positions)


class GraphRunnerSuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (a `GraphRunner` for the context).

    config: what else an engine must be told for this runner to be used. A runner that needs more
    than the model's forward pass (its decoder, its attention) is tested in engines only.
    """

    kind = "graph_runner"
    config: ClassVar[engine_run.Config] = {}

    def runner(self, forward: Any, model: Any) -> GraphRunner:
        """The runner under test around a module of the suite."""
        import torch

        def dummy(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
            """No attention reads a plan here."""
            positions = torch.arange(tokens).repeat(rows)
            return torch.zeros(rows * tokens, dtype=torch.int64), positions

        device = torch.device("cpu")
        context = GraphRunnerContext(forward, model, device, "all", 8, 64, dummy=dummy)
        try:
            made = self.make(context)
        except OctavoError as error:
            raise NotApplicable(f"it takes no arbitrary module: {error}") from error
        assert isinstance(made, GraphRunner), f"make returned {type(made).__name__}"
        return made

    @staticmethod
    def toy() -> Any:
        """A module with one hidden layer."""
        import torch

        class Toy(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.embedding = torch.nn.Embedding(50, 16)
                self.mix = torch.nn.Linear(16, 16)

            def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
                hidden = self.embedding(token_ids) + positions[:, None] * 0.01
                mixed: torch.Tensor = self.mix(hidden).tanh()
                return mixed

        return Toy()

    def test_warm_up_names_seconds(self) -> None:
        """compile and warm_up give seconds by name."""
        toy = self.toy()
        runner = self.runner(toy, toy)
        for call in (runner.compile, runner.warm_up):
            took = call()
            assert isinstance(took, dict), f"{call.__name__} gave {type(took).__name__}"
            for name, seconds in took.items():
                assert isinstance(name, str), f"{name!r} is no name"
                assert seconds >= 0, f"{name} took {seconds} s"

    def test_memory_is_told_in_bytes(self) -> None:
        """estimate_bytes and captured tell bytes and numbers, none below zero."""
        toy = self.toy()
        runner = self.runner(toy, toy)
        runner.compile()
        estimate = runner.estimate_bytes()
        assert isinstance(estimate, int), f"estimate_bytes gave {estimate!r}"
        assert estimate >= 0, f"estimate_bytes gave {estimate}"
        runner.warm_up()
        found = runner.captured()
        assert isinstance(found, Captured), f"captured gave {type(found).__name__}"
        for name in ("num_graphs", "num_bytes"):
            count = getattr(found, name)
            assert isinstance(count, int), f"{name} is {count!r}"
            assert count >= 0, f"{name} is {count}"
        for note in found.notes:
            assert isinstance(note, str), f"the note {note!r} is no line"

    def test_results_are_those_of_the_forward_pass(self) -> None:
        """For every number of tokens, in any order of sizes, the result is the forward pass's."""
        import torch

        toy = self.toy()
        runner = self.runner(toy, toy)
        with torch.inference_mode():
            runner.warm_up()
            for count in (1, 2, 3, 8, 1, 5, 64, 7, 8, 33, 2):
                for num_decodes in {0, min(count, 8), count if count <= 8 else 0}:
                    token_ids = torch.arange(count) * 7 % 50
                    positions = torch.arange(count) * 3
                    got = runner.forward(token_ids, positions, num_decodes)
                    wanted = toy(token_ids, positions)
                    assert got.shape == wanted.shape, f"{count} tokens gave {tuple(got.shape)}"
                    assert got.dtype == wanted.dtype, f"hidden states are {got.dtype}"
                    error = float((got - wanted).abs().max())
                    assert error < 1e-5, f"{count} tokens: differs by {error:.3g} from eager"

    def test_new_weights_are_seen(self) -> None:
        """A weight that is changed in place (an adapter, a reload) changes the results."""
        import torch

        toy = self.toy()
        runner = self.runner(toy, toy)
        token_ids, positions = torch.arange(4), torch.arange(4)
        with torch.inference_mode():
            runner.warm_up()
            before = runner.forward(token_ids, positions, 4).clone()
        with torch.no_grad():
            toy.mix.weight.add_(0.5)
        with torch.inference_mode():
            after = runner.forward(token_ids, positions, 4)
            wanted = toy(token_ids, positions)
        assert not after.equal(before), "the old weights are still used"
        assert float((after - wanted).abs().max()) < 1e-5, "the new weights give wrong results"

    def test_a_changed_forward_is_followed(self) -> None:
        """After `invalidate`, a layer that was replaced by an adapter around it is what runs."""
        import torch

        class Adapter(torch.nn.Module):
            def __init__(self, inner: torch.nn.Module) -> None:
                super().__init__()
                self.inner = inner
                self.low = torch.nn.Linear(16, 2, bias=False)
                self.high = torch.nn.Linear(2, 16, bias=False)

            def forward(self, hidden: torch.Tensor) -> torch.Tensor:
                adapted: torch.Tensor = self.inner(hidden) + self.high(self.low(hidden))
                return adapted

        toy = self.toy()
        runner = self.runner(toy, toy)
        token_ids, positions = torch.arange(4), torch.arange(4)
        with torch.inference_mode():
            runner.compile()
            runner.warm_up()
            before = runner.forward(token_ids, positions, 4).clone()
            for adapted in (Adapter(toy.mix), Adapter(toy.mix)):
                toy.mix = adapted
                runner.invalidate()
                after = runner.forward(token_ids, positions, 4)
                wanted = toy(token_ids, positions)
                assert not after.equal(before), "the old forward pass still runs"
                error = float((after - wanted).abs().max())
                assert error < 1e-5, f"differs by {error:.3g} from the changed forward pass"
                before = after.clone()

    def test_an_engine_follows_a_changed_forward(self) -> None:
        """A real engine whose model gets a hook and a higher `forward_version` gives the tokens of
        a runner that calls the model every time."""
        got = self._tokens_around_a_change(self.make)
        wanted = self._tokens_around_a_change(lambda context: _Plain(context.forward))
        assert got[0] == wanted[0], f"at first it gives {got[0]}, the model {wanted[0]}"
        assert got[1] != got[0], "a change of the model changes no token"
        assert got[1] == wanted[1], f"then it gives {got[1]}, the changed model {wanted[1]}"

    def _tokens_around_a_change(self, make: Any) -> tuple[list[list[int]], list[list[int]]]:
        """Of an engine, before and after its model was changed."""
        import torch

        contexts: list[GraphRunnerContext] = []

        def recorded(options: Any, context: GraphRunnerContext) -> GraphRunner:
            contexts.append(context)
            made: GraphRunner = make(context)
            return made

        provider = ("graph_runner", Provider[Any](name="recorded", factory=recorded))
        config = engine_run.merged(self.config, {"graph": {"runner": "recorded"}})
        engine = make_engine(engine_run.tiny_model(), config, [provider])
        try:
            before = generate(engine, make_requests(3))
            model: Any = contexts[-1].model
            lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
            layer = max(lists, key=len)[0]
            layer.register_forward_hook(lambda module, inputs, output: output * -1.5)
            model.forward_version += 1
            return before, generate(engine, make_requests(3))
        finally:
            engine.close()

    def test_an_error_of_the_forward_pass_is_raised(self) -> None:
        """An exception in the forward pass comes through, and the next pass works."""
        import torch

        toy, fail = self.toy(), [False]

        def forward(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            if fail[0]:
                raise ZeroDivisionError("planted")
            hidden: torch.Tensor = toy(token_ids, positions)
            return hidden

        runner = self.runner(forward, toy)
        tokens = torch.arange(3)
        with torch.inference_mode():
            runner.forward(tokens, tokens, 0)
            fail[0] = True
            try:
                runner.forward(tokens, tokens, 0)
            except Exception as error:
                if "planted" not in str(error):
                    raise AssertionError(f"the error is hidden behind {error!r}") from error
            else:
                raise NotApplicable("it runs what it recorded, not the function")
            fail[0] = False
            got = runner.forward(tokens, tokens, 0)
        assert got.shape == (3, 16), "after an error the runner does not work"

    def test_engine_gives_the_tokens_of_eager(self) -> None:
        """A real engine gives the tokens that it gives with `eager`, for prefill, chunks, decodes
        and after preemption."""
        engine_run.compare_engines(self, self.config, {"graph": {"runner": "eager"}})
