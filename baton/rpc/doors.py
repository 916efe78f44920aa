"""The door of a process that takes calls of other members: it sees each call's proof before its message is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import grpc

from baton.errors import NotAMember
from baton.rpc.errors import abort
from baton.trust import KeyFile, Principal, ProofBook, prove
from baton.trust.proofs import PROOF_KEY


class MemberDoor(grpc.aio.ServerInterceptor):
    """Refuses calls of services that only members may call, unless their proof is right.

    Args:
        book: checks the proofs.
        allowed: the members that may call a service, by its full name. Other services are open.
    """

    def __init__(self, book: ProofBook, allowed: Mapping[str, Collection[Principal]]) -> None:
        self._book = book
        self._allowed = {f"/{service}/": members for service, members in allowed.items()}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        service = details.method[: details.method.rfind("/") + 1]
        if (members := self._allowed.get(service)) is not None:
            proof: Any = next((value for name, value in details.invocation_metadata or () if name == PROOF_KEY), b"")
            try:
                self._book.check(proof if isinstance(proof, bytes) else b"", details.method, members)
            except NotAMember as error:
                return _refusal(error)
        return await continuation(details)


def _refusal(error: NotAMember) -> Any:
    """Returns a handler that reads no message and ends the call with the error."""

    async def refuse(_: Any, context: Any) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def member_metadata(key_file: KeyFile | None, method: str, callee: str) -> tuple[tuple[str, bytes], ...]:
    """Returns the metadata of a call to another member: a new proof, or none where the cluster has no secret.

    Args:
        method: the full name, as gRPC has it: `/package.Service/Method`.
        callee: the incarnation of the process that is called.
    """
    return () if key_file is None else ((PROOF_KEY, prove(key_file.keys, method, callee)),)
