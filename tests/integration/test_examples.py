"""The examples run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from router.admission.tenants import TenantBook
from tests.chaos.fleet import Fleet, running_fleet

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    router = RouterConfig(mode="auto", cache_secret="shared")
    with running_fleet(TransferConfig(), router, num_routers=2, step_ms=40.0) as fleet:
        fleet.wait_for(*(fleet.add(role) for role in Role))
        yield fleet


def started(script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, EXAMPLES / script, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment,
    )  # fmt: skip


def test_openais_client(fleet: Fleet) -> None:
    base_url = f"http://{fleet.routers[0].http}/v1"
    script = started("openai_client.py", "What is the capital?", OPENAI_BASE_URL=base_url)
    output, errors = script.communicate(timeout=180)
    assert (script.returncode, errors) == (0, "")
    assert output.endswith("64 generated]\n")


def test_a_grpc_client_goes_on_at_the_next_router(fleet: Fleet) -> None:
    addresses = [router.grpc for router in fleet.routers]
    unbroken, _ = started("grpc_resume.py", addresses[1], "Once upon a time").communicate(timeout=180)
    assert "[128 tokens, " in unbroken
    with started("grpc_resume.py", ",".join(addresses), "Once upon a time") as script:
        assert script.stdout is not None
        assert script.stderr is not None
        begin = script.stdout.read(20)
        fleet.routers[0].process.kill()
        assert begin + script.stdout.read() == unbroken
        assert "going on elsewhere" in script.stderr.read()
    assert script.returncode == 0


def test_a_placement_policy_of_ones_own() -> None:
    script = started("placement_policy.py")
    output, errors = script.communicate(timeout=240)
    assert (script.returncode, errors) == (0, "")
    hit_rates = {line.split()[0]: float(line.split()[1]) for line in output.splitlines()[1:]}
    assert hit_rates["round_robin"] < hit_rates["prefix_less_load"] <= hit_rates["baton"] * 1.1


def test_the_tenants_keys_are_those_in_its_comment() -> None:
    path = EXAMPLES / "tenants.yaml"
    book = TenantBook.load(path)
    keys = {"acme": "demo-interactive", "acme-batch": "demo-batch", "operations": "demo-operator"}
    assert all(key in path.read_text().partition("\n\n")[0] for key in keys.values())
    tenants = {name: book.identify(key) for name, key in keys.items()}
    assert {name: tenant.id for name, tenant in tenants.items()} == {name: name for name in keys}
    assert tenants["acme-batch"].scope == tenants["acme"].scope
    assert [name for name, tenant in tenants.items() if tenant.operator] == ["operations"]
