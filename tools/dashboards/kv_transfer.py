"""Dashboard of KV between workers: transfers from prefill to decode, and prefixes pulled from other workers."""

from __future__ import annotations

from baton.telemetry.request_metrics import DURATION_BOUNDS, STAGE_BOUNDS
from tools.dashboards.model import EACH_WORKER, MODEL, OF_MODEL, RELEASE, ROLE, WORKER, Dashboard, Lead, Panel, Section
from tools.dashboards.overview import quantiles

OF_WORKER = f'{OF_MODEL}, role=~"$role", worker=~"$worker"'


def per_second(counter: str, by: str, labels: str = "") -> str:
    """Return the summed rate of a workers' counter. Each worker counts once, although every router reports it."""
    inner = ", ".join(dict.fromkeys(("release", "worker", "role", *filter(None, by.split(", ")), *_names(labels))))
    each = f"max by ({inner}) (rate({counter}{{$cluster, {OF_WORKER}{labels}}}[$__rate_interval]))"
    return f"sum by ({by}) ({each})" if by else f"sum({each})"


def _names(labels: str) -> list[str]:
    """Return the label names of matchers: `, direction="sent"` -> `direction`."""
    return [part.partition("=")[0].strip() for part in labels.split(",") if part.strip()]


NUM_SENT = per_second("baton_kv_transfers_total", "", ', direction="sent", outcome="committed"')
TRANSFER_S = per_second("baton_kv_transfer_time_seconds_total", "")
EXPOSED_S = per_second("baton_kv_transfer_exposed_time_seconds_total", "")

TRAFFIC = Section(
    "Traffic",
    (
        Panel(
            title="Sent",
            description="Bytes of KV per second that a worker sent in committed transfers. At the network's limit "
            "choose a narrower transfer.wire_dtype; more workers do not help.",
            unit="Bps",
            queries={
                EACH_WORKER: per_second("baton_kv_transfer_bytes_total", "release, worker, role", ', direction="sent"')
            },
            is_stacked=True,
            leads=(Lead("hardware", "NVLink and PCIe"), Lead("hardware", "Network")),
        ),
        Panel(
            title="Received",
            description="Bytes of KV per second that a worker received in committed transfers.",
            unit="Bps",
            queries={
                EACH_WORKER: per_second(
                    "baton_kv_transfer_bytes_total", "release, worker, role", ', direction="received"'
                )
            },
            is_stacked=True,
        ),
        Panel(
            title="Transfers by outcome",
            description="Finished transfers per second; both sides count each. The KV of failed ones was recomputed "
            "elsewhere: see the reasons.",
            unit="ops",
            queries={"{{direction}} {{outcome}}": per_second("baton_kv_transfers_total", "direction, outcome")},
            is_stacked=True,
            leads=(Lead("kv-transfer", "Failures by reason"),),
        ),
        Panel(
            title="Chunk size",
            description="Mean bytes of a chunk. If chunks are small, the overhead dominates: raise "
            "transfer.span_tokens.",
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
            queries=quantiles("baton_transfer_duration_seconds", f", {OF_MODEL}"),
            width=8,
            is_logarithmic=True,
            last_bound=DURATION_BOUNDS[-1],
        ),
        Panel(
            title="Exposed time",
            description="Mean seconds of a transfer after the prompt was computed, which are not hidden behind "
            "computation. If high, the network is slow, or the receiver has no room; see staging and "
            "unsent KV.",
            unit="s",
            queries={"exposed": f"{EXPOSED_S} / ({NUM_SENT} > 0)", "whole": f"{TRANSFER_S} / ({NUM_SENT} > 0)"},
            width=8,
            leads=(Lead("kv-transfer", "Computed but not sent"), Lead("hardware", "Network")),
        ),
        Panel(
            title="Stage transfer of requests",
            description="Time that requests waited for KV, as counted for the stage to blame.",
            unit="s",
            queries=quantiles("baton_stage_duration_seconds", f', {OF_MODEL}, stage="transfer"'),
            width=8,
            is_logarithmic=True,
            last_bound=STAGE_BOUNDS[-1],
        ),
    ),
)

