"""An agent's loop of five turns with three tools, through each HTTP API, while workers die and leave: the messages are
those of an undisturbed loop.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from tests.chaos.fleet import Fleet, running_fleet
from tests.support.waiting import wait_until

NUM_TURNS = 5
ORDERS = {1: signal.SIGKILL, 3: signal.SIGTERM}
"""What the decode worker gets in the middle of a turn: it dies, or it leaves and has its answer go on elsewhere."""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAMES = ("weather", "time", "hotel")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Api:
    """How one API asks for a turn, what it calls, and how the result goes back."""

    path: str
    body: Callable[[list[Json]], Json]
    said: Callable[[Json], list[Json]]
    """What of an answer goes into the history."""
    results: Callable[[list[Json]], list[Json]]
    """What comes of the calls in it."""


def _chat_results(said: list[Json]) -> list[Json]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": f"sunny, {call['function']['arguments']}"}
        for call in said[0]["tool_calls"]
    ]


def _items_results(said: list[Json]) -> list[Json]:
    return [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"sunny, {item['arguments']}"}
        for item in said
    ]


def _blocks_results(said: list[Json]) -> list[Json]:
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": f"sunny, {json.dumps(block['input'])}"}
        for block in said[0]["content"]
    ]
    return [{"role": "user", "content": results}]


ASKED: Json = {"model": "", "temperature": 0}
APIS = {
    "chat": Api(
        "/v1/chat/completions",
        lambda history: {
            **ASKED, "messages": history, "tool_choice": "required", "max_tokens": 300,
            "tools": [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES],
        },
        lambda answer: [answer["choices"][0]["message"]],
        _chat_results,
    ),
    "responses": Api(
        "/v1/responses",
        lambda history: {
            **ASKED, "input": history, "tool_choice": "required", "max_output_tokens": 300, "store": False,
            "tools": [{"type": "function", "name": name, "parameters": SCHEMA, "strict": True} for name in NAMES],
        },
        lambda answer: answer["output"],
        _items_results,
    ),
    "messages": Api(
        "/v1/messages",
        lambda history: {
            **ASKED, "messages": history, "tool_choice": {"type": "any"}, "max_tokens": 300,
            "tools": [{"name": name, "input_schema": SCHEMA} for name in NAMES],
        },
        lambda answer: [{"role": answer["role"], "content": answer["content"]}],
        _blocks_results,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    router = RouterConfig(mode="disaggregated", cache_secret="agents", max_attempts=16)
    with running_fleet(TransferConfig(op_timeout_s=3.0, ping_s=0.5), router, step_ms=5.0, lease_s=4.0) as fleet:
        fleet.fill(Role.PREFILL, Role.DECODE)
        yield fleet


def turns(fleet: Fleet, api: Api, name: str, disturb: Callable[[int], None]) -> list[Json]:
    """The history of a loop. The ids of calls are drawn from the request's."""
    history: list[Json] = [{"role": "user", "content": "Plan my journey."}]
    with httpx2.Client(base_url=f"http://{fleet.routers[0].http}", timeout=120) as client:
        for number in range(NUM_TURNS):
            with ThreadPoolExecutor(1) as pool:
                disturbing = pool.submit(disturb, number)
                answer = client.post(api.path, json=api.body(history), headers={"x-request-id": f"{name}-{number}"})
                disturbing.result(120)
            assert answer.status_code == 200, answer.text
            said = api.said(answer.json())
            history += said
            history += api.results(said)
    return history


def without_ids(history: list[Json]) -> str:
    """A history in which each id is replaced by the number of its first appearance."""
    text = json.dumps(history)
    ids: dict[str, str] = {}

    def find(value: Any) -> None:
        match value:
            case dict():
                for name, inner in value.items():
                    if name in ("id", "call_id", "tool_call_id", "tool_use_id") and isinstance(inner, str):
                        ids.setdefault(inner, f"id-{len(ids)}")
                    find(inner)
            case list():
                for inner in value:
                    find(inner)

    find(history)
    for each, number in ids.items():
        text = text.replace(each, number)
    return text


@pytest.mark.parametrize("name", APIS)
def test_a_loop_in_which_workers_die_and_leave_has_the_same_messages(fleet: Fleet, name: str) -> None:
    api = APIS[name]
    undisturbed = turns(fleet, api, name, lambda number: None)

    def disturb(number: int) -> None:
        if (order := ORDERS.get(number)) is None:
            return
        (decode,) = fleet.started_as(Role.DECODE)
        before = fleet.progress[decode].num_drawn
        wait_until(lambda: fleet.progress[decode].num_drawn > before)  # the answer is being written
        fleet.send(decode, order)
        fleet.wait_for(fleet.add(Role.DECODE))
        fleet.workers.pop(decode).join(60)  # not told twice: a second SIGTERM would end it at once

    disturbed = turns(fleet, api, name, disturb)
    assert without_ids(disturbed) == without_ids(undisturbed)
    assert len(undisturbed) > 2 * NUM_TURNS
