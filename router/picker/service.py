"""The server of the endpoint picker: ext_proc and health checks over TLS, for gateways."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from baton.config import Config
from baton.errors import Overloaded
from baton.rpc import RpcServer
from baton.rpc.errors import CallContext
from baton.rpc.server import CLIENTS_PING_TIMEOUT_S, ClientLimits
from baton.tls import Tls
from router.api.exchange import MAX_BODY_BYTES
from router.picker import wire
from router.picker.exchange import MAX_HELD_BYTES, BodyMemory, Chooser, Exchange, Sources
from router.picker.v3 import external_processor_pb2_grpc

SERVICE_NAME = "envoy.service.ext_proc.v3.ExternalProcessor"
READINESS, LIVENESS = "readiness", "liveness"
"""Names for health checks, as the endpoint picker protocol defines them."""
MAX_STREAMS = 8192
"""Maximum number of streams. Each HTTP request of a gateway has one, until its response is complete."""
MAX_MESSAGE_BYTES = MAX_BODY_BYTES + 2**18
"""Maximum size of a message: a buffered body comes in one."""
OWN_NAME = "baton-endpoint-picker"
"""Name in a certificate that the picker makes itself."""
_VALID = datetime.timedelta(days=3650)


class Picker(external_processor_pb2_grpc.ExternalProcessorServicer):
    """The endpoint picker of a router, with its server.

    Bind it, then start it. It reports itself ready after `set_serving`.

    Args:
        sources: queries to the router.
    """

    def __init__(self, config: Config, sources: Sources) -> None:
        self._stall_s = config.router.stall_s
        self._chooser, self._memory = Chooser(sources), BodyMemory(MAX_HELD_BYTES)
        self._num_streams = 0
        self._rpc = RpcServer(
            (SERVICE_NAME, READINESS),
            shares_port=config.cluster.routers > 1,
            max_connection_age_s=config.router.max_connection_age_s,
            max_message_bytes=MAX_MESSAGE_BYTES,
            clients=ClientLimits(config.router.max_connections, config.router.max_streams_per_client),
            ping_timeout_s=CLIENTS_PING_TIMEOUT_S,
            describes_itself=False,
        )
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(self, self._rpc.server)

    def bind(self, host: str, port: int, tls: Tls | None) -> int:
        """Bind and return the port (0 asks for a free one).

        Args:
            tls: the router's certificates; None: the picker makes a certificate of its own. Gateways expect TLS, and
                do not check the certificate.

        Raises:
            ConfigError: the port is in use or the host does not belong to this machine.
        """
        return self._rpc.bind(host, port, tls or SelfSigned.make())

    async def start(self) -> None:
        """Start to answer gateways."""
        await self._rpc.start()
        await self._rpc.set_serving(True, (LIVENESS,))

    async def set_serving(self, serving: bool) -> None:
        """Report to health checks whether requests can be served."""
        await self._rpc.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Accept no more streams, give running ones `grace_s` seconds, then cancel them."""
        await self._rpc.stop(grace_s)

    async def Process(self, _: object, context: CallContext) -> None:  # type: ignore[override]  # noqa: N802
        """Serve the stream of one HTTP request: gRPC lets a coroutine read and write the messages itself."""
        if self._num_streams >= MAX_STREAMS:
            await context.write(wire.refusal(Overloaded("the endpoint picker has too many streams; try again later")))
            return
        self._num_streams += 1
        try:
            await Exchange(context, self._chooser, self._memory, self._stall_s).run()
        finally:
            self._num_streams -= 1


@dataclass(frozen=True, slots=True)
class SelfSigned:
    """A certificate without an authority, for clients that only need encryption."""

    certificate: bytes
    key: bytes

    @staticmethod
    def make() -> SelfSigned:
        """Return a new certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, OWN_NAME)])
        now = datetime.datetime.now(datetime.UTC)
        made = x509.CertificateBuilder(
            subject_name=name,
            issuer_name=name,
            public_key=key.public_key(),
            serial_number=int.from_bytes(os.urandom(16)) >> 1,
            not_valid_before=now - datetime.timedelta(days=1),  # a gateway's clock may be behind
            not_valid_after=now + _VALID,
            extensions=[
                x509.Extension(
                    x509.SubjectAlternativeName.oid, False, x509.SubjectAlternativeName([x509.DNSName(OWN_NAME)])
                )
            ],
        ).sign(key, hashes.SHA256())
        return SelfSigned(
            made.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a gRPC server."""
        return grpc.ssl_server_credentials([(self.key, self.certificate)])
