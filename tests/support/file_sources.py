"""Processes that provide a model's files, and some that send anything else."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from baton.errors import Conflict
from baton.rpc import RpcServer
from baton.rpc.member_auth import WORKERS_RULES, Rules, member_auth
from baton.rpc.model_files import PIECE_BYTES
from baton.serving_files import ServingFiles
from baton.trust import KeyFile
from baton.v1 import worker_pb2, worker_pb2_grpc

INCARNATION = "a1"
FILES = ServingFiles({
    "config.json": b"{}",
    "empty.json": b"",
    "tokenizer.json": bytes(range(256)) * (3 * PIECE_BYTES // 256) + b"end",
})  # fmt: skip
Piece = worker_pb2.ReadModelFilesResponse


@contextlib.asynccontextmanager
async def serving(
    servicer: worker_pb2_grpc.ModelFilesServicer, keys: KeyFile | None = None, rules: Rules = WORKERS_RULES
) -> AsyncIterator[str]:
    rpc = RpcServer((), member_auth(keys, INCARNATION, rules), describes_itself=False)
    worker_pb2_grpc.add_ModelFilesServicer_to_server(servicer, rpc.server)
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await rpc.stop(0)


def only(files: ServingFiles) -> Callable[[str], ServingFiles]:
    def find(digest: str) -> ServingFiles:
        if digest != files.digest:
            raise Conflict("others")
        return files

    return find


class Hostile(worker_pb2_grpc.ModelFilesServicer):
    """Sends what it is given, and then sends it again for as long as somebody reads it."""

    def __init__(self, *pieces: Piece, again: Callable[[int], Piece] | None = None) -> None:
        self.pieces = pieces
        self.again = again
        self.num_sent = 0

    async def ReadModelFiles(self, request: Any, context: Any) -> AsyncIterator[Piece]:  # noqa: N802
        for piece in self.pieces:
            yield piece
        while self.again is not None:
            self.num_sent += 1
            yield self.again(self.num_sent)
