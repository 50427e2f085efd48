"""`/dashboard` in a real browser, on a real server over an executor without a model."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
KEY = "key-of-anna"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as runner:
        browser = runner.chromium.launch(executable_path=path, args=list(FLAGS), timeout=120_000)
        yield browser
        browser.close()


class Page:
    """A page of the dashboard. errors: what the console complains of. requests: all that it asked
    for."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._console)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.set_default_timeout(60_000)
        self.page.goto(f"{url}/dashboard")

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression holds. (`wait_for_function` evaluates strings inside the
        page, which its policy forbids.)"""
        deadline = time.monotonic() + 60
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, (condition, self.text("body"))
            self.page.wait_for_timeout(50)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def number(self, selector: str) -> float:
        return float(self.text(selector).replace(",", "").split()[0])


@pytest.fixture
def open_page(chromium) -> Iterator[Any]:
    made: list[Page] = []

    def make(url: str, **context: Any) -> Page:
        made.append(Page(chromium, url, **context))
        return made[-1]

    yield make
    for page in made:
        page.context.close()


def test_numbers_move_and_the_chat_streams(shared, stream, open_page) -> None:
    assert shared.line(r"live, and a chat: (\S+)$")[1] == f"{shared.url}/dashboard"
    page = open_page(shared.url)
    page.wait("document.getElementById('state').textContent === 'ready'")
    assert page.text("#model") == "m"
    held = [stream(shared, max_tokens=3000, prompt="x" * 200) for _ in range(5)]
    page.wait("document.getElementById('running').textContent === '4'")
    page.wait("document.getElementById('waiting').textContent === '1'")
    page.wait("parseFloat(document.getElementById('tps').textContent) > 0")
    page.wait("document.getElementById('n-used').textContent > '0'")
    page.wait("document.querySelectorAll('#requests .badge.decode').length === 4")
    page.wait("document.querySelector('#tps-chart polyline') !== null")
    assert page.number("#n-used") + page.number("#n-shared") + page.number("#n-free") > 400
    assert page.page.evaluate("document.getElementById('blocks').height") > 20
    assert "steps/s" in page.text("#step-rate")
    for one in held:
        one.close()
    page.wait("document.getElementById('running').textContent === '0'")
    page.wait("document.querySelector('#requests .badge.abort') !== null")

    page.page.click(".settings summary")
    page.page.fill("#system", "Be <b>brief</b>.")
    page.page.fill("#max-tokens", "200")  # four seconds, in which it is seen to stream
    page.page.fill("#prompt", "<img src=x onerror=alert(1)>")
    page.page.keyboard.press("Enter")
    page.wait("document.querySelector('.message.streaming .text')?.textContent.length > 3")
    page.wait("!document.querySelector('.message.streaming')")
    assert page.text(".message.user .text") == "<img src=x onerror=alert(1)>"
    assert page.text(".message.assistant .text") == "a" * 200
    assert "200 tokens" in page.text(".message.assistant .meta")
    assert "cut at max tokens" in page.text(".message.assistant .meta")
    assert page.page.query_selector(".log img") is None
    assert page.page.is_visible("#send")
    assert page.errors == []
    assert {url.partition("?")[0] for url in page.requests} == {
        f"{shared.url}/dashboard",
        f"{shared.url}/dashboard/data",
        f"{shared.url}/v1/chat/completions",
    }


def test_whatever_the_model_says_is_text(shared, open_page) -> None:
    deltas = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"reasoning_content": "<i>hm</i>"}}]},
        {"choices": [{"index": 0, "delta": {"content": "<img src=x "}}]},
        {"choices": [{"index": 0, "delta": {"content": "onerror=alert(1)> 😀"}}]},
        {"error": {"message": "it <b>broke</b>"}},
    ]
    page = open_page(shared.url)
    page.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream",
            body="".join(f"data: {json.dumps(event)}\n\n" for event in deltas),
        ),
    )
    page.page.fill("#prompt", "hello")
    page.page.keyboard.press("Enter")
    page.wait("document.querySelector('.message.error') !== null")
    assert page.text(".message.assistant .text") == "<img src=x onerror=alert(1)> 😀"
    assert page.text(".message .thinking") == "<i>hm</i>"
    assert page.text(".message.error .text") == "it <b>broke</b>"
    assert page.page.query_selector(".log img, .log b, .log i") is None
    assert page.errors == []


def test_stopping_and_a_timeline(shared, open_page, tools) -> None:
    page = open_page(shared.url)
    page.page.fill("#prompt", "hello")
    page.page.click("#send")
    page.wait("document.querySelector('.message.streaming .text')?.textContent.length > 3")
    page.page.click("#stop")
    page.wait("document.querySelector('.message.assistant .meta') !== null")
    assert "stopped" in page.text(".message.assistant .meta")
    tools.until(lambda: shared.metrics()["num_running"] == 0)
    page.page.fill("#prompt", "again")  # the conversation goes on after it
    page.page.click("#send")
    page.wait("document.querySelectorAll('.message.assistant').length === 2")
    page.page.keyboard.press("Escape")
    page.wait("!document.querySelector('.message.streaming')")
    page.page.click("#clear")
    assert page.page.query_selector(".message") is None
    page.page.wait_for_selector("#requests button")
    assert page.errors == []
    page.page.click("#requests button >> nth=0")
    page.wait("document.getElementById('timeline').textContent.includes('timelines is 0')")
    page.page.keyboard.press("Escape")
    assert not page.page.is_visible("#timeline-dialog")


def test_keys_timelines_and_a_narrow_dark_screen(start, open_page) -> None:
    server = start(api_keys={"anna": KEY}, executor={"step_s": 0.0})
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/dashboard").status_code == 200
        assert client.get("/dashboard/data").status_code == 401
        assert client.get("/metrics").status_code == 401
        bearer = {"authorization": f"Bearer {KEY}"}
        assert client.get("/metrics", headers=bearer).status_code == 200
    phone = {"viewport": {"width": 380, "height": 800}, "color_scheme": "dark"}
    page = open_page(server.url, **phone)
    page.page.wait_for_selector("#key-dialog[open]")
    assert not page.page.is_visible("#key-error")
    page.page.fill("#key", "wrong")
    page.page.keyboard.press("Enter")
    page.wait("!document.getElementById('key-error').hidden")
    page.page.fill("#key", KEY)
    page.page.keyboard.press("Enter")
    page.wait("document.getElementById('state').textContent === 'ready'")
    assert not page.page.is_visible("#key-dialog")
    page.page.fill("#max-tokens", "5") if page.page.is_visible("#max-tokens") else None
    page.page.fill("#prompt", "hello")
    page.page.keyboard.press("Enter")
    page.wait("document.querySelector('.message.assistant .text')?.textContent.startsWith('aaa')")
    wide = page.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 380, "nothing sticks out sideways"
    page.page.reload()  # the tab keeps the key
    page.wait("document.getElementById('state').textContent === 'ready'")
    assert page.page.evaluate("sessionStorage.getItem('octavo-key')") == KEY
    assert page.page.evaluate("localStorage.length + document.cookie.length") == 0
    assert all("401" in error for error in page.errors), page.errors
    assert KEY not in "\n".join(server.lines)
    other = open_page(server.url)
    other.page.wait_for_selector("#key-dialog[open]")


def test_a_large_pool_is_shown_in_aggregate_and_a_dead_engine_is_said(
    model_folder, tmp_path, tools, open_page
) -> None:
    made = tools.settings(model_folder, {"step_s": 0.01})
    made["kv_cache"]["num_blocks"] = 20_000
    made["observability"] = {"timelines": 10}
    server = tools.Server(tmp_path, made)
    try:
        server.ready()
        page = open_page(server.url)
        page.wait("document.getElementById('per-cell').textContent.startsWith('one square is 20')")
        assert page.number("#n-free") == 20_000
        server.post(max_tokens=3)
        page.page.wait_for_selector("#requests .badge.length")
        page.page.click("#requests button")
        page.wait("document.getElementById('timeline').textContent.includes('admitted')")
        page.page.click("#timeline-close")
        assert page.errors == []
        server.post(prompt=[250], max_tokens=2)  # the executor raises at it
        page.wait("document.getElementById('state').textContent === 'not ready'")
        assert "the prompt asked for it" in page.text("#problem")
        page.page.fill("#prompt", "hello")
        page.page.keyboard.press("Enter")
        page.wait("document.querySelector('.message.error') !== null")
        assert "the engine has stopped" in page.text(".message.error .text")
    finally:
        server.clean_up()
