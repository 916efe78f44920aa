"""A request that cannot be served is refused at either endpoint with a sentence, before any worker hears of it.

The endpoints are the real ones, gRPC on a socket and HTTP in the process, over the real service and the default model's
tokenizer. Its driver notes whether it was asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from fastapi import FastAPI
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api import Chat, GenerateChunk, GenerateRequest, ModelCard, Text, TokenIds
from baton.chat import ChatMessage
from baton.config import RouterConfig
from baton.errors import Overloaded, RouterStopping
from baton.messages import NewTokens
from baton.registered_adapters import NO_ADAPTERS, Adapters
from baton.rpc import RpcServer
from baton.sampling import FinishReason
from baton.tasks import cancel_and_wait
from baton.telemetry.instruments import Instruments
from baton.v1 import inference_pb2, inference_pb2_grpc
from baton.wire import generate_request_from_pb
from kvstore.index import MemoryStore
from kvstore.leases import MemoryRecords
from router.admission import Accounts, MemoryLedger, ModelFacts, SloCounts
from router.admission.tenants import DEFAULT_TENANT, TenantBook
from router.answer import PLAIN, AnswerFormat
from router.api import delivery
from router.api.delivery import GRPC
from router.api.grpc_api import SERVICE_NAMES, Authentication, InferenceServicer
from router.api.http import create_app
from router.models.table import ModelTable, Release
from router.placement.pool_view import PoolView
from router.prompt import Tokenizer
from router.request.model import LoadedModel
from router.request.resume import Journal
from router.serve import Holding, ImageLooker, WorkerClient
from router.serve.choice import Choice, ChoiceGroup
from router.service import Front, RouterService
from router.timeline.usage_log import UsageBook
from router.timeline.usage_marks import MemoryMarks
from tests.support.asking import VOCABULARY
from tests.support.builders import cluster_status, waker
from tests.support.models import release
from tests.support.waiting import until

MODEL = "smollm2-135m-instruct"


class OneToken:
    """A driver without workers: each choice it is asked for is one token long."""

    is_crowded = False

    def __init__(self) -> None:
        self.num_asked = 0

    async def run(self, group: ChoiceGroup) -> AsyncIterator[tuple[Choice, NewTokens]]:
        self.num_asked += 1
        for choice in group.choices:
            choice.emitted.append(5)
            choice.finish_reason = FinishReason.LENGTH
            yield choice, NewTokens(token_ids=(5,), finish_reason=FinishReason.LENGTH)

    def answered(self, choice: Choice, num_tokens: int) -> None: ...


class TwoTokens(OneToken):
    """A driver whose choices have two tokens and never come to their end."""

    async def run(self, group: ChoiceGroup) -> AsyncIterator[tuple[Choice, NewTokens]]:
        self.num_asked += 1
        (choice,) = group.choices
        for token_id in (5, 6):
            choice.emitted.append(token_id)
            yield choice, NewTokens(token_ids=(token_id,), finish_reason=None)
        await asyncio.Event().wait()


class ManyTokens(OneToken):
    """A driver whose choices have more tokens than gRPC sends to a client that reads none.

    Args:
        ends: whether they come to their end.
        num: how many there are.
    """

    NUM = 8000

    def __init__(self, *, ends: bool, num: int = NUM) -> None:
        super().__init__()
        self._ends = ends
        self._num = num

    async def run(self, group: ChoiceGroup) -> AsyncIterator[tuple[Choice, NewTokens]]:
        (choice,) = group.choices
        for number in range(1, self._num + 1):
            is_last = self._ends and number == self._num
            reason = FinishReason.LENGTH if is_last else None
            choice.emitted.append(5)
            yield choice, NewTokens(token_ids=(5,), finish_reason=reason)
            if number % 100 == 0:
                await asyncio.sleep(0)
        if not self._ends:
            await asyncio.Event().wait()


class Router:
    """Both endpoints of a router.

    Attributes:
        driver: what its workers would have been asked.
        adapters: those that are registered.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        driver: OneToken | None = None,
        answers: AnswerFormat = PLAIN,
        max_model_len: int = 8192,
    ) -> None:
        facts = ModelFacts(
            id=MODEL,
            vocab_size=tokenizer.vocab_size,
            max_model_len=max_model_len,
            default_sampling=tokenizer.default_sampling,
            default_max_tokens=RouterConfig().default_max_tokens,
        )
        self.driver = driver or OneToken()
        self.adapters: Adapters = NO_ADAPTERS
        stand_in: Any = self.driver
        instruments = self.instruments = Instruments(cluster_status)
        self.pools = PoolView(lambda keys: {}, time.monotonic)
        self.client = WorkerClient()
        self.ledger = MemoryLedger()
        self.accounts = Accounts(self.ledger, instruments, lambda: 1)
        self.journal = Journal(MemoryRecords(MemoryStore()))
        usage_book = UsageBook(None, MemoryMarks(), instruments)
        self.front = Front.of(RouterConfig(), instruments, self.accounts, usage_book)
        self.limiter = self.front.limiter
        self.slo_counts = SloCounts()
        self.service = RouterService(
            LoadedModel(
                card=ModelCard(
                    id=MODEL, path="", max_model_len=max_model_len, created=0, weights="exact", kv_dtype="auto"
                ),
                tokenizer=tokenizer,
                format=answers,
                content_id="content",
                facts=facts,
            ),
            self.front,
            driver=stand_in,
            holding=Holding(pools=self.pools, held=self.front.held, waker=waker(self.pools), config=RouterConfig()),
            looker=ImageLooker(pools=self.pools, client=self.client, config=RouterConfig(), waker=waker(self.pools)),
            journal=self.journal,
            slo_counts=self.slo_counts,
            adapters=lambda: self.adapters,
        )
        self.table = ModelTable(self.front)
        self.table.put(release(self.service))
        self._tenants = TenantBook.configured("")

    def close(self) -> None:
        self.service.close()

    @contextlib.asynccontextmanager
    async def inference(self, stall_s: float = 30.0) -> AsyncIterator[inference_pb2_grpc.InferenceAsyncStub]:
        rpc = RpcServer(SERVICE_NAMES, [Authentication(self._tenants)])
        InferenceServicer(self.table, stall_s=stall_s).add_to(rpc.server)
        port = rpc.bind("127.0.0.1", 0)
        await rpc.start()
        try:
            small_window = [("grpc.http2.bdp_probe", 0)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=small_window) as channel:
                stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
                yield stub
        finally:
            await rpc.stop(0)

    async def refusal(self, message: inference_pb2.GenerateRequest) -> tuple[grpc.StatusCode, str]:
        """The status and the message with which gRPC ends the call."""
        async with self.inference() as inference:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in inference.Generate(message, timeout=30):
                    pass
        return caught.value.code(), caught.value.details() or ""

    async def post(self, path: str, body: object) -> httpx2.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        async with self._http() as client:
            return await client.post(path, content=data, headers=headers)

    async def get(self, path: str) -> httpx2.Response:
        async with self._http() as client:
            return await client.get(path)

    def app(self) -> FastAPI:
        """Its HTTP endpoints."""
        return create_app(self.table, self._tenants, lambda: "", lambda: b"")

    def _http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app()), base_url="http://baton")


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    loaded = Tokenizer.load(model_dir)
    assert loaded.vocab_size == VOCABULARY
    return loaded


