"""Who comes in where, and that a stranger's message is not even read."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.config import ClusterConfig, Config, IndexConfig
from baton.errors import ConfigError, NotAMember
from baton.rpc import RpcServer, channel, from_rpc_error
from baton.rpc.errors import CLIENTS_METHODS
from baton.rpc.member_auth import (
    CONTROLLERS_RULES,
    WORKERS_RULES,
    Rules,
    is_loopback,
    member_auth,
    member_metadata,
    require_keys,
)
from baton.trust import KeyFile, Principal, draw_secret, write_private
from deploy.controller import process as controller
from router import server as router
from router.api.grpc_api import SERVICE_NAMES as ROUTERS_SERVICES
from tests.support.waiting import until
from worker import process as worker

CONTRACTS = Path(__file__).parents[3] / "proto"
OWN = CONTRACTS / "baton"
INCARNATION = "a1"
CALL, UNRULED = "/test.Closed/Call", "/test.Unruled/Call"
STRANGERS_CALLS = 1000


def services() -> Iterator[Any]:
    """Every service of Baton's contracts, as its descriptor."""
    for path in sorted(OWN.rglob("*.proto")):
        name = path.relative_to(CONTRACTS).with_suffix("").as_posix().replace("/", ".")
        yield from importlib.import_module(f"{name}_pb2").DESCRIPTOR.services_by_name.values()


MEMBERS_METHODS = [
    (rules, f"/{service.full_name}/{method}", rules.get(f"{service.full_name}/{method}") or rules[service.full_name])
    for service in services()
    for rules in (WORKERS_RULES, CONTROLLERS_RULES)
    if service.full_name in rules
    for method in service.methods_by_name
]


class Endpoints:
    """A server that answers every method alike, and what it has read."""

    def __init__(self, folder: Path, rules: Rules, methods: list[str]) -> None:
        self.secret = folder / "secret"
        write_private(self.secret, draw_secret())
        self.parsed: list[bytes] = []
        keys = KeyFile(self.secret, Principal.WORKER)
        self.rpc = RpcServer((), member_auth(keys, INCARNATION, rules), describes_itself=False)
        handler: grpc.RpcMethodHandler[Any, bytes] = grpc.unary_unary_rpc_method_handler(
            self._answer, request_deserializer=self._parse
        )
        for each in methods:
            _, service, name = each.split("/")
            self.rpc.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {name: handler})])
        self.address = f"127.0.0.1:{self.rpc.bind('127.0.0.1', 0)}"

    def proof(self, member: Principal, method: str = CALL, callee: str = INCARNATION) -> Any:
        return member_metadata(KeyFile(self.secret, member), method, callee)

    async def call(self, method: str, metadata: Any) -> bytes:
        async with channel(self.address) as link:
            answer: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = link.unary_unary(method)
            try:
                return await answer(b"", metadata=metadata, timeout=20)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, "the server") from error

    async def lets_in(self, method: str, metadata: Any) -> bool:
        self.parsed.clear()
        try:
            assert await self.call(method, metadata) == b"served"
        except NotAMember:
            assert not self.parsed, "a message was read that nobody may send"
            return False
        return True

    def _parse(self, message: bytes) -> Any:
        self.parsed.append(message)
        return Empty.FromString(message)

    async def _answer(self, request: Any, context: Any) -> bytes:
        return b"served"


@pytest.fixture
async def endpoints(tmp_path: Path) -> AsyncIterator[Endpoints]:
    found = Endpoints(tmp_path, {"test.Closed": frozenset({Principal.ROUTER})}, [CALL, UNRULED])
    await found.rpc.start()
    yield found
    await found.rpc.stop(0)


async def test_a_proof_is_good_once_and_for_one_member_method_and_process(endpoints: Endpoints) -> None:
    used = endpoints.proof(Principal.ROUTER)
    assert await endpoints.lets_in(CALL, used)
    for metadata in (
        (),
        used,
        endpoints.proof(Principal.ROUTER, callee="b2"),
        endpoints.proof(Principal.ROUTER, callee=""),
        endpoints.proof(Principal.ROUTER, "/test.Closed/Other"),
        endpoints.proof(Principal.WORKER),
        (("baton-proof-bin", b"\0" * 97),),
        (("baton-proof-bin", b""),),
        (("baton-proof", "text"),),
    ):
        assert not await endpoints.lets_in(CALL, metadata)


async def test_what_no_rule_opens_is_shut_and_probes_are_answered(endpoints: Endpoints) -> None:
    assert not await endpoints.lets_in(UNRULED, ())
    for member in Principal:
        assert not await endpoints.lets_in(UNRULED, endpoints.proof(member, UNRULED))
    await endpoints.rpc.set_serving(True)
    async with channel(endpoints.address) as link:
        answer = await health_pb2_grpc.HealthStub(link).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await link.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")().read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_every_method_of_every_contract_takes_its_own_callers_alone(tmp_path: Path) -> None:
    for rules in (WORKERS_RULES, CONTROLLERS_RULES):
        methods = {method: allowed for these, method, allowed in MEMBERS_METHODS if these is rules}
        endpoints = Endpoints(tmp_path, rules, list(methods))
        await endpoints.rpc.start()
        for method, allowed in methods.items():
            assert not await endpoints.lets_in(method, ())
            admitted = {
                member for member in Principal if await endpoints.lets_in(method, endpoints.proof(member, method))
            }
            assert admitted == allowed, method
        await endpoints.rpc.stop(0)


