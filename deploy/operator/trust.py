"""Options of client commands for a cluster whose routers speak TLS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from baton.tls import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustOptions:
    """Whom a client believes, and what it shows."""

    tls: Annotated[bool, typer.Option("--tls", help="Speak TLS; a file below says so, too.", envvar="BATON_TLS")] = (
        False
    )
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
            help="PEM file of this client's certificate, if routers ask for one.",
            envvar="BATON_CERTIFICATE",
            show_default=False,
        ),
    ] = ""
    key: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="PEM file of that certificate's key.", envvar="BATON_KEY", show_default=False
        ),
    ] = ""

    def read(self) -> Tls | None:
        """Returns what the options ask for; None: plain text. Raises ConfigError where a file is wrong."""
        from baton.tls import client_tls

        return client_tls(is_on=self.tls, ca=self.ca, certificate=self.certificate, key=self.key)
