"""The real model's streams when their decode worker is killed: not a byte differs, in the middle of an emoji or not."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from baton import wire
from baton.api import GenerateRequest, Text
from baton.structure import StructuredOutputs
from tests.chaos.asks import Answer, Listening, listen
from tests.integration.cluster import Cluster, running_cluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.chaos

NUM_TOKENS = 24
PARTY = "🙂🎉🙂🎉🙂🎉🙂🎉"
ANIMALS = "猫🐈犬🐕猫🐈犬🐕猫🐈"
"""With both, each token wins by more than 0.03: no other batch shape gives another one."""


CAT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "lives": {"type": "integer", "maximum": 9}},
    "required": ["name", "lives"],
    "additionalProperties": False,
}


def greedy(text: str) -> GenerateRequest:
    return GenerateRequest(
        prompt=Text(text), sampling={"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    )


REQUESTS = [
    greedy(ANIMALS),
    greedy(PARTY),
    replace(greedy(ANIMALS), sampling={**greedy("").sampling, "stop": ("🐕猫",)}),
    GenerateRequest(
        prompt=Text("Once upon a time"),
        sampling={"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": NUM_TOKENS, "ignore_eos": True},
    ),
    GenerateRequest(
        prompt=Text("A cat, as JSON:\n"),
        sampling={
            "temperature": 1.0, "seed": 7, "max_tokens": 2 * NUM_TOKENS,
            "structured_outputs": StructuredOutputs(json=json.dumps(CAT)),
        },
    ),
    GenerateRequest(
        prompt=Text("Once upon a time"),
        sampling={
            "temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "use_beam_search": True, "beam_width": 3,
        },
    ),
]  # fmt: skip


def ask(cluster: Cluster, request: GenerateRequest, kill_after: int | None = None) -> Listening:
    """With `kill_after`, the decode worker dies once so many tokens have been heard; with 0, once one is chosen."""
    victims: list[dict[str, Any]] = []

    def kill(num_tokens: int) -> None:
        if kill_after is not None and num_tokens >= kill_after and not victims:
            victims.append(cluster.worker(_decode_worker(cluster, request.request_id)))
            psutil.Process(victims[0]["pid"]).kill()

    parts = cluster.inference.Generate(wire.generate_request(request), timeout=240)
    if kill_after == 0:
        kill(0)
    heard = listen(parts, kill)
    for victim in victims:  # its lease outlives it: the pool is whole once the next one of its name is there
        cluster.wait_for(partial(_is_replaced, victim), timeout_s=120)
    return heard


def _is_replaced(victim: dict[str, Any], status: dict[str, Any]) -> bool:
    return any(w["id"] == victim["id"] and w["epoch"] > victim["epoch"] for w in status["workers"])


def _decode_worker(cluster: Cluster, request_id: str) -> str:
    placed = wait_until(lambda: cluster.client.explain(request_id), 60.0, every_s=0.005)
    return placed[0].decode_worker


def test_streams_outlive_their_decode_worker(model_dir: Path) -> None:
    with (
        running_cluster("--decode", "2", router_mode="disaggregated") as cluster,
        ThreadPoolExecutor(len(REQUESTS)) as pool,
    ):
        undisturbed = [ask(cluster, request).answer for request in REQUESTS]
        _check(undisturbed)
        for kill_after in (0, 2, 13, 20):  # of the first one; the others are somewhere on their way
            named = [replace(r, request_id=f"{kill_after}-{number}") for number, r in enumerate(REQUESTS)]
            kills = [kill_after] + [None] * (len(named) - 1)
            heard = list(pool.map(partial(ask, cluster), named, kills))
            assert [listening.answer for listening in heard] == undisturbed
            assert heard[0].retries, "the worker died with nothing to do"
            print(f"killed after {kill_after} tokens, longest gap {max(h.longest_gap_s for h in heard):.1f} s")
            cluster.wait_for(lambda s: s["pools"]["decode"]["ready"] == 2, timeout_s=120)
            cluster.wait_until_idle()


def _check(answers: list[Answer]) -> None:
    """They are what the test is about."""
    texts = [answer.choices[0].text for answer in answers]
    assert "🎉" in texts[1]
    assert "🐈" in texts[0]
    assert len(texts[0]) < len(answers[0].choices[0].token_ids), "characters of several tokens"
    assert texts[2] == texts[0][: texts[0].index("🐕猫")]
    assert answers[2].choices[0].finish_reason == "stop"
    assert answers[4].choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(texts[4]), CAT)
