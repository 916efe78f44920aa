"""Which hosts HTTP requests may name: a website that leads its own name to a laptop's router is not answered."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import httpx2
import pytest

from baton.config import ClusterConfig, Config, RouterConfig
from router.admission.tenants import TenantBook
from router.api.browsers import Hosts
from router.api.http import create_app, create_scraped_app
from tests.support.models import table_of
from tests.unit.router.api.test_http import Service

LOOPBACK, NETWORK = "127.0.0.1", "10.0.0.7"
OURS = ["localhost", "localhost:8000", "LOCALHOST", "baton.localhost:80", "127.0.0.1:8000", "[::1]:8000", "10.0.0.7",
        "baton", "baton:8000", "localhost.", "llm.example.org:8000", ""]  # fmt: skip
THEIRS = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example",
          "evil.localhost.example", "xllm.example.org", "evil.example.", "evil.example:80:80", "[::1].evil.example",
          "[::1].evil.example:80", "[::1]evil.example", "[::1", "localhost:80@evil.example", "localhost@evil.example",
          "localhost:80:80", "localhost/evil.example", "localhost:80/evil.example", "localhost:evil.example",
          "localhost#evil.example", "localhost\\evil.example", "localhost evil.example", "localhost,evil.example",
          "localhost%2eevil.example", "[evil.example]", "[::1]:80:80", "::1", "fe80::1%25eth0",
          "http://localhost"]  # fmt: skip


def refused(hosts: Hosts, *named: str, reached: str = LOOPBACK) -> bool:
    headers = [(b"host", name.encode()) for name in named]
    return hosts.refused({"type": "http", "headers": headers, "server": (reached, 8000)}) is not None


def hosts(*allowed: str, needs_key: bool = False) -> Hosts:
    config = Config(router=RouterConfig(allowed_hosts=allowed), cluster=ClusterConfig(advertise_host="LLM.example.org"))
    return Hosts.configured(config, needs_key)


def test_a_name_that_a_website_could_have_is_refused_over_loopback_where_no_key_is_needed() -> None:
    assert [name for name in OURS if refused(hosts(), name)] == []
    assert [name for name in THEIRS if not refused(hosts(), name)] == []
    assert refused(hosts(), "localhost", "evil.example"), "all names count"
    assert not refused(hosts()), "what sends none is no browser"
    assert refused(hosts(), "evil.example", reached="::1")


def test_every_name_is_answered_where_there_is_an_ingress_between_or_a_key_is_needed() -> None:
    assert not refused(hosts(), "evil.example", reached=NETWORK)
    assert not refused(hosts(needs_key=True), "evil.example")
    unknown: dict[str, Any] = {"type": "http", "headers": [(b"host", b"evil.example")], "server": None}
    assert hosts().refused(unknown) is None, "a socket without an address is a proxy's"


@pytest.mark.parametrize("needs_key", [True, False])
@pytest.mark.parametrize("reached", [LOOPBACK, NETWORK])
def test_names_that_are_listed_are_the_only_ones(needs_key: bool, reached: str) -> None:
    listed = hosts("API.example.com", "*.inner.example", needs_key=needs_key)
    for name in (
        "api.example.com",
        "Api.Example.Com:443",
        "a.inner.example",
        "a.b.inner.example:1",
        "10.1.2.3",
        "baton",
    ):
        assert not refused(listed, name, reached=reached)
    for name in ("example.com", "xapi.example.com", "inner.example", "api.example.com.evil.example"):
        assert refused(listed, name, reached=reached)
    assert not refused(hosts("*"), "anything.example")


def test_this_machines_own_name_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.example.net")
    assert not refused(hosts(), "box.example.net:8000")
    assert refused(hosts(), "other.example.net")


async def get(app: Any, path: str, host: str) -> httpx2.Response:
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url=f"http://{LOOPBACK}:8000") as client:
        return await client.get(path, headers={"host": host})


async def test_a_refusal_has_the_form_of_its_api_and_probes_are_answered() -> None:
    service: Any = Service()
    app = create_app(
        table_of(service, requests=service.requests), TenantBook.open_to_all(), lambda: "", lambda: b"figures", hosts()
    )
    sentence = "this router does not answer for the host 'evil.example'; see router.allowed_hosts"
    for path in ("/v1/models", "/metrics", "/api/metrics", "/", "/openapi.json"):
        response = await get(app, path, "evil.example")
        assert response.status_code == 421
        assert response.json()["error"] == {
            "message": sentence, "type": "invalid_request_error", "param": None, "code": None,
        }  # fmt: skip
    response = await get(app, "/v1/messages", "evil.example")
    assert (response.status_code, response.json()["type"]) == (421, "error")
    assert response.json()["error"] == {"type": "invalid_request_error", "message": sentence}
    for path in ("/healthz", "/health", "/readyz"):
        assert (await get(app, path, "evil.example")).status_code == 200
    for path in ("/metrics", "/"):
        assert (await get(app, path, "localhost:8000")).status_code == 200


async def test_metrics_on_a_port_of_their_own_need_no_key_so_no_website_reads_them_on_a_laptop() -> None:
    strict = dataclasses.replace(hosts(needs_key=True), needs_key=False)
    app = create_scraped_app(lambda: "not yet", lambda: b"figures", strict)
    assert (await get(app, "/metrics", "evil.example")).status_code == 421
    assert (await get(app, "/metrics", "localhost")).content == b"figures"
    assert (await get(app, "/readyz", "evil.example")).status_code == 503
    assert (await get(app, "/", "localhost")).status_code == 404
