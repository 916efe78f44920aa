"""Answers of /api/requests for tests of the page: requests of every outcome, and the life of one that failed once."""

from __future__ import annotations

import time
from typing import Any

STAGES = ("queue", "decode_admission", "prefill", "transfer", "decode", "recovery")
OUTCOMES = ("met", "ttft_missed", "itl_missed", "error", "rejected", "running", "cancelled")


def summary(number: int, outcome: str = "met") -> dict[str, Any]:
    """A request as the list has it."""
    seconds = (0.02, 0.003, 0.12, 0.01, 1.2, 0.4 if outcome == "met" else 0.0)
    is_placed = outcome != "rejected"
    return {
        "request_id": f"chatcmpl-{number:032x}",
        "router": "router-0",
        "tenant": "acme",
        "slo_class": "interactive",
        "priority": 0,
        "operation": "chat",
        "is_streamed": True,
        "arrived_s": time.time() - 7 * number,
        "outcome": outcome,
        "error": "WorkerFailed: worker-2 (decode) is gone" if outcome == "error" else "",
        "blamed_stage": "queue" if outcome == "ttft_missed" else "",
        "num_prompt_tokens": 37,
        "num_cached_tokens": 16,
        "num_tokens": 64 if is_placed else 0,
        "num_choices": 1,
        "ttft_s": 0.143 if is_placed else None,
        "itl_s": 0.019 if is_placed else None,
        "total_s": sum(seconds),
        "ttft_objective_s": 0.4,
        "itl_objective_s": 0.06,
        "e2e_objective_s": None,
        "stages": dict(zip(STAGES, seconds, strict=True)),
        "mode": "disaggregated" if is_placed else "",
        "prefill_worker": "worker-0" if is_placed else "",
        "decode_worker": "worker-2" if is_placed else "",
        "retries": 1 if outcome == "met" else 0,
    }


def answer() -> dict[str, Any]:
    """The answer of /api/requests."""
    found = [summary(number, outcome) for number, outcome in enumerate(OUTCOMES * 3, 1)]
    return {"router": "router-0", "now_s": time.time(), "num_kept": len(found), "requests": found}


def detail() -> dict[str, Any]:
    """The answer of /api/requests/ID: placed, failed on a worker, and placed again."""
    one = summary(1)
    ends = (0.02, 0.023, 0.143, 0.153, 0.75, 1.15, 1.753)
    names = ("queue", "decode_admission", "prefill", "transfer", "decode", "recovery", "decode")
    begins = (0.0, *ends[:-1])
    phases = [
        {"stage": name, "begin_s": begin, "end_s": end} for name, begin, end in zip(names, begins, ends, strict=True)
    ]
    told = (
        (0.0, "arrived", "arrived"),
        (0.004, "admitted", "admitted, 37 prompt tokens"),
        (
            0.02,
            "placed",
            "placed: disaggregated on worker-0 (prefill) -> worker-1 (decode); first token predicted in 0.131 s",
        ),
        (0.143, "first_token", "worker-0 (prefill) has the first token: 0.002 s in its queue"),
        (0.153, "transferred", "KV is on worker-1 (decode): 2.0 MiB in 0.010 s"),
        (0.75, "failed", "failed on worker-1 (decode) after 31 tokens: WorkerFailed: worker-1 (decode) is gone"),
        (0.76, "placed", "placed: disaggregated on worker-0 (prefill) -> worker-2 (decode)"),
        (1.753, "finished", "finished: 64 tokens, stop"),
    )
    events = [
        {"at_s": at, "what": what, "choice_index": 0, "attempt": int(at > 0.75), "worker": "", "text": text}
        for at, what, text in told
    ]
    terms = ("wait_s", "room_s", "pull_s", "compute_s", "exposed_s", "step_s")
    option = {"num_cached_tokens": 16, **dict.fromkeys(terms, 0.01), "cost_s": 0.131}
    placement = {
        "choice_index": 0,
        "mode": "disaggregated",
        "prefill_worker": "worker-0",
        "decode_worker": "worker-1",
        "source": "",
        "source_tokens": 0,
        "num_expected_tokens": 64,
        "outcome": "admitted",
        "predicted_ttft_s": 0.131,
        "measured_ttft_s": 0.123,
        "predicted": dict.fromkeys(terms, 0.01),
        "measured": {**dict.fromkeys(terms, 0.012), "pull_s": None},
        "options": [
            {"worker_id": "worker-0", "role": "prefill", **option},
            {"worker_id": "worker-1", "role": "decode", **option},
        ],
    }
    life = {"phases": phases, "events": events, "num_events_left_out": 0, "placements": [placement]}
    return {"requests": [{**one, **life}]}
