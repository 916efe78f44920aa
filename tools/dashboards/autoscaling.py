"""Dashboard of the autoscaler: required, desired and actual pool sizes."""

from __future__ import annotations

from tools.dashboards.model import MODEL, OF_MODEL, RELEASE, Dashboard, Lead, Panel, Section

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
                    "wanted for {{release}}": "max by (release) "
                    f'(baton_autoscale_wanted_workers{{$cluster, {OF_MODEL}, pool="{pool}"}})',
                    "desired for {{release}}": "max by (release) "
                    f'(baton_pool_workers{{$cluster, {OF_MODEL}, pool="{pool}", state="desired"}})',
                    "ready for {{release}}": "max by (release) "
                    f'(baton_pool_workers{{$cluster, {OF_MODEL}, pool="{pool}", state="ready"}})',
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
            queries={
                "{{release}} {{pool}}": f"max by (release, pool) (baton_autoscale_utilisation{{$cluster, {OF_MODEL}}})"
            },
            leads=(Lead("pools", "Running sequences"), Lead("pools", "Waiting sequences")),
        ),
        Panel(
            title="Goodput guard",
            description="Share of the requests that met their objectives. The autoscaler stops no worker while it is "
            "below autoscale.goodput_target (0.95).",
            unit="percentunit",
            queries={
                "met": f'(sum(rate(baton_requests_slo_total{{$cluster, {OF_MODEL}, outcome="met"}}[$__rate_interval])) '
                f'or $zero) / (sum(rate(baton_requests_slo_total{{$cluster, {OF_MODEL}, outcome!="cancelled"}}'
                "[$__rate_interval])) > 0)"
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
            queries={
                "{{mode}}": f"sum by (mode) (rate(baton_placements_total{{$cluster, {OF_MODEL}}}[$__rate_interval]))"
            },
            width=8,
            is_stacked=True,
        ),
        Panel(
            title="Placements by decode worker",
            description="Placements per second. If one worker gets far more than the others, it holds a prefix that "
            "many requests share.",
            unit="ops",
            queries={
                "{{decode}} of {{release}}": "sum by (release, decode) "
                f"(rate(baton_placements_total{{$cluster, {OF_MODEL}}}[$__rate_interval]))"
            },
            width=8,
            is_stacked=True,
        ),
        Panel(
            title="Placements by prefill worker",
            description="Placements of prompts. Aggregated requests have no prefill worker.",
            unit="ops",
            queries={
                "{{prefill}} of {{release}}": "sum by (release, prefill) "
                f'(rate(baton_placements_total{{$cluster, {OF_MODEL}, prefill!=""}}[$__rate_interval]))'
            },
            width=8,
            is_stacked=True,
        ),
        Panel(
            title="Waiting",
            description="Waiting sequences, by role. More workers shorten the queue.",
            unit="short",
            queries={
                "{{role}}": "sum by (role) (max by (release, worker, role) "
                f'(baton_worker_sequences{{$cluster, {OF_MODEL}, state="waiting"}}))'
            },
            width=8,
        ),
        Panel(
            title="Draining workers",
            description="Workers that migrate their requests before they exit or change their role.",
            unit="short",
            queries={
                "{{role}}": "sum by (role) (max by (release, worker, role) "
                f'(baton_worker_state{{$cluster, {OF_MODEL}, state="draining"}})) '
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
                "pulled={{pulled}}": "sum by (pulled) "
                f"(rate(baton_migrations_total{{$cluster, {OF_MODEL}}}[$__rate_interval])) "
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
    variables=(MODEL, RELEASE),
    sections=(SIZES, WORK),
)
