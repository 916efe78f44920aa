"""Checks of the configured certificates: validity, names and expiry."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator

from cryptography import x509

from baton.config import Config
from baton.errors import ConfigError
from baton.tls import Tls, endpoint_tls, member_tls
from deploy.doctor.checks import Check, judged

SOON_DAYS = 3.0
"""Remaining days below which the renewal of certificates has probably stopped."""


def files(config: Config, now: datetime.datetime | None = None) -> Iterator[Check]:
    """Check the configured certificates, if any.

    Args:
        now: the time, with its zone; None: this machine's clock.
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
        yield Check(name, "fail", str(error), "cluster.tls_... and router.tls_... must name matching PEM files")
        return
    if tls is None:
        return
    found = x509.load_pem_x509_certificate(tls.now().certificate)
    days = (found.not_valid_after_utc - now).total_seconds() / 86_400
    if tls.name and tls.name not in _dns_names(found):
        yield Check(
            name,
            "fail",
            f"it does not contain the name {tls.name!r}, which members require",
            "issue one with that DNS name, or set cluster.tls_name to a name in all members' certificates",
        )
        return
    yield judged(
        name,
        days > SOON_DAYS,
        f"valid for {days:.0f} more days" if days > 0 else "expired",
        "issue a new one; processes reread the files when they change",
        "warn" if days > 0 else "fail",
    )


def _dns_names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return list(names.get_values_for_type(x509.DNSName))
