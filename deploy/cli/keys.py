"""`baton keys`: write the keys of a cluster's members."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.trust import Principal
from deploy.local.keys import follow_secret, write_keys


def keys(
    role: Annotated[Principal, typer.Option(help="Member whose keys to write.")],
    secret: Annotated[
        Path, typer.Option(help="File with the cluster's secret. If it has several lines, each is a valid secret.")
    ],
    out: Annotated[Path, typer.Option(help="File to write; use it as cluster.secret of that member's processes.")],
    follow: Annotated[
        bool, typer.Option(help="Keep running, and rewrite the file whenever the secret changes.")
    ] = False,
) -> None:
    """Derive the keys of one cluster member from the cluster's secret, so that its processes never see the secret.

    To create a secret: python -c 'import secrets; print(secrets.token_hex(32))'
    """
    (follow_secret if follow else write_keys)(secret, out, role)
