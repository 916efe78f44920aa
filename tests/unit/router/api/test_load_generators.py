"""What others' load generators send, as recorded (docs/load-generators.md tells how they are run), is served."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.unit.router.api.test_http import Service, app_of

USAGE = {"include_usage": True}
COMMON = {"model": "m", "stream": True, "ignore_eos": True}
COMPLETION = {**COMMON, "prompt": "hi", "max_tokens": 16}
CHAT = {**COMMON, "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 16}
PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {**COMPLETION, "stream_options": {**USAGE, "continuous_usage_stats": True}}),
        ("chat/completions", {**CHAT, **PARTS, "stream_options": {**USAGE, "continuous_usage_stats": True}}),
        ("completions", {**COMPLETION, "stream_options": USAGE, "repetition_penalty": 1.0, "logprobs": None}),
        ("chat/completions", {**CHAT, **PARTS, "stream_options": USAGE, "temperature": 0.0}),
        ("completions", {**COMPLETION, "stream_options": USAGE}),
        ("chat/completions", {**CHAT, "stream_options": USAGE}),
    ],
    ids=["guidellm", "guidellm, chat", "vllm bench serve", "vllm bench serve, chat", "aiperf", "aiperf, chat"],
)
async def test_what_load_generators_send_is_served(path: str, body: dict[str, Any]) -> None:
    service = Service()
    service.may_answer.set()
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app_of(service)), base_url="http://baton") as client:
        response = await client.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    *_, usage, done = response.text.strip().split("\n\n")
    assert '"usage"' in usage
    assert done == "data: [DONE]"
    (asked,) = service.asked
    assert (asked.sampling["max_tokens"], asked.sampling["ignore_eos"]) == (16, True)
