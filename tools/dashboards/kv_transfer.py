"""KV between workers: KV transfers from prefill to decode, and prefixes pulled from others."""

from __future__ import annotations

from baton.telemetry.request_metrics import DURATION_BOUNDS, STAGE_BOUNDS
from tools.dashboards.model import ROLE, WORKER, Dashboard, Lead, Panel, Section
from tools.dashboards.overview import quantiles

OF_WORKER = 'role=~"$role", worker=~"$worker"'


def per_second(counter: str, by: str, labels: str = "") -> str:
    """The rate of a workers' counter, summed by labels; each worker counts once, though every router reports it."""
    inner = ", ".join(dict.fromkeys(("worker", "role", *filter(None, by.split(", ")), *_names(labels))))
    each = f"max by ({inner}) (rate({counter}{{$cluster, {OF_WORKER}{labels}}}[$__rate_interval]))"
    return f"sum by ({by}) ({each})" if by else f"sum({each})"


def _names(labels: str) -> list[str]:
    """`, direction="sent"` -> `direction`."""
    return [part.partition("=")[0].strip() for part in labels.split(",") if part.strip()]


NUM_SENT = per_second("baton_kv_transfers_total", "", ', direction="sent", outcome="committed"')
TRANSFER_S = per_second("baton_kv_transfer_time_seconds_total", "")
EXPOSED_S = per_second("baton_kv_transfer_exposed_time_seconds_total", "")

TRAFFIC = Section(
    "Traffic",
    (
        Panel(
            title="Sent",
            description="Bytes of KV a second that a worker sent in committed transfers. At the network's limit a "
            "narrower transfer.wire_dtype helps; more workers do not.",
            unit="Bps",
            queries={
                "{{worker}} ({{role}})": per_second(
                    "baton_kv_transfer_bytes_total", "worker, role", ', direction="sent"'
                )
            },
            is_stacked=True,
            leads=(Lead("hardware", "NVLink and PCIe"), Lead("hardware", "Network")),
        ),
        Panel(
            title="Received",
            description="Bytes of KV a second that a worker received in committed transfers.",
            unit="Bps",
            queries={
                "{{worker}} ({{role}})": per_second(
                    "baton_kv_transfer_bytes_total", "worker, role", ', direction="received"'
                )
            },
            is_stacked=True,
        ),
        Panel(
            title="Transfers by outcome",
            description="Ended transfers a second; both sides count each. Failed ones were computed again "
            "elsewhere: see the "
            "reasons.",
            unit="ops",
            queries={"{{direction}} {{outcome}}": per_second("baton_kv_transfers_total", "direction, outcome")},
            is_stacked=True,
            leads=(Lead("kv-transfer", "Failures by reason"),),
        ),
        Panel(
            title="Chunk size",
            description="Mean bytes of a chunk. Small ones cost more than they carry: raise transfer.span_tokens.",
            unit="bytes",
            queries={
                "{{direction}}": f"{per_second('baton_kv_transfer_bytes_total', 'direction')} / "
                f"({per_second('baton_kv_transfer_chunks_total', 'direction')} > 0)"
            },
        ),
    ),
)

TIME = Section(
    "Time",
    (
        Panel(
            title="KV transfer",
            description="Duration of a KV transfer, from the first chunk to the acknowledged commit. Most of it "
            "overlaps with the prefill.",
            unit="s",
            queries=quantiles("baton_transfer_duration_seconds", ""),
            width=8,
            is_logarithmic=True,
            last_bound=DURATION_BOUNDS[-1],
        ),
        Panel(
            title="Exposed time",
            description="Mean seconds of a transfer after the prompt was computed, which no computation hid. High: "
            "the network is slow, or the receiver has no room; see staging and unsent KV.",
            unit="s",
            queries={"exposed": f"{EXPOSED_S} / ({NUM_SENT} > 0)", "whole": f"{TRANSFER_S} / ({NUM_SENT} > 0)"},
            width=8,
            leads=(Lead("kv-transfer", "Computed and not sent"), Lead("hardware", "Network")),
        ),
        Panel(
            title="Stage transfer of requests",
            description="Time that requests waited for KV, as the stage to blame counts it.",
            unit="s",
            queries=quantiles("baton_stage_duration_seconds", ', stage="transfer"'),
            width=8,
            is_logarithmic=True,
            last_bound=STAGE_BOUNDS[-1],
        ),
    ),
)

