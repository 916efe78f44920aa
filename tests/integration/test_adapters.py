"""Adapters in a cluster: registered at one router, served by all, on workers that load them when they are needed."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton import wire
from baton.api import GenerateChunk, GenerateRequest, TokenIds
from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from baton.errors import InvalidRequest, ModelNotFound, Unsupported
from deploy.operator.client import Client
from engine.testing import expected_tokens
from tests.chaos.asks import listen
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import Served
from tests.support.adapters import registered, save_adapter, save_config
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration
STEP_MS = 4.0
MAX_ADAPTERS = 3
FOLLOWED_S = 1.5
"""Longest time until a router has followed a change: the fleet's poll is 0.2 s."""
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Two routers, and no worker yet."""
    transfer, router = TransferConfig(op_timeout_s=3.0, ping_s=0.5), RouterConfig(max_attempts=4, cache_secret="a")
    with running_fleet(transfer, router, num_routers=2, step_ms=STEP_MS, max_adapters=MAX_ADAPTERS) as found:
        yield found


@pytest.fixture
def workers(fleet: Fleet) -> Iterator[Fleet]:
    """A worker of each role; the registry is empty, before and after."""
    fleet.fill(Role.PREFILL, Role.DECODE)
    yield fleet
    for each in fleet.client.adapters():
        fleet.client.remove_adapter(each["name"])
    fleet.clear()


@pytest.fixture
def poet(tmp_path: Path) -> Path:
    save_adapter(tmp_path / "poet", seed=1)
    return tmp_path / "poet"


def prompt(length: int = 40) -> tuple[int, ...]:
    """A prompt that no cache holds."""
    start = 100 * next(_NUMBERS)
    return tuple(range(start, start + length))


def asked(token_ids: Sequence[int], model: str, num_tokens: int = 6, request_id: str = "") -> GenerateRequest:
    sampling = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}
    return GenerateRequest(prompt=TokenIds(tuple(token_ids)), model=model, sampling=sampling, request_id=request_id)


def answered(
    router: Served, request: GenerateRequest, on_tokens: Callable[[int], object] = lambda _: None
) -> list[int]:
    parts = router.inference.Generate(wire.generate_request(request), timeout=60)
    return list(listen(parts, on_tokens).answer.choices[0].token_ids)


def right(token_ids: Sequence[int], num_tokens: int = 6, folder: Path | None = None) -> list[int]:
    return expected_tokens(token_ids, num_tokens, adapter=registered(folder).digest if folder else "")


def check(router: Served, model: str, folder: Path | None, num_tokens: int = 6) -> None:
    token_ids = prompt()
    assert answered(router, asked(token_ids, model, num_tokens)) == right(token_ids, num_tokens, folder)


def names(router: Served) -> list[str]:
    return [each["name"] for each in router.client.adapters()]


def follow(fleet: Fleet, expected: Sequence[str]) -> None:
    began_s = time.monotonic()
    for router in fleet.routers:
        wait_until(lambda router=router: names(router) == list(expected), 10)  # type: ignore[misc]
    assert time.monotonic() - began_s < FOLLOWED_S


def test_answers_are_those_of_the_adapter_on_every_router(workers: Fleet, poet: Path) -> None:
    adapter, is_replaced = workers.client.add_adapter("poet", str(poet))
    assert (adapter["digest"], adapter["rank"], is_replaced) == (registered(poet).digest, 4, False)
    follow(workers, ["poet"])
    for router in workers.routers:
        for _ in range(3):
            check(router, "poet", poet)
            check(router, "", None)
    token_ids = prompt()
    for model, folder in (("", None), ("poet", poet), ("", None), ("poet", poet)):
        assert answered(workers.routers[0], asked(token_ids, model)) == right(token_ids, folder=folder), (
            "their blocks are apart"
        )


def test_the_status_names_what_workers_hold(workers: Fleet, poet: Path) -> None:
    router = workers.routers[0]
    router.client.add_adapter("poet", str(poet))
    check(router, "poet", poet)
    held = router.wait_for(lambda status: any(worker["adapters"] for worker in status["workers"]))
    assert {name for worker in held["workers"] for name in worker["adapters"]} == {"poet"}
    assert {worker["max_adapters"] for worker in held["workers"]} == {MAX_ADAPTERS}
    metrics = dict(router.metrics())
    assert [value for name, value in metrics.items() if name.startswith("baton_adapters_registered")] == [1]
    resident = [value for name, value in metrics.items() if name.startswith("baton_adapters_resident")]
    assert len(resident) == 2
    assert max(resident) == 1


def test_more_adapters_than_workers_hold_are_served(workers: Fleet, tmp_path: Path) -> None:
    folders = {f"a{i}": tmp_path / f"a{i}" for i in range(2 * MAX_ADAPTERS)}
    for number, (name, folder) in enumerate(folders.items()):
        save_adapter(folder, seed=number)
        workers.client.add_adapter(name, str(folder))
    wrong: list[str] = []

    def ask(name: str, folder: Path) -> None:
        token_ids = prompt()
        if answered(workers.routers[0], asked(token_ids, name, 20)) != right(token_ids, 20, folder):
            wrong.append(name)

    for _ in range(2):
        threads = [threading.Thread(target=ask, args=each) for each in folders.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []


def test_an_adapter_is_found_after_a_worker_restarts(workers: Fleet, poet: Path) -> None:
    workers.client.add_adapter("poet", str(poet))
    check(workers.routers[0], "poet", poet)
    old = workers.started_as(Role.DECODE)[0]
    new = workers.add(Role.DECODE)
    workers.wait_for(new)
    workers.remove(old, signal.SIGKILL)
    check(workers.routers[0], "poet", poet)


def test_an_answer_of_an_adapter_outlives_its_worker(workers: Fleet, poet: Path) -> None:
    workers.client.add_adapter("poet", str(poet))
    workers.wait_for(workers.add(Role.DECODE))
    router, token_ids = workers.routers[0], prompt()
    killed: list[str] = []

    def kill(num_tokens: int) -> None:
        if num_tokens >= 5 and not killed:
            (placed,) = router.client.explain("outlives")
            killed.append(placed.decode_worker)
            workers.send(placed.decode_worker, signal.SIGKILL)

    request = asked(token_ids, "poet", 60, "outlives")
    assert answered(router, request, kill) == right(token_ids, 60, poet)
    assert len(killed) == 1
    workers.remove(killed[0], signal.SIGKILL)


def test_adapters_outlive_the_loss_of_redis(workers: Fleet, poet: Path) -> None:
    workers.client.add_adapter("poet", str(poet))
    follow(workers, ["poet"])
    workers.redis.kill()
    check(workers.routers[1], "poet", poet)
    workers.redis.start()  # empty
    for router in workers.routers:
        router.wait_for(lambda status: status["redis"]["ok"])
    workers.client.add_adapter("prose", str(poet))
    follow(workers, ["poet", "prose"])
    check(workers.routers[0], "poet", poet)


def test_new_weights_serve_new_requests_and_old_ones_keep_theirs(workers: Fleet, poet: Path, tmp_path: Path) -> None:
    router, token_ids = workers.routers[0], prompt()
    other = tmp_path / "other"
    save_adapter(other, seed=2)
    router.client.add_adapter("poet", str(poet))
    replaced: list[Any] = []

    def replace_it(num_tokens: int) -> None:
        if num_tokens >= 5 and not replaced:
            replaced.append(router.client.add_adapter("poet", str(other)))
            replaced.append(answered(router, asked(token_ids, "poet")))

    assert answered(router, asked(token_ids, "poet", 80), replace_it) == right(token_ids, 80, poet)
    (adapter, is_replaced), new = replaced
    assert (adapter["digest"], is_replaced) == (registered(other).digest, True)
    assert new == right(token_ids, folder=other)


def test_a_resumed_request_under_new_weights_starts_over(workers: Fleet, poet: Path, tmp_path: Path) -> None:
    """Its client has tokens of the old weights, so it gets the rest of the new weights' answer, never a mixture of both
    under one record."""
    first, second = workers.routers
    other, token_ids = tmp_path / "other", prompt()
    save_adapter(other, seed=2)
    first.client.add_adapter("poet", str(poet))
    follow(workers, ["poet"])
    request = asked(token_ids, "poet", 40, "resumed")
    parts: Iterator[GenerateChunk] = map(
        wire.generate_chunk, first.inference.Generate(wire.generate_request(request), timeout=60)
    )
    num_tokens = 0
    for part in parts:
        num_tokens += len(part.token_ids)
        if num_tokens >= 8:
            break
    first.client.add_adapter("poet", str(other))
    wait_until(lambda: second.client.adapters()[0]["digest"] == registered(other).digest, 10)
    rest = answered(second, replace(request, resume_from={0: num_tokens}))
    assert rest == right(token_ids, 40, other)[num_tokens:]


def test_after_its_removal_an_adapter_is_not_found_and_running_requests_end(workers: Fleet, poet: Path) -> None:
    router, token_ids = workers.routers[0], prompt()
    removed: list[bool] = []
    router.client.add_adapter("poet", str(poet))

    def remove(num_tokens: int) -> None:
        if num_tokens >= 5 and not removed:
            router.client.remove_adapter("poet")
            removed.append(True)

    assert answered(router, asked(token_ids, "poet", 60), remove) == right(token_ids, 60, poet)
    with pytest.raises(ModelNotFound, match="'poet' does not exist"):
        list(router.client.generate(asked(token_ids, "poet")))
    with pytest.raises(ModelNotFound):
        router.client.remove_adapter("poet")
    follow(workers, [])


def test_the_workers_refusal_reaches_the_operator(workers: Fleet, poet: Path, tmp_path: Path) -> None:
    client = workers.client
    with pytest.raises(InvalidRequest, match="cannot read"):
        client.add_adapter("poet", str(tmp_path / "nothing"))
    save_adapter(tmp_path / "bad")
    save_config(tmp_path / "bad", use_dora=True)
    with pytest.raises(InvalidRequest, match="DoRA"):
        client.add_adapter("poet", str(tmp_path / "bad"))
    model = client.status()["models"][0]["id"]
    with pytest.raises(InvalidRequest, match="is the name of the served model"):
        client.add_adapter(model, str(poet))
    assert client.adapters() == []


def test_weights_that_changed_in_their_folder_are_refused_by_workers(workers: Fleet, poet: Path) -> None:
    """A folder of other content is another adapter: it must be registered again."""
    router = workers.routers[0]
    router.client.add_adapter("poet", str(poet))
    shutil.rmtree(poet)
    save_adapter(poet, seed=3)
    with pytest.raises(InvalidRequest, match="poet"):
        list(router.client.generate(asked(prompt(), "poet")))
    router.client.add_adapter("poet", str(poet))
    check(router, "poet", poet)


def test_the_apis_of_http_serve_and_list_it(workers: Fleet, poet: Path) -> None:
    router = workers.routers[0]
    model = router.client.status()["models"][0]["id"]
    router.client.add_adapter("org/poet", str(poet))
    body = {"model": "org/poet", "prompt": list(prompt()), "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    assert _http(router, "/v1/completions", body)["model"] == "org/poet"
    cards = _http(router, "/v1/models")["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards[1:]] == [("org/poet", str(poet), model)]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        _http(router, "/v1/completions", {**body, "model": "org/prose"})


def test_workers_that_serve_no_adapters_are_passed_over(fleet: Fleet, poet: Path) -> None:
    without = replace(fleet.config, engine=replace(fleet.config.engine, max_adapters=0))
    router = fleet.routers[0]
    try:
        fleet.wait_for(fleet.add(Role.PREFILL, config=without), fleet.add(Role.DECODE, config=without))
        with pytest.raises(Unsupported, match=r"no worker serves adapters; set engine\.max_adapters"):
            router.client.add_adapter("poet", str(poet))
        able = fleet.add(Role.DECODE)
        fleet.wait_for(able)
        router.client.add_adapter("poet", str(poet))
        for _ in range(3):
            check(router, "poet", poet)
        fleet.remove(able, signal.SIGTERM)
        router.wait_for(lambda status: len(status["workers"]) == 2)
        with pytest.raises(Unsupported, match=r"no decode worker serves adapters.*engine\.max_adapters"):
            list(router.client.generate(asked(prompt(), "poet")))
        check(router, "", None)
    finally:
        _remove_all(router.client)
        fleet.clear()


def _remove_all(client: Client) -> None:
    for each in client.adapters():
        client.remove_adapter(each["name"])


def _http(router: Served, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"http://{router.http}{path}", data, headers), timeout=30
    ) as got:
        return json.load(got)