@pytest.fixture
def router(tokenizer: Tokenizer) -> Iterator[Router]:
    found = Router(tokenizer)
    yield found
    found.close()


def asked(**fields: Any) -> inference_pb2.GenerateRequest:
    """A request; `sampling` and the objectives are given as plain dicts."""
    kinds: dict[str, Any] = {"sampling": inference_pb2.SamplingParams, "slo": inference_pb2.ServiceLevelObjective}
    return inference_pb2.GenerateRequest(
        **{name: kinds[name](**value) if name in kinds else value for name, value in fields.items()}
    )


def ids(*token_ids: int) -> inference_pb2.TokenIds:
    return inference_pb2.TokenIds(ids=token_ids)


def chat(*messages: tuple[str, str]) -> inference_pb2.ChatInput:
    return inference_pb2.ChatInput(
        messages=[inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    )


INVALID = {
    "no input": (asked(), "no input"),
    "empty text": (asked(text=""), "empty"),
    "empty chat": (asked(chat=chat()), "message"),
    "empty ids": (asked(token_ids=ids()), "empty"),
    "too long": (asked(token_ids=ids(*[5] * 9000)), "shorten"),
    "no room": (asked(token_ids=ids(*[5] * 8000), sampling={"max_tokens": 400}), "lower max_tokens"),
    "unknown model": (asked(text="a", model="gpt-4"), "does not exist"),
    "unknown role": (asked(chat=chat(("wizard", "hi"))), "role"),
    "ids out of range": (asked(token_ids=ids(VOCABULARY)), "vocabulary"),
    "negative max_tokens": (asked(text="a", sampling={"max_tokens": -1}), "max_tokens must be at least 1"),
    "zero max_tokens": (asked(text="a", sampling={"max_tokens": 0}), "max_tokens must be at least 1"),
    "temperature": (asked(text="a", sampling={"temperature": 100.0}), "temperature"),
    "negative temperature": (asked(text="a", sampling={"temperature": -0.1}), "temperature"),
    "nan temperature": (asked(text="a", sampling={"temperature": float("nan")}), "temperature"),
    "top_p": (asked(text="a", sampling={"top_p": 0.0}), "top_p"),
    "top_k": (asked(text="a", sampling={"top_k": -7}), "top_k"),
    "min_p": (asked(text="a", sampling={"min_p": 2.0}), "min_p"),
    "n": (asked(text="a", sampling={"n": 1000}), "sampling.n"),
    "empty stop": (asked(text="a", sampling={"stop": [""]}), "stop"),
    "stop id": (asked(text="a", sampling={"stop_token_ids": [99999]}), "stop_token_ids"),
    "priority": (asked(text="a", priority=1), "priority must be at most 0"),
    "no time": (asked(text="a", slo={"ttft_ms": 0}), "slo.ttft_ms must be a positive"),
    "nan": (asked(text="a", slo={"itl_ms": float("nan")}), "slo.itl_ms must be a posi"),
    "millions of ids": (asked(token_ids=ids(*[5] * 2_000_000)), "a field of more than 1048576 numbers"),
    "a million ids": (asked(token_ids=ids(*[5] * 1_000_000)), "the prompt has 1000000 tokens"),
    "many messages": (
        asked(chat=chat(*[("user", "a")] * 3000)),
        "messages must have 1 to 1024 elements, got 3000",
    ),
    "very many messages": (asked(chat=chat(*[("user", "a")] * 5000)), "messages has 5000 items; send at most 4096"),
    "many bad words": (
        asked(text="a", sampling={"bad_word_ids": [ids(*[5] * 100)] * 50}),
        "bad_word_ids has 5000 items; send at most 4096",
    ),
    "many stop ids": (asked(text="a", sampling={"stop_token_ids": [5] * 5000}), "stop_token_ids has 5000 items"),
    "many choices to resume": (
        asked(text="a", request_id="r", resume_from=dict.fromkeys(range(5000), 1)),
        "resume_from has 5000 items",
    ),
    "nothing to resume": (asked(text="a", resume_from={0: 3}), "resume_from continues the request of a request_id"),
}


@pytest.mark.parametrize(("message", "part_of_sentence"), INVALID.values(), ids=INVALID)
async def test_a_bad_request_is_refused_with_a_sentence_and_no_worker_hears_of_it(
    router: Router, message: inference_pb2.GenerateRequest, part_of_sentence: str
) -> None:
    code, sentence = await router.refusal(message)
    is_unknown = part_of_sentence == "does not exist"
    assert code is (grpc.StatusCode.NOT_FOUND if is_unknown else grpc.StatusCode.INVALID_ARGUMENT)
    assert part_of_sentence in sentence
    assert router.driver.num_asked == 0


@pytest.mark.parametrize("place", ["", "sampling.", "chat.messages[0]."])
async def test_a_field_of_a_newer_release_is_refused_by_number(router: Router, place: str) -> None:
    message = asked(chat=chat(("user", "hello")))
    places = {"": message, "sampling.": message.sampling, "chat.messages[0].": message.chat.messages[0]}
    places[place].MergeFromString(b"\x98\x06\x01")
    code, sentence = await router.refusal(message)
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert re.search(rf"has a field {re.escape(place)}99 that this release does not", sentence)
    assert router.driver.num_asked == 0


WHOLE = (0, 1, 2, 5, 16, 17, 300, 49151, 49152, 2**31 - 1, 2**32 - 1, 2**63 - 1, -1, -5, -(2**31), -(2**63))
FRACTIONS = (0.0, 1.0, 0.5, 0.95, 2.0, -0.5, 10.0, 101.0, 1e-30, 1e38, float("nan"), float("inf"), -float("inf"))
TEXTS = (
    "", "a", "in", "\n", "é", "(", "[a-z]{2,4}", "true", "never", "x" * 300, "\0", MODEL, "{", '{"type": "object"}',
    '{"$ref": "#"}', '{"oneOf": [{"type": "string"}, {"type": "string"}]}', 'start: "a" start | "b"', 'root ::= "a"',
)  # fmt: skip


def message_of(descriptor: Descriptor, draw: random.Random, message: Message, most: int) -> None:
    """Sets a few fields of a message, each to something that is on an edge of what it may be."""
    for field in draw.sample(list(descriptor.fields), draw.randint(1, min(most, len(descriptor.fields)))):
        number = draw.randint(1, 3) if field.is_repeated else 1
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _, value = field.message_type.fields
            for _ in range(number):
                getattr(message, field.name)[abs(draw.choice(WHOLE)) % 2**32] = scalar_of(value, draw)
        elif field.message_type is not None:
            for _ in range(number):
                into = getattr(message, field.name)
                into = into.add() if field.is_repeated else into
                into.SetInParent()
                message_of(field.message_type, draw, into, most)
        elif field.is_repeated:
            getattr(message, field.name).extend(scalar_of(field, draw) for _ in range(number))
        else:
            setattr(message, field.name, scalar_of(field, draw))


def scalar_of(field: FieldDescriptor, draw: random.Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return draw.choice((b"", b"GIF89a", b"\x89PNG\r\n\x1a\n" + bytes(100), b"no image"))
        case FieldDescriptor.CPPTYPE_STRING:
            return draw.choice(TEXTS)
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return draw.choice(FRACTIONS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return draw.random() < 0.5
    lowest, bits = {
        FieldDescriptor.CPPTYPE_INT32: (-(2**31), 31), FieldDescriptor.CPPTYPE_INT64: (-(2**63), 63),
        FieldDescriptor.CPPTYPE_UINT32: (0, 32), FieldDescriptor.CPPTYPE_UINT64: (0, 64),
    }[field.cpp_type]  # fmt: skip
    return draw.choice([number for number in WHOLE if lowest <= number < 2**bits])


PER_ROUND = 60
ANSWERS = {
    grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND,
}  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
async def test_whatever_a_client_sends_is_served_or_refused_by_name(tokenizer: Tokenizer, seed: int) -> None:
    """Every field of the contract: no INTERNAL, nothing that hangs, and a sentence with each refusal."""
    router, codes, draw = Router(tokenizer), list[grpc.StatusCode](), random.Random(seed)
    try:
        async with router.inference() as inference:
            for _ in range(PER_ROUND):
                message = asked(text="a")
                if draw.random() < 0.3:
                    message_of(message.DESCRIPTOR, draw, message, 4)
                message_of(message.sampling.DESCRIPTOR, draw, message.sampling, 3)
                call = inference.Generate(message, timeout=30)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in call:
                        pass
                code, sentence = await call.code(), await call.details()
                assert code in ANSWERS, f"{code} {sentence}: {message}"
                assert code is grpc.StatusCode.OK or sentence, message
                codes.append(code)
    finally:
        router.close()
    assert codes.count(grpc.StatusCode.OK) > PER_ROUND / 20


async def test_a_call_is_taken_over_from_the_task_that_awaits_it_not_from_the_one_that_did(
    tokenizer: Tokenizer,
) -> None:
    """An HTTP stream's first chunk is awaited by another task than the rest."""
    async with contextlib.AsyncExitStack() as closing:
        router = Router(tokenizer, TwoTokens())
        closing.callback(router.close)
        request = GenerateRequest(prompt=Text("a"), request_id="r", sampling={"max_tokens": 9})
        chunks = router.service.generate(request)
        closing.push_async_callback(chunks.aclose)
        assert (await anext(chunks)).token_ids == (5,)

        async def rest() -> list[GenerateChunk]:
            return [chunk async for chunk in chunks]

        reading = asyncio.create_task(rest())
        for _ in range(10):
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            again = router.service.generate(replace(request, resume_from={0: 1}))
            closing.push_async_callback(again.aclose)
            assert (await anext(again)).token_ids == (6,)
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_a_router_that_stops_ends_what_it_has(tokenizer: Tokenizer) -> None:
    """One request waits for a token, one for its client to read, and one comes later."""
    async with contextlib.AsyncExitStack() as closing:
        router = Router(tokenizer, TwoTokens())
        closing.callback(router.close)
        table = ModelTable(router.front)
        table.put(Release(content_id="content", name=MODEL, release="", share=1.0, service=router.service))

        def generating(request_id: str) -> AsyncGenerator[GenerateChunk]:
            request = GenerateRequest(prompt=Text("a"), request_id=request_id, sampling={"max_tokens": 9})
            chunks = router.service.generate(request)
            closing.push_async_callback(chunks.aclose)
            return chunks

        async def third_token() -> int:
            chunks, task = generating("waits"), asyncio.current_task()
            assert task is not None
            assert [(await anext(chunks)).token_ids for _ in range(2)] == [(5,), (6,)]
            with pytest.raises(RouterStopping):
                await anext(chunks)
            return task.cancelling()

        reading, paused = asyncio.create_task(third_token()), generating("is not read")
        assert (await anext(paused)).token_ids == (5,)
        await until(lambda: router.limiter.num_in_flight == 2)
        for _ in range(10):
            await asyncio.sleep(0)
        table.stop_requests()
        async with asyncio.timeout(30):
            assert await reading == 0, "the task counts as cancelled"
            for chunks in (paused, generating("comes later")):
                with pytest.raises(RouterStopping):
                    await anext(chunks)
        assert router.limiter.num_in_flight == 0


async def test_a_good_request_is_passed_on(router: Router) -> None:
    async with router.inference() as inference:
        tokens = [token async for part in inference.Generate(asked(text="a"), timeout=30) for token in part.token_ids]
    assert (tokens, router.driver.num_asked) == ([5], 1)


COMPLETION = {"prompt": "hi", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
BODIES: list[tuple[str, object, int]] = [
    ("/v1/completions", {**COMPLETION, "n": 2, "top_k": 2**32}, 200),
    ("/v1/completions", {**COMPLETION, "stream": None, "model": None, "logprobs": None, "audio": None}, 200),
    ("/v1/chat/completions", {**CHAT, "verbosity": None, "logprobs": False, "tools": None, "user": "me"}, 200),
    ("/v1/chat/completions", {**CHAT, "skip_special_tokens": True, "frequency_penalty": 0.0}, 200),
    (
        "/v1/completions",
        {**COMPLETION, "priority": -3, "slo": {"ttft_ms": 9000, "itl_ms": 500.5, "e2e_ms": 1e5}},
        200,
    ),
    ("/v1/chat/completions", {**CHAT, "priority": 0, "slo": {}}, 200),
    ("/v1/chat/completions", {**CHAT, "slo": None}, 200),
    ("/v1/chat/completions", {**CHAT, "stream_options": {"continuous_usage_stats": True}}, 200),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"5": 1, "4": -0.5}, "min_tokens": 2, "bad_words": ["x"]}, 200),
    ("/v1/completions", {**COMPLETION, "bad_word_ids": [[1, 2], [3]], "allowed_token_ids": [5], "typical_p": 1}, 200),
    ("/v1/chat/completions", {**CHAT, "logit_bias": {}, "bad_words": [], "dry_sequence_breakers": []}, 200),
    ("/v1/completions", {**COMPLETION, "dry_multiplier": 1, "dry_range": 2**31 - 1, "xtc_probability": 1}, 200),
    ("/v1/completions", {**COMPLETION, "dry_multiplier": 1, "dry_range": 2**31}, 400),
    ("/v1/completions", {**COMPLETION, "dry_multiplier": 1, "dry_allowed_length": 2**31}, 400),
    ("/v1/completions", {**COMPLETION, "min_tokens": 3}, 400),
    ("/v1/completions", {**COMPLETION, "min_tokens": 2**31, "max_tokens": None}, 400),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"-1": 1}}, 400),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"\u0665": 1}}, 400),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"4.0": 1}}, 400),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"9" * 5000: 1}}, 400),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"1000000": 1}}, 400),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"1": 1, "01": 2}}, 400),
    ("/v1/completions", {**COMPLETION, "logit_bias": [1]}, 400),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"": 1}}, 400),
    ("/v1/completions", {**COMPLETION, "": 1}, 400),
    ("/v1/completions", {**COMPLETION, "slo": {"": 1}}, 400),
    ("/v1/completions", {**COMPLETION, "structured_outputs": {"regex": "a", "": 1}}, 400),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "hi", "": 1}]}, 400),
    ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"": 1}}, 200),
    *(
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}, **odd}]}, status)
        for odd, status in (
            ({}, 200),
            ({"": 1}, 400),
            ({"function": {"name": "f", "": 1}}, 400),
            ({"function": {"name": "f", "\ud800": 1}}, 400),
        )
    ),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"4": "1"}}, 400),
    ("/v1/completions", {**COMPLETION, "allowed_token_ids": [2**32]}, 400),
    ("/v1/completions", {**COMPLETION, "allowed_token_ids": [-1]}, 400),
    ("/v1/completions", {**COMPLETION, "bad_word_ids": [[]]}, 400),
    ("/v1/completions", {**COMPLETION, "bad_word_ids": [[10**7]]}, 400),
    ("/v1/completions", {**COMPLETION, "bad_words": ["\ud800"]}, 400),
    ("/v1/completions", {**COMPLETION, "bad_words": [""]}, 400),
    ("/v1/completions", {**COMPLETION, "presence_penalty": 1e999}, 400),
    ("/v1/completions", {**COMPLETION, "skip_special_tokens": 1}, 400),
    ("/v1/completions", {**COMPLETION, "priority": 1}, 400),
    ("/v1/completions", {**COMPLETION, "priority": 2**40}, 400),
    ("/v1/completions", {**COMPLETION, "priority": -(2**40)}, 400),
    ("/v1/completions", {**COMPLETION, "priority": "urgent"}, 400),
    ("/v1/completions", {**COMPLETION, "slo": {"ttft_ms": 0}}, 400),
    ("/v1/completions", {**COMPLETION, "slo": {"itl_ms": -1}}, 400),
    ("/v1/completions", {**COMPLETION, "slo": {"ttft": 10}}, 400),
    ("/v1/completions", {**COMPLETION, "structured_outputs": {"regex": "a+"}, "thinking_budget": None}, 200),
    ("/v1/completions", {**COMPLETION, "structured_outputs": {"regex": "("}}, 400),
    ("/v1/completions", {**COMPLETION, "structured_outputs": {"json": "{"}}, 400),
    ("/v1/completions", {**COMPLETION, "structured_outputs": {"regex": "a"}, "ignore_eos": True}, 400),
    ("/v1/completions", {**COMPLETION, "structured_outputs": {"choice": ["\ud800"]}}, 400),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, 200),
    ("/v1/chat/completions", {**CHAT, "thinking_budget": 4, "reasoning_end_ids": [4, 5]}, 200),
    ("/v1/chat/completions", {**CHAT, "thinking_budget": 4}, 400),
    ("/v1/chat/completions", {**CHAT, "reasoning_end_ids": [10**7]}, 400),
    ("/v1/completions", {**COMPLETION, "n": 2, "best_of": 1}, 400),
    ("/v1/completions", {**COMPLETION, "best_of": 17}, 400),
    ("/v1/completions", {**COMPLETION, "best_of": 2, "stream": True}, 400),
    ("/v1/completions", {**COMPLETION, "best_of": 1, "n": 1}, 200),
    ("/v1/completions", {**COMPLETION, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}, 200),
    ("/v1/completions", {**COMPLETION, "beam_width": 4}, 400),
    ("/v1/completions", {**COMPLETION, "length_penalty": 2.0}, 400),
    ("/v1/completions", {**COMPLETION, "early_stopping": "never"}, 400),
    ("/v1/completions", {**COMPLETION, "use_beam_search": True, "beam_width": 17}, 400),
    ("/v1/completions", {**COMPLETION, "use_beam_search": True, "n": 3, "beam_width": 2}, 400),
    ("/v1/completions", {**COMPLETION, "use_beam_search": True, "length_penalty": 1e999}, 400),
    ("/v1/completions", {**COMPLETION, "use_beam_search": True, "temperature": 0.7}, 400),
    ("/v1/completions", {**COMPLETION, "use_beam_search": True, "top_p": 0.9}, 400),
    ("/v1/completions", {**COMPLETION, "use_beam_search": True, "stop": "a"}, 400),
    ("/v1/completions", {**COMPLETION, "use_beam_search": True, "best_of": 2}, 400),
    ("/v1/completions", {**COMPLETION, "use_beam_search": True, "stream": True}, 400),
    ("/v1/chat/completions", {**CHAT, "use_beam_search": True, "early_stopping": "soon"}, 400),
    ("/v1/completions", {**COMPLETION, "logprobs": 0}, 200),
    ("/v1/completions", {**COMPLETION, "logprobs": True}, 400),
    ("/v1/completions", {**COMPLETION, "logprobs": 21}, 400),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 20}, 200),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": -1}, 400),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, 400),
    ("/v1/chat/completions", {**CHAT, "logprobs": 1}, 400),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400),
    ("/v1/completions", {**COMPLETION, "n": 2, "request_id": "\ud800"}, 400),
    ("/v1/completions", {**COMPLETION, "request_id": "x" * 1000}, 400),
    ("/v1/completions", {**COMPLETION, "temprature": 1}, 400),
    ("/v1/completions", {**COMPLETION, "model": "x" * 100_000}, 404),
    ("/v1/completions", {"prompt": []}, 400),
    ("/v1/completions", {"prompt": [[1, 2], "a"]}, 400),
    ("/v1/completions", {"prompt": [10**30]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "\ud800": 1}]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, 400),
    ("/v1/chat/completions", {"messages": "hi"}, 400),
    ("/v1/chat/completions", b"{", 400),
    ("/v1/chat/completions", b" " * (9 * 2**20), 413),
    ("/detokenize", {"tokens": [-1]}, 400),
    ("/detokenize", {"tokens": [2**33]}, 400),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 0}, 400),
]


