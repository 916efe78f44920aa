"""Certificates of a process, as PEM files that are read again when they change.

Every user of TLS gets it from here: the router's two endpoints, gRPC between members, Redis and the trace receiver.
Open connections stay as they are; new ones use the current contents of the files. Invalid or half-written files change
nothing: the contents that were read before stay in use.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.config import ClusterConfig, Config  # clients have no settings, and do not need it

logger = logging.getLogger(__name__)
_GRPC_NAMES = {
    "x509_common_name": "CN",
    "peer_dns": "DNS",
    "peer_uri": "URI",
    "peer_email": "email",
    "peer_ip": "IP",
}
_SSL_NAMES = {"DNS": "DNS", "URI": "URI", "email": "email", "IP Address": "IP"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """Paths of PEM files."""

    certificate: str
    """The certificate, followed by its intermediate certificates, if any. Empty: none, for clients."""
    key: str
    authorities: tuple[str, ...] = ()
    """Files with the authorities of the other side's certificates. Empty: the system's, or none for servers."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the files that are set."""
        return tuple(path for path in (self.certificate, self.key, *self.authorities) if path)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Certificates:
    """Contents of the files when they were read; compared by identity."""

    certificate: bytes
    key: bytes
    authorities: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext
    term_s: tuple[float, float]
    """Unix times between which the certificate is valid; (0, 0) if there is none."""


class Tls:
    """One identity, with its trusted authorities. Thread-safe.

    Args:
        name: DNS name that the certificate of every server must bear, whatever its address; empty: its host name.
        clients: whether clients must present a certificate: off, optional (HTTP asks for one, gRPC does not) or
            required (gRPC rejects clients without one; HTTP asks, and its application rejects them).

    Raises:
        ConfigError: a file cannot be read, or has invalid contents.
    """

    def __init__(self, files: CertificateFiles, *, name: str = "", clients: str = "off") -> None:
        self.name = name
        self.clients = clients
        self._files = files
        self._lock = threading.Lock()
        self._stamp = _stamp(files)
        self._now = _read(files, clients)

    def now(self) -> Certificates:
        """Return the contents of the files, or their last valid contents."""
        with self._lock:
            if (stamp := _stamp(self._files)) != self._stamp:
                self._stamp = stamp
                try:
                    self._now = _read(self._files, self.clients)
                except ConfigError as error:
                    logger.error("the new certificates are invalid, the previous ones stay in use: %s", error)
                else:
                    logger.info("the certificates have changed: new connections use %s", self._files.certificate)
            return self._now

    # -- gRPC ----------------------------------------------------------------------------------------------------------

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a gRPC server, which checks for changes at every connection."""
        served = self.now()

        def changed() -> Any:  # None stands for no change, despite grpc's annotations
            nonlocal served
            if (now := self.now()) is served:
                return None
            served = now
            return _configuration(now)

        return grpc.dynamic_ssl_server_credentials(_configuration(served), changed, self.clients == "required")

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials from the current files; a channel keeps them for its life."""
        now = self.now()
        return grpc.ssl_channel_credentials(now.authorities or None, now.key or None, now.certificate or None)

    def channel_options(self) -> list[tuple[str, str]]:
        """Options of a channel that requires `name` in servers' certificates."""
        return [("grpc.ssl_target_name_override", self.name)] if self.name else []

    # -- ssl -----------------------------------------------------------------------------------------------------------

    def server_context(self) -> ssl.SSLContext:
        """Return a context for a server's whole life: each handshake continues with the current files."""
        context = _server_context(self._files, self.clients)

        def go_on(connection: ssl.SSLObject, name: str, initial: ssl.SSLContext) -> None:
            connection.context = self.now().server

        context.sni_callback = go_on  # also called when a client names no server
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return a context for one connection as a client, which checks the server's host name."""
        return self.now().client


def member_tls(cluster: ClusterConfig) -> Tls | None:
    """Return the TLS of connections between members; None: plain text. Raises ConfigError like `Tls`."""
    given = [bool(path) for path in (cluster.tls_certificate, cluster.tls_key, cluster.tls_ca)]
    if not any(given):
        return None
    if not (all(given) and cluster.tls_name):
        raise ConfigError("cluster.tls_certificate, tls_key, tls_ca and tls_name need each other: one is empty")
    files = CertificateFiles(certificate=cluster.tls_certificate, key=cluster.tls_key, authorities=(cluster.tls_ca,))
    return Tls(files, name=cluster.tls_name, clients="required")


