"""Faults planted into the built-in parts of a device and of the text side: each is caught."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
import torch

from octavo.backends.attention.torch_attention import TorchAttention
from octavo.backends.graph_runners.eager import EagerRunner
from octavo.backends.quantization.none import FusedLinear, Unquantized
from octavo.core.contracts.attention_backend import KVLayout
from octavo.core.contracts.model import KVSpec
from octavo.core.contracts.provider import NoOptions
from octavo.core.errors import WeightError
from octavo.core.sampling_params import SamplingParams
from octavo.models.families.decoder import Decoder
from octavo.models.tokenizers.fast import FastTokenizer
from octavo.models.weight_sources.folder import Folder
from octavo.plugins.logits_processors.bias import BiasProcessor
from octavo.plugins.logits_processors.penalties import PenaltiesProcessor
from octavo.plugins.samplers.torch_sampler import TorchSampler
from octavo.testing.conformance.attention_backend import AttentionBackendSuite
from octavo.testing.conformance.base import run_promise
from octavo.testing.conformance.graph_runner import GraphRunnerSuite
from octavo.testing.conformance.logits_processor import LogitsProcessorSuite
from octavo.testing.conformance.model import ModelSuite
from octavo.testing.conformance.quantization import QuantizationSuite
from octavo.testing.conformance.sampler import SamplerSuite
from octavo.testing.conformance.tokenizer import TokenizerSuite
from octavo.testing.conformance.weight_source import WeightSourceSuite

pytestmark = pytest.mark.slow

FAULTS = []


def planted(suite, promise, raises=None, **attributes):
    """Register a class as a fault that breaks `promise` of `suite`. raises: the exception of its
    own that shows it, where no check of the suite does."""

    def add(cls):
        own = {"make": lambda self, context: cls(NoOptions(), context), **attributes}
        if suite is AttentionBackendSuite:
            own["backend_class"] = lambda self: cls
        made = type(f"Suite{cls.__name__}", (suite,), own)
        FAULTS.append(pytest.param(made, promise, raises, id=f"{suite.kind}-{cls.__name__}"))
        return cls

    return add


# ---- attention backends -------------------------------------------------------------------------


@planted(AttentionBackendSuite, "test_every_layer_equals_float64")
class ForgetsTheScale(TorchAttention):
    def run(self, layer, q, k, v, out):
        super().run(layer, q * 1.05, k, v, out)


@planted(AttentionBackendSuite, "test_edges")
class ForgetsThePast(TorchAttention):
    def plan(self, batch):
        batch.seq_lens_cpu = np.minimum(batch.seq_lens_cpu, 400)
        super().plan(batch)


@planted(AttentionBackendSuite, "test_only_its_own_places_are_written")
class WritesTheNullBlock(TorchAttention):
    def run(self, layer, q, k, v, out):
        super().run(layer, q, k, v, out)
        layer.k_cache[0, 0] = 1.0


@planted(AttentionBackendSuite, "test_neighbours_do_not_leak")
class MixesRows(TorchAttention):
    def run(self, layer, q, k, v, out):
        super().run(layer, q, k, v, out)
        out += 0 * out.mean(0)


@planted(AttentionBackendSuite, "test_two_layers_share_a_plan")
class UsesUpItsPlan(TorchAttention):
    turn = 0

    def run(self, layer, q, k, v, out):
        super().run(layer, q, k, v, out)
        self.turn += 1
        out += self.turn * 1e-3


@planted(AttentionBackendSuite, "test_a_new_plan_forgets_the_old_one")
class KeepsTheFirstPlan(TorchAttention):
    batch = None

    def plan(self, batch):
        if self.batch is None or self.batch.num_tokens != batch.num_tokens:
            self.batch = batch
            super().plan(batch)


@planted(AttentionBackendSuite, "test_captured_batches_never_wait_for_the_device")
class WaitsForTheDevice(TorchAttention):
    graph_support = "decode"

    def run(self, layer, q, k, v, out):
        if float(q.abs().max()) > 0:
            super().run(layer, q, k, v, out)


@planted(AttentionBackendSuite, "test_layouts_are_complete")
class ForgetsADimension(TorchAttention):
    @staticmethod
    def kv_layouts(spec):
        return [KVLayout(("kv", "block", "token", "head"))]


@planted(AttentionBackendSuite, "test_supports_answers_for_every_layer")
class SaysTrue(TorchAttention):
    @staticmethod
    def supports(spec, platform):
        return True if spec.sinks else None


# ---- samplers -----------------------------------------------------------------------------------


@planted(SamplerSuite, "test_seed_position_and_index_matter")
class IgnoresTheSeed(TorchSampler):
    def sample(self, logits, batch):
        batch.seed = torch.zeros_like(batch.seed)
        return super().sample(logits, batch)


@planted(SamplerSuite, "test_seed_position_and_index_matter")
class HalfTheSeed(TorchSampler):
    def sample(self, logits, batch):
        batch.seed = batch.seed & 0xFFFFFFFF
        return super().sample(logits, batch)


@planted(SamplerSuite, "test_company_does_not_matter")
class DrawsByRow(TorchSampler):
    def sample(self, logits, batch):
        batch.position = batch.position + torch.arange(batch.num_rows)
        return super().sample(logits, batch)


@planted(SamplerSuite, "test_greedy_takes_the_largest")
class LastOfEquals(TorchSampler):
    def sample(self, logits, batch):
        result = super().sample(logits, batch)
        if batch.all_greedy:
            result.token_ids = logits.shape[1] - 1 - logits.flip(1).argmax(1)
        return result


@planted(SamplerSuite, "test_a_row_without_a_token_is_marked")
class AlwaysValid(TorchSampler):
    def sample(self, logits, batch):
        result = super().sample(logits, batch)
        result.valid = torch.ones_like(result.valid)
        return result


@planted(SamplerSuite, "test_draws_follow_the_formula")
class IgnoresMinP(TorchSampler):
    def sample(self, logits, batch):
        batch.any_min_p = False
        batch.min_p = torch.zeros_like(batch.min_p)
        batch.host.min_p = np.zeros_like(batch.host.min_p)
        return super().sample(logits, batch)


@planted(SamplerSuite, "test_logprobs_are_those_of_the_raw_logits")
class RanksFromZero(TorchSampler):
    def logprobs(self, logits, token_ids, num):
        result = super().logprobs(logits, token_ids, num)
        result.ranks = result.ranks - 1
        return result


@planted(SamplerSuite, "test_draws_follow_the_formula")
class TokensOfTheWrongDtype(TorchSampler):
    def sample(self, logits, batch):
        result = super().sample(logits, batch)
        result.token_ids = result.token_ids.int()
        return result


# ---- graph runners ------------------------------------------------------------------------------


@planted(GraphRunnerSuite, "test_results_are_those_of_the_forward_pass")
class ReplaysTheFirst(EagerRunner):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.kept = {}

    def forward(self, token_ids, positions, num_decodes):
        if len(token_ids) not in self.kept:
            self.kept[len(token_ids)] = super().forward(token_ids * 0, positions, num_decodes)
        return self.kept[len(token_ids)]


@planted(GraphRunnerSuite, "test_results_are_those_of_the_forward_pass")
class PadsAndForgets(EagerRunner):
    def forward(self, token_ids, positions, num_decodes):
        padded = torch.cat((token_ids, token_ids[:1]))
        return super().forward(padded, torch.cat((positions, positions[:1])), num_decodes)


@planted(GraphRunnerSuite, "test_new_weights_are_seen")
class CopiesTheModel(EagerRunner):
    def __init__(self, options, context):
        super().__init__(options, context)
        import copy

        self.copy = copy.deepcopy(context.model)

    def forward(self, token_ids, positions, num_decodes):
        return self.copy(token_ids, positions)


@planted(GraphRunnerSuite, "test_a_changed_forward_is_followed")
class RemembersTheLayers(EagerRunner):
    """As one does that holds references to what it looked up at the start."""

    def __init__(self, options, context):
        super().__init__(options, context)
        import copy

        self.then = copy.copy(context.model)
        self.then._modules = dict(context.model._modules)

    def forward(self, token_ids, positions, num_decodes):
        return self.then.forward(token_ids, positions)


@planted(GraphRunnerSuite, "test_an_engine_follows_a_changed_forward")
class RemembersTheHooks(EagerRunner):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.model = context.model

    def forward(self, token_ids, positions, num_decodes):
        for module in self.model.modules():
            module._forward_hooks.clear()
        return super().forward(token_ids, positions, num_decodes)


@planted(GraphRunnerSuite, "test_memory_is_told_in_bytes")
class EstimatesInMegabytes(EagerRunner):
    def estimate_bytes(self):
        return 2.5


@planted(GraphRunnerSuite, "test_an_error_of_the_forward_pass_is_raised")
class HidesErrors(EagerRunner):
    def forward(self, token_ids, positions, num_decodes):
        try:
            return super().forward(token_ids, positions, num_decodes)
        except Exception:
            raise RuntimeError("the graph failed") from None


@planted(GraphRunnerSuite, "test_warm_up_names_seconds")
class WarmsUpInSilence(EagerRunner):
    def warm_up(self):
        return None


@planted(GraphRunnerSuite, "test_results_are_those_of_the_forward_pass")
class HalfPrecision(EagerRunner):
    def forward(self, token_ids, positions, num_decodes):
        return super().forward(token_ids, positions, num_decodes).bfloat16()


# ---- quantization -------------------------------------------------------------------------------


class Layer(FusedLinear):
    pass


def made_of(layer):
    """A method whose layers are of a class."""

    class Method(Unquantized):
        def linear(self, prefix, in_features, out_features, bias):
            made = super().linear(prefix, in_features, out_features, bias)
            made.__class__ = layer
            return made

    Method.__name__ = layer.__name__
    return Method


def planted_layer(promise):
    def add(layer):
        planted(QuantizationSuite, promise)(made_of(layer))
        return layer

    return add


@planted_layer("test_products_are_close_to_float64")
class ForgetsTheBias(Layer):
    def forward(self, x):
        return super().forward(x) if self.bias is None else super().forward(x) - self.bias


@planted_layer("test_the_input_is_left_alone")
class WorksInPlace(Layer):
    def forward(self, x):
        result = super().forward(x)
        x.mul_(2)
        return result


@planted_layer("test_rows_do_not_depend_on_each_other")
class ScalesByTheBatch(Layer):
    def forward(self, x):
        scale = x.abs().amax() if len(x) else 1.0
        return super().forward(x / scale) * scale


@planted_layer("test_a_missing_part_is_named")
class ForgivesMissing(Layer):
    def finish(self):
        try:
            super().finish()
        except WeightError:
            return


@planted_layer("test_checkpoints_of_other_dtypes")
class TakesTheDtypeOfTheCheckpoint(Layer):
    def load(self, part, kind, tensor):
        self.dtype = tensor.dtype
        super().load(part, kind, tensor)

    def forward(self, x):
        return super().forward(x).to(self.dtype)


@planted_layer("test_a_tied_head_takes_the_embedding")
class ChangesTheEmbedding(Layer):
    def load(self, part, kind, tensor):
        super().load(part, kind, tensor)
        tensor.data.mul_(1.0001)


# ---- models -------------------------------------------------------------------------------------


@planted(ModelSuite, "test_positions_are_used")
class CountsFromZero(Decoder):
    def forward(self, token_ids, positions):
        return super().forward(token_ids, torch.arange(len(token_ids)))


@planted(ModelSuite, "test_a_missing_tensor_is_named")
class ForgivesMissingTensors(Decoder):
    def load_weights(self, tensors):
        try:
            super().load_weights(tensors)
        except WeightError:
            return


@planted(ModelSuite, "test_an_unknown_tensor_is_named")
class TakesAnything(Decoder):
    def load_weights(self, tensors):
        super().load_weights((n, t) for n, t in tensors if "nobody" not in n)


@planted(ModelSuite, "test_kv_specs_are_complete")
class ForgetsALayer(Decoder):
    def kv_specs(self):
        return super().kv_specs()[:-1]


@planted(ModelSuite, "test_shapes_and_dtypes")
class HalfLogits(Decoder):
    def compute_logits(self, hidden):
        return super().compute_logits(hidden).half()


@planted(ModelSuite, "test_later_tokens_do_not_matter")
class LooksAhead(Decoder):
    def forward(self, token_ids, positions):
        hidden = super().forward(token_ids, positions)
        return hidden + hidden[-1:] * 0.01


@planted(ModelSuite, "test_kv_specs_are_complete")
class OddKind(Decoder):
    def kv_specs(self):
        return [
            KVSpec(s.layer, "odd", s.num_kv_heads, s.head_size, s.value_head_size)
            for s in super().kv_specs()
        ]


@planted(ModelSuite, "test_logits_are_those_of_the_reference")
class ScalesLogits(Decoder):
    def compute_logits(self, hidden):
        return super().compute_logits(hidden) * 1.01


# ---- logits processors --------------------------------------------------------------------------

BIAS = {"params": (SamplingParams(logit_bias={3: 5.0, 60: -100.0}),), "plain": SamplingParams()}
PENALTY = {"params": (SamplingParams(repetition_penalty=1.7, frequency_penalty=1.0),)}


@planted(LogitsProcessorSuite, "test_a_slot_leaks_nothing_to_its_next_user", **PENALTY)
class LeaksOnReuse(PenaltiesProcessor):
    kept = None

    def detach(self, slot):
        self.kept = self._tokens.clone()
        super().detach(slot)

    def apply(self, logits, slots, rows):
        super().apply(logits, slots, rows)
        if self.kept is not None:
            logits[rows[0], self.kept[0]] -= 1.0


@planted(LogitsProcessorSuite, "test_preemption_changes_nothing", **PENALTY)
class ForgetsTheOutput(PenaltiesProcessor):
    def attach(self, request):
        import dataclasses

        return super().attach(dataclasses.replace(request, output=request.output[:0]))


@planted(LogitsProcessorSuite, "test_rollback_undoes_accept", **PENALTY)
class CannotGoBack(PenaltiesProcessor):
    def rollback(self, slot, num_tokens):
        pass


@planted(LogitsProcessorSuite, "test_other_rows_stay_as_they_are", **BIAS)
class EditsEverything(BiasProcessor):
    def apply(self, logits, slots, rows):
        super().apply(logits, slots, rows)
        logits += 1.0


@planted(LogitsProcessorSuite, "test_asking_twice_changes_nothing", **BIAS)
class CountsCalls(BiasProcessor):
    calls = 0

    def apply(self, logits, slots, rows):
        self.calls += 1
        super().apply(logits, slots, rows)
        logits[rows] += torch.arange(logits.shape[1]) * 0.001 * self.calls


@planted(LogitsProcessorSuite, "test_logits_keep_shape_and_meaning", **BIAS)
class DividesByZero(BiasProcessor):
    def apply(self, logits, slots, rows):
        super().apply(logits, slots, rows)
        logits[rows[0], 0] = float("nan")


@planted(LogitsProcessorSuite, "test_attach_says_whether_there_is_work", **BIAS)
class AlwaysAttaches(BiasProcessor):
    def attach(self, request):
        super().attach(request)
        return True


@planted(LogitsProcessorSuite, "test_several_rows_in_one_call", **BIAS)
class FirstRowOnly(BiasProcessor):
    def apply(self, logits, slots, rows):
        super().apply(logits, slots[:1], rows[:1])


# ---- tokenizers ---------------------------------------------------------------------------------


@planted(TokenizerSuite, "test_texts_come_back")
class StripsSpaces(FastTokenizer):
    def encode(self, text, *, add_special_tokens=True):
        return super().encode(text.strip(), add_special_tokens=add_special_tokens)


@planted(TokenizerSuite, "test_special_tokens_are_hidden_on_request")
class HidesAlways(FastTokenizer):
    def decode(self, token_ids, *, skip_special_tokens=True):
        return super().decode(token_ids, skip_special_tokens=True)


@planted(TokenizerSuite, "test_ids_that_no_token_has", "IndexError")
class RaisesForUnknownIds(FastTokenizer):
    def token_bytes(self, token_id):
        if token_id >= self.vocab_size:
            raise IndexError(token_id)
        return super().token_bytes(token_id)


@planted(TokenizerSuite, "test_chat_continues_a_message")
class EndsEveryMessage(FastTokenizer):
    def chat(self, messages, **more):
        return super().chat(messages, **more) + "<|end|>"


@planted(TokenizerSuite, "test_a_lone_surrogate_is_the_callers_mistake")
class ReplacesSurrogates(FastTokenizer):
    def encode(self, text, *, add_special_tokens=True):
        text = re.sub("[\ud800-\udfff]", "?", text)
        return super().encode(text, add_special_tokens=add_special_tokens)


@planted(TokenizerSuite, "test_fewest_tokens_is_never_too_many")
class CountsTheBeginToken(FastTokenizer):
    def fewest_tokens(self, text):
        return 1 + super().fewest_tokens(text)


@planted(TokenizerSuite, "test_what_it_says_about_itself")
class CountsOneTooFew(FastTokenizer):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.vocab_size = max(self.special_ids)


# ---- weight sources -----------------------------------------------------------------------------


@planted(WeightSourceSuite, "test_tensors_are_named_once")
class NamesATensorTwice(Folder):
    def tensors(self):
        for name, tensor in super().tensors():
            yield name, tensor
            if "norm" in name:
                yield name, tensor


@planted(WeightSourceSuite, "test_tensors_are_named_once")
class ChangesWhenReadAgain(Folder):
    turn = 0

    def tensors(self):
        self.turn += 1
        for name, tensor in super().tensors():
            yield name, tensor + self.turn


@planted(WeightSourceSuite, "test_config_names_an_architecture")
class ForgetsTheArchitecture(Folder):
    def config(self):
        return {k: v for k, v in super().config().items() if k != "architectures"}


@planted(WeightSourceSuite, "test_tokenizer_files_are_there")
class PointsNowhere(Folder):
    def tokenizer_dir(self):
        return super().tokenizer_dir() / "not-there"


@planted(WeightSourceSuite, "test_nothing_there_is_said")
class InventsAModel(Folder):
    def __init__(self, options, context):
        try:
            super().__init__(options, context)
            self.there = True
        except Exception:
            self.there = False

    def config(self):
        return super().config() if self.there else {"architectures": ["LlamaForCausalLM"]}


@planted(WeightSourceSuite, "test_generation_config_is_a_mapping")
class NoGenerationConfig(Folder):
    def generation_config(self):
        return None


@pytest.mark.parametrize(("suite", "promise", "raises"), FAULTS)
def test_the_fault_is_caught(suite, promise, raises):
    verdict = run_promise(suite, promise)
    assert verdict.outcome == "broken", f"{promise} did not notice: {verdict}"
    own = re.match(r"(\w+): .* \(\S+:\d+, in ", verdict.message)
    assert (own and own[1]) == raises, f"not what the suite looks for: {verdict.message}"


def test_each_kind_has_five_faults():
    kinds = Counter(fault.values[0].kind for fault in FAULTS)
    assert min(kinds.values()) >= 5, kinds
