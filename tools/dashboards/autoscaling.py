"""The dashboard of the autoscaler: what the pools need, have and get."""

from __future__ import annotations

from tools.dashboards.model import Dashboard, Lead, Panel, Section

SIZES = Section(
    "Sizes",
    (
        *(
            Panel(
                title=f"Workers of {pool}",
                description="What the autoscaler wants (absent while it is off), what is ordered, and what is "
                "ready. wanted above "
                "desired: it only advises (autoscale.dry_run). Ready below desired: no node has room, or workers do "
                "not start; `baton status`.",
                unit="short",
                queries={
                    "wanted": f'max(baton_autoscale_wanted_workers{{$cluster, pool="{pool}"}})',
                    "desired": f'max(baton_pool_workers{{$cluster, pool="{pool}", state="desired"}})',
                    "ready": f'max(baton_pool_workers{{$cluster, pool="{pool}", state="ready"}})',
                },
            )
            for pool in ("prefill", "decode")
        ),
        Panel(
            title="Utilisation",
            description="Utilisation of a pool, as the autoscaler measures it. Prefill: share of time spent on "
            "prompts. Decode: share of the sequences and KV that it can hold within its objectives. "
            "Above autoscale.target_utilisation (0.7) workers are moved or started; if it stays there, "
            "autoscale.max_workers is reached. `baton autoscale --dry-run` shows why.",
            unit="percentunit",
            queries={"{{pool}}": "max by (pool) (baton_autoscale_utilisation{$cluster})"},
            leads=(Lead("pools", "Running sequences"), Lead("pools", "Waiting sequences")),
        ),
        Panel(
            title="Goodput, the guard",
            description="Share of the requests that met their objectives. No worker is stopped while it is below "
            "autoscale.goodput_target (0.95).",
            unit="percentunit",
            queries={
                "met": '(sum(rate(baton_requests_slo_total{$cluster, outcome="met"}[$__rate_interval])) or $zero) / '
                '(sum(rate(baton_requests_slo_total{$cluster, outcome!="cancelled"}[$__rate_interval])) > 0)'
            },
            bad_below=0.95,
            leads=(Lead("overview", "SLO attainment"),),
        ),
    ),
)

WORK = Section(
    "Work",
    (
        Panel(
            title="Placements by mode",
            description="disaggregated: prefill and decode on different workers; aggregated: both on a decode worker, "
            "for short prompts or if prefill workers are busy. If many are aggregated and tokens are late, add prefill "
            "workers.",
            unit="ops",
            queries={"{{mode}}": "sum by (mode) (rate(baton_placements_total{$cluster}[$__rate_interval]))"},
            width=8,
            is_stacked=True,
        ),
        Panel(
            title="Placements by decode worker",
            description="Placements a second. A worker that gets far more than the others holds a prefix that many "
            "requests share.",
            unit="ops",
            queries={"{{decode}}": "sum by (decode) (rate(baton_placements_total{$cluster}[$__rate_interval]))"},
            width=8,
            is_stacked=True,
        ),
        Panel(
            title="Placements by prefill worker",
            description="Placements of prompts; aggregated requests have no prefill worker.",
            unit="ops",
            queries={
                "{{prefill}}": "sum by (prefill) "
                '(rate(baton_placements_total{$cluster, prefill!=""}[$__rate_interval]))'
            },
            width=8,
            is_stacked=True,
        ),
        Panel(
            title="Waiting",
            description="Sequences that wait, by role. More workers shorten the queue.",
            unit="short",
            queries={
                "{{role}}": 'sum by (role) (max by (worker, role) (baton_worker_sequences{$cluster, state="waiting"}))'
            },
            width=8,
        ),
        Panel(
            title="Leaving workers",
            description="Workers that transfer their work before they end or change their role.",
            unit="short",
            queries={
                "{{role}}": 'sum by (role) (max by (worker, role) (baton_worker_state{$cluster, state="draining"})) '
                "or $zero"
            },
            width=8,
            leads=(Lead("pools", "Workers by state"),),
        ),
        Panel(
            title="Migrations",
            description="Choices that moved from a worker that leaves, with their KV; pulled=false: it had to be "
            "computed again. "
            "Many without an order: something drains workers, such as nodes that go; `baton status`.",
            unit="ops",
            queries={
                "pulled={{pulled}}": "sum by (pulled) (rate(baton_migrations_total{$cluster}[$__rate_interval])) "
                "or $zero"
            },
            width=8,
        ),
    ),
)

DASHBOARD = Dashboard(
    name="autoscaling",
    title="Baton / Autoscaling",
    description="What the pools need and have, and what the autoscaler orders.",
    variables=(),
    sections=(SIZES, WORK),
)
