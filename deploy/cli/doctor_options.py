"""Options of `baton doctor`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from deploy.cli.options import ApiKey, ConfigFile
from deploy.operator.trust import TrustOptions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions(TrustOptions):
    """Selection of the checks, and access to the routers."""

    address: Annotated[
        str, typer.Option(help="Address of the router, host:port. Default: as configured.", envvar="BATON_ADDRESS")
    ] = ""
    part: Annotated[
        str,
        typer.Option(
            help="Checks to run: laptop, cluster, or the requirements of a router, controller or worker container."
        ),
    ] = "laptop"
    model: Annotated[
        str,
        typer.Option(
            help="Check only this model (a folder, a hub id or a name from the catalogue): its files, and whether it "
            "can be served."
        ),
    ] = ""
    config: ConfigFile = None
    api_key: ApiKey = ""
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds for which to repeat the checks while one fails.")] = (
        0.0
    )