TROUBLE = Section(
    "Faults",
    (
        Panel(
            title="Failures by reason",
            description="Failed transfers per second, by reason. corrupted: faulty memory or network; replace the "
            "worker. expired, timed_out: the network or the receiver hangs. refused: the two workers are "
            "incompatible; `baton doctor`. lost: a worker or the connection died.",
            unit="ops",
            queries={"{{reason}}": per_second("baton_kv_transfer_failures_total", "reason")},
            is_stacked=True,
        ),
        Panel(
            title="Failures by worker",
            description="Failed transfers per second by worker, as sender or receiver. If only one worker is "
            "affected: `baton drain WORKER`.",
            unit="ops",
            queries={
                "{{worker}} ({{role}}, {{release}}) {{direction}}": per_second(
                    "baton_kv_transfers_total", "release, worker, role, direction", ', outcome="failed"'
                )
            },
            leads=(Lead("pools", "Takes traffic", "worker"),),
        ),
        Panel(
            title="Fenced and resent",
            description="Dropped messages of unknown or past transfers, and messages that were resent because no "
            "reply came. A few after a failure are normal. Many without a failure: the network loses or "
            "delays messages.",
            unit="ops",
            queries={
                "fenced": per_second("baton_kv_messages_fenced_total", ""),
                "resent": per_second("baton_kv_messages_resent_total", ""),
            },
        ),
        Panel(
            title="Transport failures",
            description="Transports that could not be opened and are retried, NCCL communicators that could not be "
            "aborted, and those that may share a stream of their GPU.",
            unit="ops",
            queries={
                "not opened": per_second("baton_kv_failed_openings_total", ""),
                "not ended": per_second("baton_kv_nccl_stuck_aborts_total", ""),
                "share a stream": per_second("baton_kv_nccl_shared_streams_total", ""),
            },
        ),
        Panel(
            title="NCCL stalls",
            description="NCCL operations that timed out; their connection was closed and reopened. If there are any, "
            "see the fabric's logs, and run `baton doctor` on both nodes.",
            unit="ops",
            queries={EACH_WORKER: per_second("baton_kv_nccl_stalls_total", "release, worker, role")},
        ),
    ),
)

MEANS = Section(
    "Connections, staging and pulls",
    (
        Panel(
            title="Open connections",
            description="Open connections of a worker to others, one per pair of ranks. At transfer.max_connections "
            "connections are opened and closed all the time.",
            unit="short",
            queries={
                EACH_WORKER: f"max by (release, worker, role) (baton_kv_open_connections{{$cluster, {OF_WORKER}}})"
            },
            width=8,
        ),
        Panel(
            title="Connections by transport",
            description="Connections by kind, and by NCCL's own transport. Between GPUs, tcp or NET/Socket means "
            "that the fast transport could not be opened.",
            unit="short",
            queries={
                "{{transport}} {{carrier}}": "sum by (transport, carrier) "
                f"(max by (release, worker, transport, carrier) (baton_kv_connections{{$cluster, {OF_WORKER}}}))"
            },
            width=8,
        ),
        Panel(
            title="Staging slots in use",
            description="Staging slots that hold a chunk. If the number stays at transfer.num_slots, chunks wait for "
            "slots: raise it.",
            unit="short",
            queries={
                EACH_WORKER: f"max by (release, worker, role) (baton_kv_staging_slots_in_use{{$cluster, {OF_WORKER}}})"
            },
            width=8,
        ),
        Panel(
            title="Computed but not sent",
            description="Bytes of computed KV that are pinned until they are sent. At transfer.max_unsent_mib a "
            "prefill worker starts no new prompt: the decode pool has no room, or the network is slow.",
            unit="bytes",
            queries={EACH_WORKER: f"max by (release, worker, role) (baton_kv_unsent_bytes{{$cluster, {OF_WORKER}}})"},
            width=8,
            leads=(Lead("pools", "KV in use", "worker"),),
        ),
        Panel(
            title="Pulled tokens",
            description="Prompt tokens per second that were pulled from another worker's cache instead of being "
            "computed.",
            unit="suffix: tok/s",
            queries={EACH_WORKER: per_second("baton_kv_pulled_tokens_total", "release, worker, role")},
            width=8,
        ),
        Panel(
            title="Failed pulls",
            description="Prefixes that could not be pulled and were computed: they were evicted, or did not arrive "
            "within transfer.pull_timeout_s. If there are many stale hints too, the mirror lags: see the "
            "prefix cache dashboard.",
            unit="ops",
            queries={EACH_WORKER: per_second("baton_kv_pull_failures_total", "release, worker, role")},
            width=8,
            leads=(Lead("prefix-cache", "Stale hints"),),
        ),
        Panel(
            title="KV transfers counted by routers",
            description="Bytes of KV per second that were transferred for requests. The rest of the workers' traffic "
            "is pulled prefixes.",
            unit="Bps",
            queries={"transferred": f"sum(rate(baton_transfer_bytes_total{{$cluster, {OF_MODEL}}}[$__rate_interval]))"},
            width=8,
        ),
    ),
)

DASHBOARD = Dashboard(
    name="kv-transfer",
    title="Baton / KV transfer",
    description="KV between workers: traffic, durations, failures.",
    variables=(MODEL, RELEASE, ROLE, WORKER),
    sections=(TRAFFIC, TIME, TROUBLE, MEANS),
)
