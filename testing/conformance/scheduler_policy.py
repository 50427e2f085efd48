"""What every scheduler policy promises."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from octavo.core.contracts.scheduler_policy import (
    RunningView,
    SchedulerPolicy,
    SchedulerPolicyContext,
    WaitingRequest,
)
from octavo.testing.conformance.base import ConformanceSuite, create, executed_lines
from octavo.testing.conformance.workload import SITUATIONS, run_situation
from octavo.testing.fake_engine import Collector, make_fake_engine, request

SIZES = (1, 2, 3, 8, 64, 257)


def make_view(rows: int, seed: int = 0, now: float = 100.0) -> RunningView:
    """Read-only columns of `rows` running requests, decoding and prefilling ones mixed."""
    random = np.random.default_rng(seed)
    prompt = random.integers(1, 500, rows)
    prefilling = random.random(rows) < 0.4
    tokens = np.where(prefilling, prompt, prompt + random.integers(1, 50, rows))
    computed = np.where(prefilling, random.integers(0, prompt), tokens - 1)
    columns: dict[str, Any] = {
        "slots": random.permutation(rows + 3)[:rows].astype(np.intp),
        "handles": np.arange(1, rows + 1, dtype=np.int64),
        "num_tokens": tokens.astype(np.int64),
        "num_computed": computed.astype(np.int64),
        "num_prompt": prompt.astype(np.int64),
        "priority": random.integers(0, 3, rows).astype(np.int64),
        "arrival": np.sort(random.random(rows) * now),
        "user": random.integers(0, 3, rows).astype(np.int64),
    }
    for column in columns.values():
        column.setflags(write=False)
    return RunningView(**columns, user_names=["a", "b", None], now=now)


def waiting(handle: int, arrival: float = 0.0, tokens: int = 20, **more: Any) -> WaitingRequest:
    """A request as a policy sees it."""
    return WaitingRequest(handle=handle, arrival=arrival, num_tokens=tokens, **more)


class SchedulerPolicySuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (a `SchedulerPolicy` for the context)."""

    kind = "scheduler_policy"

    def policy(self, **changes: Any) -> SchedulerPolicy:
        """The policy under test, for an engine of 512 slots and 2048 tokens a step by default."""
        context: dict[str, Any] = {
            "max_num_seqs": 512,
            "max_num_batched_tokens": 2048,
            "clock": lambda: 100.0,
        }
        context.update(changes)

        def make(choice: Any) -> SchedulerPolicy:
            policy: SchedulerPolicy = create("scheduler_policy", choice, made)
            return policy

        made = SchedulerPolicyContext(**context, make=make)
        policy = self.make(made)
        assert isinstance(policy, SchedulerPolicy), f"make returned {type(policy).__name__}"
        return policy

    # ---- the queue --------------------------------------------------------------------------

    def test_an_empty_queue_has_nothing_next(self) -> None:
        """A fresh policy holds nothing, and says so."""
        policy = self.policy()
        assert len(policy) == 0, f"a fresh policy holds {len(policy)} requests"
        assert policy.peek() is None, "peek on an empty queue must return None"
        assert not policy.remove(1), "remove must return False for what is not there"

    def test_everything_added_comes_out_exactly_once(self) -> None:
        """What was added comes out of peek and pop once each, and the length counts it."""
        policy = self.policy()
        requests = self._mixed(60)
        for index, item in enumerate(requests):
            policy.add(item)
            assert len(policy) == index + 1, (
                f"len(policy) is {len(policy)} after {index + 1} requests were added"
            )
        seen: list[int] = []
        while (first := policy.peek()) is not None:
            assert policy.pop() is first, "pop took out another request than peek showed"
            seen.append(first.handle)
            assert len(policy) == 60 - len(seen), "the length does not follow pop"
        assert sorted(seen) == sorted(item.handle for item in requests), "requests were lost"

    def test_peek_changes_nothing(self) -> None:
        """peek gives the same request until something is added or taken out."""
        policy = self.policy()
        for item in self._mixed(20):
            policy.add(item)
        first = policy.peek()
        assert all(policy.peek() is first for _ in range(5)), "peek changes its mind"
        assert len(policy) == 20, "peek changes the length"

    def test_removed_requests_never_come_out(self) -> None:
        """A removed request is gone, wherever it stood; a second remove finds nothing."""
        policy = self.policy()
        requests = self._mixed(30)
        for item in requests:
            policy.add(item)
        gone = {item.handle for item in requests[::3]}
        for handle in sorted(gone):
            assert policy.remove(handle), f"request {handle} was not found"
            assert not policy.remove(handle), f"request {handle} was removed twice"
        assert len(policy) == 20, f"len(policy) is {len(policy)} after 10 of 30 were removed"
        out = []
        while policy.peek() is not None:
            out.append(policy.pop().handle)
        assert not gone & set(out), "a removed request came out"
        assert len(out) == 20, "requests were lost with the removed ones"

    def test_the_next_one_can_be_removed(self) -> None:
        """Removing what peek has just shown shows another one."""
        policy = self.policy()
        for item in self._mixed(3):
            policy.add(item)
        for left in (2, 1, 0):
            first = policy.peek()
            assert first is not None, "nothing is next, though requests wait"
            policy.remove(first.handle)
            then = policy.peek()
            assert (then is None) == (left == 0), "the queue and its length disagree"
            assert then is None or then.handle != first.handle, "a removed request is still next"

    def test_take_takes_out_one_that_is_not_next(self) -> None:
        """take removes any waiting request and accounts for it as pop does."""
        policy = self.policy()
        requests = self._mixed(10)
        for item in requests:
            policy.add(item)
        first = policy.peek()
        other = next(item for item in requests if item is not first)
        policy.take(other)
        assert len(policy) == 9, "take did not take it out"
        assert not policy.remove(other.handle), "a taken request is still there"

    def test_a_preempted_request_waits_again(self) -> None:
        """A request that was admitted and lost its slot can be added again, and comes out."""
        policy = self.policy()
        for item in self._mixed(5):
            policy.add(item)
        admitted = policy.pop()
        policy.add(
            waiting(
                admitted.handle,
                admitted.arrival,
                admitted.num_tokens + 3,
                priority=admitted.priority,
                user=admitted.user,
                num_preemptions=1,
            )
        )
        out = []
        while policy.peek() is not None:
            out.append(policy.pop().handle)
        assert sorted(out) == [1, 2, 3, 4, 5], "the preempted request is lost or doubled"

    def test_waiting_lists_what_waits(self) -> None:
        """waiting() gives all requests, or nothing where it is not implemented."""
        policy = self.policy()
        for item in self._mixed(7):
            policy.add(item)
        listed = [item.handle for item in policy.waiting()]
        implemented = type(policy).waiting is not SchedulerPolicy.waiting
        assert not implemented or sorted(listed) == [1, 2, 3, 4, 5, 6, 7], (
            f"waiting() lists {sorted(listed)}, expected 1 to 7"
        )

    # ---- answers about running requests -----------------------------------------------------

    def test_order_is_a_permutation(self) -> None:
        """order gives None, or each row once, as integers usable as an index."""
        for rows in SIZES:
            order = self.policy().order(make_view(rows))
            if order is None:
                continue
            assert isinstance(order, np.ndarray), f"order is {type(order).__name__}"
            assert order.dtype == np.intp, f"order has dtype {order.dtype}, expected intp"
            assert sorted(order.tolist()) == list(range(rows)), (
                f"order gave {order.tolist()[:20]}, no permutation of {rows} rows"
            )

    def test_cap_is_a_count_a_row(self) -> None:
        """cap gives None, or one count a row that is not negative."""
        for rows in SIZES:
            view = make_view(rows)
            want = np.maximum(view.num_tokens - view.num_computed, 1)
            want.setflags(write=False)
            cap = self.policy().cap(view, want)
            if cap is None:
                continue
            assert isinstance(cap, np.ndarray), f"cap gave {type(cap).__name__}"
            assert cap.shape == (rows,), f"cap has shape {cap.shape}, expected ({rows},)"
            assert cap.dtype == np.int64, f"cap has dtype {cap.dtype}, expected int64"
            assert (cap >= 0).all(), f"cap gave {int(cap.min())}, expected 0 and more"

    def test_admit_cap_lies_between_nothing_and_what_is_wanted(self) -> None:
        """admit_cap gives a whole number from 0 to `want`."""
        for want in (1, 2, 17, 2048):
            policy = self.policy()
            item = waiting(1, 99.0, want)
            policy.add(item)
            given = policy.admit_cap(item, want)
            assert isinstance(given, int | np.integer), f"admit_cap gave {given!r}"
            assert 0 <= given <= want, f"admit_cap gave {given} for a chunk of {want}"

    def test_victim_keys_are_one_number_a_row(self) -> None:
        """victim_keys gives one float64 a row, none of them NaN."""
        for rows in SIZES:
            keys = self.policy().victim_keys(make_view(rows))
            assert isinstance(keys, np.ndarray), f"victim_keys gave {type(keys).__name__}"
            assert keys.shape == (rows,), f"victim_keys has shape {keys.shape}, expected ({rows},)"
            assert keys.dtype == np.float64, f"victim_keys has dtype {keys.dtype}, expected float64"
            assert not np.isnan(keys).any(), "a victim key is NaN"

    def test_preempts_names_a_running_slot(self) -> None:
        """preempts gives None or the slot of a request that runs, and the same one when asked
        again."""
        for rows in (1, 3, 16):
            view, policy = make_view(rows), self.policy()
            item = waiting(900, 1.0, 20, priority=-1, user="a")
            policy.add(item)
            slot = policy.preempts(item, view)
            assert slot is None or slot in view.slots.tolist(), f"slot {slot} does not run"
            assert policy.preempts(item, view) == slot, "preempts changes its mind"

    def test_classes_agree_with_class_of(self) -> None:
        """classes gives equal numbers exactly where class_of is equal."""
        policy, view = self.policy(), make_view(12)
        classes = policy.classes(view)
        if classes is None:
            return
        names = [
            policy.class_of(
                waiting(
                    int(view.handles[row]),
                    float(view.arrival[row]),
                    priority=int(view.priority[row]),
                    user=view.user_names[view.user[row]],
                )
            )
            for row in range(12)
        ]
        assert classes.shape == (12,), f"classes have shape {classes.shape}, expected (12,)"
        for a in range(12):
            for b in range(a):
                same = names[a] == names[b]
                assert (classes[a] == classes[b]) == same, (
                    f"requests of classes {names[a]!r} and {names[b]!r} have the numbers "
                    f"{classes[a]} and {classes[b]}"
                )

    def test_equal_histories_give_equal_answers(self) -> None:
        """Two policies that saw the same give the same order, caps, keys and queue."""
        assert self._history() == self._history(), "two equal histories ended differently"

    def _history(self) -> list[Any]:
        policy, answers = self.policy(), []
        for item in self._mixed(20):
            policy.add(item)
        for step in range(6):
            view = make_view(9, step)
            want = np.maximum(view.num_tokens - view.num_computed, 1)
            for answer in (policy.order(view), policy.cap(view, want), policy.victim_keys(view)):
                answers.append(None if answer is None else answer.tolist())
            policy.on_step(view, want)
            answers.append(policy.pop().handle)
        return answers

    # ---- cost -------------------------------------------------------------------------------

    def test_ten_thousand_waiting_cost_a_step_nothing(self) -> None:
        """peek executes no more Python with 10,000 waiting requests than with ten."""
        cost = {}
        for count in (10, 10_000):
            policy = self.policy()
            for item in self._mixed(count):
                policy.add(item)
            policy.peek()
            cost[count] = executed_lines(policy.peek)
        assert cost[10_000] <= 2 * cost[10] + 40, f"lines executed by the number waiting: {cost}"

    def test_answers_are_vectorised(self) -> None:
        """order, cap, victim_keys and on_step execute no Python a row."""
        for name in ("order", "victim_keys", "cap", "on_step"):
            cost = {}
            for rows in (64, 512):
                policy, view = self.policy(), make_view(rows)
                want = np.maximum(view.num_tokens - view.num_computed, 1)
                given = (view, want) if name in ("cap", "on_step") else (view,)
                getattr(policy, name)(*given)  # what is made at the first call
                call = partial(getattr(policy, name), *given)
                cost[rows] = executed_lines(call)
            assert cost[512] <= cost[64] + 100, f"{name}: lines executed by rows: {cost}"

    # ---- in an engine -----------------------------------------------------------------------

    def test_engine_gives_every_request_its_own_tokens(self) -> None:
        """In an engine, whatever is short: every request ends with the tokens it has alone."""
        for where in SITUATIONS:
            for seed in range(2):
                run_situation(where, seed, policy=self._fresh(where.engine))

    def test_engine_nothing_starves_behind_a_stream(self) -> None:
        """A request that came when all slots were taken ends although others keep coming."""
        settings: dict[str, Any] = {"max_num_seqs": 2, "budget": 16, "num_blocks": 60}
        engine = make_fake_engine(policy=self._fresh(settings), **settings)
        collector, handle = Collector(engine), 1
        for step in range(1500):
            if step == 3:
                engine.add(request(1, range(10, 40), 12, priority=2, ignore_eos=True))
            while len(engine.scheduler.policy) < 4:
                handle += 1
                engine.add(request(handle, range(10, 14), 6, priority=0, user="other"))
            collector.step()
            if 1 in collector.reasons:
                return
        raise AssertionError("after 1,500 steps the first request has not ended")

    def test_engine_running_decodes_wait_at_most_one_chunk(self) -> None:
        """With a steady stream of long prompts, a running decode gets a token every other step at
        least."""
        settings: dict[str, Any] = {"budget": 16, "num_blocks": 400, "max_num_seqs": 4}
        engine = make_fake_engine(policy=self._fresh(settings), **settings)
        collector = Collector(engine)
        engine.add(request(1, range(10, 14), 60, ignore_eos=True))
        gap = longest = 0
        for step in range(400):
            if step % 3 == 0:
                engine.add(request(2 + step, [20 + step % 50] * 60, 2))
            before = len(collector.tokens.get(1, []))
            collector.step()
            gap = 0 if len(collector.tokens.get(1, [])) > before or not before else gap + 1
            longest = max(longest, gap)
            if 1 in collector.reasons:
                break
        assert 1 in collector.reasons, "the decoding request has not ended after 400 steps"
        assert longest <= 1, f"a running decode waited {longest} steps in a row"

    def _fresh(self, settings: dict[str, Any]) -> SchedulerPolicy:
        ticks = iter(range(10**9))
        return self.policy(
            max_num_seqs=settings.get("max_num_seqs", 8),
            max_num_batched_tokens=settings.get("budget", 32),
            clock=lambda: float(next(ticks)),
        )

    @staticmethod
    def _mixed(count: int) -> list[WaitingRequest]:
        return [
            waiting(
                handle,
                handle * 0.5 if handle % 4 else 1.0,
                1 + handle * 7 % 50,
                priority=handle % 3,
                user=("a", "b", None)[handle % 3],
            )
            for handle in range(1, count + 1)
        ]
