from __future__ import annotations

import asyncio
import hashlib
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.blocks import cache_seed
from baton.errors import (
    BatonError,
    ConfigError,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    NoController,
    NoWorker,
    Unauthenticated,
)
from baton.rpc import RpcServer, channel, from_rpc_error
from baton.sampling import SamplingParams
from baton.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from deploy.operator.client import Client
from router.admission.limits import Limits
from router.admission.tenants import DEFAULT_TENANT, Tenant, TenantBook, api_key_of
from router.api.grpc_api import CALLER, SERVICE_NAMES, AdminServicer, Authentication
from router.api.openai import error_body
from router.prompt import SequenceBuilder
from router.timeline.log import RequestLog
from tests.support.builders import cluster_status
from tests.support.models import operated


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def load(folder: Path, text: str) -> TenantBook:
    path = folder / "tenants.yaml"
    path.write_text(text)
    return TenantBook.load(path)


@pytest.fixture
def book(tmp_path: Path) -> TenantBook:
    return load(
        tmp_path,
        f"""
acme:
  key_sha256: [{digest("key-a")}, "{digest("key-a2").upper()}"]
  weight: 2
  slo_class: interactive
  max_priority: 5
zeta:
  key_sha256: [{digest("ключ")}, {digest("key-z")}]
  cache_scope: acme
operations:
  key_sha256: [{digest("key-o")}]
  operator: true
""",
    )


def test_a_key_tells_its_tenant(book: TenantBook) -> None:
    acme = Tenant(id="acme", weight=2, slo_class="interactive", max_priority=5, cache_scope="")
    assert book.identify("key-a") == book.identify("key-a2") == acme
    assert book.identify("ключ") == Tenant(id="zeta", cache_scope="acme")


def test_a_tenant_has_models_and_limits_with_each(tmp_path: Path) -> None:
    book = load(
        tmp_path,
        f"""
acme:
  key_sha256: [{digest("key-a")}]
  requests_per_minute: 600
  models: [llama-*, "*poet"]
  model_limits:
    llama-70b: {{requests_per_minute: 60, max_in_flight: 4}}
    llama-8b: {{}}
    "llama-*": {{tokens_per_minute: 5, tokens_per_day: 6, max_answer_tokens: 7}}
zeta: {{key_sha256: [{digest("key-z")}], model_limits: {{}}}}
""",
    )
    assert book.identify("key-a") == Tenant(
        id="acme",
        requests_per_minute=600,
        models=("llama-*", "*poet"),
        model_limits=(
            ("llama-70b", Limits(requests_per_minute=60, max_in_flight=4)),
            ("llama-8b", Limits()),
            ("llama-*", Limits(tokens_per_minute=5, tokens_per_day=6, max_answer_tokens=7)),
        ),
    )
    assert book.identify("key-z") == Tenant(id="zeta")


@pytest.mark.parametrize("key", [None, "", "key-b", "KEY-A", "key-a ", digest("key-a"), "x" * 100_000, "\udc80"])
def test_nobodys_key_is_refused_and_not_quoted(book: TenantBook, key: str | None) -> None:
    with pytest.raises(Unauthenticated) as caught:
        book.identify(key)
    assert not key or key not in str(caught.value)


def test_without_a_file_everybody_is_the_default_tenant() -> None:
    for book in (TenantBook.open_to_all(), TenantBook.configured("")):
        for key in (None, "", "none", "sk-whatever"):
            assert book.identify(key) is DEFAULT_TENANT


def test_a_tenant_jumps_no_queue_unless_its_operator_says_so() -> None:
    assert DEFAULT_TENANT.max_priority == Tenant(id="acme").max_priority == 0


def test_a_tenants_cache_is_keyed_by_its_scope() -> None:
    """The default tenant's keys are those of the time before there were tenants: routers of both kinds share caches."""
    sequences = SequenceBuilder("content", vocab_size=100, cache_secret="secret")

    def seed_of(tenant: Tenant) -> bytes:
        return sequences.build("r", (1,), SamplingParams(max_tokens=1), tenant).cache_seed

    for tenant in (
        DEFAULT_TENANT,
        Tenant(id="acme"),
        Tenant(id="zeta", cache_scope="acme"),
        Tenant(id="acme", cache_scope="x"),
    ):
        for _ in range(2):
            expected = cache_seed("content", b"secret", tenant.cache_scope or tenant.id)
            assert seed_of(tenant) == expected
    assert seed_of(DEFAULT_TENANT) == bytes.fromhex("711a42635d9581076c80f6359e2f1976")


