"""`/metrics` and `/load` of one API process over a fake engine: what requests are counted as."""

from __future__ import annotations

import asyncio
import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families

from octavo.frontend.vllm.keywords import from_keywords
from octavo.plugins.observers.prometheus.board import Board
from octavo.plugins.observers.prometheus.families import API, ENGINE
from octavo.server.app.app import create_app
from octavo.server.config import ServiceConfig
from octavo.server.operations.stats_log import line


def run(coroutine):
    return asyncio.run(coroutine)


VLLMS_DASHBOARD = (
    *("e2e_request_latency_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("time_to_first_token_seconds_bucket", "time_to_first_token_seconds_sum"),
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
    *("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
    *("request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
)
"""What the panels of the Grafana dashboards that vLLM ships ask for."""


class Scrape:
    """Samples by name, without model_name and engine."""

    def __init__(self, text: str, prefix: str = "octavo:") -> None:
        self.samples = {}
        for family in text_string_to_metric_families(text):
            for name, labels, value, *_ in family.samples:
                assert labels.pop("engine") == "0"
                if not name.endswith("cache_config_info"):
                    assert labels.pop("model_name") == "fake"
                rest = tuple(sorted(labels.items()))
                self.samples[name.removeprefix(prefix), rest] = value

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[name, tuple(sorted(labels.items()))]

    def ends(self) -> dict[str, float]:
        """Requests by how they ended, without zeros."""
        found = {}
        for (name, labels), value in self.samples.items():
            if name == "request_success_total" and value:
                found[dict(labels)["finished_reason"]] = value
        return found


async def scrape(client) -> Scrape:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return Scrape(answer.text)


async def post(client, prompt, status=200, **body):
    answer = await client.post("/v1/completions", json={"prompt": prompt, **body})
    assert answer.status_code == status
    return answer


def test_every_family_is_there_with_vllms_labels(connect, fake):
    async def go():
        async with connect(fake) as client:
            text = (await client.get("/metrics")).text
        Scrape(text)
        found = {family.name: family.type for family in text_string_to_metric_families(text)}
        for family in ENGINE + API:
            assert found.pop(f"octavo:{family.name}") == family.kind
        assert not found
        assert re.search(r'octavo:num_preemptions_total\{engine="0",model_name="fake"\} 0.0', text)

    run(go())


def test_a_request_is_counted_as_its_usage_says(connect, fake):
    async def go():
        async with connect(fake) as client:
            usage = (await post(client, "say:hey", n=3, max_tokens=20)).json()["usage"]
            seen = await scrape(client)
        assert seen("prompt_tokens_total") == usage["prompt_tokens"]
        assert seen("generation_tokens_total") == usage["completion_tokens"] == 12
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert seen("prompt_tokens_cached_total") == cached == 3
        assert seen.ends() == {"stop": 1}
        for once in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
            assert seen(f"{once}_count") == 1
            assert 0 < seen(f"{once}_sum") < 60
        assert seen("inter_token_latency_seconds_count") == 9
        assert seen("request_prompt_tokens_sum") == usage["prompt_tokens"]
        assert seen("request_generation_tokens_sum") == 12
        assert seen("request_generation_tokens_bucket", le="10.0") == 0
        assert seen("request_generation_tokens_bucket", le="20.0") == 1
        assert seen("request_max_num_generation_tokens_sum") == 4
        assert seen("request_params_n_sum") == 3
        assert seen("request_params_max_tokens_sum") == 20

    run(go())


def test_several_prompts_are_several_requests(connect, fake):
    async def go():
        async with connect(fake) as client:
            await post(client, ["say:a", "say:bcd"], max_tokens=2)
            seen = await scrape(client)
        assert seen.ends() == {"stop": 1, "length": 1}
        assert seen("time_to_first_token_seconds_count") == 2
        assert seen("generation_tokens_total") == 4

    run(go())


def test_chats_and_streams_are_counted_alike(connect, fake):
    async def go():
        async with connect(fake) as client:
            body = {"messages": [{"role": "user", "content": "say:ab"}]}
            usage = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
            once = await scrape(client)
            await client.post("/v1/chat/completions", json={**body, "stream": True})
            twice = await scrape(client)
        for name in ("prompt_tokens_total", "generation_tokens_total"):
            assert twice(name) == 2 * once(name)
        assert once("prompt_tokens_total") == usage["prompt_tokens"]
        assert twice.ends() == {"stop": 2}

    run(go())


@pytest.mark.parametrize("prompt", ["row-error", "fail:2"])
def test_what_fails_is_an_error(connect, fake, prompt):
    async def go():
        async with connect(fake) as client:
            await client.post("/v1/completions", json={"prompt": prompt})
            seen = await scrape(client)
        assert seen.ends() == {"error": 1}
        assert seen("e2e_request_latency_seconds_count") == 0

    run(go())


def test_what_is_wrong_is_no_request(connect, fake):
    async def go():
        async with connect(fake) as client:
            await post(client, "x", 400, temperature=-1)
            for prompts in ("refuse", ["refuse", "refuse"]):  # by the engine
                for stream in (False, True):
                    await post(client, prompts, 400, stream=stream)
            seen = await scrape(client)
        assert seen.ends() == {}
        assert seen("server_load") == seen("prompt_tokens_total") == 0

    run(go())


def test_a_client_that_leaves_is_an_abort(connect, fake):
    async def go():
        async with connect(fake) as client:
            task = asyncio.create_task(post(client, "slow", max_tokens=200))
            while not fake.calls:
                await asyncio.sleep(0.01)
            while (await scrape(client))("generation_tokens_total") == 0:
                await asyncio.sleep(0.01)
            assert (await client.get("/load")).json() == {"server_load": 1}
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            seen = await scrape(client)
            assert (await client.get("/load")).json() == {"server_load": 0}
        assert seen.ends() == {"abort": 1}
        assert seen("generation_tokens_total") > 0
        assert seen("server_load") == 0

    run(go())


def test_a_scored_prompt_generates_nothing(connect, fake):
    async def go():
        async with connect(fake) as client:
            answer = await post(client, "hello", max_tokens=0, echo=True, logprobs=1)
            seen = await scrape(client)
        assert seen("prompt_tokens_total") == answer.json()["usage"]["prompt_tokens"] > 0
        assert seen("generation_tokens_total") == 0
        assert seen.ends() == {"length": 1}

    run(go())


def test_refusals_are_counted(connect, fake):
    async def go():
        async with connect(fake, max_queued_requests=1, max_queued_tokens=50) as client:
            fake.num_queued, fake.num_queued_tokens = 1, 10
            await post(client, "x", 503)
            fake.num_queued, fake.num_queued_tokens = 0, 49
            await post(client, "xxx", 503)
            seen = await scrape(client)
        assert seen("admission_rejections_total", reason="requests") == 1
        assert seen("admission_rejections_total", reason="tokens") == 1
        assert seen.ends() == {}

    run(go())


def test_the_prefix_can_be_vllms_and_openmetrics_is_spoken(fake):
    config = ServiceConfig.model_validate({"observability": {"metrics_prefix": "vllm"}})

    async def go():
        import httpx

        app = create_app(fake, config)
        async with app.router.lifespan_context(app):
            await app.state.server.started.wait()
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
                await post(client, "say:x")
                plain = (await client.get("/metrics")).text
                accept = {"accept": "application/openmetrics-text; version=1.0.0"}
                opened = await client.get("/metrics", headers=accept)
        assert {name for name in VLLMS_DASHBOARD if f"vllm:{name}{{" not in plain} == set()
        assert "octavo:" not in plain
        assert opened.headers["content-type"].startswith("application/openmetrics-text")
        assert {f.name for f in parse_open(opened.text)} >= {"vllm:generation_tokens"}

    run(go())


OPEN = "application/openmetrics-text"
PROMETHEUS_2 = f"{OPEN};version=1.0.0;q=0.5,{OPEN};version=0.0.1;q=0.4,text/plain;q=0.3,*/*;q=0.2"
PROMETHEUS_3 = f"{OPEN};version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (PROMETHEUS_2, OPEN),
        (PROMETHEUS_3, OPEN),
        (f"{OPEN};version=abc", OPEN),
        (f"{OPEN}; version=0.0.1", "text/plain"),
        ("text/plain;version=1.0.0;escaping=values", "text/plain"),
        ("", "text/plain"),
    ],
)
def test_names_keep_their_colon_whoever_asks(connect, fake, accept, kind):
    async def go():
        async with connect(fake) as client:
            answer = await client.get("/metrics", headers={"accept": accept})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        names = {line.partition("{")[0] for line in answer.text.splitlines() if line[0] != "#"}
        assert "octavo:generation_tokens_total" in names
        assert all(name.startswith("octavo:") for name in names)

    run(go())


def test_a_dead_engine_runs_nothing_and_metrics_stay(connect, fake):
    async def go():
        async with connect(fake) as client:
            await post(client, "say:x")
            fake.dead_reason = "it was killed"
            seen = await scrape(client)
        assert seen.ends() == {"stop": 1}
        assert seen("num_requests_running") == 0

    run(go())


def test_vllms_flags():
    assert from_keywords({"disable_log_stats": True}) == {"observability.log_stats": False}
    assert from_keywords({"enable_prompt_tokens_details": True}) == {}


# ---- the line in the log -------------------------------------------------------------------------


def test_the_log_says_what_happened_and_nothing_when_nothing_did():
    board = Board(None, 2)
    before = board.totals()
    assert line(before, board.totals(), 10) is None
    engine, first, second = board.engine(), board.api(0), board.api(1)
    first.numbers[first.at("prompt_tokens")] += 50
    second.numbers[second.at("prompt_tokens")] += 50
    first.numbers[first.at("generation_tokens")] += 25
    engine.numbers[engine.at("num_requests_running")] = 3
    engine.numbers[engine.at("kv_cache_usage_perc")] = 0.125
    engine.numbers[engine.at("prefix_cache_queries")] += 100
    engine.numbers[engine.at("prefix_cache_hits")] += 25
    text = line(before, board.totals(), 10)
    assert text == (
        "prompt 10.0 tokens/s, generation 2.5 tokens/s, running 3, waiting 0, KV cache 12.5%, "
        "prefix cache hits 25.0%"
    )
    engine.numbers[engine.at("num_requests_running")] = 0
    assert line(board.totals(), board.totals(), 10) is None


def test_a_section_goes_on_where_it_was():
    board = Board(None, 1)
    for _ in range(2):
        section = board.api(0)
        section.numbers[section.at("prompt_tokens")] += 5
        section.numbers[section.at("server_load")] += 1
        section.histogram("time_to_first_token_seconds").observe(0.02, 2)
    totals = board.totals()
    assert totals["prompt_tokens", ""] == [10]
    assert totals["server_load", ""] == [1]
    assert totals["time_to_first_token_seconds", ""][3] == 4  # at the bound is below it
    assert totals["time_to_first_token_seconds", ""][-1] == pytest.approx(0.08)


def test_every_metric_is_in_the_docs(repository):
    page = (repository / "docs" / "metrics.md").read_text()
    names = re.findall(r"`([a-z0-9_]+)`", page)
    for family in ENGINE + API:
        shown = f"{family.name}_total" if family.kind == "counter" else family.name
        assert shown in names, f"docs/metrics.md does not explain {shown}"
        assert set(family.values) - {""} <= set(names)
