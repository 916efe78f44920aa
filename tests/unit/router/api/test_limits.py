"""What HTTP says of a tenant's limits, in OpenAI's words."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import Request
from fastapi.responses import Response

from baton.errors import Overloaded, QuotaExceeded, error_of
from baton.quota import UNLIMITED, Quota, RateLimit
from router.api.exchange import duration, limit_headers
from router.api.http import StreamLimit, _on_baton_error
from tests.support.waiting import until


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0004, "1ms"), (0.25, "250ms"), (1, "1s"), (7.66, "7.66s"), (60, "1m0s"), (360.5, "6m0.5s"),
     (3720, "1h2m0s"), (87_840, "24h24m0s")],
)  # fmt: skip
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_limits_that_there_are_become_headers() -> None:
    assert limit_headers(None) == limit_headers(UNLIMITED) == {}
    assert limit_headers(Quota(RateLimit(5, 2, 61.0), RateLimit(100, 0, 0.5))) == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "1m1s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "500ms",
    }


async def test_a_refusal_carries_them_and_says_when_to_come_back() -> None:
    request: Any = Request({"type": "http", "path": "/v1/completions", "headers": [(b"x-request-id", b"r")]})
    error = QuotaExceeded("used up", 12.1, Quota(tokens=RateLimit(9, 0, 60.0)))
    answer = await _on_baton_error(request, error)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "13"
    assert answer.headers["x-ratelimit-limit-tokens"] == "9"
    told = json.loads(bytes(answer.body))["error"]
    assert told == {"message": "used up", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}


async def test_an_address_has_so_many_requests_in_progress() -> None:
    going_on, num_asked = asyncio.Event(), 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_asked
        num_asked += 1
        await going_on.wait()
        await Response()(scope, receive, send)

    async def status(client: str, path: str = "/v1/completions") -> int:
        said: list[Any] = []

        async def send(message: Any) -> None:
            said.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "client": (client, 1)}
        await limit(scope, receive, send)
        return int(said[0]["status"])

    receive: Any = None
    limit = StreamLimit(app, most=2)
    running = [asyncio.create_task(status(client)) for client in ("a", "a", "b")]
    await until(lambda: num_asked == 3)
    assert await status("a") == 429
    probe = asyncio.create_task(status("a", "/healthz"))
    await until(lambda: num_asked == 4)
    going_on.set()
    assert await asyncio.gather(*running, probe) == [200] * 4
    assert await status("a") == 200


def test_between_processes_it_is_still_a_refusal_with_a_time() -> None:
    error = error_of("QuotaExceeded", "used up", 12.5)
    assert isinstance(error, QuotaExceeded)
    assert isinstance(error, Overloaded)
    assert (error.retry_after_s, error.quota) == (12.5, UNLIMITED)
