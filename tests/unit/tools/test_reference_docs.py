"""Reference pages say what settings, contracts and errors are today."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from baton.config import EngineConfig
from baton.config.engine import UNKNOWN_TO_VLLM, VLLM_ARGS
from engine.vllm.versions import SUPPORTED
from tools import reference_docs

ROOT = Path(__file__).parents[3]

PROTO = """
// Asks.
service Asks {
  // Asks
  // once.
  rpc Ask(Question) returns (stream Answer);
}

message Question {}

// What comes.
message Answer {
  oneof what {
    // A text.
    string text = 1;
    map<string, uint32> counts = 2;
  }
  optional double time_s = 3;
}
"""


def test_the_pages_are_todays() -> None:
    for page, text in reference_docs.written().items():
        assert (ROOT / page).read_text() == text, f"run `python -m tools.reference_docs`: {page} is not today's"


def test_every_setting_has_a_row_and_every_public_method_too() -> None:
    settings, calls = reference_docs.settings_tables(), reference_docs.grpc_tables()
    for name in ("engine.kv_cache_gib", "router.slo_classes", "cluster.grpc_port", "telemetry.vllm_aliases"):
        assert f"| `{name}` |" in settings
    assert "In the environment: `BATON_GRPC_PORT`." in settings
    assert "| `Generate(GenerateRequest)` | stream `GenerateResponse`." in calls
    assert "| `SetWorkerRole(SetWorkerRoleRequest)` |" in calls
    assert "| NoWorker | UNAVAILABLE | 503 |" in calls


def test_a_contract_is_read_with_its_comments() -> None:
    asks, question, answer = reference_docs.blocks_of(PROTO)
    assert (asks.kind, asks.name, asks.comment) == ("service", "Asks", "Asks.")
    assert [entry.comment for entry in asks.entries] == ["Asks once."]
    assert (question.name, question.comment, question.entries) == ("Question", "", ())
    assert answer.comment == "What comes."
    assert [(entry.text, entry.comment) for entry in answer.entries] == [
        ("string text = 1", "One of `what`. A text."),
        ("map<string, uint32> counts = 2", "One of `what`. "),
        ("optional double time_s = 3", ""),
    ]


def test_the_page_on_engines_is_that_of_the_code() -> None:
    """What is written by hand there: versions, and the settings of either kind."""
    page = (ROOT / "docs/engines.md").read_text()
    assert f"Baton supports vLLM {' and '.join(SUPPORTED)}." in page
    assert f"install {' or '.join(f'{each}.*' for each in SUPPORTED)}\n" in page
    assert f"'vllm=={SUPPORTED[-1]}.*'" in page
    _, _, settings = page.partition("## Settings\n")
    named = set(re.findall(r"`engine\.(\w+)`", settings.partition("`engine.runner: vllm`")[0]))
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    assert named == known - UNKNOWN_TO_VLLM - {"runner", "vllm_python", "vllm_args"}
    assert all(f"| `{name}` |" in settings for name in VLLM_ARGS)