def test_the_documented_command_makes_the_hash(tmp_path: Path) -> None:
    out = subprocess.run("printf %s my-key | sha256sum", shell=True, capture_output=True, text=True, check=True).stdout
    book = load(tmp_path, f"acme: {{key_sha256: [{out.split()[0]}]}}")
    assert book.identify("my-key").id == "acme"


A, B = digest("a"), digest("b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must hold tenants"),
        ("[acme]", "must hold tenants"),
        ("acme", "must hold tenants"),
        ("acme: [", "cannot read"),
        ("acme: {key_sha256: [\x00]}", "cannot read"),
        ("acme:", "tenant 'acme' must be a section"),
        ("acme: {weight: 1}", "tenant 'acme': key_sha256 is missing"),
        ("acme: {key_sha256: []}", "tenant 'acme': key_sha256 must be a list of one or more"),
        (f"acme: {{key_sha256: {A}}}", "tenant 'acme': key_sha256 must be a list"),
        (f"acme: {{key_sha256: [{A}0]}}", "tenant 'acme': key_sha256 must be a list"),
        (f"acme: {{key_sha256: [{'1' * 64}]}}", "64 digits, quoted"),
        (f"acme: {{key_sha256: [{A}], wieght: 1}}", "tenant 'acme': unknown field 'wieght'; known here: cache_scope"),
        (f"acme: {{key_sha256: [{A}], id: b}}", "tenant 'acme': unknown field 'id'"),
        (f"acme: {{key_sha256: [{A}], weight: 0}}", "tenant 'acme': weight must be a number from 0.001"),
        (f"acme: {{key_sha256: [{A}], weight: .nan}}", "weight must be"),
        (f"acme: {{key_sha256: [{A}], weight: .inf}}", "weight must be"),
        (f"acme: {{key_sha256: [{A}], weight: true}}", "weight must be"),
        (f"acme: {{key_sha256: [{A}], weight: heavy}}", "weight must be"),
        (f"acme: {{key_sha256: [{A}], max_priority: 1.5}}", "max_priority must be a whole number"),
        (f"acme: {{key_sha256: [{A}], max_priority: -1}}", "max_priority must be a whole number"),
        (f"acme: {{key_sha256: [{A}], requests_per_minute: 0}}", "requests_per_minute must be a whole number from 1"),
        (f"acme: {{key_sha256: [{A}], tokens_per_minute: 1.0}}", "tokens_per_minute must be a whole number from 1"),
        (f"acme: {{key_sha256: [{A}], tokens_per_day: {10**12 + 1}}}", "tokens_per_day must be a whole number from 1"),
        (f"acme: {{key_sha256: [{A}], max_in_flight: true}}", "max_in_flight must be a whole number from 1"),
        (f"acme: {{key_sha256: [{A}], max_answer_tokens: -1}}", "max_answer_tokens must be a whole number from 1"),
        (f"acme: {{key_sha256: [{A}], models: llama}}", "tenant 'acme': models must be a list of at most 64 patterns"),
        (f"acme: {{key_sha256: [{A}], models:}}", "tenant 'acme': models must be a list"),
        (f"acme: {{key_sha256: [{A}], models: [3]}}", "models must be a list"),
        (f"acme: {{key_sha256: [{A}], models: []}}", "printable characters; leave it out to allow all models"),
        (f"acme: {{key_sha256: [{A}], models: ['']}}", "models must be a list"),
        (f"acme: {{key_sha256: [{A}], models: [{'x' * 257}]}}", "each of 1 to 256 printable characters"),
        (f'acme: {{key_sha256: [{A}], models: ["a\\nb"]}}', "models must be a list"),
        (f"acme: {{key_sha256: [{A}], models: [{', '.join('a' * 65)}]}}", "models must be a list of at most 64"),
        (f"acme: {{key_sha256: [{A}], model_limits: [a]}}", "tenant 'acme': model_limits must be a section of limits"),
        (
            f"acme: {{key_sha256: [{A}], model_limits: {{7: {{}}}}}}",
            "model_limits must be a section of limits by at most",
        ),
        (f"acme: {{key_sha256: [{A}], model_limits: {{a: 5}}}}", "'acme': model_limits of 'a' must be a section with"),
        (
            f"acme: {{key_sha256: [{A}], model_limits: {{'a*': {{weight: 5}}}}}}",
            "tenant 'acme': model_limits of 'a*': unknown field 'weight'; known here: max_answer_tokens,",
        ),
        (
            f"acme: {{key_sha256: [{A}], model_limits: {{a: {{max_in_flight: 0}}}}}}",
            "tenant 'acme': model_limits of 'a': max_in_flight must be a whole number from 1",
        ),
        (
            f"acme: {{key_sha256: [{A}], model_limits: {{a: {{max_in_flight: 1}}, a: {{}}}}}}",
            "tenant 'acme': model_limits of 'a' is listed twice",
        ),
        (
            f"acme: {{key_sha256: [{A}], model_limits: {{{', '.join(f'm{i}: {{}}' for i in range(65))}}}}}",
            "model_limits must be a section of limits by at most 64 patterns",
        ),
        (f"acme: {{key_sha256: [{A}], [a]: 5}}", "cannot read"),
        (f"acme: {{key_sha256: [{A}], 5: 5}}", "tenant 'acme': unknown field 5; known here"),
        (f"acme: {{key_sha256: [{A}], max_priority: {2**31}}}", "max_priority must be a whole number"),
        (f"acme: {{key_sha256: [{A}], slo_class: 3}}", "slo_class must be a string"),
        (f"acme: {{key_sha256: [{A}], cache_scope: 3}}", "cache_scope must be a string"),
        (f'acme: {{key_sha256: [{A}], cache_scope: "\\ud800"}}', "cache_scope must be a string"),
        (f"7: {{key_sha256: [{A}]}}", "tenant 7: the id must be a string"),
        (f'"": {{key_sha256: [{A}]}}', "tenant '': the id must be"),
        (f'"a\\nb": {{key_sha256: [{A}]}}', "the id must be a string of printable"),
        (f"a: {{key_sha256: [{A}]}}\na: {{key_sha256: [{B}]}}", "tenant 'a' is listed twice"),
        (f'"": {{key_sha256: [{A}]}}\n"": {{key_sha256: [{B}]}}', "tenant '' is listed twice"),
        (f"a: {{key_sha256: [{A}]}}\nb: {{key_sha256: [{B}, {A}]}}", "tenants 'a' and 'b' have a key in common"),
    ],
)
def test_a_bad_file_is_refused_by_entry(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert words in str(caught.value)
    assert "tenants.yaml" in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff")
    for name in ("none.yaml", "", "latin"):
        with pytest.raises(ConfigError, match="cannot read the tenants' file"):
            TenantBook.configured(str(tmp_path / name))


def test_a_key_put_in_place_of_its_hash_is_not_told_to_the_log(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "acme: {key_sha256: [sk-very-secret]}")
    assert "sk-very-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([], None),
        ([("user-agent", "x")], None),
        ([("authorization", "Bearer k")], "k"),
        ([("authorization", "bearer   k ")], "k"),
        ([(b"authorization", b"Bearer k")], "k"),
        ([(b"authorization", "Bearer ключ".encode())], "ключ"),
        ([(b"authorization", b"Bearer \xff")], "\udcff"),
        ([("authorization", "Bearer")], ""),
        ([("authorization", "Basic dXNlcg==")], None),
        ([("authorization", "k")], None),
        ([("x-api-key", "k")], "k"),
        ([(b"x-api-key", b" k ")], "k"),
        ([("x-api-key", "other"), ("authorization", "Bearer k")], "k"),
        ([("authorization", "Basic dXNlcg=="), ("x-api-key", "k")], "k"),
    ],
)
def test_where_a_key_is_looked_for(headers: list[tuple[str | bytes, str | bytes]], key: str | None) -> None:
    assert api_key_of(headers) == key