TROUBLE = Section(
    "Trouble",
    (
        Panel(
            title="Failures by reason",
            description="corrupted: faulty memory or network; replace the worker. expired, timed_out: the network or "
            "the receiver hangs. refused: the two sides do not fit; `baton doctor`. lost: a worker or "
            "the connection died.",
            unit="ops",
            queries={"{{reason}}": per_second("baton_kv_transfer_failures_total", "reason")},
            is_stacked=True,
        ),
        Panel(
            title="Failures by worker",
            description="Failed transfers a second by worker, as sender or receiver. One worker alone: `baton "
            "drain WORKER`.",
            unit="ops",
            queries={
                "{{worker}} ({{role}}) {{direction}}": per_second(
                    "baton_kv_transfers_total", "worker, role, direction", ', outcome="failed"'
                )
            },
            leads=(Lead("pools", "Takes traffic", "worker"),),
        ),
        Panel(
            title="Fenced and resent",
            description="Messages of unknown or past transfers, which were dropped, and messages sent again because "
            "no answer came. A few after a failure are normal; many without one: the network loses or "
            "delays messages.",
            unit="ops",
            queries={
                "fenced": per_second("baton_kv_messages_fenced_total", ""),
                "resent": per_second("baton_kv_messages_resent_total", ""),
            },
        ),
        Panel(
            title="Links that fail",
            description="Transports that could not be opened and are tried again, NCCL communicators that could not be "
            "ended, and those that may share a stream of their GPU.",
            unit="ops",
            queries={
                "not opened": per_second("baton_kv_failed_openings_total", ""),
                "not ended": per_second("baton_kv_nccl_stuck_aborts_total", ""),
                "share a stream": per_second("baton_kv_nccl_shared_streams_total", ""),
            },
        ),
        Panel(
            title="NCCL stalls",
            description="NCCL operations that did not end in time; their connection was closed and opened again. If "
            "there are any, see the fabric's logs, and run `baton doctor` on both nodes.",
            unit="ops",
            queries={"{{worker}} ({{role}})": per_second("baton_kv_nccl_stalls_total", "worker, role")},
        ),
    ),
)

MEANS = Section(
    "Pairs, staging and pulls",
    (
        Panel(
            title="Open pairs",
            description="Connections of a worker to others, one per pair of ranks. At transfer.max_pairs they are "
            "opened and closed all the time.",
            unit="short",
            queries={"{{worker}} ({{role}})": f"max by (worker, role) (baton_kv_open_pairs{{$cluster, {OF_WORKER}}})"},
            width=8,
        ),
        Panel(
            title="Pairs by transport",
            description="Connections by kind of transport, and by what NCCL moves bytes by. Between GPUs, tcp or "
            "NET/Socket means that the fast way could not be opened.",
            unit="short",
            queries={
                "{{link}} {{transport}}": f"sum by (link, transport) (max by (worker, link, transport) "
                f"(baton_kv_pairs{{$cluster, {OF_WORKER}}}))"
            },
            width=8,
        ),
        Panel(
            title="Staging slots in use",
            description="Staging slots that hold a chunk. If they stay at transfer.num_slots, chunks wait for slots: "
            "raise it.",
            unit="short",
            queries={
                "{{worker}} ({{role}})": f"max by (worker, role) ("
                f"baton_kv_staging_slots_in_use{{$cluster, {OF_WORKER}}})"
            },
            width=8,
        ),
        Panel(
            title="Computed and not sent",
            description="Bytes of KV that are pinned until they are sent. At transfer.max_unsent_mib a prefill "
            "worker takes no new prompt: the decode pool has no room, or the network is slow.",
            unit="bytes",
            queries={
                "{{worker}} ({{role}})": f"max by (worker, role) (baton_kv_unsent_bytes{{$cluster, {OF_WORKER}}})"
            },
            width=8,
            leads=(Lead("pools", "KV in use", "worker"),),
        ),
        Panel(
            title="Pulled tokens",
            description="Prompt tokens a second that came from another worker's cache instead of being computed.",
            unit="suffix: tok/s",
            queries={"{{worker}} ({{role}})": per_second("baton_kv_pulled_tokens_total", "worker, role")},
            width=8,
        ),
        Panel(
            title="Failed pulls",
            description="Prefixes that could not be pulled and were computed: they were evicted, or did not arrive "
            "within transfer.pull_timeout_s. With many stale hints, the mirror lags: see the prefix "
            "cache's dashboard.",
            unit="ops",
            queries={"{{worker}} ({{role}})": per_second("baton_kv_pull_failures_total", "worker, role")},
            width=8,
            leads=(Lead("prefix-cache", "Stale hints"),),
        ),
        Panel(
            title="KV transfers, as routers count them",
            description="Bytes of KV a second that were transferred for requests; the rest of what workers send is "
            "pulled.",
            unit="Bps",
            queries={"transferred": "sum(rate(baton_transfer_bytes_total{$cluster}[$__rate_interval]))"},
            width=8,
        ),
    ),
)

DASHBOARD = Dashboard(
    name="kv-transfer",
    title="Baton / KV transfer",
    description="KV between workers: traffic, time, failures.",
    variables=(ROLE, WORKER),
    sections=(TRAFFIC, TIME, TROUBLE, MEANS),
)
