"""Faults planted into the built-in parts that run without a device: each is caught by its suite."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute

from octavo.core.contracts.executor import Ticket, WarmUp
from octavo.core.contracts.kv_cache_manager import Match
from octavo.core.contracts.observer import Observer
from octavo.core.contracts.preemption_policy import PreemptionAction
from octavo.core.contracts.provider import NoOptions
from octavo.core.errors import EngineDeadError
from octavo.core.messages import StepResult
from octavo.plugins.eviction.lru import LruPolicy
from octavo.plugins.executors.local import LocalExecutor, LocalOptions
from octavo.plugins.executors.threaded import ThreadedExecutor
from octavo.plugins.kv_cache_managers.paged import PagedKVCacheManager
from octavo.plugins.preemption.recompute import RecomputePolicy
from octavo.plugins.preemption.swap import SwapPolicy
from octavo.plugins.scheduler_policies.fcfs import FcfsPolicy
from octavo.server.contracts.reasoning_parser import Split
from octavo.server.contracts.route import RoutePlugin
from octavo.server.contracts.tool_parser import CallArguments, CallBegin
from octavo.server.testing.reasoning_parser import ReasoningParserSuite
from octavo.server.testing.route import RouteSuite
from octavo.server.testing.templates import reasoning_parser, tool_parser
from octavo.server.testing.tool_parser import ToolParserSuite
from octavo.testing.conformance.base import run_promise
from octavo.testing.conformance.eviction_policy import EvictionPolicySuite
from octavo.testing.conformance.executor import ExecutorSuite
from octavo.testing.conformance.grammar_engine import GrammarEngineSuite
from octavo.testing.conformance.kv_cache_manager import KVCacheManagerSuite
from octavo.testing.conformance.observer import ObserverSuite
from octavo.testing.conformance.preemption_policy import PreemptionPolicySuite
from octavo.testing.conformance.scheduler_policy import SchedulerPolicySuite
from octavo.testing.templates import grammar_engine

pytestmark = pytest.mark.slow

FAULTS = []


def own_exception(verdict):
    """The name of the exception that broke the promise, None for a check of the suite."""
    found = re.match(r"(\w+): .* \(\S+:\d+, in ", verdict.message)
    return found and found[1]


def planted(suite, promise, raises=None, options=NoOptions):
    """Register a class as a fault that breaks `promise` of `suite`. raises: the exception of its
    own that shows it, where no check of the suite does."""

    def add(cls):
        made = type(
            f"Suite{cls.__name__}",
            (suite,),
            {"make": lambda self, context: cls(options(), context)},
        )
        FAULTS.append(pytest.param(made, promise, raises, id=f"{suite.kind}-{cls.__name__}"))
        return cls

    return add


# ---- scheduler policies -------------------------------------------------------------------------


@planted(SchedulerPolicySuite, "test_removed_requests_never_come_out")
class ForgetsToRemove(FcfsPolicy):
    def remove(self, handle):
        return any(item.handle == handle for item in self.waiting())


@planted(SchedulerPolicySuite, "test_everything_added_comes_out_exactly_once")
class LosesEveryTenth(FcfsPolicy):
    def add(self, request):
        if request.handle % 10:
            super().add(request)


@planted(SchedulerPolicySuite, "test_peek_changes_nothing")
class PeekTurnsTheQueue(FcfsPolicy):
    def peek(self):
        first = super().peek()
        if first is not None:
            super().remove(first.handle)
            self._queue.add(1e9 + first.handle, first)
        return first


@planted(SchedulerPolicySuite, "test_victim_keys_are_one_number_a_row")
class KeysOfTheWrongDtype(FcfsPolicy):
    def victim_keys(self, view):
        return view.arrival.astype(np.float32)


@planted(SchedulerPolicySuite, "test_order_is_a_permutation")
class OrderLeavesOneOut(FcfsPolicy):
    def order(self, view):
        order = np.argsort(view.arrival)
        order[-1] = order[0]
        return order


@planted(SchedulerPolicySuite, "test_cap_is_a_count_a_row")
class NegativeCap(FcfsPolicy):
    def cap(self, view, want):
        return want - 3


@planted(SchedulerPolicySuite, "test_ten_thousand_waiting_cost_a_step_nothing")
class PeekLooksAtAll(FcfsPolicy):
    def peek(self):
        return min(self.waiting(), key=lambda item: (item.arrival, item.handle), default=None)


@planted(SchedulerPolicySuite, "test_answers_are_vectorised")
class KeysByALoop(FcfsPolicy):
    def victim_keys(self, view):
        keys = np.zeros(len(view.slots))
        for row in range(len(view.slots)):
            keys[row] = view.arrival[row]
        return keys


@planted(SchedulerPolicySuite, "test_engine_nothing_starves_behind_a_stream")
class StarvesTheLow(FcfsPolicy):
    def key(self, request):
        return request.priority * 1e12 + request.arrival


@planted(SchedulerPolicySuite, "test_equal_histories_give_equal_answers")
class Random(FcfsPolicy):
    def victim_keys(self, view):
        return np.random.random(len(view.slots))


@planted(SchedulerPolicySuite, "test_engine_running_decodes_wait_at_most_one_chunk")
class NewestFirst(FcfsPolicy):
    def key(self, request):
        return -request.arrival

    def preempts(self, request, view):
        row = int(view.arrival.argmin())
        return int(view.slots[row]) if view.arrival[row] < request.arrival else None


# ---- KV cache managers --------------------------------------------------------------------------


@planted(KVCacheManagerSuite, "test_walks_in_a_roomy_pool")
class LeaksOnRelease(PagedKVCacheManager):
    def release(self, slot):
        if self.num_slot_blocks[slot] > 3:
            self._table[slot] = 0
            self.num_slot_blocks[slot] = 0
        else:
            super().release(slot)


@planted(KVCacheManagerSuite, "test_walks_in_a_roomy_pool")
class OneBlockShort(PagedKVCacheManager):
    def extend(self, slots, totals):
        return super().extend(slots, np.maximum(totals - 1, 1))


@planted(KVCacheManagerSuite, "test_extra_keys_keep_requests_apart")
class IgnoresSalt(PagedKVCacheManager):
    def digest(self, token_ids, extra):
        return super().digest(token_ids, ())


@planted(KVCacheManagerSuite, "test_walks_in_a_tight_pool")
class MatchesEverything(PagedKVCacheManager):
    def lookup(self, digest, token_ids):
        match = super().lookup(digest, token_ids)
        return Match(match.num_tokens + 1, match.handle)


@planted(KVCacheManagerSuite, "test_fits_says_what_can_ever_fit")
class CountsTheNullBlock(PagedKVCacheManager):
    def fits(self, total):
        return None if super().fits(total - 4) is None else super().fits(total)


@planted(KVCacheManagerSuite, "test_walks_in_a_roomy_pool")
class TruncateKeepsBlocks(PagedKVCacheManager):
    def truncate(self, slot, total):
        pass


@planted(KVCacheManagerSuite, "test_a_fresh_pool_is_empty")
class TablesOfTheWrongDtype(PagedKVCacheManager):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.block_tables = self.block_tables.astype(np.int64)


@planted(KVCacheManagerSuite, "test_walks_with_several_groups")
class ForkWithoutCopy(PagedKVCacheManager):
    def fork(self, parent, child, total):
        copies = super().fork(parent, child, total)
        return copies if copies is None else [copy for copy in copies if copy.group == 0]


@planted(KVCacheManagerSuite, "test_a_decode_step_costs_by_borders_not_by_rows")
class LoopsOverRows(PagedKVCacheManager):
    def extend(self, slots, totals):
        for slot in slots:
            assert slot >= 0
            assert totals is not None
        return super().extend(slots, totals)


@planted(KVCacheManagerSuite, "test_nothing_is_found_before_it_was_committed")
class PublishesTooEarly(PagedKVCacheManager):
    def admit(self, slot, digest, match, total):
        copies = super().admit(slot, digest, match, total)
        if copies is not None:
            tokens = np.tile(np.arange(1, 41, dtype=np.int32), (8, 1))
            super().commit(np.asarray([slot], np.intp), np.asarray([total], np.int64), tokens)
        return copies


@planted(KVCacheManagerSuite, "test_engine_gives_every_request_its_own_tokens")
class HandsOutUsedBlocks(PagedKVCacheManager):
    def release(self, slot):
        super().release(slot)
        others = [s for s in np.flatnonzero(self.num_slot_blocks) if s != slot]
        if others and self.num_slot_blocks[others[0]] > 4:
            self._table[others[0], 0] = self._table[others[0], 1]


# ---- eviction policies --------------------------------------------------------------------------


@planted(EvictionPolicySuite, "test_a_reused_block_is_safe")
class IgnoresReuse(LruPolicy):
    def reuse(self, blocks):
        pass


@planted(EvictionPolicySuite, "test_a_block_goes_before_the_one_it_continues")
class HeadsFirst(LruPolicy):
    def retire(self, blocks):
        super().retire(list(blocks)[::-1])


@planted(EvictionPolicySuite, "test_each_block_is_evictable_or_not")
class EvictsOneTooFew(LruPolicy):
    def evict(self, count):
        return super().evict(count)[: max(1, count - 1)]


@planted(EvictionPolicySuite, "test_each_block_is_evictable_or_not")
class CountsWrong(LruPolicy):
    def __len__(self):
        return min(super().__len__(), 3)


@planted(EvictionPolicySuite, "test_moves_cost_the_same_in_a_large_pool")
class SortsEveryTime(LruPolicy):
    def evict(self, count):
        for _ in self.blocks():
            pass
        return super().evict(count)


@planted(EvictionPolicySuite, "test_equal_histories_give_equal_evictions")
class ShufflesVictims(LruPolicy):
    def evict(self, count):
        return np.random.permutation(super().evict(count)).tolist()


# ---- preemption policies ------------------------------------------------------------------------


@planted(PreemptionPolicySuite, "test_swaps_is_true_to_its_word")
class SwapsSecretly(SwapPolicy):
    swaps = False


@planted(PreemptionPolicySuite, "test_every_victim_gets_an_action")
class AnswersWithText(RecomputePolicy):
    def decide(self, victim):
        return "recompute"


@planted(PreemptionPolicySuite, "test_deciding_is_not_learning")
class TakesTurns(SwapPolicy):
    turn = 0

    def decide(self, victim):
        self.turn += 1
        return (PreemptionAction.SWAP, PreemptionAction.RECOMPUTE)[self.turn % 2]


@planted(PreemptionPolicySuite, "test_odd_costs_are_taken", ZeroDivisionError)
class DividesByZero(RecomputePolicy):
    def observe(self, cost):
        self.rate = cost.num_prefill / cost.compute_s


@planted(PreemptionPolicySuite, "test_memory_does_not_grow_with_steps")
class RemembersEverything(RecomputePolicy):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.seen = []

    def observe(self, cost):
        self.seen.append(cost)

    def decide(self, victim):
        for cost in self.seen:
            assert cost is not None
        return super().decide(victim)


@planted(PreemptionPolicySuite, "test_reasons_are_text")
class NoReason(RecomputePolicy):
    def reason(self):
        return None


# ---- observers ----------------------------------------------------------------------------------


class Quiet(Observer):
    def __init__(self, options, context):
        self.steps = []

    def on_step(self, record):
        pass


@planted(ObserverSuite, "test_it_sees_something")
class SeesNothing(Observer):
    def __init__(self, options, context):
        pass


@planted(ObserverSuite, "test_every_end_is_taken", TypeError)
class NeedsFirstToken(Quiet):
    def on_request(self, record):
        assert record.first_token - record.arrival >= 0


@planted(ObserverSuite, "test_every_step_is_taken", ZeroDivisionError)
class DividesByTokens(Quiet):
    def on_step(self, record):
        self.rate = record.forward_s / record.num_tokens


@planted(ObserverSuite, "test_events_cost_the_same_however_many_came")
class SumsAllSteps(Quiet):
    def on_step(self, record):
        self.steps.append(record.forward_s)
        for seconds in self.steps:
            assert seconds >= 0


@planted(ObserverSuite, "test_two_of_them_do_not_disturb_each_other")
class OneOnly(Quiet):
    alive = 0

    def __init__(self, options, context):
        super().__init__(options, context)
        type(self).alive += 1
        assert type(self).alive == 1, "there is one already"

    def close(self):
        type(self).alive -= 1


@planted(ObserverSuite, "test_it_can_be_closed_at_any_time", AttributeError)
class ClosesWhatItNeverOpened(Quiet):
    def close(self):
        self.file.close()


# ---- executors ----------------------------------------------------------------------------------


@planted(ExecutorSuite, "test_a_warm_up_is_passed_on", options=LocalOptions)
class TellsItsOwnWarmUp(LocalExecutor):
    def allocate_kv(self, num_blocks, num_host_blocks=0):
        super().allocate_kv(num_blocks, num_host_blocks)
        return WarmUp({"everything": 0.0})


@planted(ExecutorSuite, "test_it_says_how_many_steps_may_run", options=LocalOptions)
class NoneInFlight(LocalExecutor):
    max_in_flight = 0


@planted(ExecutorSuite, "test_masks_reach_the_step_they_are_for", options=LocalOptions)
class DropsMasks(LocalExecutor):
    def sample(self, ticket, masks):
        super().sample(ticket, None)


@planted(ExecutorSuite, "test_requests_get_their_own_tokens", options=LocalOptions)
class RepeatsAResult(LocalExecutor):
    kept = None

    def collect(self, ticket):
        result = super().collect(ticket)
        if self.kept is not None and ticket % 5 == 4 and len(self.kept) == len(result.token_ids):
            return StepResult(step=result.step, token_ids=self.kept)
        self.kept = result.token_ids
        return result


@planted(ExecutorSuite, "test_results_may_be_kept", options=LocalOptions)
class ReusesItsBuffer(LocalExecutor):
    buffer = np.zeros((8, 1), np.int32)

    def collect(self, ticket):
        result = super().collect(ticket)
        view = self.buffer[: len(result.token_ids)]
        view[:] = result.token_ids
        return StepResult(step=result.step, token_ids=view)


@planted(ExecutorSuite, "test_an_error_of_the_worker_reaches_the_engine", options=LocalOptions)
class SwallowsErrors(LocalExecutor):
    def submit(self, plan):
        try:
            return super().submit(plan)
        except ZeroDivisionError:
            return Ticket(plan.step)

    def collect(self, ticket):
        try:
            return super().collect(ticket)
        except Exception:
            return StepResult(step=ticket, token_ids=np.zeros((1, 1), np.int32))

    def sample(self, ticket, masks):
        try:
            super().sample(ticket, masks)
        except Exception:
            return


@planted(ExecutorSuite, "test_close_after_nothing")
class LeavesItsThread(ThreadedExecutor):
    left = []

    def close(self):
        self.left.append(self)

    @classmethod
    def clean_up(cls):
        for executor in cls.left:
            ThreadedExecutor.close(executor)
        cls.left.clear()


@planted(ExecutorSuite, "test_start_reports_what_the_worker_reports", options=LocalOptions)
class StartsNothing(LocalExecutor):
    def start(self):
        super().start()


# ---- grammar engines ----------------------------------------------------------------------------


def planted_matcher(promise):
    """A template engine whose matchers are of a class."""

    def add(matcher):
        class Grammar(grammar_engine.ExampleGrammar):
            def matcher(self, end_token_ids):
                return matcher(self, frozenset(end_token_ids), ())

        class Engine(grammar_engine.ExampleEngine):
            def load(self, data):
                made = super().load(data)
                return Grammar(made.texts, made.tokens)

        Engine.__name__ = matcher.__name__
        planted(GrammarEngineSuite, promise)(Engine)
        return matcher

    return add


ExampleMatcher = grammar_engine.ExampleMatcher


@planted_matcher("test_masks_allow_what_keeps_the_output_possible")
class EndsAnywhere(ExampleMatcher):
    def _allows(self, token, text):
        return token in self._ends or super()._allows(token, text)


@planted_matcher("test_masks_allow_what_keeps_the_output_possible")
class AddsToTheMask(ExampleMatcher):
    def fill(self, bitmask):
        before = bitmask.copy()
        super().fill(bitmask)
        bitmask |= before


@planted_matcher("test_rollback_undoes_accept")
class TakesBackOneTooFew(ExampleMatcher):
    def rollback(self, num_tokens):
        super().rollback(max(1, num_tokens - 1))


@planted_matcher("test_forks_go_their_own_way")
class SharesWithForks(ExampleMatcher):
    def fork(self):
        made = super().fork()
        made._taken = self._taken
        return made


@planted_matcher("test_nothing_follows_an_end_token")
class GoesOnAfterTheEnd(ExampleMatcher):
    def accept(self, token_id):
        return token_id in self._ends or super().accept(token_id)


@planted_matcher("test_accept_agrees_with_the_mask")
class TakesAnything(ExampleMatcher):
    def accept(self, token_id):
        super().accept(token_id)
        return True


@planted(GrammarEngineSuite, "test_mistakes_are_the_callers")
class RaisesItsOwn(grammar_engine.ExampleEngine):
    def compile(self, spec):
        return repr(spec.choice[0]).encode()


# ---- route plugins ------------------------------------------------------------------------------


class Routes(RoutePlugin):
    def __init__(self, options, context):
        self.context = context

    def routes(self):
        return [Route("/own", self.answer)]

    async def answer(self, request):
        """An answer."""
        return PlainTextResponse("yes")


@planted(RouteSuite, "test_the_engine_is_left_alone_at_first", EngineDeadError)
class AsksTheEngine(Routes):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.tokenizer = getattr(context.engine, "tokenizer", None)


@planted(RouteSuite, "test_paths_are_its_own")
class TakesHealth(Routes):
    def routes(self):
        return [Route("/health", self.answer)]


@planted(RouteSuite, "test_paths_are_its_own")
class OffersTwice(Routes):
    def routes(self):
        return super().routes() * 2


@planted(RouteSuite, "test_handlers_are_described")
class SaysNothing(Routes):
    def routes(self):
        return [Route("/own", self.silent)]

    async def silent(self, request):
        return PlainTextResponse("yes")


@planted(RouteSuite, "test_bare_requests_are_answered", KeyError)
class NeedsAQuery(Routes):
    async def answer(self, request):
        """Fails without `text`."""
        return PlainTextResponse(request.query_params["text"])


@planted(RouteSuite, "test_routes_are_routes")
class OffersASocket(Routes):
    def routes(self):
        return [WebSocketRoute("/own", self.answer)]


# ---- tool parsers, reasoning parsers ------------------------------------------------------------


class MarkedToolParserSuite(ToolParserSuite):
    call = 'CALL get_weather {"city": "Paris"}\n'
    bare = "CALL get_time\n"


class MarkedReasoningSuite(ReasoningParserSuite):
    answer = "Hm.[answer]Yes."


class ReadsOneWay(tool_parser.ExampleParser):
    """A parser with another stream."""

    stream = tool_parser.ExampleStream

    def __init__(self, options, context):
        super().__init__(tool_parser.ExampleOptions(), context)

    def begin(self, tools):
        return self.stream("CALL ", {tool["function"]["name"] for tool in tools})


@planted(MarkedToolParserSuite, "test_cutting_changes_nothing")
class LooksAtPiecesAlone(ReadsOneWay):
    class stream(tool_parser.ExampleStream):
        def feed(self, text):
            return super().feed(text) + self._end_line()


@planted(MarkedToolParserSuite, "test_text_without_calls_comes_back")
class StripsText(ReadsOneWay):
    class stream(tool_parser.ExampleStream):
        def _end_line(self):
            self._line = self._line.strip()
            return super()._end_line()


@planted(MarkedToolParserSuite, "test_calls_are_found")
class LosesEmptyArguments(ReadsOneWay):
    class stream(tool_parser.ExampleStream):
        def _end_line(self):
            return [e for e in super()._end_line() if getattr(e, "text", "") != "{}"]


@planted(MarkedToolParserSuite, "test_arguments_of_whole_calls_are_objects")
class LosesMalformedCalls(ReadsOneWay):
    class stream(tool_parser.ExampleStream):
        def _end_line(self):
            marked = self._line.startswith("CALL ")
            events = super()._end_line()
            return [] if marked and len(events) == 1 else events


@planted(MarkedToolParserSuite, "test_a_call_that_was_cut_off_has_what_came")
class MakesArgumentsUp(ReadsOneWay):
    class stream(tool_parser.ExampleStream):
        def finish(self, truncated):
            if truncated and self._line.startswith("CALL get_weather "):
                return [CallBegin("get_weather"), CallArguments('{"town": ')]
            return super().finish(truncated)


@planted(MarkedToolParserSuite, "test_streams_share_nothing")
class SharesAStream(ReadsOneWay):
    kept = None

    def begin(self, tools):
        self.kept = self.kept or super().begin(tools)
        return self.kept


@planted(MarkedToolParserSuite, "test_ids_differ")
class OneId(ReadsOneWay):
    def call_id(self):
        return "call"


class ThinksOneWay(reasoning_parser.ExampleParser):
    """A parser with another stream."""

    stream = reasoning_parser.ExampleStream

    def __init__(self, options, context):
        super().__init__(reasoning_parser.ExampleOptions(), context)

    def begin(self, prompt, continued):
        return self.stream("[answer]", answering=False)


@planted(MarkedReasoningSuite, "test_cutting_changes_nothing")
class HoldsNothingBack(ThinksOneWay):
    class stream(reasoning_parser.ExampleStream):
        def feed(self, text):
            split = super().feed(text)
            rest = super().finish()
            return Split(split.reasoning + rest.reasoning, split.content)


@planted(MarkedReasoningSuite, "test_nothing_is_made_up_or_lost")
class LosesWhatIsHeld(ThinksOneWay):
    class stream(reasoning_parser.ExampleStream):
        def feed(self, text):
            return Split(content=super().feed(text).content)


@planted(MarkedReasoningSuite, "test_cutting_changes_nothing")
class ThinksAgain(ThinksOneWay):
    class stream(reasoning_parser.ExampleStream):
        def feed(self, text):
            return Split(text) if self._answering else super().feed(text)


@planted(MarkedReasoningSuite, "test_nothing_is_made_up_or_lost")
class EndsWithAPoint(ThinksOneWay):
    class stream(reasoning_parser.ExampleStream):
        def finish(self):
            return Split(content=super().finish().reasoning + "...")


@planted(MarkedReasoningSuite, "test_reasoning_is_told_apart")
class AllIsContent(ThinksOneWay):
    class stream(reasoning_parser.ExampleStream):
        def feed(self, text):
            return Split(content=text)


@planted(MarkedReasoningSuite, "test_streams_share_nothing")
class SharesAThought(ThinksOneWay):
    kept = None

    def begin(self, prompt, continued):
        self.kept = self.kept or super().begin(prompt, continued)
        return self.kept


@pytest.mark.parametrize(("suite", "promise", "raises"), FAULTS)
def test_the_fault_is_caught(suite, promise, raises):
    verdict = run_promise(suite, promise)
    LeavesItsThread.clean_up()
    assert verdict.outcome == "broken", f"{promise} did not notice"
    assert verdict.message
    assert own_exception(verdict) == (raises and raises.__name__), verdict.message


def test_an_exception_is_shown_where_the_implementation_raised_it():
    """Not in the kit, nor in a library that it called."""
    shown = {
        fault.id: run_promise(*fault.values[:2]).message
        for fault in FAULTS
        if fault.values[2] in (ZeroDivisionError, KeyError)
    }
    assert re.fullmatch(
        r"ZeroDivisionError: float division by zero \(test_planted_faults_host\.py:\d+, in on_step:"
        r" self\.rate = record\.forward_s / record\.num_tokens\)",
        shown["observer-DividesByTokens"],
    )
    assert "(test_planted_faults_host.py:" in shown["route-NeedsAQuery"]


def test_each_kind_has_five_faults():
    kinds = Counter(fault.values[0].kind for fault in FAULTS)
    assert min(kinds.values()) >= 5, kinds
