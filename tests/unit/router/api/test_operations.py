"""What the page asks of /api: for operators alone, and orders only with a key."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest

from baton.cluster import VERSION, PoolStatus, Role
from baton.config import SloClassConfig
from baton.errors import Conflict, InvalidRequest, WorkerFailed
from baton.registered_adapters import CheckedAdapter
from baton.rpc import RpcServer
from baton.rpc.member_auth import WORKERS_RULES, member_auth
from baton.telemetry import logs
from baton.telemetry.request_metrics import TO_COMPUTE, RequestMetrics, prompt_class
from baton.trust import KeyFile, Principal, draw_secret, write_private
from baton.v1 import admin_pb2, worker_pb2_grpc
from kvstore.adapters import MemoryAdapters
from kvstore.index import MemoryStore
from router.admission.tenants import TenantBook
from router.api.apis import document
from router.api.http import create_app
from router.api.operations import Operations
from router.api.parsing import PacedWork
from router.api.places import ConnectionLimits, OpenConnections
from router.cluster.history import ClusterHistory, MemoryHistory
from router.cluster.orders import AdapterOrders
from router.cluster.watch import AlertBook, AlertWatch, LoadMeter
from router.serve.worker_client import WorkerClient
from tests.support.builders import cluster_status, worker
from tests.support.described import check_described
from tests.support.models import operated, table_of
from tools.api_docs import ROUTES
from worker.log import WorkerLog

KEYS = ("acme", "operations")


class Orders:
    """A controller's client that notes what it is asked for."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    async def scale(self, request: admin_pb2.ScalePoolRequest) -> admin_pb2.ScalePoolResponse:
        self.heard.append(("scale", request.pool, request.desired))
        return admin_pb2.ScalePoolResponse(pool=admin_pb2.Pool(desired=request.desired, ready=1))

    async def drain(self, request: admin_pb2.DrainWorkerRequest) -> admin_pb2.DrainWorkerResponse:
        self.heard.append(("drain", request.worker_id))
        return admin_pb2.DrainWorkerResponse()

    async def set_role(self, request: admin_pb2.SetWorkerRoleRequest) -> admin_pb2.SetWorkerRoleResponse:
        self.heard.append(("role", request.worker_id, request.role))
        raise Conflict("it is not free in time")


class Logs:
    """A client of workers that have one line each."""

    async def read_log(self, asked: Any, max_lines: int) -> tuple[str, ...]:
        if asked.info.id == "old":
            raise WorkerFailed("old is of a release without this call")
        return (f"{asked.info.id} joins",)


class Checks:
    """A client of a worker that takes every adapter but one."""

    async def check_adapter(self, asked: Any, path: str) -> CheckedAdapter:
        if path == "/bad":
            raise InvalidRequest("its bias is not applied", "path")
        return CheckedAdapter(digest="ab" * 32, rank=8, num_bytes=4096)


class Endpoint:
    """The HTTP port of a router, with a tenant and an operator, or with nobody."""

    def __init__(self, tmp_path: Path, has_tenants: bool = True) -> None:
        path = tmp_path / "tenants.yaml"
        hashes = [hashlib.sha256(key.encode()).hexdigest() for key in KEYS]
        path.write_text(
            f"acme: {{key_sha256: [{hashes[0]}]}}\noperations: {{key_sha256: [{hashes[1]}], operator: true}}\n"
        )
        self.orders, self.metrics = Orders(), RequestMetrics()
        checks: Any = Checks()
        has_adapters = worker("w0", max_adapters=4)
        self.adapters = AdapterOrders(MemoryAdapters(MemoryStore()), checks, lambda: (has_adapters,), "tiny")
        pools = {"decode": PoolStatus(desired=2, ready=1)}
        status = cluster_status(worker("w0"), worker("old", Role.PREFILL), pools=pools)
        history = ClusterHistory(MemoryHistory(), "router-0", self.metrics, lambda: 1005.0)
        self.connections = OpenConnections(limits=ConnectionLimits(max_connections=64, max_per_client=8))
        load = LoadMeter(lambda: self.connections.filled, lambda: (2, 16))
        operations = Operations(
            router_id="router-0",
            status=lambda models: status,
            history=history,
            load=load,
            alerts=AlertBook(
                AlertWatch("router-0", lambda: status, load, history, clock=lambda: 1005.0), lambda: 1005.0
            ),
            connections=self.connections,
            classes={"default": SloClassConfig(ttft_ms=500)},
            models=operated("tiny", *status.workers, controller=self.orders, client=Logs(), adapters=self.adapters),
        )
        tenants = TenantBook.configured(str(path) if has_tenants else "")
        self.app = create_app(table_of(), tenants, lambda: "no worker", lambda: b"", operations=operations)

    async def ask(self, method: str, path: str, key: str = "operations", **more: Any) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app), base_url="http://baton") as client:
            return await client.request(method, path, headers=headers, **more)