def endpoint_tls(config: Config) -> Tls | None:
    """Return the TLS of routers' client endpoints; None: plain text. Raises ConfigError like `Tls`."""
    router, cluster = config.router, config.cluster
    if bool(router.tls_certificate) != bool(router.tls_key):
        raise ConfigError("router.tls_certificate and router.tls_key need each other: one is empty")
    certificate, key = router.tls_certificate or cluster.tls_certificate, router.tls_key or cluster.tls_key
    clients = router.tls_client_certificates
    # Members are clients, too: `baton up` calls its routers.
    authorities = tuple(path for path in (router.tls_client_ca, cluster.tls_ca) if path) if clients != "off" else ()
    if clients != "off" and not (certificate and authorities):
        raise ConfigError(
            f"router.tls_client_certificates is {clients}, which needs a certificate (router.tls_certificate or "
            "cluster.tls_certificate) and authorities (router.tls_client_ca or cluster.tls_ca)"
        )
    if not certificate:
        return None
    return Tls(CertificateFiles(certificate=certificate, key=key, authorities=authorities), clients=clients)


def own_endpoint_tls(config: Config) -> Tls | None:
    """Return the TLS with which processes of a router's own machine call its endpoint; None: plain text.

    They trust exactly its certificate, independent of its issuer, and present the members' certificate if there is one.

    Raises:
        ConfigError: as in `Tls`.
    """
    router, cluster = config.router, config.cluster
    if not router.tls_certificate:
        return member_tls(cluster)
    seen = router.tls_certificate
    files = CertificateFiles(certificate=cluster.tls_certificate, key=cluster.tls_key, authorities=(seen,))
    return Tls(files, name=_first_name(seen))


def client_tls(*, is_on: bool, ca: str, certificate: str, key: str) -> Tls | None:
    """Return the TLS that a client's options request; None: plain text. An option with a file implies TLS.

    Raises:
        ConfigError: as in `Tls`, or a certificate or its key is missing.
    """
    if bool(certificate) != bool(key):
        raise ConfigError("--certificate and --key need each other")
    if not (is_on or ca or certificate):
        return None
    return Tls(CertificateFiles(certificate=certificate, key=key, authorities=(ca,) if ca else ()))


def names_in_call(auth_context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """Return the names in the certificate of a gRPC call's client, such as DNS:acme.example; empty without one."""
    return tuple(
        f"{kind}:{value.decode(errors='replace')}"
        for key, kind in _GRPC_NAMES.items()
        for value in auth_context.get(key, ())
    )


def names_in_connection(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the names in a certificate as `ssl` describes it, in the form of `names_in_call`."""
    found = certificate or {}
    common = [value for part in found.get("subject", ()) for name, value in part if name == "commonName"]
    others = [f"{_SSL_NAMES[kind]}:{value}" for kind, value in found.get("subjectAltName", ()) if kind in _SSL_NAMES]
    return (*(f"CN:{value}" for value in common), *others)


def _configuration(now: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(now.key, now.certificate)], now.authorities or None)


def _stamp(files: CertificateFiles) -> tuple[tuple[int, int, int] | None, ...]:
    """Return a value that changes when a file is written, replaced, or reached through another link."""
    return tuple(_stamp_of(path) for path in files.paths)


def _stamp_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(files: CertificateFiles, clients: str) -> Certificates:
    before = _contents(files)
    server = _server_context(files, clients) if files.certificate else ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made = Certificates(**before, server=server, client=_client_context(files), term_s=_term_s(before["certificate"]))
    if _contents(files) != before:
        raise ConfigError(f"{', '.join(files.paths)} are being written")
    return made


def _contents(files: CertificateFiles) -> dict[str, bytes]:
    kinds = {"certificate": (files.certificate,), "key": (files.key,), "authorities": files.authorities}
    try:
        return {kind: b"\n".join(Path(path).read_bytes() for path in paths if path) for kind, paths in kinds.items()}
    except OSError as error:
        raise ConfigError(f"cannot read a certificate or its key: {error}") from error


def _server_context(files: CertificateFiles, clients: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # a resumed session would not be checked against the current authorities
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    _load(context, files)
    if clients != "off":
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def _client_context(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.create_default_context() if not files.authorities else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, files)
    return context


def _load(context: ssl.SSLContext, files: CertificateFiles) -> None:
    try:
        if files.certificate:
            context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except (OSError, ValueError) as error:
        pair = f"{files.certificate} and {files.key}"
        raise ConfigError(f"{pair} are not a PEM certificate and its key without a password: {error}") from error
    for path in files.authorities:
        try:
            context.load_verify_locations(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} does not hold PEM certificates of authorities: {error}") from error


def _term_s(certificate: bytes) -> tuple[float, float]:
    if not certificate:
        return 0.0, 0.0
    from cryptography import x509  # only needed for TLS

    found = x509.load_pem_x509_certificate(certificate)
    return found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()


def _first_name(path: str) -> str:
    """Return a name in a server's certificate. Raises ConfigError."""
    from cryptography import x509  # only needed for TLS

    try:
        found = x509.load_pem_x509_certificate(Path(path).read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"{path} is not a PEM certificate of a server: {error}") from error
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    if not hosts:
        raise ConfigError(f"{path} is not a certificate of a server: it names no host")
    return hosts[0].replace("*", "any")


def _no_password() -> str:
    """Reject a password instead of letting OpenSSL ask on the terminal."""
    raise ValueError("it is encrypted")
