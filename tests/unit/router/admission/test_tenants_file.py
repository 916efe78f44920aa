"""The tenants' file while it changes."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from baton.config import RouterConfig
from baton.errors import ConfigError, Unauthenticated
from baton.telemetry.instruments import Instruments
from router.admission import tenants
from router.admission.tenants import Tenant, TenantBook, TenantsFile
from tests.support.builders import cluster_status
from tests.support.waiting import until


def entry(tenant: str, fields: str = "") -> str:
    return f"{tenant}: {{key_sha256: [{hashlib.sha256(tenant.encode()).hexdigest()}]{fields}}}\n"


class Followed:
    """A file and the book that follows it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text(entry("acme"))
        config = RouterConfig(tenants_file=str(path))
        self.book = TenantsFile.load(config)
        self.instruments = Instruments(cluster_status)
        self.file = TenantsFile(config, self.book, self.instruments)

    async def poll(self, times: int = 2) -> None:
        for _ in range(times):
            await self.file.poll()

    def knows(self, tenant: str) -> bool:
        try:
            return self.book.identify(tenant).id == tenant
        except Unauthenticated:
            return False

    def reads(self, outcome: str) -> int:
        lines = self.instruments.exposition().decode().splitlines()
        found = [line for line in lines if line.startswith(f'baton_tenants_file_reads_total{{outcome="{outcome}"}}')]
        return int(float(found[0].split()[-1])) if found else 0


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path / "tenants.yaml")


async def test_the_models_of_a_tenant_change_with_the_file(followed: Followed) -> None:
    assert followed.book.identify("acme").may_use("gpt")
    followed.path.write_text(entry("acme", ", models: [llama-*], model_limits: {llama-1: {max_in_flight: 2}}"))
    await followed.poll()
    tenant = followed.book.identify("acme")
    assert [name for name in ("gpt", "llama-1") if tenant.may_use(name)] == ["llama-1"]
    assert tenant.limits_of("llama-1").max_in_flight == 2
    followed.path.write_text(entry("acme", ", models: [llama-*], model_limits: {llama-1: {max_in_flight: none}}"))
    await followed.poll()
    assert (followed.book.identify("acme"), followed.reads("refused")) == (tenant, 1)


async def test_a_change_holds_after_it_was_read_twice(followed: Followed) -> None:
    followed.path.write_text(entry("zeta", ", requests_per_minute: 7"))
    await followed.poll(1)
    assert (followed.knows("acme"), followed.knows("zeta")) == (True, False)
    await followed.poll(1)
    assert (followed.knows("acme"), followed.knows("zeta")) == (False, True)
    assert followed.book.identify("zeta") == Tenant(id="zeta", requests_per_minute=7)
    await followed.poll(5)
    assert (followed.reads("adopted"), followed.reads("refused")) == (1, 0)


async def test_an_unchanged_file_is_not_adopted_anew(followed: Followed) -> None:
    await followed.poll(3)
    assert followed.reads("adopted") == 0


async def test_the_same_size_and_time_are_no_reason_to_look_away(followed: Followed) -> None:
    import os

    before = followed.path.stat()
    followed.path.write_text(entry("acme").replace("acme:", "emca:"))
    os.utime(followed.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    await followed.poll()
    assert followed.book.identify("acme").id == "emca"


async def test_links_are_swapped_as_kubernetes_does_it(tmp_path: Path) -> None:
    for version, text in (("..1", entry("acme")), ("..2", entry("zeta"))):
        (tmp_path / version).mkdir()
        (tmp_path / version / "tenants.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "tenants.yaml").symlink_to("..data/tenants.yaml")
    config = RouterConfig(tenants_file=str(tmp_path / "tenants.yaml"))
    book = TenantsFile.load(config)
    file = TenantsFile(config, book, Instruments(cluster_status))
    (tmp_path / "..new").symlink_to("..2")
    (tmp_path / "..new").rename(tmp_path / "..data")
    for _ in range(2):
        await file.poll()
    assert book.identify("zeta").id == "zeta"


@pytest.mark.parametrize(
    "text",
    ["", "acme: {key_sha256: [x]}", entry("zeta") + "}", entry("zeta", ", slo_class: none"), "\0", None],
)
async def test_a_file_that_is_wrong_changes_nothing_and_is_said_once(
    followed: Followed, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    followed.path.unlink()
    if text is not None:
        followed.path.write_text(text)
    await followed.poll(5)
    assert (followed.knows("acme"), followed.knows("zeta")) == (True, False)
    assert followed.reads("refused") == caplog.text.count("the tenants' file is invalid") == 1
    followed.path.write_text(entry("zeta"))
    await followed.poll()
    assert (followed.knows("acme"), followed.knows("zeta")) == (False, True)


async def test_it_runs_until_it_is_cancelled_and_not_at_all_without_a_file(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "POLL_S", 0.01)
    await TenantsFile(RouterConfig(), TenantBook.open_to_all(), followed.instruments).run()
    running = asyncio.create_task(followed.file.run())
    followed.path.write_text(entry("zeta"))
    await until(lambda: followed.knows("zeta"))
    running.cancel()


def test_a_router_does_not_start_with_a_file_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    for text, reason in (("", "must hold tenants"), (entry("a", ", slo_class: none"), "no SLO class is called 'none'")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=reason):
            TenantsFile.load(RouterConfig(tenants_file=str(path)))


def test_two_readings_are_made_within_the_two_seconds_that_are_promised() -> None:
    assert 2 * tenants.POLL_S <= 1.0