@pytest.mark.parametrize("path", ["/api/status", "/api/history", "/api/workers/w0/log"])
async def test_the_cluster_is_shown_to_operators_alone(tmp_path: Path, path: str) -> None:
    endpoint = Endpoint(tmp_path)
    answers = [await endpoint.ask("GET", path, key) for key in ("", *KEYS)]
    assert [answer.status_code for answer in answers] == [401, 403, 200]
    assert answers[-1].headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/api/status", "/api/history", "/api/requests"])
async def test_reports_are_written_one_at_a_time_and_clients_take_turns(tmp_path: Path, path: str) -> None:
    endpoint = Endpoint(tmp_path)
    owners: list[str] = []
    reports: PacedWork = endpoint.app.state.reports
    plain = reports.turn

    @contextlib.asynccontextmanager
    async def turn(owner: str, size: int) -> AsyncIterator[None]:
        async with plain(owner, size):
            owners.append(owner)
            yield

    reports.turn = turn
    with contextlib.suppress(AttributeError):  # there is no service that has requests
        await endpoint.ask("GET", path)
    assert owners == ["127.0.0.1"]


async def test_the_status_is_that_of_the_terminal_and_says_what_the_page_needs(tmp_path: Path) -> None:
    status = (await Endpoint(tmp_path).ask("GET", "/api/status")).json()
    assert [(each["id"], each["state"]) for each in status["workers"]] == [("w0", "ready"), ("old", "ready")]
    assert (status["version"], status["router"], status["not_ready"]) == (VERSION, "router-0", "no worker")
    assert status["takes_orders"] is True
    assert status["slo_classes"] == {"default": {"ttft_s": 0.5, "itl_s": 1.0, "e2e_s": None}}
    assert status["pools"] == {"decode": {"desired": 2, "ready": 1, "engine": []}}


async def test_the_status_has_alerts_and_the_load_of_the_router(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path)
    place = endpoint.connections.enter("127.0.0.1")
    status = (await endpoint.ask("GET", "/api/status")).json()
    assert [(each["name"], each["about"], each["since_s"], each["is_firing"]) for each in status["alerts"]] == [
        ("BatonControllerDown", "", 1005.0, False),
        ("BatonPoolBelowDesired", "decode", 1005.0, False),
    ]
    assert (status["load"]["connections"], status["load"]["max_connections"]) == (1, 64)
    assert (status["load"]["in_flight"], status["load"]["max_in_flight"]) == (2, 16)
    place.leave()
    assert (await endpoint.ask("GET", "/api/status")).json()["load"]["connections"] == 0


async def test_first_tokens_are_counted_by_the_prompt_tokens_to_compute(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path)
    for num_to_compute, seconds in ((0, 0.03), (256, 0.03), (257, 0.1), (4097, 30.0)):
        endpoint.metrics.time_to_first_token.record(seconds, {TO_COMPUTE: prompt_class(num_to_compute)})
    history = (await endpoint.ask("GET", "/api/history")).json()
    assert history["bounds"]["ttft_of"] == [256, 1024, 4096]
    assert history["slots"][0]["counts"] == {
        "ttft/0.032": 2, "ttft/0.1": 1, "ttft/32.0": 1,
        "ttft_of/256/0.032": 2, "ttft_of/1024/0.1": 1, "ttft_of/+Inf/32.0": 1,
    }  # fmt: skip


async def test_the_history_comes_from_a_slot_on(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path)
    endpoint.metrics.requests_slo.add(2, {"slo_class": "default", "outcome": "met"})
    history = (await endpoint.ask("GET", "/api/history")).json()
    assert history["slots"] == [{"slot": 100, "num_routers": 1, "counts": {"requests/met/default": 2}}]
    assert (history["slot_s"], history["bounds"]["ttft"]) == (10, list(endpoint.metrics.time_to_first_token.bounds))
    assert (await endpoint.ask("GET", "/api/history?since=101")).json()["slots"] == []
    assert (await endpoint.ask("GET", "/api/history?since=x")).status_code == 400


