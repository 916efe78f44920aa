"""Transfer of a model's files (`baton.serving_files`) from a worker or the controller to a router, in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc

from baton.errors import Conflict, ModelLoadError, NotRead, Overloaded, WorkerFailed
from baton.rpc.errors import CallContext, from_rpc_error
from baton.rpc.member_auth import MemberLink, member_metadata
from baton.rpc.server import MEMBER_CHANNEL_OPTIONS, channel
from baton.serving_files import SHOWN_DIGITS, ServingFiles, check_bounds, check_name
from baton.v1 import worker_pb2, worker_pb2_grpc

METHOD = "/baton.v1.ModelFiles/ReadModelFiles"
PIECE_BYTES = 2**20
READ_S = 30.0
"""Time that a reader waits for all files, in seconds."""
SEND_S = 60.0
"""Time after which a reader that does not take the files is disconnected, in seconds."""
MAX_READS = 4
"""Maximum number of readers at a time; each holds the files in memory."""
MAX_WAITING = 64
"""Maximum number of readers that wait."""
OPTIONS = list((dict(MEMBER_CHANNEL_OPTIONS) | {"grpc.max_receive_message_length": 2 * PIECE_BYTES}).items())
REFUSALS = (Conflict, Overloaded)
"""Errors of a provider that its reader raises unchanged."""


class ModelFilesServicer(worker_pb2_grpc.ModelFilesServicer):
    """Sends files to a few readers at a time; others wait.

    Args:
        read: returns the files with a digest, such as `ProvidedFiles.read`; it runs in a thread. It raises Conflict if
            this process does not have them.
        send_s: see `SEND_S`.
    """

    def __init__(self, read: Callable[[str], ServingFiles], *, send_s: float = SEND_S) -> None:
        self._read = read
        self._send_s = send_s
        self._places = asyncio.Semaphore(MAX_READS)
        self._num_open = 0

    # It writes to the context instead of yielding, so that the time limit also covers writes that wait for the reader.
    async def ReadModelFiles(  # type: ignore[override]  # noqa: N802 - the generated name
        self, request: worker_pb2.ReadModelFilesRequest, context: CallContext
    ) -> None:
        if self._num_open >= MAX_READS + MAX_WAITING:
            raise Overloaded(
                f"this process already serves {self._num_open} readers of the model's files; try again later"
            )
        self._num_open += 1
        try:
            async with self._places:
                files = await asyncio.to_thread(self._read, request.digest)
                async with asyncio.timeout(self._send_s):
                    for piece in _pieces(files):
                        await context.write(piece)
        except TimeoutError:
            raise NotRead(f"the reader did not read the model's files within {self._send_s:g} s") from None
        finally:
            self._num_open -= 1


class FileSource(NamedTuple):
    """A process that provides a model's files."""

    name: str
    """Name for messages, such as a worker's label."""
    address: str
    """host:port of its gRPC server."""
    incarnation: str
    """Identity of the process, to which the proof of the call is bound."""


async def read_model_files(
    source: FileSource, digest: str, *, link: MemberLink, timeout_s: float = READ_S
) -> ServingFiles:
    """Read a model's files from a worker or a controller, verify them and return them.

    Raises:
        Conflict: it does not have files with this digest.
        Overloaded: too many others read them now.
        WorkerFailed: it cannot be reached, refuses the proof, takes too long, or sends other files or too many.
    """
    proof = member_metadata(link.keys, METHOD, source.incarnation)
    arriving = _Arriving()
    async with channel(source.address, link.tls, OPTIONS) as opened:
        stub: Any = worker_pb2_grpc.ModelFilesStub(opened)
        asked = worker_pb2.ReadModelFilesRequest(digest=digest)
        try:
            async for piece in stub.ReadModelFiles(asked, metadata=proof, timeout=timeout_s):
                arriving.add(piece.name, piece.piece)
            files = ServingFiles(arriving.contents())
        except grpc.aio.AioRpcError as error:
            if isinstance(why := from_rpc_error(error, source.name), REFUSALS):
                raise why from error
            raise WorkerFailed(f"{source.name} does not provide the model's files: {why}") from error
        except ModelLoadError as error:
            raise WorkerFailed(f"{source.name} sends files that are refused: {error}") from error
    if (found := await asyncio.to_thread(lambda: files.digest)) != digest:
        raise WorkerFailed(
            f"{source.name} sends other files than those announced: their digest is {found[:SHOWN_DIGITS]}, and not "
            f"{digest[:SHOWN_DIGITS]}"
        )
    return files


class _Arriving:
    """Files whose pieces arrive one after the other."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[bytes]] = {}
        self._latest: str | None = None
        self._num_bytes = 0

    def add(self, name: str, piece: bytes) -> None:
        """Add a piece of a file; raises ModelLoadError for one that is out of order or exceeds a limit."""
        if name != self._latest:
            check_name(name)
            if self._latest is not None and name < self._latest:
                raise ModelLoadError(f"{name} comes after {self._latest}")
            self._pieces[name] = []
            self._latest = name
        elif not piece:
            raise ModelLoadError(f"a later piece of {name!a} is empty")
        self._pieces[name].append(piece)
        self._num_bytes += len(piece)
        check_bounds(len(self._pieces), self._num_bytes)

    def contents(self) -> dict[str, bytes]:
        return {name: b"".join(pieces) for name, pieces in self._pieces.items()}


def _pieces(files: ServingFiles) -> Iterator[worker_pb2.ReadModelFilesResponse]:
    for name, content in sorted(files.contents.items()):
        for begin in range(0, max(len(content), 1), PIECE_BYTES):
            yield worker_pb2.ReadModelFilesResponse(name=name, piece=content[begin : begin + PIECE_BYTES])