@pytest.mark.parametrize(("path", "body", "status"), BODIES)
async def test_an_odd_body_gets_an_answer_of_openais_shape_and_no_worker_hears_of_a_bad_one(
    router: Router, path: str, body: object, status: int
) -> None:
    response = await router.post(path, body)
    assert response.status_code == status, response.text
    assert router.driver.num_asked == (status == 200)
    if status != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]


async def test_a_slot_is_free_when_the_last_token_is_computed_whenever_it_is_read(tokenizer: Tokenizer) -> None:
    router = Router(tokenizer, ManyTokens(ends=True))
    async with router.inference() as inference, asyncio.timeout(60):
        message = asked(text="a", sampling={"max_tokens": ManyTokens.NUM})
        calls = [inference.Generate(message) for _ in range(2)]
        await until(lambda: router.limiter.num_in_flight == 2)
        await until(lambda: router.limiter.num_in_flight == 0)
        for call in calls:
            token_ids = [token_id async for chunk in call for token_id in chunk.token_ids]
            assert token_ids == [5] * ManyTokens.NUM
    router.close()


async def test_a_client_that_does_not_read_is_ended(tokenizer: Tokenizer) -> None:
    router = Router(tokenizer, ManyTokens(ends=False))
    async with router.inference(stall_s=0.5) as inference, asyncio.timeout(60):
        call = inference.Generate(asked(text="a", sampling={"max_tokens": ManyTokens.NUM + 1}))
        await until(lambda: router.limiter.num_in_flight == 1)
        await until(lambda: router.limiter.num_in_flight == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "has not read for 0.5 s" in (caught.value.details() or "")
    router.close()


def is_crowded(router: Router) -> None:
    """Has the router refuse a request for want of places."""
    most = router.limiter.max_in_flight
    with router.limiter.slot("all", most), contextlib.suppress(Overloaded), router.limiter.slot("one more", 1):
        raise AssertionError("admitted")


@pytest.mark.parametrize("crowded", ["as one was refused", "as one waits", ""])
async def test_a_client_that_does_not_read_is_seen_after_few_tokens_where_others_are_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, crowded: str
) -> None:
    monkeypatch.setattr(delivery, "LOOK_S", 0.05)
    monkeypatch.setattr(delivery, "CROWDED_STALL_S", 0.2)
    router = Router(tokenizer, ManyTokens(ends=False, num=40))
    if crowded == "as one was refused":
        is_crowded(router)
    router.driver.is_crowded = crowded == "as one waits"
    async with router.inference() as inference, asyncio.timeout(60):
        call = inference.Generate(asked(text="a", sampling={"max_tokens": 41}))
        await until(lambda: router.limiter.num_in_flight == 1)
        if not crowded:
            await asyncio.sleep(1.0)
            assert router.limiter.num_in_flight == 1, "so few tokens are taken by gRPC"
            return
        await until(lambda: router.limiter.num_in_flight == 0)
        with pytest.raises(grpc.aio.AioRpcError, match="other requests wait for its slot"):
            async for _ in call:
                pass
    router.close()