async def test_the_history_is_that_of_one_model_by_any_of_its_names(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path)
    for release, number in (("tiny-1", 2), ("other-1", 3)):
        endpoint.metrics.requests_slo.add(number, {"slo_class": "default", "outcome": "met", "release": release})
    for query, number in (("", 5), ("?model=tiny", 2), ("?model=tiny-1", 2), ("?model=content&since=100", 2)):
        (slot,) = (await endpoint.ask("GET", f"/api/history{query}")).json()["slots"]
        assert slot["counts"] == {"requests/met/default": number}, query
    assert (await endpoint.ask("GET", "/api/history?model=other-1")).status_code == 404, "it is not served"


async def test_a_worker_without_a_log_is_named(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path)
    assert (await endpoint.ask("GET", "/api/workers/w0/log")).json() == {"worker": "w0", "lines": ["w0 joins"]}
    for path, status, sentence in (("old", 503, "a release without"), ("gone", 404, "no worker 'gone'")):
        answer = await endpoint.ask("GET", f"/api/workers/{path}/log")
        assert answer.status_code == status
        assert sentence in answer.json()["error"]["message"]


ORDERS: tuple[tuple[str, dict[str, Any], tuple[Any, ...], int], ...] = (
    ("/api/workers/w0/drain", {}, ("drain", "w0"), 200),
    ("/api/pools/decode", {"workers": 3}, ("scale", "decode", 3), 200),
    ("/api/workers/w0/role", {"role": "prefill"}, ("role", "w0", "prefill"), Conflict.http),
)


@pytest.mark.parametrize(("path", "body", "order", "status"), ORDERS)
async def test_an_operators_order_reaches_the_controller(
    tmp_path: Path, path: str, body: dict[str, Any], order: tuple[Any, ...], status: int
) -> None:
    endpoint = Endpoint(tmp_path)
    assert (await endpoint.ask("POST", path, json=body)).status_code == status
    assert endpoint.orders.heard == [order]


@pytest.mark.parametrize(("path", "body", "order", "status"), ORDERS)
async def test_without_an_operators_key_no_order_is_given(
    tmp_path: Path, path: str, body: dict[str, Any], order: object, status: int
) -> None:
    endpoint, nobodys = Endpoint(tmp_path), Endpoint(tmp_path, has_tenants=False)
    refused = [await endpoint.ask("POST", path, key, json=body) for key in ("", "acme")]
    refused += [await nobodys.ask("POST", path, key, json=body) for key in ("", "operations")]
    assert [answer.status_code for answer in refused] == [401, 403, 403, 403]
    assert "router.tenants_file is not set" in refused[-1].json()["error"]["message"]
    assert (await nobodys.ask("GET", "/api/status")).json()["takes_orders"] is False
    assert endpoint.orders.heard == nobodys.orders.heard == []


async def test_an_order_is_json_and_nothing_else(tmp_path: Path) -> None:
    """A browser asks another website's host first before it sends that, and a client's certificate with it."""
    endpoint = Endpoint(tmp_path)
    for path, body, *_ in ORDERS:
        plain = {"content": json.dumps(body)}
        for more in (
            plain,
            {"json": body | {"force": True}},
            {"json": {"workers": "3", "role": "both"}},
            {"content": ""},
        ):
            assert (await endpoint.ask("POST", path, **more)).status_code in (400, 415), (path, more)
        assert (await endpoint.ask("POST", path, **plain)).status_code == 415
    assert endpoint.orders.heard == []


async def test_an_operator_adds_and_removes_adapters(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path)
    poet = {"name": "org/poet", "path": "/adapters/poet"}
    for is_replaced in (False, True):
        answer = await endpoint.ask("POST", "/api/adapters", json=poet)
        assert (answer.status_code, answer.json()["is_replaced"]) == (200, is_replaced)
    adapter = answer.json()["adapter"]
    assert {**poet, "digest": "ab" * 32, "rank": 8, "num_bytes": 4096}.items() <= adapter.items()
    assert (await endpoint.ask("GET", "/api/adapters")).json() == {"adapters": [adapter]}
    bad = await endpoint.ask("POST", "/api/adapters", json={**poet, "path": "/bad"})
    assert (bad.status_code, bad.json()["error"]["message"]) == (400, "its bias is not applied")
    assert (await endpoint.ask("POST", "/api/adapters/remove", json={"name": "org/poet"})).status_code == 200
    assert (await endpoint.ask("POST", "/api/adapters/remove", json={"name": "org/poet"})).status_code == 404
    assert (await endpoint.ask("GET", "/api/adapters")).json() == {"adapters": []}


