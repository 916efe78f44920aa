"""What the router says of the workers' transfers: each instrument means one thing, and every count is in one."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import time
from pathlib import Path

from baton.cluster import (
    BlockCounts,
    CertificateTerm,
    Computes,
    ControllerInfo,
    OpenConnections,
    PoolScaling,
    PoolTrouble,
    Role,
    StoreGarbage,
    StoreMemory,
    TransferCounts,
    Worker,
    WorkerLoad,
    WorkerState,
)
from baton.config import SloClassConfig
from baton.telemetry.instruments import Instruments
from baton.telemetry.observed import OBSERVED, TransferRows
from baton.telemetry.prometheus import Histogram
from baton.telemetry.request_metrics import FIRST_BOUND, LENGTH_BOUNDS
from tests.support.builders import cluster_status, registered_adapter, worker, worker_info

COUNTS = TransferCounts(**{field.name: i for i, field in enumerate(dataclasses.fields(TransferCounts), 1)})
"""Every field has a value of its own."""
LINKS = (OpenConnections("nccl", "NET/IB", 3), OpenConnections("tcp", "", 2))


OF_WORKER = ("worker=", "role=", "model=", "release=")
MODEL = 'model="tiny"'
RELEASE = 'release="tiny-1"'


def exposed() -> dict[str, dict[str, float]]:
    """By metric and labels, of one worker whose labels are left out."""
    told = worker("d0", load=WorkerLoad(state=WorkerState.READY, transfers=COUNTS, connections=LINKS))
    instruments = Instruments(lambda: cluster_status(told, mirrored_blocks={told.info.content_id: {"d0": 77}}))
    lines = instruments.exposition().decode().splitlines()
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        if line.startswith(("baton_kv_", "baton_mirror_blocks")) and not line.startswith("baton_kv_blocks"):
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            others = sorted(x for x in labels.split(",") if not x.startswith(OF_WORKER))
            found.setdefault(name, {})[",".join(others).replace('"', "")] = float(value)
    return found


def test_every_count_of_a_lease_is_in_one_instrument() -> None:
    fields = [name for each in OBSERVED if isinstance(each.observe, TransferRows) for name in each.observe.fields]
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
        "baton_kv_nccl_stuck_aborts_total": {"": c.nccl_stuck_aborts},
        "baton_kv_nccl_shared_streams_total": {"": c.nccl_shared_streams},
        "baton_kv_failed_openings_total": {"": c.failed_openings},
        "baton_kv_pulled_tokens_total": {"": c.pulled_tokens},
        "baton_kv_pull_failures_total": {"": c.failed_pulls},
        "baton_kv_open_connections": {"": c.open_connections},
        "baton_kv_connections": {"carrier=NET/IB,transport=nccl": 3, "carrier=,transport=tcp": 2},
        "baton_kv_staging_slots_in_use": {"": c.slots_in_use},
        "baton_kv_unsent_bytes": {"": c.unsent_bytes},
        "baton_mirror_blocks": {"": 77},
    }


def test_objectives_and_predictions_have_instruments() -> None:
    instruments = Instruments(cluster_status)
    instruments.requests_slo.add(1, {"model": "m", "slo_class": "interactive", "outcome": "met"})
    instruments.tokens_slo_met.add(30, {"model": "m", "slo_class": "interactive"})
    instruments.shed.add(2, {"tenant": "acme"})
    instruments.prediction_error.record(0.15, {"of": "ttft"})
    lines = instruments.exposition().decode().splitlines()
    names = ("baton_requests_slo", "baton_tokens_slo_met", "baton_admission_shed", "baton_placement_prediction_error")
    found = {line for line in lines if line.startswith(names) and "_created" not in line}
    assert found >= {
        'baton_requests_slo_total{model="m",outcome="met",slo_class="interactive"} 1.0',
        'baton_tokens_slo_met_total{model="m",slo_class="interactive"} 30.0',
        'baton_admission_shed_total{tenant="acme"} 2.0',
        'baton_placement_prediction_error_bucket{le="0.1",of="ttft"} 0.0',
        'baton_placement_prediction_error_bucket{le="0.2",of="ttft"} 1.0',
        'baton_placement_prediction_error_count{of="ttft"} 1.0',
    }


def test_a_bucket_holds_its_bound_and_every_row_has_every_label() -> None:
    instruments = Instruments(cluster_status)
    for value in (0.01, 0.011, 100.0):
        instruments.request_duration.record(value, {"gen_ai.operation.name": "chat"})
    instruments.request_duration.record(0.5, {"error.type": "Overloaded", "gen_ai.operation.name": "chat"})
    found = instruments.exposition().decode().splitlines()
    name, chat = "gen_ai_server_request_duration_seconds", 'error_type="",gen_ai_operation_name="chat"'
    assert f"# TYPE {name} histogram" in found
    assert f'{name}_bucket{{{chat},le="0.01"}} 1.0' in found
    assert f'{name}_bucket{{{chat},le="0.02"}} 2.0' in found
    assert f'{name}_bucket{{{chat},le="84.0"}} 2.0' in found
    assert f'{name}_bucket{{{chat},le="+Inf"}} 3.0' in found
    assert f"{name}_sum{{{chat}}} 100.021" in found
    assert f'{name}_count{{error_type="Overloaded",gen_ai_operation_name="chat"}} 1.0' in found
    assert not any("baton_retries" in line for line in found), "nothing was recorded"


NOBODY = cluster_status()
INFO = worker_info("d0", Role.DECODE, node="node-7", wire_compat="wire", block_size=16, engine="e", sampler="s/1")
LOAD = WorkerLoad(
    state=WorkerState.DRAINING,
    running=3,
    waiting=2,
    blocks=BlockCounts(8, 1, 5, 2),
    preemptions=4,
    drafted_tokens=9,
    accepted_tokens=5,
    model_drafted_tokens=3,
    model_accepted_tokens=1,
)
SCALING = (PoolScaling("prefill", 0.25, 1), PoolScaling("decode", 0.75, 3))
CLUSTER = cluster_status(Worker(INFO, LOAD), controller=ControllerInfo(pid=1, address="h:2", scaling=SCALING))


def samples(instruments: Instruments, *names: str) -> set[str]:
    lines = instruments.exposition().decode().splitlines()
    return {line for line in lines if re.split("[{ ]", line)[0] in names}


def test_every_instrument_is_defined_and_has_the_name_that_is_shown() -> None:
    instruments = Instruments(lambda: CLUSTER, {"default": SloClassConfig()}, shows_vllm=True)
    catalogue = instruments.catalogue()
    for name, definition in catalogue.items():
        assert re.fullmatch("(baton|gen_ai_server|process)_[a-z_]+|vllm:[a-z0-9_]+", name)
        assert len(definition.description) >= 8, name
        assert definition.description.endswith("."), name
        assert name.endswith("_total") == (definition.kind == "counter"), name
    heads = [line.split() for line in instruments.exposition().decode().splitlines() if line.startswith("# TYPE")]
    shown = {name: kind for _, _, name, kind in heads if not name.endswith("_created")}
    assert len(shown) > 20
    for name, kind in shown.items():
        assert catalogue[name].kind == kind, "what is shown is in the catalogue"


def test_the_catalogue_has_what_dashboards_and_rules_ask_for() -> None:
    catalogue = Instruments(lambda: NOBODY).catalogue()
    counters = {
        "baton_requests_slo_total", "baton_tokens_slo_met_total", "baton_slo_misses_total",
        "baton_tenant_requests_total", "baton_tenant_tokens_total", "baton_prefix_ceiling_tokens_total",
        "baton_prefix_hit_tokens_total", "baton_prompt_tokens_total", "baton_preemptions_total",
        "baton_drafted_tokens_total", "baton_accepted_tokens_total",
        "baton_placements_total", "baton_retries_total", "baton_migrations_total", "baton_admission_shed_total",
        "baton_index_stale_hints_total", "baton_index_stale_tokens_total", "baton_transfer_bytes_total",
    }  # fmt: skip
    gauges = {
        "baton_slo_objective_seconds", "baton_hot_prefix_share", "baton_worker_state", "baton_worker_info",
        "baton_build_info", "baton_autoscale_utilisation", "baton_autoscale_wanted_workers", "baton_kv_blocks",
        "baton_worker_sequences", "baton_worker_ready", "baton_worker_self_check_ok", "baton_mirror_blocks",
        "baton_mirror_lag_seconds", "baton_pool_workers", "baton_redis_up",
    }  # fmt: skip
    histograms = {
        "baton_stage_duration_seconds", "baton_inter_token_latency_seconds", "baton_transfer_duration_seconds",
        "gen_ai_server_request_duration_seconds", "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_time_per_output_token_seconds",
    }  # fmt: skip
    for kind, names in (("counter", counters), ("gauge", gauges), ("histogram", histograms)):
        assert names <= {name for name, one in catalogue.items() if one.kind == kind}
    replaced = {f"baton_{name}_duration_seconds" for name in ("queue", "prefill", "decode", "transfer_exposed")}
    assert not replaced & catalogue.keys()
    assert not any(name.startswith("vllm:") for name in catalogue), "only where they are asked for"


def test_histograms_reach_as_far_as_late_answers_do() -> None:
    """Where the last finite bound is below what happens, every quantile above it is told as that bound."""
    instruments = Instruments(lambda: NOBODY, shows_vllm=True)
    stages = ("queue", "prefill", "decode")
    for each, labels in (
        (instruments.time_to_first_token, {}),
        (instruments.time_per_output_token, {}),
        (instruments.inter_token_latency, {}),
        (instruments.request_duration, {}),
        (instruments.transfer_duration, {}),
        *((instruments.stage_duration, {"stage": stage}) for stage in stages),
    ):
        each.record(0.1, labels)
    reach: dict[str, float] = {}
    for line in instruments.exposition().decode().splitlines():
        name, _, rest = line.partition("_seconds_bucket{")
        if (bound := re.search(r'le="([\d.]+)"', rest)) is not None:
            reach[name] = max(reach.get(name, 0.0), float(bound[1]))
    first, token, long = 600.0, 30.0, 3600.0
    assert reach == {
        "gen_ai_server_time_to_first_token": first, "vllm:time_to_first_token": first,
        "gen_ai_server_time_per_output_token": token, "baton_inter_token_latency": token,
        "vllm:inter_token_latency": token,
        "gen_ai_server_request_duration": long, "baton_stage_duration": long, "baton_transfer_duration": long,
        "vllm:e2e_request_latency": long, "vllm:request_queue_time": long, "vllm:request_prefill_time": long,
        "vllm:request_decode_time": long,
    }  # fmt: skip


def test_objectives_are_shown_where_there_are_any() -> None:
    classes = {"default": SloClassConfig(), "batch": SloClassConfig(ttft_ms=math.inf, itl_ms=2000.0, e2e_ms=8000.0)}
    assert samples(Instruments(lambda: NOBODY, classes), "baton_slo_objective_seconds") == {
        'baton_slo_objective_seconds{objective="ttft",slo_class="default"} 60.0',
        'baton_slo_objective_seconds{objective="itl",slo_class="default"} 1.0',
        'baton_slo_objective_seconds{objective="itl",slo_class="batch"} 2.0',
        'baton_slo_objective_seconds{objective="e2e",slo_class="batch"} 8.0',
    }


def test_what_a_worker_and_the_autoscaler_say() -> None:
    role = f'{RELEASE},role="decode"'
    names = ("baton_worker_state", "baton_worker_info", "baton_autoscale_utilisation", "baton_autoscale_wanted_workers")
    assert samples(Instruments(lambda: CLUSTER), *names) == {
        f'baton_worker_state{{{MODEL},{role},state="starting",worker="d0"}} 0.0',
        f'baton_worker_state{{{MODEL},{role},state="ready",worker="d0"}} 0.0',
        f'baton_worker_state{{{MODEL},{role},state="draining",worker="d0"}} 1.0',
        f'baton_worker_state{{{MODEL},{role},state="dead",worker="d0"}} 0.0',
        f'baton_worker_info{{block_size="16",engine="e",{MODEL},node="node-7",{role},sampler="s/1",wire_compat="wire",'
        'worker="d0"} 1.0',
        'baton_autoscale_utilisation{model="tiny",pool="prefill",release="tiny-1"} 0.25',
        'baton_autoscale_utilisation{model="tiny",pool="decode",release="tiny-1"} 0.75',
        'baton_autoscale_wanted_workers{model="tiny",pool="prefill",release="tiny-1"} 1.0',
        'baton_autoscale_wanted_workers{model="tiny",pool="decode",release="tiny-1"} 3.0',
    }
    off = cluster_status(Worker(INFO, LOAD), controller=ControllerInfo(pid=1, address="h:2"))
    assert not samples(Instruments(lambda: off), *names[2:]), "the autoscaler is off"
    assert not samples(Instruments(lambda: NOBODY), *names), "nobody is there"
    (build,) = samples(Instruments(lambda: NOBODY), "baton_build_info")
    assert re.fullmatch(r'baton_build_info\{version="\d[^"]*"\} 1\.0', build)


def test_rows_of_states_are_counted_if_there_are_any() -> None:
    load = dataclasses.replace(LOAD, state_rows=BlockCounts(9, free=4, cached=3, in_use=2))
    status = cluster_status(Worker(INFO, load), worker("w-1"))
    assert samples(Instruments(lambda: status), "baton_state_rows") == {
        f'baton_state_rows{{{MODEL},{RELEASE},role="decode",state="{state}",worker="d0"}} {count:.1f}'
        for state, count in (("free", 4), ("cached", 3), ("in_use", 2))
    }


def test_what_a_worker_computes_with_is_shown() -> None:
    slow = Computes(
        gpu="Tesla T4",
        dtype="float16",
        weights="exact",
        kv_dtype="float16",
        attention="torch",
        fallbacks=("a: b", "c: d"),
    )
    names = ("baton_worker_computes", "baton_worker_fallbacks")
    assert samples(Instruments(lambda: cluster_status(worker("d0", computes=slow))), *names) == {
        'baton_worker_computes{attention="torch",dtype="float16",fused="0",gpu="Tesla T4",graphs="0",kv_copies="",'
        'kv_dtype="float16",model="tiny",plans_ahead="false",ranks="1",release="tiny-1",role="decode",weights="exact",'
        'worker="d0"} 1.0',
        'baton_worker_fallbacks{model="tiny",release="tiny-1",role="decode",worker="d0"} 2.0',
    }


def test_what_will_end_a_cluster_is_shown() -> None:
    names = (
        *("baton_controller_up", "baton_unplaced_workers", "baton_worker_failures_total"),
        *("baton_redis_memory_bytes", "baton_redis_evicted_keys_total", "baton_certificate_validity_seconds"),
    )
    status = cluster_status(
        controller=ControllerInfo(pid=1, address="h:2", trouble=(PoolTrouble("decode", 2, 3),)),
        store_memory=StoreMemory(5, 8, 1),
        certificates=(CertificateTerm("members", 10.0, 20.0),),
    )
    assert samples(Instruments(lambda: status), *names) == {
        'baton_controller_up{model="tiny",release="tiny-1"} 1.0',
        'baton_unplaced_workers{model="tiny",pool="decode",release="tiny-1"} 2.0',
        'baton_worker_failures_total{model="tiny",pool="decode",release="tiny-1"} 3.0',
        'baton_redis_memory_bytes{kind="used"} 5.0',
        'baton_redis_memory_bytes{kind="limit"} 8.0',
        "baton_redis_evicted_keys_total 1.0",
        'baton_certificate_validity_seconds{certificate="members",end="begins"} 10.0',
        'baton_certificate_validity_seconds{certificate="members",end="ends"} 20.0',
    }
    assert samples(Instruments(lambda: NOBODY), *names) == {'baton_controller_up{model="tiny",release="tiny-1"} 0.0'}
    boundless = cluster_status(store_memory=StoreMemory(5, 0, 0))
    assert samples(Instruments(lambda: boundless), names[3]) == {'baton_redis_memory_bytes{kind="used"} 5.0'}


def test_the_process_shows_what_it_takes() -> None:
    names = ("cpu_seconds_total", "resident_memory_bytes", "start_time_seconds", "open_fds", "max_fds")
    found = {}
    with Path(__file__).open():  # one more file
        for line in samples(Instruments(lambda: NOBODY), *(f"process_{name}" for name in names)):
            name, _, value = line.partition(" ")
            found[name.removeprefix("process_")] = float(value)
    assert set(found) == set(names)
    assert 0 < found["cpu_seconds_total"] < time.time() - found["start_time_seconds"] + 1e6
    assert 2**24 < found["resident_memory_bytes"] < 2**36
    assert 3 < found["open_fds"] <= found["max_fds"]


def test_drafts_are_shown_by_what_guessed_them() -> None:
    worker = f'{MODEL},{RELEASE},role="decode",worker="d0"'
    assert samples(Instruments(lambda: CLUSTER), "baton_drafted_tokens_total", "baton_accepted_tokens_total") == {
        f'baton_drafted_tokens_total{{kind="lookup",{worker}}} 6.0',
        f'baton_drafted_tokens_total{{kind="model",{worker}}} 3.0',
        f'baton_accepted_tokens_total{{kind="lookup",{worker}}} 4.0',
        f'baton_accepted_tokens_total{{kind="model",{worker}}} 1.0',
    }


def test_common_beginnings_are_shown() -> None:
    instruments = Instruments(lambda: NOBODY)
    for key in (b"\xab" * 16, b"\xab" * 16, b"\xcd" * 16, b"\xef" * 16):
        instruments.prefixes.see_prompt([key])
    shown = samples(instruments, "baton_hot_prefix_share")
    assert shown == {'baton_hot_prefix_share{prefix="abababab"} 0.5'}


def test_vllms_names_show_the_same_values() -> None:
    instruments = Instruments(lambda: CLUSTER, shows_vllm=True)
    for value, error in ((0.3, ""), (0.4, ""), (0.5, "Overloaded")):
        labels = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "m",
            **({"error.type": error} if error else {}),
        }
        instruments.request_duration.record(value, labels)
    instruments.request_duration.record(0.5, {"gen_ai.operation.name": "text_completion", "gen_ai.request.model": "m"})
    for stage, seconds in (("queue", 0.25), ("prefill", 0.5), ("decode", 2.0), ("transfer", 4.0)):
        instruments.stage_duration.record(seconds, {"model": "m", "stage": stage})
    instruments.inter_token_latency.record(0.125, {"model": "m"}, times=3)
    instruments.prompt_tokens.add(100, {"model": "m"})
    instruments.prefix_hit_tokens.add(64, {"model": "m"})
    instruments.finished_choices.add(5, {"model": "m", "reason": "stop"})
    instruments.finished_choices.add(2, {"model": "m", "reason": "length"})
    lines = instruments.exposition().decode().splitlines()
    worker, model = 'engine="d0",model_name="tiny"', 'model_name="m"'
    values = {line for line in lines if line.startswith("vllm:") and "_bucket" not in line and "_created" not in line}
    assert values == {
        f"vllm:num_requests_running{{{worker}}} 3.0",
        f"vllm:num_requests_waiting{{{worker}}} 2.0",
        f"vllm:kv_cache_usage_perc{{{worker}}} 0.25",
        f"vllm:num_preemptions_total{{{worker}}} 4.0",
        f"vllm:spec_decode_num_draft_tokens_total{{{worker}}} 9.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{worker}}} 5.0",
        f'vllm:cache_config_info{{block_size="16",{worker},num_gpu_blocks="8"}} 1.0',
        f"vllm:prefix_cache_queries_total{{{model}}} 100.0",
        f"vllm:prefix_cache_hits_total{{{model}}} 64.0",
        f"vllm:prompt_tokens_total{{{model}}} 100.0",
        f'vllm:request_success_total{{finished_reason="stop",{model}}} 5.0',
        f'vllm:request_success_total{{finished_reason="length",{model}}} 2.0',
        f"vllm:inter_token_latency_seconds_count{{{model}}} 3.0",
        f"vllm:inter_token_latency_seconds_sum{{{model}}} 0.375",
        f"vllm:e2e_request_latency_seconds_count{{{model}}} 3.0",
        f"vllm:e2e_request_latency_seconds_sum{{{model}}} 1.2",
        f"vllm:request_queue_time_seconds_count{{{model}}} 1.0",
        f"vllm:request_queue_time_seconds_sum{{{model}}} 0.25",
        f"vllm:request_prefill_time_seconds_count{{{model}}} 1.0",
        f"vllm:request_prefill_time_seconds_sum{{{model}}} 0.5",
        f"vllm:request_decode_time_seconds_count{{{model}}} 1.0",
        f"vllm:request_decode_time_seconds_sum{{{model}}} 2.0",
    }, "the refused one is none; nothing is recorded of first tokens and of generated ones"
    assert f'vllm:e2e_request_latency_seconds_bucket{{le="0.32",{model}}} 1.0' in lines
    assert "# TYPE vllm:e2e_request_latency_seconds histogram" in lines


def test_what_could_not_be_read_is_counted_by_who_was_sent_it() -> None:
    workers = worker("w-0"), worker("w-1", load=WorkerLoad(malformed=3))
    controller = ControllerInfo(pid=1, address="h:1", malformed=2)
    exposition = Instruments(lambda: cluster_status(*workers, malformed=1, controller=controller)).exposition()
    assert [
        line for line in exposition.decode().splitlines() if "malformed_messages_total" in line and "#" not in line
    ] == [
        "baton_malformed_messages_total 1.0",
        f'baton_member_malformed_messages_total{{{MODEL},{RELEASE},role="controller",worker="controller"}} 2.0',
        f'baton_member_malformed_messages_total{{{MODEL},{RELEASE},role="decode",worker="w-0"}} 0.0',
        f'baton_member_malformed_messages_total{{{MODEL},{RELEASE},role="decode",worker="w-1"}} 3.0',
    ]


def test_what_is_skipped_in_redis_is_counted_by_what_it_is() -> None:
    garbage = (StoreGarbage("event", 2, "there"), StoreGarbage("lease", 5, "here"))
    exposition = Instruments(lambda: cluster_status(store_garbage=garbage)).exposition()
    lines = [line for line in exposition.decode().splitlines() if line.startswith("baton_store_garbage")]
    assert lines == ['baton_store_garbage_total{what="event"} 2.0', 'baton_store_garbage_total{what="lease"} 5.0']


def test_objectives_of_the_classes_are_bounds_of_what_they_limit() -> None:
    """How many met them is then known exactly. One beyond the last bound, or none, is no bound."""
    classes = {
        "fast": SloClassConfig(ttft_ms=333.0, itl_ms=47.5, e2e_ms=7777.0),
        "patient": SloClassConfig(ttft_ms=math.inf, itl_ms=1e6, e2e_ms=math.inf),
        "default": SloClassConfig(),
    }
    plain, divided = Instruments(lambda: NOBODY), Instruments(lambda: NOBODY, classes)
    for name, added in (
        ("time_to_first_token", {0.333}),
        ("inter_token_latency", {0.0475}),
        ("time_per_output_token", {0.0475}),
        ("request_duration", {7.777}),
        ("stage_duration", set[float]()),
    ):
        before, after = getattr(plain, name).bounds, getattr(divided, name).bounds
        assert set(after) - set(before) == added, name
        assert list(after) == sorted(after)
        assert after[-1] == before[-1]
    divided.time_to_first_token.record(0.333)
    divided.time_to_first_token.record(0.3331)
    shown = divided.exposition().decode()
    assert 'gen_ai_server_time_to_first_token_seconds_bucket{le="0.333"} 1.0' in shown
    assert {60.0} < set(plain.time_to_first_token.bounds), "the default objectives are bounds in any case"
    assert {1.0} < set(plain.inter_token_latency.bounds)


def test_bounds_are_so_close_that_a_quantile_is_within_a_fifth() -> None:
    instruments = Instruments(lambda: NOBODY)
    found = [each for each in vars(instruments).values() if isinstance(each, Histogram)]
    histograms = [each for each in found if list(each.bounds) != LENGTH_BOUNDS]  # lengths are for heat maps
    assert (len(found), len(histograms)) == (9, 7)
    for each in histograms:
        ratios = [above / below for below, above in itertools.pairwise(each.bounds)]
        assert max(ratios) <= 1.2 + 1e-9, each.definition.name
        assert each.bounds[0] == FIRST_BOUND


def test_adapters_are_counted_where_they_are_served() -> None:
    load = dataclasses.replace(LOAD, adapters=("ab" * 32, "cd" * 32))
    workers = (
        worker("d0", load=load, max_adapters=4),
        worker("d1", load=LOAD, max_adapters=4),
        worker("d2", load=LOAD),
    )
    poet = registered_adapter("poet")
    content = workers[0].info.content_id
    status = dataclasses.replace(cluster_status(*workers), adapters={content: {poet.name: poet}})
    instruments = Instruments(lambda: status)
    assert samples(instruments, "baton_adapters_resident") == {
        'baton_adapters_resident{model="tiny",release="tiny-1",role="decode",worker="d0"} 2.0',
        'baton_adapters_resident{model="tiny",release="tiny-1",role="decode",worker="d1"} 0.0',
    }
    assert samples(instruments, "baton_adapters_registered") == {
        'baton_adapters_registered{model="tiny",release="tiny-1"} 1.0'
    }
