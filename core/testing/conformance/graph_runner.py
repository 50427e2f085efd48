"""What every graph runner promises."""

from __future__ import annotations

from typing import Any, ClassVar

from octavo.core.contracts.graph_runner import GraphRunner, GraphRunnerContext
from octavo.core.errors import OctavoError
from octavo.core.testing.conformance import engine_run
from octavo.core.testing.conformance.base import ConformanceSuite, NotApplicable


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

        context = GraphRunnerContext(forward, model, torch.device("cpu"), "all", 8, 64)
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
        """warm_up gives seconds by name."""
        toy = self.toy()
        took = self.runner(toy, toy).warm_up()
        assert isinstance(took, dict), f"warm_up gave {type(took).__name__}"
        for name, seconds in took.items():
            assert isinstance(name, str), f"{name!r} is no name"
            assert seconds >= 0, f"{name} took {seconds} s"

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
