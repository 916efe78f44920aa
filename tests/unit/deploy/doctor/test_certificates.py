"""What doctor says of certificates."""

from __future__ import annotations

import datetime
from pathlib import Path

from baton.config import ClusterConfig, Config
from deploy.doctor import certificates
from tests.support.certificates import Authority, cluster_settings

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


def _states(config: Config, now: datetime.datetime = NOW) -> dict[str, tuple[str, str]]:
    return {check.name: (check.state, check.found) for check in certificates.files(config, now)}


def test_certificates_that_fit_and_how_long(tmp_path: Path) -> None:
    assert not _states(Config())
    files = Authority.make(tmp_path).sign("member")
    config = Config(cluster=ClusterConfig(**cluster_settings(files)))
    names = ("members' certificate", "routers' certificate")
    for now, state in ((NOW - 10 * DAY, "ok"), (NOW, "warn"), (NOW + 10 * DAY, "fail")):
        assert {name: found[0] for name, found in _states(config, now).items()} == dict.fromkeys(names, state)


def test_certificates_that_do_not_fit(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    strange = Config(cluster=ClusterConfig(**cluster_settings(authority.sign("member", ["elsewhere.example"]))))
    state, found = _states(strange, NOW - 10 * DAY)["members' certificate"]
    assert state == "fail"
    assert "'baton'" in found
    missing = Config(cluster=ClusterConfig(tls_certificate="none.crt", tls_key="none.key", tls_ca=authority.path))
    assert {state for state, _ in _states(missing).values()} == {"fail"}