def test_every_service_has_an_endpoint() -> None:
    """One that is new belongs to clients, to workers or to the controller, and says so."""
    named = {service.full_name for service in services()}
    of_clients = {re.sub("/", "", prefix) for prefix in CLIENTS_METHODS}
    ruled = {rule.partition("/")[0] for rule in (*WORKERS_RULES, *CONTROLLERS_RULES)}
    assert named == of_clients | ruled
    assert set(worker.SERVICE_NAMES) == WORKERS_RULES.keys()
    assert (
        set(controller.SERVICE_NAMES) == {"baton.v1.Admin", "baton.v1.ModelFiles"} == CONTROLLERS_RULES.keys() & named
    )
    assert [rule for rule, members in CONTROLLERS_RULES.items() if members != {Principal.ROUTER}] == [
        "baton.v1.Admin/DrainWorker"
    ], "baton leave has an operator's keys, in every pod of workers"
    assert set(ROUTERS_SERVICES) == of_clients
    assert WORKERS_RULES["baton.v1.WorkerControl"] == {Principal.CONTROLLER}, "nobody else ends or flips a worker"


async def test_a_thousand_wrong_calls_leave_nothing(endpoints: Endpoints) -> None:
    async def stray(number: int) -> None:
        proof = (("baton-proof-bin", os.urandom(97)),) if number % 2 else endpoints.proof(Principal.OPERATOR)
        assert not await endpoints.lets_in(CALL, proof)

    async def knock(number: int) -> None:
        _, writer = await asyncio.open_connection(*endpoints.address.split(":"))
        writer.write((b"", b"\0" * 9, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", os.urandom(64))[number % 4])
        writer.close()
        await writer.wait_closed()

    for number in range(20):
        await stray(number)
        await knock(number)
    process = psutil.Process()
    await _settled(process, at_most=process.num_fds())
    before_fds, before_bytes = process.num_fds(), process.memory_info().rss
    for begin in range(0, STRANGERS_CALLS, 50):
        await asyncio.gather(*(stray(number) for number in range(begin, begin + 50)))
        await asyncio.gather(*(knock(number) for number in range(begin, begin + 50)))
    await _settled(process, at_most=before_fds)
    assert process.memory_info().rss - before_bytes < 64 * 2**20
    assert await endpoints.lets_in(CALL, endpoints.proof(Principal.ROUTER))


async def _settled(process: psutil.Process, at_most: int) -> None:
    await until(lambda: process.num_fds() <= at_most, 30.0, seen=process.num_fds)


async def test_without_a_secret_calls_have_no_proof_and_need_none() -> None:
    assert member_auth(None, INCARNATION, WORKERS_RULES) == ()
    assert member_metadata(None, CALL, INCARNATION) == ()


async def test_no_process_of_a_cluster_without_a_secret_starts_for_others() -> None:
    """A router faces clients, but speaks to members, too."""
    index = IndexConfig(redis_url="redis://127.0.0.1:1")
    cluster = ClusterConfig(host="0.0.0.0", controller_host="0.0.0.0")
    config = Config(index=index, cluster=cluster)
    with pytest.raises(ConfigError, match=r"without cluster\.secret .* cluster\.host is 0\.0\.0\.0"):
        router.build(config)
    arguments = controller.Arguments(
        cluster="c",
        state_file=Path("s"),
        worker_host="",
        worker_keys="",
        ready_fd=None,
        shows_logs=False,
        end=False,
        awaits_address=False,
    )
    with pytest.raises(ConfigError, match=r"without cluster\.secret .* cluster\.controller_host is 0\.0\.0\.0"):
        await controller.run(config, arguments, controller.Stop(), controller.Ready(None))
    with pytest.raises(ConfigError, match=r"without cluster\.secret .* this worker's address is 0\.0\.0\.0"):
        worker.require_clusters_keys(config, "0.0.0.0", "")


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("[::]", False),
        ("", False),
        ("10.0.0.1", False),
        ("fe80::1", False),
        ("nobody.invalid", False),
    ],
)
def test_without_a_secret_only_this_machine_is_listened_to(host: str, is_own: bool, tmp_path: Path) -> None:
    assert is_loopback(host) == is_own
    write_private(tmp_path / "secret", draw_secret())
    require_keys(KeyFile(tmp_path / "secret", Principal.WORKER), host, "cluster.host")
    if is_own:
        require_keys(None, host, "cluster.host")
    else:
        with pytest.raises(
            ConfigError, match=r"without cluster.secret .* loopback addresses only, and cluster.host is"
        ):
            require_keys(None, host, "cluster.host")
