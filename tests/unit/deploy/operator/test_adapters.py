"""`baton adapters`, against a router whose registry is in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.errors import InvalidRequest, ModelNotFound
from baton.rpc.errors import ERROR_KEY
from baton.v1 import admin_pb2
from deploy.operator.adapters import manage
from deploy.operator.client import Client
from deploy.operator.tables import adapter_lines


class Admin:
    """A router's service, whose worker takes any folder."""

    def __init__(self) -> None:
        self.adapters: dict[str, admin_pb2.RegisteredAdapter] = {}

    def add(self, request: admin_pb2.AddAdapterRequest, context: Any) -> admin_pb2.AddAdapterResponse:
        adapter = admin_pb2.RegisteredAdapter(
            name=request.name,
            path=request.path,
            digest="ab" * 32,
            rank=8,
            num_bytes=3 * 2**19,
            since_s=1_700_000_000,
            model="base",
        )
        is_replaced = request.name in self.adapters
        self.adapters[request.name] = adapter
        return admin_pb2.AddAdapterResponse(adapter=adapter, is_replaced=is_replaced)

    def remove(self, request: admin_pb2.RemoveAdapterRequest, context: Any) -> admin_pb2.RemoveAdapterResponse:
        if self.adapters.pop(request.name, None) is None:
            context.set_trailing_metadata([(ERROR_KEY, "ModelNotFound")])
            context.abort(grpc.StatusCode.NOT_FOUND, "no adapter is named so")
        return admin_pb2.RemoveAdapterResponse()

    def listed(self, request: admin_pb2.ListAdaptersRequest, context: Any) -> admin_pb2.ListAdaptersResponse:
        return admin_pb2.ListAdaptersResponse(adapters=[self.adapters[name] for name in sorted(self.adapters)])


@pytest.fixture
def client() -> Iterator[Client]:
    server, admin = grpc.server(ThreadPoolExecutor(1)), Admin()
    methods: dict[str, tuple[Any, Any, Any]] = {
        "AddAdapter": (admin.add, admin_pb2.AddAdapterRequest, admin_pb2.AddAdapterResponse),
        "RemoveAdapter": (admin.remove, admin_pb2.RemoveAdapterRequest, admin_pb2.RemoveAdapterResponse),
        "ListAdapters": (admin.listed, admin_pb2.ListAdaptersRequest, admin_pb2.ListAdaptersResponse),
    }
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(method, asked.FromString, answer.SerializeToString)
        for name, (method, asked, answer) in methods.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.v1.Admin", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    found = Client(f"127.0.0.1:{port}")
    yield found
    found.close()
    server.stop(None)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_adapters_are_added_listed_and_removed(
    client: Client, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manage(client, "list", "", "", False)
    assert "no adapters are registered" in said(capsys)
    manage(client, "add", "poet", "poet", False)
    assert said(capsys) == f"poet is added: rank 8, 1.5 MiB, {tmp_path}/poet\n"
    manage(client, "add", "poet", "/adapters/poet", False)
    assert said(capsys) == "poet is replaced: rank 8, 1.5 MiB, /adapters/poet\n"
    manage(client, "list", "", "", False)
    heading, row = said(capsys).splitlines()
    assert heading.split() == ["adapter", "rank", "size", "digest", "since", "(UTC)", "path"]
    assert row.split() == ["poet", "8", "1.5", "MiB", "ab" * 6, "2023-11-14", "22:13", "/adapters/poet"]
    manage(client, "remove", "poet", "", False)
    assert "poet is removed" in said(capsys)
    with pytest.raises(ModelNotFound):
        manage(client, "remove", "poet", "", False)


def test_the_home_folder_is_found(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    manage(client, "add", "poet", "~/poet", True)
    assert json.loads(said(capsys))["path"] == str(Path("~/poet").expanduser())


def test_documents_hold_all_that_is_known(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    manage(client, "add", "poet", "/adapters/poet", True)
    adapter = {
        "name": "poet",
        "path": "/adapters/poet",
        "digest": "ab" * 32,
        "rank": 8,
        "num_bytes": 3 * 2**19,
        "since_s": 1_700_000_000,
        "model": "base",
    }
    assert json.loads(said(capsys)) == {**adapter, "is_replaced": False}
    manage(client, "list", "", "", True)
    assert json.loads(said(capsys)) == [adapter]
    manage(client, "remove", "poet", "", True)
    assert json.loads(said(capsys)) == {"name": "poet"}


@pytest.mark.parametrize(
    ("action", "name", "path", "usage"),
    [
        ("add", "poet", "", "add NAME PATH"),
        ("add", "", "", "add NAME PATH"),
        ("remove", "", "", "remove NAME"),
        ("remove", "poet", "/adapters/poet", "remove NAME"),
        ("list", "poet", "", "list"),
    ],
)
def test_arguments_that_are_missing_or_too_many_are_refused(
    client: Client, action: str, name: str, path: str, usage: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"`baton adapters {usage}`"):
        manage(client, action, name, path, False)
    assert client.adapters() == []


def test_the_status_shows_what_workers_hold() -> None:
    workers: list[dict[str, Any]] = [
        {"id": "worker-0", "role": "decode", "max_adapters": 8, "adapters": ["prose", "poet"]},
        {"id": "worker-1", "role": "prefill", "max_adapters": 8, "adapters": []},
        {"id": "worker-2", "role": "prefill"},
    ]
    assert adapter_lines(workers) == ["adapters on worker-0 (decode), 2 of 8: poet, prose"]
