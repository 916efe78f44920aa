"""A model's files from one process to another, and what a reader does with a process that sends anything else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.errors import BatonError, Conflict, NotAMember, Overloaded, WorkerFailed
from baton.rpc import channel, from_rpc_error, model_files
from baton.rpc.member_auth import CONTROLLERS_RULES, WORKERS_RULES, MemberLink, Rules
from baton.rpc.model_files import (
    MAX_READS,
    MAX_WAITING,
    METHOD,
    PIECE_BYTES,
    FileSource,
    ModelFilesServicer,
    read_model_files,
)
from baton.serving_files import MAX_FILES, ProvidedFiles, ServingFiles
from baton.trust import KeyFile, Principal, draw_secret, write_private
from baton.v1 import worker_pb2, worker_pb2_grpc
from tests.support.file_sources import FILES, INCARNATION, Hostile, Piece, only, serving
from tests.support.waiting import until


async def read(address: str, digest: str = FILES.digest, keys: KeyFile | None = None, **said: Any) -> ServingFiles:
    source = FileSource(address, address, said.pop("incarnation", INCARNATION))
    return await read_model_files(source, digest, link=MemberLink(keys, None), **said)


async def test_the_files_arrive_as_they_are() -> None:
    async with serving(ModelFilesServicer(only(FILES))) as address:
        assert (await read(address)).contents == FILES.contents
        with pytest.raises(Conflict, match="others"):
            await read(address, "0" * 64)


async def test_a_changed_folder_is_refused_and_not_served(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    provided = ProvidedFiles.of_model(str(tmp_path))
    async with serving(ModelFilesServicer(provided.read)) as address:
        assert (await read(address, provided.digest)).digest == provided.digest
        (tmp_path / "generation_config.json").write_text("{}")
        with pytest.raises(Conflict, match="have changed since this process started"):
            await read(address, provided.digest)


@pytest.mark.parametrize(
    ("rules", "allowed"),
    [(WORKERS_RULES, {Principal.ROUTER, Principal.CONTROLLER}), (CONTROLLERS_RULES, {Principal.ROUTER})],
)
async def test_only_members_that_need_them_get_them(tmp_path: Path, rules: Rules, allowed: set[Principal]) -> None:
    secret = tmp_path / "secret"
    write_private(secret, draw_secret())
    got = set()
    async with serving(ModelFilesServicer(only(FILES)), KeyFile(secret, Principal.WORKER), rules) as address:
        for member in Principal:
            with contextlib.suppress(WorkerFailed):
                assert (await read(address, keys=KeyFile(secret, member))).digest == FILES.digest
                got.add(member)
        assert got == allowed
        for said in (
            {"keys": KeyFile(secret, Principal.OPERATOR)},
            {"keys": KeyFile(secret, Principal.ROUTER), "incarnation": "b2"},
        ):
            with pytest.raises(WorkerFailed, match=r"does not provide the model's files: .*/baton\.v1\.") as caught:
                await read(address, **said)
            assert not isinstance(caught.value, NotAMember), "a client must not see it as a refusal of its own call"


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        ([Piece(name="../x", piece=b"1")], "'../x' is no name of a model's file"),
        ([Piece(name="", piece=b"1")], "'' is no name of a model's file"),
        ([Piece(name="b", piece=b"1"), Piece(name="a", piece=b"1")], "a comes after b"),
        ([Piece(name="a"), Piece(name="b"), Piece(name="a")], "a comes after b"),
        ([Piece(name="a", piece=b"1"), Piece(name="a")], "a later piece of 'a' is empty"),
        ([Piece(name=f"f{i:02}") for i in range(MAX_FILES + 1)], f"at most {MAX_FILES} files"),
        ([Piece(name="a", piece=bytes(3 * PIECE_BYTES))], "RESOURCE_EXHAUSTED"),
        ([Piece(name="config.json", piece=b"{}")], f"their digest is .*, and not {FILES.digest[:12]}$"),
        ([], "their digest is"),
    ],
)
async def test_what_is_not_the_announced_set_is_refused(sent: list[Piece], complaint: str) -> None:
    async with serving(Hostile(*sent)) as address:
        with pytest.raises(WorkerFailed, match=complaint):
            await read(address)


@pytest.mark.parametrize(
    "again",
    [
        lambda number: Piece(name="a", piece=bytes(PIECE_BYTES)),
        lambda number: Piece(name="a"),
        lambda number: Piece(name=f"f{number:020}"),
    ],
)
async def test_a_stream_without_an_end_is_left(again: Callable[[int], Piece]) -> None:
    hostile = Hostile(again=again)
    async with serving(hostile) as address:
        with pytest.raises(WorkerFailed, match="sends files that are refused"):
            await read(address, timeout_s=60)
        await asyncio.sleep(0.1)
        num_sent = hostile.num_sent
        await asyncio.sleep(0.1)
        assert hostile.num_sent == num_sent, "the call was cancelled"


async def test_who_sends_nothing_is_left_after_the_timeout() -> None:
    class Silent(worker_pb2_grpc.ModelFilesServicer):
        async def ReadModelFiles(self, request: Any, context: Any) -> AsyncIterator[Piece]:  # noqa: N802
            yield Piece(name="a", piece=b"1")
            await asyncio.sleep(60)

    begin = time.monotonic()
    async with serving(Silent()) as address:
        with pytest.raises(WorkerFailed, match="DEADLINE_EXCEEDED"):
            await read(address, timeout_s=0.3)
    with pytest.raises(WorkerFailed, match="does not provide the model's files"):
        await read(address, timeout_s=5)  # nobody listens there any more
    assert time.monotonic() - begin < 20


async def test_a_peer_may_say_nonsense_about_when_to_come_back() -> None:
    class Busy(worker_pb2_grpc.ModelFilesServicer):
        async def ReadModelFiles(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
            trailers = (("baton-error", "Overloaded"), ("retry-after", "soon"))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", trailers)

    async with serving(Busy()) as address:
        with pytest.raises(Overloaded, match="busy") as caught:
            await read(address)
    assert caught.value.retry_after_s == 1.0


@pytest.mark.parametrize("trailers", [(("baton-error", "InvalidRequest"),), (("baton-error", "Strange"),), ()])
async def test_no_other_error_of_a_peer_passes_as_ones_own(trailers: tuple[tuple[str, str], ...]) -> None:
    class Refusing(worker_pb2_grpc.ModelFilesServicer):
        async def ReadModelFiles(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "yours", trailers)

    async with serving(Refusing()) as address:
        with pytest.raises(WorkerFailed, match=rf"{address} does not provide the model's files: .*yours"):
            await read(address)


async def test_few_read_at_a_time_some_wait_and_others_come_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, running, most = threading.Event(), 0, 0
    lock = threading.Lock()

    def find(digest: str) -> ServingFiles:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        gate.wait(60)
        with lock:
            running -= 1
        return FILES

    monkeypatch.setattr(model_files, "MAX_WAITING", 3)
    async with serving(ModelFilesServicer(find)) as address:
        readers = [asyncio.create_task(read(address, timeout_s=60)) for _ in range(MAX_READS + 3 + 2)]
        await until(lambda: sum(each.done() for each in readers) == 2)
        gate.set()
        results = await asyncio.gather(*readers, return_exceptions=True)
        assert sum(isinstance(each, Overloaded) for each in results) == 2
        assert sum(isinstance(each, ServingFiles) for each in results) == MAX_READS + 3
        assert most == MAX_READS
        assert (await read(address)).digest == FILES.digest, "the places are free again"
    assert MAX_WAITING > 3


async def test_a_reader_that_takes_nothing_loses_its_place() -> None:
    large = ServingFiles({"a": bytes(64 * PIECE_BYTES)})  # more than the buffers between both take
    together = threading.Barrier(MAX_READS)

    def find(digest: str) -> ServingFiles:
        if digest == large.digest:
            return large
        together.wait(60)
        return FILES

    servicer = ModelFilesServicer(find, send_s=0.5)
    async with serving(servicer) as address, contextlib.AsyncExitStack() as stack:
        calls = []
        for _ in range(MAX_READS):
            link = await stack.enter_async_context(channel(address))
            stub: Any = worker_pb2_grpc.ModelFilesStub(link)
            calls.append(stub.ReadModelFiles(worker_pb2.ReadModelFilesRequest(digest=large.digest)))
            await calls[-1].read()
        later = await asyncio.gather(*(read(address, timeout_s=60) for _ in range(MAX_READS)))
        assert [each.digest for each in later] == [FILES.digest] * MAX_READS, "all have lost their places"

        async def drained(call: Any) -> BatonError:
            try:
                while await call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error, "the worker")
            raise AssertionError("it got all")

        for call in calls:
            assert "did not read the model's files within 0.5 s" in str(await drained(call))


def test_the_method_is_that_of_the_contract() -> None:
    service = worker_pb2.DESCRIPTOR.services_by_name["ModelFiles"]
    assert f"/{service.full_name}/{next(iter(service.methods_by_name))}" == METHOD