def test_http_clients_see_what_openai_answers() -> None:
    assert error_body(Unauthenticated("no")) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
    }


def test_a_key_that_no_header_can_carry_is_refused_by_the_client() -> None:
    for key in ("ключ", "a\nb", "\udc80"):
        with pytest.raises(InvalidRequest, match="printable ASCII"):
            Client("127.0.0.1:1", key)


class WhoAmI(inference_pb2_grpc.InferenceServicer):
    """Answers with the caller's tenant, after a moment in which others call."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.num_calls += 1
        for _ in range(3):
            await asyncio.sleep(0.001)
            yield inference_pb2.GenerateResponse(text=CALLER.get().id)

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.TokenizeResponse:
        raise AssertionError("no test gets here")

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ListModelsResponse:
        self.num_calls += 1
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id=CALLER.get().id)])


SERVICER = WhoAmI()
NOTHING_RUNS = cluster_status(redis_ok=False)


@pytest.fixture
async def connection(book: TenantBook) -> AsyncGenerator[grpc.aio.Channel]:
    rpc = RpcServer(SERVICE_NAMES, [Authentication(book)])
    inference_pb2_grpc.add_InferenceServicer_to_server(SERVICER, rpc.server)
    admin = AdminServicer(lambda models: NOTHING_RUNS, RequestLog(), operated())
    admin_pb2_grpc.add_AdminServicer_to_server(admin, rpc.server)
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    await rpc.set_serving(True)
    async with channel(f"127.0.0.1:{port}") as connection:
        yield connection
    await rpc.stop(0)


async def answered(connection: grpc.aio.Channel, *metadata: tuple[str, str]) -> set[str]:
    """The ids that the messages of one stream and the answer to one unary call tell."""
    stub = inference_pb2_grpc.InferenceStub(connection)
    ids = {m.text async for m in stub.Generate(inference_pb2.GenerateRequest(), metadata=metadata)}
    models = await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
    return ids | {model.id for model in models.models}


async def test_calls_at_the_same_time_keep_their_tenants(connection: grpc.aio.Channel) -> None:
    metadata = [("authorization", "Bearer key-a"), ("authorization", "Bearer key-z"), ("x-api-key", "key-a2")]
    told = await asyncio.gather(*(answered(connection, metadata[i % 3]) for i in range(12)))
    assert told == [{"acme"}, {"zeta"}, {"acme"}] * 4


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer nobody"),), (("x-api-key", ""),)])
async def test_a_call_without_a_tenants_key_ends_before_its_handler(
    connection: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]
) -> None:
    before = SERVICER.num_calls
    stub = inference_pb2_grpc.InferenceStub(connection)
    calls = (
        lambda: anext(aiter(stub.Generate(inference_pb2.GenerateRequest(), metadata=metadata))),
        lambda: stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata),
        lambda: stub.Tokenize(inference_pb2.TokenizeRequest(), metadata=metadata),
    )
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "API key" in (caught.value.details() or "")
        assert type(from_rpc_error(caught.value, "router")) is Unauthenticated
    assert SERVICER.num_calls == before


async def test_health_needs_no_key(connection: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(connection)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="baton.v1.Inference"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


ADMIN = {
    "GetStatus": admin_pb2.GetStatusRequest(),
    "ListPools": admin_pb2.ListPoolsRequest(),
    "ListWorkers": admin_pb2.ListWorkersRequest(),
    "Explain": admin_pb2.ExplainRequest(request_id="another's"),
    "ListRequests": admin_pb2.ListRequestsRequest(),
    "ScalePool": admin_pb2.ScalePoolRequest(pool="decode", desired=2),
    "DrainWorker": admin_pb2.DrainWorkerRequest(worker_id="decode-0"),
    "SetWorkerRole": admin_pb2.SetWorkerRoleRequest(worker_id="a", role="decode"),
    "AddAdapter": admin_pb2.AddAdapterRequest(name="poet", path="/adapters/poet"),
    "RemoveAdapter": admin_pb2.RemoveAdapterRequest(name="poet"),
    "ListAdapters": admin_pb2.ListAdaptersRequest(),
    "WakeModel": admin_pb2.WakeModelRequest(),
}
MET = {
    **dict.fromkeys(("ScalePool", "DrainWorker", "SetWorkerRole", "WakeModel"), NoController),
    "AddAdapter": NoWorker,
    "RemoveAdapter": ModelNotFound,
}
"""What an operator's call meets here: no controller, no worker, and no adapter."""


def test_every_method_of_admin_is_tried() -> None:
    assert set(ADMIN) == {method.name for method in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods}


@pytest.mark.parametrize("method", ADMIN)
async def test_admin_takes_an_operators_key(connection: grpc.aio.Channel, method: str) -> None:
    """With one, orders get as far as the controller or a worker, of which there is none here."""

    async def outcome(key: str) -> type[BatonError] | None:
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        try:
            await getattr(admin_pb2_grpc.AdminStub(connection), method)(ADMIN[method], metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return type(from_rpc_error(error, "router"))
        return None

    outcomes = [await outcome(key) for key in ("", "nobody", "key-a", "key-o")]
    assert outcomes == [Unauthenticated, Unauthenticated, Forbidden, MET.get(method)]