async def test_a_client_that_reads_gets_the_same_answer_where_others_are_refused(tokenizer: Tokenizer) -> None:
    router = Router(tokenizer, ManyTokens(ends=True, num=40))
    is_crowded(router)
    async with router.inference() as inference, asyncio.timeout(60):
        chunks = [chunk async for chunk in inference.Generate(asked(text="a", sampling={"max_tokens": 40}))]
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == [5] * 40
    assert GRPC.num_bytes < sum(chunk.ByteSize() for chunk in chunks) < 2 * GRPC.num_bytes
    router.close()


@pytest.mark.parametrize("side", ["left", "right"])
async def test_ids_that_are_to_be_cut_may_be_many_and_few_are_copied(router: Router, side: str) -> None:
    kept = [7] * 10
    others = [5] * 1_000_000
    token_ids = others + kept if side == "left" else kept + others
    message = asked(token_ids=ids(*token_ids), truncate_prompt_tokens=10, truncation_side=side)
    read = generate_request_from_pb(message, 8191)
    assert isinstance(read.prompt, TokenIds)
    assert len(read.prompt.ids) == 8191
    async with router.inference() as inference:
        chunks = [chunk async for chunk in inference.Generate(message)]
    assert chunks[-1].usage.prompt_tokens == 10


COMPLETIONS: dict[str, tuple[dict[str, Any], str]] = {
    "millions of ids": ({"prompt": [5] * 2_000_000}, "more than 1048576 values"),
    "a million ids": ({"prompt": [5] * 1_000_000}, "the prompt has 1000000 tokens"),
    "several": ({"prompt": [[5], [5] * 20_000]}, "the prompt has 20000 tokens"),
    "prompts": ({"prompt": [[5]] * 10_000}, "prompt holds 10000 prompts"),
    "lists": ({"prompt": [[]] * 200_000}, "objects and lists"),
}


