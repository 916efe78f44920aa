"""`baton doctor`: runs the checks, with --wait repeatedly while one fails, and shows the results."""

from __future__ import annotations

import dataclasses
import json
import time

from baton import config as baton_config
from baton.addresses import address_of
from baton.errors import ConfigError, InvalidRequest
from baton.tls import Tls, own_endpoint_tls
from deploy.cli.doctor_options import DoctorOptions
from deploy.cli.options import console
from deploy.doctor import Check, DoctorPart, diagnose, model_checks, not_configured, show
from deploy.operator.client import Access
from deploy.say import say
from deploy.terminal import Terminal


def is_well(options: DoctorOptions, as_json: bool) -> bool:
    """Run the checks, print their results, and return True if none failed.

    Raises:
        InvalidRequest: `options.part` does not exist.
    """
    if options.part not in list(DoctorPart):
        raise InvalidRequest(f"--part must be one of {', '.join(DoctorPart)}; got {options.part!r}")
    what = f"the model {options.model}" if options.model else f"what the {options.part} needs"
    console().print(f"==> Checking {what}; this takes some seconds", style="dim", soft_wrap=True)
    checks = _checks(options)
    if as_json:
        say(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    else:
        show(checks, Terminal())
    return _are_well(checks)


def _are_well(checks: list[Check]) -> bool:
    return all(check.state != "fail" for check in checks)


def _checks(options: DoctorOptions) -> list[Check]:
    """Run the checks. Repeat those of the machine and the cluster for `wait_s` seconds while one of them fails."""
    try:
        settings = baton_config.load(options.config)
    except ConfigError as error:
        return not_configured(error)
    if options.model:
        model = dataclasses.replace(settings.model, id=options.model)
        return model_checks(dataclasses.replace(settings, model=model))
    address = options.address or address_of(settings.cluster.host, settings.cluster.grpc_port)
    access = Access(options.api_key, _endpoint(settings, options))
    end_s = time.monotonic() + options.wait_s
    while True:
        checks = diagnose(settings, address, DoctorPart(options.part), access)
        if _are_well(checks) or time.monotonic() >= end_s:
            return checks
        time.sleep(1)


def _endpoint(settings: baton_config.Config, options: DoctorOptions) -> Tls | None:
    """Return TLS as the options say; without TLS options, and for the configured router, as the settings say."""
    try:
        return options.read() or (None if options.address else own_endpoint_tls(settings))
    except ConfigError:
        return None  # a check of the files reports the error
