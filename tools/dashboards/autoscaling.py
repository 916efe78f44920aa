"""Dashboard of the autoscaler: required, desired and actual pool sizes."""

from __future__ import annotations

from tools.dashboards.model import Dashboard, Lead, Panel, Section

SIZES = Section(
    "Sizes",
    (
        *(
            Panel(
                title=f"Workers of {pool}",
                description="Wanted: the autoscaler's recommendation (absent if it is off); desired: the pool's "
                "size; ready: workers that serve. Wanted above desired: the autoscaler only advises "
                "(autoscale.dry_run). Ready below desired: no node has room, or workers do not start; "
                "see `baton status`.",
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
            description="Utilisation of a pool, as the autoscaler measures it. Prefill: share of the time spent on "
            "prompts. Decode: share of the sequences and KV that the pool can hold within its "
            "objectives. Above autoscale.target_utilisation (0.7) workers change their role or are "
            "started. If it stays there, autoscale.max_workers is reached. `baton autoscale --dry-run` "
            "shows why.",
            unit="percentunit",
            queries={"{{pool}}": "max by (pool) (baton_autoscale_utilisation{$cluster})"},
            leads=(Lead("pools", "Running sequences"), Lead("pools", "Waiting sequences")),
        ),
        Panel(
            title="Goodput guard",
            description="Share of the requests that met their objectives. The autoscaler stops no worker while it is "
            "below autoscale.goodput_target (0.95).",
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
            description="Placements per second. disaggregated: prefill and decode on different workers. aggregated: "
            "both on a decode worker, for short prompts or if prefill workers are busy. If many are "
            "aggregated and tokens are late, add prefill workers.",
            unit="ops",
            queries={"{{mode}}": "sum by (mode) (rate(baton_placements_total{$cluster}[$__rate_interval]))"},
            width=8,
            is_stacked=True,
        ),
        Panel(
            title="Placements by decode worker",
            description="Placements per second. If one worker gets far more than the others, it holds a prefix that "
            "many requests share.",
            unit="ops",
            queries={"{{decode}}": "sum by (decode) (rate(baton_placements_total{$cluster}[$__rate_interval]))"},
            width=8,
            is_stacked=True,
        ),
        Panel(
            title="Placements by prefill worker",
            description="Placements of prompts. Aggregated requests have no prefill worker.",
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
            description="Waiting sequences, by role. More workers shorten the queue.",
            unit="short",
            queries={
                "{{role}}": 'sum by (role) (max by (worker, role) (baton_worker_sequences{$cluster, state="waiting"}))'
            },
            width=8,
        ),
        Panel(
            title="Draining workers",
            description="Workers that migrate their requests before they exit or change their role.",
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
            description="Choices per second that migrated from a draining worker with their KV; pulled=false: their "
            "KV was recomputed. Many without a scaling command: something else drains workers, such as "
            "the removal of nodes; see `baton status`.",
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
    description="Required, desired and actual pool sizes, and the autoscaler's decisions.",
    variables=(),
    sections=(SIZES, WORK),
)