@pytest.mark.parametrize("path", ["/api/adapters", "/api/adapters/remove"])
async def test_without_an_operators_key_no_adapter_changes(tmp_path: Path, path: str) -> None:
    endpoint, nobodys = Endpoint(tmp_path), Endpoint(tmp_path, has_tenants=False)
    body = {"name": "poet", "path": "/adapters/poet"} if path == "/api/adapters" else {"name": "poet"}
    refused = [await endpoint.ask("POST", path, key, json=body) for key in ("", "acme")]
    refused += [await nobodys.ask("POST", path, key, json=body) for key in ("", "operations")]
    assert [answer.status_code for answer in refused] == [401, 403, 403, 403]
    assert (await endpoint.ask("GET", "/api/adapters", "acme")).status_code == 403
    assert endpoint.adapters.adapters == nobodys.adapters.adapters == {}


async def test_the_document_describes_all_that_operators_ask(tmp_path: Path) -> None:
    endpoint, whole = Endpoint(tmp_path), document(ROUTES)
    endpoint.metrics.requests_slo.add(2, {"slo_class": "default", "outcome": "met"})
    served = {
        (path.replace(":path}", "}"), method.lower())
        for route in endpoint.app.routes
        for path, method in itertools.product([getattr(route, "path", "")], getattr(route, "methods", None) or ())
        if path.startswith("/api/") and method != "HEAD"
    }
    described = {(path, method) for path, item in whole["paths"].items() for method in item if path.startswith("/api/")}
    assert served == described
    assert len(served) == 13
    asked = (
        whole["paths"]["/api/requests"]["get"]["parameters"] + whole["paths"]["/api/pools/{pool}"]["post"]["parameters"]
    )
    places = [(each["name"], each["in"]) for each in asked]
    assert places == [
        *((name, "query") for name in ("tenant", "slo_class", "outcome", "model", "limit")),
        ("pool", "path"),
    ]
    for path in ("/api/status", "/api/history", "/version"):
        check_described(path, (await endpoint.ask("GET", path)).json())
    check_described("/api/workers/{worker_id}/log", (await endpoint.ask("GET", "/api/workers/w0/log")).json())
    drained = await endpoint.ask("POST", "/api/workers/w0/drain", json={})
    check_described("/api/workers/{worker_id}/drain", drained.json(), "post")
    scaled = await endpoint.ask("POST", "/api/pools/decode", json={"workers": 3})
    check_described("/api/pools/{pool}", scaled.json(), "post")
    added = await endpoint.ask("POST", "/api/adapters", json={"name": "poet", "path": "/adapters/poet"})
    check_described("/api/adapters", added.json(), "post")
    check_described("/api/adapters", (await endpoint.ask("GET", "/api/adapters")).json())
    removed = await endpoint.ask("POST", "/api/adapters/remove", json={"name": "poet"})
    check_described("/api/adapters/remove", removed.json(), "post")
    with pytest.raises(jsonschema.ValidationError):
        check_described("/api/pools/{pool}", {**scaled.json(), "more": 1}, "post")


def test_the_document_says_that_orders_alone_always_need_a_key() -> None:
    whole = document(ROUTES)
    assert {} in whole["security"]
    found = {
        path: operation["security"]
        for path, item in whole["paths"].items()
        for operation in item.values()
        if "security" in operation
    }
    of_the_controller = {"/api/workers/{worker_id}/drain", "/api/workers/{worker_id}/role", "/api/pools/{pool}"}
    assert set(found) == of_the_controller | {"/api/adapters", "/api/adapters/remove", "/api/models/wake"}
    assert all({} not in each and len(each) == 2 for each in found.values())


@contextlib.asynccontextmanager
async def logging_worker(secret: Path) -> AsyncIterator[Any]:
    endpoints = member_auth(KeyFile(secret, Principal.WORKER), "w1", WORKERS_RULES)
    rpc = RpcServer(("baton.v1.WorkerLog",), endpoints, describes_itself=False)
    worker_pb2_grpc.add_WorkerLogServicer_to_server(WorkerLog("w0"), rpc.server)
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    yield worker("w0", address=f"127.0.0.1:{port}", incarnation="w1")
    await rpc.stop(0)


async def test_routers_alone_read_the_log_of_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_private(tmp_path / "secret", draw_secret())
    lines = [f"line {number}" for number in range(5)]
    monkeypatch.setattr(logs, "latest_lines", lambda: lines)
    async with logging_worker(tmp_path / "secret") as named:
        router = WorkerClient(KeyFile(tmp_path / "secret", Principal.ROUTER))
        assert await router.read_log(named, 2) == ("line 3", "line 4")
        assert await router.read_log(named, 0) == tuple(lines)
        await router.close()
        stranger = WorkerClient(KeyFile(tmp_path / "secret", Principal.WORKER))
        with pytest.raises(WorkerFailed):
            await stranger.read_log(named, 2)
        await stranger.close()
