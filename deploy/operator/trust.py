"""TLS options of client commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from baton.tls import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustOptions:
    """Trusted authorities, and the certificate that a client presents."""

    tls: Annotated[
        bool, typer.Option("--tls", help="Use TLS. Implied by --ca, --certificate or --key.", envvar="BATON_TLS")
    ] = False
    ca: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="PEM file of the authorities that signed the routers' certificates.",
            envvar="BATON_CA",
            show_default="the system's, with --tls",
        ),
    ] = ""
    certificate: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="PEM file of this client's certificate, if the routers request one.",
            envvar="BATON_CERTIFICATE",
            show_default=False,
        ),
    ] = ""
    key: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="PEM file of the key of --certificate.", envvar="BATON_KEY", show_default=False
        ),
    ] = ""

    def read(self) -> Tls | None:
        """Return the TLS configuration of the options; None: plain text. Raises ConfigError if a file is invalid."""
        from baton.tls import client_tls

        return client_tls(is_on=self.tls, ca=self.ca, certificate=self.certificate, key=self.key)
