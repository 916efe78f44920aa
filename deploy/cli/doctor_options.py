"""Options of `baton doctor`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from deploy.cli.options import ApiKey, ConfigFile
from deploy.operator.trust import TrustOptions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions(TrustOptions):
    """What is checked, and how its routers let this client in."""

    address: Annotated[
        str, typer.Option(help="The router, host:port. Default: as configured.", envvar="BATON_ADDRESS")
    ] = ""
    part: Annotated[
        str,
        typer.Option(
            help="What to check: laptop, cluster, or what a router, controller or worker container needs to start."
        ),
    ] = "laptop"
    model: Annotated[
        str,
        typer.Option(
            help="Check only this model (a folder, a hub id or a name of the catalogue): how it is read, and "
            "whether it can be served."
        ),
    ] = ""
    config: ConfigFile = None
    api_key: ApiKey = ""
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds to repeat the checks until none fails.")] = 0.0
