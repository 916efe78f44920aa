"""Checks of the certificates that the settings name: whether they can be used, and for how long."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator

from cryptography import x509

from baton.config import Config
from baton.errors import ConfigError
from baton.tls import Tls, endpoint_tls, member_tls
from deploy.doctor.checks import Check, judged

SOON_DAYS = 3.0
"""Fewer, and what renews certificates has probably stopped."""


def files(config: Config, now: datetime.datetime | None = None) -> Iterator[Check]:
    """What the settings name, if they name something.

    Args:
        now: the time, with its zone; None: of this machine's clock.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    for name, read in (
        ("members' certificate", lambda: member_tls(config.cluster)),
        ("routers' certificate", lambda: endpoint_tls(config)),
    ):
        yield from _pair(name, read, now)


def _pair(name: str, read: Callable[[], Tls | None], now: datetime.datetime) -> Iterator[Check]:
    try:
        tls = read()
    except ConfigError as error:
        yield Check(name, "fail", str(error), "cluster.tls_... and router.tls_... name PEM files that belong together")
        return
    if tls is None:
        return
    found = x509.load_pem_x509_certificate(tls.now().certificate)
    days = (found.not_valid_after_utc - now).total_seconds() / 86_400
    if tls.name and tls.name not in _dns_names(found):
        yield Check(
            name,
            "fail",
            f"it does not bear the name {tls.name!r}, for which members look",
            "issue one with that DNS name, or set cluster.tls_name to one that all members' certificates have",
        )
        return
    yield judged(
        name,
        days > SOON_DAYS,
        f"valid for {days:.0f} days more" if days > 0 else "expired",
        "issue a new one; the files are read again when they change",
        "warn" if days > 0 else "fail",
    )


def _dns_names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return list(names.get_values_for_type(x509.DNSName))
