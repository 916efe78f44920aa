"""The examples, and what the quick starts have a newcomer ask, run as they stand."""

from __future__ import annotations

import os
import re
import shutil
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

pytestmark = pytest.mark.first

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    router = RouterConfig(mode="auto", cache_secret="shared")
    with running_fleet(TransferConfig(), router, num_routers=2, step_ms=20.0) as fleet:
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


def test_an_agent(fleet: Fleet) -> None:
    script = started("agent.py", "--force", ANTHROPIC_BASE_URL=f"http://{fleet.routers[0].http}")
    output, errors = script.communicate(timeout=180)
    assert (script.returncode, errors) == (0, "")
    assert re.search(r"^(add|multiply|today)\(.*\) = \S+$", output, re.MULTILINE)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(
    ("page", "section", "expected"),
    [
        ("laptop", "2. Ask", ['"chat.completion"', '"completion_tokens":24', '"finishReason": "length"']),
        ("vllm", "3. The same requests", ['"completion_tokens":16', '"max_model_len"', '{"status":"ok"}']),
    ],
)
def test_what_a_quick_start_asks(fleet: Fleet, page: str, section: str, expected: list[str]) -> None:
    text = (ROOT / f"docs/quickstart/{page}.md").read_text()
    _, _, behind = text.partition(f"## {section}\n")
    commands = "\n".join(re.findall(r"^```\n(.*?)^```", behind.split("\n## ")[0], re.MULTILINE | re.DOTALL))
    router = fleet.routers[0]
    commands = commands.replace("127.0.0.1:8000", router.http).replace("127.0.0.1:50051", router.grpc)
    commands = commands.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
    environment = os.environ | {"BATON_ADDRESS": router.grpc}
    asked = subprocess.run(["sh", "-ec", commands], capture_output=True, text=True, timeout=180, env=environment)
    assert (asked.returncode, asked.stderr) == (0, "")
    assert [part for part in expected if part not in asked.stdout] == []


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
        assert "continuing on another router" in script.stderr.read()
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
