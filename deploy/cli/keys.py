"""`baton keys`: the keys of a cluster's members."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.trust import Principal
from deploy.local.keys import follow_secret, write_keys


def keys(
    role: Annotated[Principal, typer.Option(help="The member whose keys to write.")],
    secret: Annotated[Path, typer.Option(help="File with the cluster's secret; several lines: several are valid.")],
    out: Annotated[Path, typer.Option(help="File to write, for cluster.secret of that member's processes.")],
    follow: Annotated[bool, typer.Option(help="Stay, and write it again whenever the secret changes.")] = False,
) -> None:
    """Write the keys that one member of a cluster needs, so that its processes never see the cluster's secret.

    A new secret: python -c 'import secrets; print(secrets.token_hex(32))'
    """
    (follow_secret if follow else write_keys)(secret, out, role)
