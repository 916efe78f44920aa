"""Reference pages say what settings, contracts and errors are today."""

from __future__ import annotations

from pathlib import Path

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
