"""`baton leave`: loads the settings, and runs `deploy.local.leave`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from baton.errors import Conflict
from deploy.cli.options import console
from deploy.cli.settings import loaded
from deploy.local.leave import leave, own_hosts
from deploy.local.parts import with_model


def leave_machine(config: Path | None, timeout_s: float | None) -> None:
    """Drain the workers of this machine, and wait until they are gone.

    Args:
        config: settings file.
        timeout_s: maximum wait; None: the time for one drain and one start.

    Raises:
        Conflict: some workers are still on this machine after the timeout.
    """
    settings = loaded(config)
    if timeout_s is None:
        timeout_s = settings.cluster.drain_timeout_s + settings.cluster.start_timeout_s
    left = asyncio.run(leave(with_model(settings, console(), weights=False), own_hosts(), timeout_s))
    if left:
        raise Conflict(f"these workers are still on this machine after {timeout_s:g} s: {', '.join(left)}")
