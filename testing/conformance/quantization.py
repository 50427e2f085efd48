"""What every quantization method promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from octavo.core.contracts.quantization import QuantizationContext, QuantizationMethod
from octavo.core.errors import WeightError
from octavo.testing.conformance import engine_run
from octavo.testing.conformance.base import ConformanceSuite

if TYPE_CHECKING:
    import torch

IN, OUT = 96, (64, 32, 48)


class QuantizationSuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (a `QuantizationMethod` for the context).

    error: largest relative error (Frobenius norm) of a product against float64, for normally
    distributed weights.
    """

    kind = "quantization"
    error: ClassVar[float] = 1e-5
    config: ClassVar[engine_run.Config] = {}

    def method(self) -> QuantizationMethod:
        """The method under test, for float32 activations on the CPU."""
        import torch

        made = self.make(QuantizationContext({}, torch.float32, torch.device("cpu")))
        assert isinstance(made, QuantizationMethod), f"make returned {type(made).__name__}"
        return made

    def layer(self, bias: bool = True, order: tuple[int, ...] = (0, 1, 2)) -> tuple[Any, Any, Any]:
        """A loaded layer of three parts, its matrix and its bias in float64."""
        import torch

        generator = torch.Generator().manual_seed(1)
        made: Any = self.method().linear("model.qkv", IN, OUT, bias)
        weights = [torch.randn(size, IN, generator=generator) for size in OUT]
        biases = [torch.randn(size, generator=generator) for size in OUT]
        for part in order:
            made.load(part, "weight", weights[part])
            if bias:
                made.load(part, "bias", biases[part])
        made.finish()
        return made, torch.cat(weights).double(), torch.cat(biases).double() if bias else 0

    @staticmethod
    def input(rows: int, seed: int = 2) -> torch.Tensor:
        import torch

        return torch.randn(rows, IN, generator=torch.Generator().manual_seed(seed))

    def test_products_are_close_to_float64(self) -> None:
        """For any number of rows the product is as close to float64 as the method says."""
        import torch

        for bias in (False, True):
            layer, weight, offset = self.layer(bias)
            for rows in (1, 2, 3, 7, 16, 65):
                x = self.input(rows)
                with torch.inference_mode():
                    got = layer(x)
                wanted = x.double() @ weight.T + offset
                assert got.shape == (rows, sum(OUT)), f"{rows} rows gave {tuple(got.shape)}"
                assert got.dtype == torch.float32, f"activations became {got.dtype}"
                error = float((got.double() - wanted).norm() / wanted.norm())
                assert error <= self.error, (
                    f"{rows} rows: relative error {error:.3g}, allowed {self.error:.3g}"
                )

    def test_no_rows_give_no_rows(self) -> None:
        """An empty batch gives an empty result."""
        import torch

        layer, _, _ = self.layer()
        with torch.inference_mode():
            got = layer(self.input(0))
        assert tuple(got.shape) == (0, sum(OUT)), f"no rows gave {tuple(got.shape)}"

    def test_parts_come_in_any_order(self) -> None:
        """The order in which the parts of a fused layer are loaded does not matter."""
        import torch

        first, second = self.layer(order=(0, 1, 2))[0], self.layer(order=(2, 0, 1))[0]
        with torch.inference_mode():
            assert first(self.input(5)).equal(second(self.input(5))), "the order of loading matters"

    def test_rows_do_not_depend_on_each_other(self) -> None:
        """A row whose input is NaN or huge spoils no other row."""
        import torch

        layer, _, _ = self.layer()
        x = self.input(4)
        with torch.inference_mode():
            clean = layer(x)
            x[1], x[3] = float("nan"), 1e30
            got = layer(x)
        for row in (0, 2):
            error = float((got[row] - clean[row]).abs().max())
            assert error < 1e-4, f"row {row} changed by {error:.3g} beside a NaN row"

    def test_the_input_is_left_alone(self) -> None:
        """The layer does not write into its input, and gives the same twice."""
        import torch

        layer, _, _ = self.layer()
        x = self.input(6)
        before = x.clone()
        with torch.inference_mode():
            first, second = layer(x), layer(x)
        assert x.equal(before), "the input was changed"
        assert first.equal(second), "two equal calls differ"

    def test_a_missing_part_is_named(self) -> None:
        """finish raises WeightError with the layer's name when a part is missing."""
        import torch

        layer: Any = self.method().linear("model.layers.3.mlp", IN, OUT, False)
        layer.load(0, "weight", torch.randn(OUT[0], IN))
        self._refused(layer.finish, "model.layers.3.mlp", "finish with a part missing")

    def test_a_wrong_shape_is_named(self) -> None:
        """load raises WeightError with the layer's name for a tensor of another shape."""
        import torch

        layer: Any = self.method().linear("model.layers.3.mlp", IN, OUT, False)

        def load() -> None:
            layer.load(1, "weight", torch.randn(OUT[1], IN + 1))
            layer.load(0, "weight", torch.randn(OUT[0], IN))
            layer.load(2, "weight", torch.randn(OUT[2], IN))
            layer.finish()

        self._refused(load, "model.layers.3.mlp", "a weight of the wrong shape")

    @staticmethod
    def _refused(call: Any, name: str, what: str) -> None:
        try:
            call()
        except WeightError as error:
            if name not in str(error):
                raise AssertionError(f"{what}: the message does not name it: {error}") from error
        else:
            raise AssertionError(f"{what} was accepted")

    def test_checkpoints_of_other_dtypes(self) -> None:
        """Weights in float64, bfloat16 and float16 are taken, and the result stays float32."""
        import torch

        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            layer: Any = self.method().linear("model.o", IN, (40,), False)
            weight = torch.randn(40, IN).to(dtype)
            layer.load(0, "weight", weight)
            layer.finish()
            x = self.input(3)
            with torch.inference_mode():
                got = layer(x)
            wanted = x.double() @ weight.double().T
            error = float((got.double() - wanted).norm() / wanted.norm())
            assert got.dtype == torch.float32, f"a {dtype} checkpoint gave {got.dtype}"
            assert error <= max(self.error, 5e-3), f"a {dtype} checkpoint: error {error:.3g}"

    def test_a_tied_head_takes_the_embedding(self) -> None:
        """A layer takes a Parameter that stays in use elsewhere, and leaves its values alone."""
        import torch

        embedding = torch.nn.Parameter(torch.randn(50, IN), requires_grad=False)
        before = embedding.detach().clone()
        layer: Any = self.method().linear("lm_head", IN, (50,), False)
        layer.load(0, "weight", embedding)
        layer.finish()
        with torch.inference_mode():
            got = layer(self.input(2))
        wanted = self.input(2).double() @ before.double().T
        error = float((got.double() - wanted).norm() / wanted.norm())
        assert embedding.detach().equal(before), "the embedding was changed"
        assert error <= self.error, f"a tied head: relative error {error:.3g}"

    def test_engine_gives_the_same_tokens_when_preempted(self) -> None:
        """A real engine gives the same tokens with room for all, and chunked and preempted."""
        roomy = engine_run.tokens_of(self, self.config)
        tight = engine_run.tokens_of(self, self.config, engine_run.TIGHT)
        assert roomy == tight, "tokens depend on preemption or chunking"