@pytest.mark.parametrize(("body", "part_of_sentence"), COMPLETIONS.values(), ids=COMPLETIONS)
async def test_what_is_too_much_is_refused_by_its_number(
    router: Router, body: dict[str, Any], part_of_sentence: str
) -> None:
    answer = await router.post("/v1/completions", body)
    assert (answer.status_code, router.driver.num_asked) == (400, 0)
    assert part_of_sentence in answer.json()["error"]["message"]


async def test_many_messages_are_refused_by_their_number(router: Router) -> None:
    body = {"messages": [{"role": "user", "content": "a"}] * 10_000}
    answer = await router.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert "at most 4096 items after validation, not 10000" in answer.json()["error"]["message"]
    answer = await router.post("/detokenize", {"tokens": [5] * 20_000})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": ["hi", "ho"], "max_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_whole_answers_of_every_api_say_where_the_time_went(
    router: Router, path: str, prompt: dict[str, Any]
) -> None:
    """A stream's header leaves before its times are known."""
    whole, stream = [await router.post(path, {**prompt, "model": MODEL, "stream": yes}) for yes in (False, True)]
    assert (whole.status_code, stream.status_code) == (200, 200)
    assert re.match(r"total;dur=\d+\.\d, first_token;dur=\d+\.\d", whole.headers["server-timing"])
    assert "server-timing" not in stream.headers


async def test_a_prompt_whose_images_a_worker_must_see_counts_as_in_flight(router: Router) -> None:
    """The entry of its model would be closed otherwise while it waits for a worker, and it would wait in vain."""
    chat = Chat(messages=(ChatMessage(role="user", content="look", parts=("look", b"picture")),))
    counted = asyncio.create_task(router.service.tokenize(chat, DEFAULT_TENANT))
    await until(lambda: router.slo_counts.in_flight)
    await asyncio.sleep(0.02)
    assert router.slo_counts.in_flight == 1
    await cancel_and_wait([counted])
    assert router.slo_counts.in_flight == 0
