"""What the router says of the workers' transfers: each instrument means one thing, and every count is in one."""

from __future__ import annotations

import dataclasses

from baton.cluster import ClusterStatus, Role, TransferCounts, Worker, WorkerInfo, WorkerLoad, WorkerState
from baton.telemetry.instruments import TRANSFER_COUNTERS, TRANSFER_GAUGES, Instruments

COUNTS = TransferCounts(*range(1, len(dataclasses.fields(TransferCounts)) + 1))
"""Every field has a value of its own."""


def exposed() -> dict[str, dict[str, float]]:
    """By metric and labels, of one worker whose labels are left out."""
    info = WorkerInfo("d0", Role.DECODE, "h:1", 1, "node", 1, "content", "wire", 16, 8192)
    worker = Worker(info, WorkerLoad(WorkerState.READY, transfers=COUNTS))
    status = ClusterStatus({}, (worker,), (), "", True, (), mirrored_blocks={"d0": 77})
    instruments = Instruments(lambda: status)
    lines = instruments.exposition().decode().splitlines()
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        if line.startswith(("baton_kv_", "baton_mirror_blocks")) and not line.startswith("baton_kv_blocks"):
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            others = sorted(x for x in labels.split(",") if not x.startswith(("worker=", "role=")))
            found.setdefault(name, {})[",".join(others).replace('"', "")] = float(value)
    return found


def test_every_count_of_a_lease_is_in_one_instrument() -> None:
    fields = [name for *_, fields in (*TRANSFER_COUNTERS, *TRANSFER_GAUGES) for name in fields]
    assert sorted(fields) == sorted(field.name for field in dataclasses.fields(TransferCounts))


def test_an_instrument_means_one_thing() -> None:
    c = COUNTS
    assert exposed() == {
        "baton_kv_transfers_total": {
            "direction=sent,outcome=committed": c.sent_committed,
            "direction=sent,outcome=failed": c.sent_failed,
            "direction=received,outcome=committed": c.received_committed,
            "direction=received,outcome=failed": c.received_failed,
        },
        "baton_kv_transfer_failures_total": {
            f"reason={name}": getattr(c, name) for name in ("corrupted", "expired", "timed_out", "refused", "lost")
        },
        "baton_kv_transfer_bytes_total": {"direction=sent": c.sent_bytes, "direction=received": c.received_bytes},
        "baton_kv_transfer_chunks_total": {"direction=sent": c.sent_chunks, "direction=received": c.received_chunks},
        "baton_kv_transfer_time_seconds_total": {"": c.transfer_s},
        "baton_kv_transfer_exposed_time_seconds_total": {"": c.exposed_s},
        "baton_kv_messages_fenced_total": {"": c.fenced},
        "baton_kv_messages_resent_total": {"": c.resent},
        "baton_kv_nccl_stalls_total": {"": c.nccl_stalls},
        "baton_kv_pulled_tokens_total": {"": c.pulled_tokens},
        "baton_kv_pull_failures_total": {"": c.failed_pulls},
        "baton_kv_open_pairs": {"": c.open_pairs},
        "baton_kv_staging_slots_in_use": {"": c.slots_in_use},
        "baton_kv_unsent_bytes": {"": c.unsent_bytes},
        "baton_mirror_blocks": {"": 77},
    }


def test_objectives_and_predictions_have_instruments() -> None:
    instruments = Instruments(lambda: ClusterStatus({}, (), (), "", True, ()))
    instruments.requests_slo.add(1, {"model": "m", "slo_class": "interactive", "outcome": "met"})
    instruments.tokens_slo_met.add(30, {"model": "m"})
    instruments.shed.add(2, {"tenant": "acme"})
    instruments.prediction_error.record(0.15, {"of": "ttft"})
    lines = instruments.exposition().decode().splitlines()
    names = ("baton_requests_slo", "baton_tokens_slo_met", "baton_admission_shed", "baton_placement_prediction_error")
    found = {line for line in lines if line.startswith(names) and "_created" not in line}
    assert found >= {
        'baton_requests_slo_total{model="m",outcome="met",slo_class="interactive"} 1.0',
        'baton_tokens_slo_met_total{model="m"} 30.0',
        'baton_admission_shed_total{tenant="acme"} 2.0',
        'baton_placement_prediction_error_bucket{le="0.1",of="ttft"} 0.0',
        'baton_placement_prediction_error_bucket{le="0.2",of="ttft"} 1.0',
        'baton_placement_prediction_error_count{of="ttft"} 1.0',
    }


def test_a_bucket_holds_its_bound_and_every_row_has_every_label() -> None:
    instruments = Instruments(lambda: ClusterStatus({}, (), (), "", True, ()))
    for value in (0.01, 0.011, 100.0):
        instruments.request_duration.record(value, {"gen_ai.operation.name": "chat"})
    instruments.request_duration.record(0.5, {"error.type": "Overloaded", "gen_ai.operation.name": "chat"})
    found = instruments.exposition().decode().splitlines()
    name, chat = "gen_ai_server_request_duration_seconds", 'error_type="",gen_ai_operation_name="chat"'
    assert f"# TYPE {name} histogram" in found
    assert f'{name}_bucket{{{chat},le="0.01"}} 1.0' in found
    assert f'{name}_bucket{{{chat},le="0.02"}} 2.0' in found
    assert f'{name}_bucket{{{chat},le="81.92"}} 2.0' in found
    assert f'{name}_bucket{{{chat},le="+Inf"}} 3.0' in found
    assert f"{name}_sum{{{chat}}} 100.021" in found
    assert f'{name}_count{{error_type="Overloaded",gen_ai_operation_name="chat"}} 1.0' in found
    assert not any("baton_retries" in line for line in found), "nothing was booked"
