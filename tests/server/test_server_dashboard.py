"""The page's headers, and what feeds it, over a fake engine. (Browser: tests/server/process.)"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re

from octavo.server.app.dashboard import viewer

OVERVIEW = {"now": 0.0, "blocks": None, "live": [], "recent": []}


def run(coroutine):
    return asyncio.run(coroutine)


def test_the_page_may_run_and_load_nothing_but_itself(connect, fake):
    async def go():
        async with connect(fake) as client:
            answer = await client.get("/dashboard")
        assert answer.headers["content-type"].startswith("text/html")
        rules = dict(
            rule.strip().split(" ", 1)
            for rule in answer.headers["content-security-policy"].split(";")
        )
        assert rules["default-src"] == "'none'"
        assert rules["connect-src"] == "'self'"
        for rule, tag in (("script-src", "script"), ("style-src", "style")):
            (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.S)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert rules[rule] == f"'sha256-{digest}'"
        linked = re.findall(r"(?:src|href)=[\"']([^\"']*)", answer.text)
        assert all(link.startswith(("#", "data:")) for link in linked)
        for unsafe in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(", ' style="'):
            assert unsafe not in answer.text

    run(go())


def test_the_data_has_totals_and_the_engines_state(connect, fake):
    async def go():
        async with connect(fake) as client:
            await client.post("/v1/completions", json={"prompt": "say:hey"})
            answer = await client.get("/dashboard/data")
            assert answer.headers["cache-control"] == "no-store"
            data = answer.json()
        assert data["ready"] is True
        assert data["models"] == ["fake", "alias"]
        assert data["numbers"]["generation_tokens"] == 4
        assert data["numbers"]["request_success"]["stop"] == 1
        first = data["histograms"]["time_to_first_token_seconds"]
        assert sum(first["counts"]) == 1
        assert len(first["counts"]) == len(first["bounds"]) + 1
        assert data["engine"]["blocks"] == {
            "counts": [2, 1, 1, 1],
            "per_cell": 1,
            "cells": "01230",
        }

    run(go())


def test_many_viewers_ask_the_engine_once(connect, fake):
    asked = []

    async def overview():
        asked.append(1)
        await asyncio.sleep(0.02)
        return OVERVIEW

    async def go():
        fake.overview = overview
        async with connect(fake) as client:
            answers = await asyncio.gather(*(client.get("/dashboard/data") for _ in range(5)))
        assert all(answer.json()["engine"] == OVERVIEW for answer in answers)
        assert len(asked) == 1

    run(go())


def test_an_engine_that_is_busy_or_fails_holds_nobody_up(connect, fake, monkeypatch, caplog):
    monkeypatch.setattr(viewer, "ENGINE_S", 0.02)
    monkeypatch.setattr(viewer, "KEPT_S", 0.0)

    go_on = asyncio.Event()

    async def busy():
        await go_on.wait()
        return OVERVIEW

    async def broken():
        raise ValueError("broken")

    async def go():
        async with connect(fake) as client:
            fake.overview = busy
            assert (await client.get("/dashboard/data")).json()["engine"] is None
            go_on.set()
            assert (await client.get("/dashboard/data")).json()["engine"] == OVERVIEW
            fake.overview = broken
            answer = await client.get("/dashboard/data")
            assert answer.status_code == 200
            assert answer.json()["engine"] is None
            fake.dead_reason = "it was killed"
            data = (await client.get("/dashboard/data")).json()
            assert data["ready"] is False
            assert "it was killed" in data["problem"]
            assert data["engine"] is None
            assert data["numbers"]["num_requests_running"] == 0

    run(go())
    assert "cannot be shown" in caplog.text
