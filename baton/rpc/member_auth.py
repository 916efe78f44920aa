"""Authorization of calls between members, which is checked before a message is read.

Any call without a matching rule is rejected. Only health checks need no proof.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from baton.errors import ConfigError, NotAMember
from baton.rpc.errors import refusal
from baton.tls import Tls
from baton.trust import KeyFile, Principal, ProofBook, prove
from baton.trust.proofs import PROOF_KEY

Rules = Mapping[str, frozenset[Principal]]
"""Members that may call a service, by its full name, or one of its methods, by `service/Method`."""
WORKERS_RULES: Rules = {
    "baton.v1.WorkerCalls": frozenset({Principal.ROUTER}),
    "baton.v1.WorkerControl": frozenset({Principal.CONTROLLER}),
    "baton.v1.WorkerLog": frozenset({Principal.ROUTER}),
    "baton.v1.ModelFiles": frozenset({Principal.ROUTER, Principal.CONTROLLER}),
    "baton.v1.KvControl": frozenset({Principal.WORKER}),
}
CONTROLLERS_RULES: Rules = {
    "baton.v1.Admin": frozenset({Principal.ROUTER}),
    "baton.v1.Admin/DrainWorker": frozenset({Principal.ROUTER, Principal.OPERATOR}),  # `baton leave`
    "baton.v1.ModelFiles": frozenset({Principal.ROUTER}),
}
OPEN_SERVICE = "grpc.health.v1.Health"
"""Public service of every process: probes learn only whether it serves."""


class MemberAuth(grpc.aio.ServerInterceptor):
    """Interceptor that rejects every call with an invalid proof, and every call of a service without a rule.

    Args:
        book: checks the proofs.
    """

    def __init__(self, book: ProofBook, rules: Rules) -> None:
        self._book = book
        self._rules = rules

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        method = details.method.strip("/")
        service = method.partition("/")[0]
        if service != OPEN_SERVICE:
            proof: Any = next((value for name, value in details.invocation_metadata or () if name == PROOF_KEY), b"")
            members = self._rules.get(method, self._rules.get(service, frozenset()))
            try:
                self._book.check(proof if isinstance(proof, bytes) else b"", details.method, members)
            except NotAMember as error:
                return refusal(error)
        return await continuation(details)


@dataclass(frozen=True, slots=True)
class MemberLink:
    """Credentials with which a member calls others."""

    keys: KeyFile | None
    """Keys that prove its identity; None: the cluster has no secret."""
    tls: Tls | None
    """Certificates that it presents and trusts; None: plain text."""


def member_auth(key_file: KeyFile | None, incarnation: str, rules: Rules) -> Sequence[grpc.aio.ServerInterceptor]:
    """Return the interceptors of a server that members call: none if the cluster has no secret.

    Args:
        incarnation: the random identity of this process, which callers know from its lease.
    """
    return () if key_file is None else (MemberAuth(ProofBook(key_file, incarnation), rules),)


def member_metadata(key_file: KeyFile | None, method: str, callee: str) -> tuple[tuple[str, bytes], ...]:
    """Return the metadata of a call to another member: a new proof, or none if the cluster has no secret.

    Args:
        method: the full name, as gRPC has it: `/package.Service/Method`.
        callee: the incarnation of the called process.
    """
    return () if key_file is None else ((PROOF_KEY, prove(key_file.keys, method, callee)),)


def require_keys(key_file: KeyFile | None, host: str, setting: str) -> None:
    """Raise ConfigError if other machines could reach a process without keys, which accepts all calls.

    Args:
        host: the name or address to listen on.
        setting: the name of the setting with that host.
    """
    if key_file is None and not is_loopback(host):
        raise ConfigError(
            "without cluster.secret (BATON_CLUSTER_SECRET) a process listens on loopback addresses only, and "
            f"{setting} is {host}; set cluster.secret to a file with the secret on each machine, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine can reach a server on that host."""
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host.strip("[]") or "0.0.0.0", None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found)
