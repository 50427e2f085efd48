"""What every logits processor promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.logits_processor import (
    AttachedRequest,
    DeviceLogitsProcessor,
    HostLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorContext,
)
from octavo.core.sampling_params import SamplingParams
from octavo.testing.conformance.base import ConformanceSuite

SLOTS, VOCAB, LENGTH = 8, 70, 64
EOS = 5


class LogitsProcessorSuite(ConformanceSuite):
    """Subclass it with `provider` (or `make`), and `params`: parameters of requests that the
    processor has something to do for. plain: of one that it has nothing to do for, or None when it
    works on every request."""

    kind = "logits_processor"
    params: ClassVar[Sequence[SamplingParams]] = (SamplingParams(),)
    plain: ClassVar[SamplingParams | None] = None

    def processor(self) -> DeviceLogitsProcessor | HostLogitsProcessor:
        """The processor under test, for 8 slots and a vocabulary of 70."""
        import torch

        context = LogitsProcessorContext(VOCAB, SLOTS, LENGTH, torch.device("cpu"))
        made = self.make(context)
        assert isinstance(made, DeviceLogitsProcessor | HostLogitsProcessor), (
            f"{type(made).__name__} is neither a device nor a host processor"
        )
        return made

    # ---- doing ------------------------------------------------------------------------------

    @staticmethod
    def request(
        slot: int,
        params: SamplingParams,
        output: Sequence[int] = (),
        prompt: Sequence[int] = (3, 9, 9, 21),
    ) -> AttachedRequest:
        return AttachedRequest(
            slot,
            100 + slot,
            np.asarray(prompt, np.int32),
            np.asarray(output, np.int32),
            params,
            () if params.ignore_eos else (EOS,),
        )

    def edit(
        self, processor: LogitsProcessor, slots: Sequence[int], logits: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Logits float32[n, V] of the slots as the processor leaves them; a mask forbids by
        -inf."""
        import torch

        where = np.asarray(slots, np.intp)
        if isinstance(processor, DeviceLogitsProcessor):
            tensor = torch.from_numpy(logits.copy())
            processor.apply(tensor, where, np.arange(len(slots), dtype=np.intp))
            return tensor.numpy()
        assert isinstance(processor, HostLogitsProcessor)
        bitmask = np.full((len(slots), -(-VOCAB // 32)), -1, np.int32)
        processor.mask(where, bitmask)
        bits = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
        return np.where(bits == 1, logits, np.float32(-np.inf))

    @staticmethod
    def logits(rows: int, seed: int = 0) -> NDArray[np.float32]:
        return np.random.default_rng(seed).normal(0, 2, (rows, VOCAB)).astype(np.float32)

    def step(
        self, processor: LogitsProcessor, slot: int, number: int = 0
    ) -> tuple[int, NDArray[np.float32]]:
        """Sample a token greedily from what the processor leaves of peaked logits, and accept it:
        the token, and the edited logits [V]. The peak moves every third step, so that tokens
        repeat."""
        logits = self.logits(1)
        logits[0, [(number // 3 * 11 + 3) % VOCAB, 9, 21]] += 6.0
        edited = self.edit(processor, [slot], logits)[0]
        token = int(edited.argmax())
        assert np.isfinite(edited[token]), "the processor forbids every token"
        processor.accept(np.asarray([slot], np.intp), np.asarray([token], np.int32))
        return token, edited

    def steps(
        self, processor: LogitsProcessor, slot: int, first: int, last: int
    ) -> list[tuple[int, NDArray[np.float32]]]:
        """Steps number `first` to `last`, without the latter."""
        return [self.step(processor, slot, number) for number in range(first, last)]

    @staticmethod
    def same(got: Sequence[Any], wanted: Sequence[Any], what: str) -> None:
        """Both runs had the same tokens and logits in every step."""
        for number, (mine, other) in enumerate(zip(got, wanted, strict=True)):
            equal = np.isclose(mine[1], other[1], rtol=1e-5, atol=1e-5, equal_nan=True)
            equal |= mine[1] == other[1]
            first = int(np.flatnonzero(~equal)[0]) if not equal.all() else -1
            assert first < 0, (
                f"{what}: in step {number} the logit of token {first} is {mine[1][first]}, "
                f"expected {other[1][first]}"
            )

    # ---- promises ---------------------------------------------------------------------------

    def test_attach_says_whether_there_is_work(self) -> None:
        """attach gives True for the suite's `params` and False for `plain`."""
        processor = self.processor()
        for slot, params in enumerate(self.params):
            answer = processor.attach(self.request(slot, params))
            assert answer is True, f"attach gave {answer!r} for {params}; is `params` right?"
        if self.plain is not None:
            answer = processor.attach(self.request(7, self.plain))
            assert answer is False, f"attach gave {answer!r} for a request without work"

    def test_logits_keep_shape_and_meaning(self) -> None:
        """Edited logits stay float32, and never become NaN or +inf."""
        for params in self.params:
            processor = self.processor()
            processor.attach(self.request(0, params))
            edited = self.edit(processor, [0], self.logits(1))
            assert edited.dtype == np.float32, f"logits became {edited.dtype}"
            assert not np.isnan(edited).any(), "a logit became NaN"
            assert not (edited == np.inf).any(), "a logit became +inf"

    def test_other_rows_stay_as_they_are(self) -> None:
        """Rows of requests without work do not change, wherever they stand."""
        import torch

        processor = self.processor()
        if isinstance(processor, HostLogitsProcessor):
            return  # it is handed its own rows only
        slots = np.asarray([6, 2], np.intp)
        for slot, params in zip(slots.tolist(), (self.params[0], self.params[-1]), strict=True):
            processor.attach(self.request(slot, params))
        logits = self.logits(7)
        tensor = torch.from_numpy(logits.copy())
        processor.apply(tensor, slots, np.asarray([1, 4], np.intp))
        for row in (0, 2, 3, 5, 6):
            assert (tensor.numpy()[row] == logits[row]).all(), f"row {row} of a stranger changed"

    def test_slots_are_independent(self) -> None:
        """A request gets the same edits alone and among others, in any slot."""
        for params in self.params:
            alone = self.processor()
            alone.attach(self.request(0, params))
            wanted = self.steps(alone, 0, 0, 8)
            crowd = self.processor()
            for slot in (0, 1, 2):
                crowd.attach(self.request(slot, self.params[slot % len(self.params)]))
                self.steps(crowd, slot, slot, slot + 3)
            crowd.attach(self.request(5, params))
            self.same(self.steps(crowd, 5, 0, 8), wanted, f"in company with {params}")

    def test_several_rows_in_one_call(self) -> None:
        """A call for several slots edits each as a call of its own would."""
        processor = self.processor()
        slots = [1, 3, 4, 6]
        for slot in slots:
            processor.attach(self.request(slot, self.params[slot % len(self.params)]))
            self.steps(processor, slot, 0, slot)
        logits = self.logits(4, 5)
        together = self.edit(processor, slots, logits)
        for row, slot in enumerate(slots):
            single = self.edit(processor, [slot], logits[row : row + 1])[0]
            assert np.array_equal(single, together[row]), f"slot {slot} differs in company"

    def test_a_slot_leaks_nothing_to_its_next_user(self) -> None:
        """After detach a slot's next user gets what it would get in a fresh processor."""
        for params in self.params:
            for after in self.params:
                processor = self.processor()
                processor.attach(self.request(2, params, prompt=(1, 1, 2, 60)))
                self.steps(processor, 2, 0, 6)
                processor.detach(2)
                processor.attach(self.request(2, after))
                fresh = self.processor()
                fresh.attach(self.request(2, after))
                self.same(
                    self.steps(processor, 2, 0, 6), self.steps(fresh, 2, 0, 6), "after another user"
                )

    def test_preemption_changes_nothing(self) -> None:
        """A request that lost its slot and is attached again with its output goes on as it would
        have."""
        for params in self.params:
            undisturbed = self.processor()
            undisturbed.attach(self.request(0, params))
            wanted = self.steps(undisturbed, 0, 0, 10)
            for lost_at in (1, 4, 9):
                processor = self.processor()
                processor.attach(self.request(0, params))
                got = self.steps(processor, 0, 0, lost_at)
                processor.detach(0)
                tokens = [token for token, _ in got]
                processor.attach(self.request(4, params, output=tokens))
                got += self.steps(processor, 4, lost_at, 10)
                self.same(got, wanted, f"preempted after {lost_at} tokens")

    def test_rollback_undoes_accept(self) -> None:
        """Tokens that are accepted and rolled back (rejected speculation) leave no trace."""
        for params in self.params:
            processor, other = self.processor(), self.processor()
            for item in (processor, other):
                item.attach(self.request(1, params))
                self.steps(item, 1, 0, 4)
            for count in (1, 2, 3):
                tried = self.steps(processor, 1, 30, 30 + count)
                processor.rollback(1, len(tried))
            self.same(
                self.steps(processor, 1, 4, 10), self.steps(other, 1, 4, 10), "after a rollback"
            )

    def test_asking_twice_changes_nothing(self) -> None:
        """Edits follow accepted tokens only: a chunk that is computed without sampling, or a step
        that is repeated, leaves no trace."""
        for params in self.params:
            processor = self.processor()
            processor.attach(self.request(3, params))
            self.steps(processor, 3, 0, 3)
            logits = self.logits(1, 8)
            first, second = (self.edit(processor, [3], logits) for _ in range(2))
            assert np.array_equal(first, second), "the second call gives other logits"

    def test_every_slot_can_be_used_at_once(self) -> None:
        """All slots may be attached, left and taken again, many times over."""
        processor = self.processor()
        for turn in range(12):
            for slot in range(SLOTS):
                params = self.params[(slot + turn) % len(self.params)]
                assert processor.attach(self.request(slot, params)), "attach refuses a free slot"
            self.edit(processor, list(range(SLOTS)), self.logits(SLOTS, turn))
            for slot in range(SLOTS):
                processor.detach((slot * 3 + turn) % SLOTS)

    def test_engine_gives_the_same_tokens_when_preempted(self) -> None:
        """In a real engine a request gets the same tokens with room for all, and chunked and
        preempted."""
        from octavo.testing.conformance import engine_run
        from octavo.testing.tiny_model import make_requests

        roomy, tight = (
            engine_run.tokens_of(self, where, requests=make_requests(6, self.params))
            for where in ({}, engine_run.TIGHT)
        )
        assert roomy == tight, "tokens depend on preemption or chunking"
