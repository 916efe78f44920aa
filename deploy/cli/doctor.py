"""`baton doctor`: checks of this machine and of a cluster."""

from __future__ import annotations

import typer

from deploy.cli.doctor_options import DoctorOptions
from deploy.cli.options import AsJson, options_from_fields


@options_from_fields
def doctor(options: DoctorOptions, as_json: AsJson = False) -> None:
    """Check this machine, and the cluster if one runs, and show how to fix each problem.

    The command changes nothing. Exit status 1: a check failed.
    """
    from deploy.cli.diagnosis import is_well

    if not is_well(options, as_json):
        raise typer.Exit(1)
