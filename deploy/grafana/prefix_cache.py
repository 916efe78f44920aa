"""How much of the prompts was known already, how much could have been, and whether the index tells the truth."""

from __future__ import annotations

from deploy.grafana.model import MODEL, Dashboard, Kind, Panel, Section


def tokens(counter: str) -> str:
    return f'sum(rate({counter}{{$cluster, model=~"$model"}}[$__rate_interval]))'


PROMPT, HIT, CEILING = (tokens(f"baton_{name}_tokens_total") for name in ("prompt", "prefix_hit", "prefix_ceiling"))

HITS = Section(
    "Hits",
    (
        Panel(
            "Hit rate and its ceiling",
            "Share of the prompt tokens that a cache had, and the share that one which forgets nothing would have had. "
            "Far below the ceiling: caches are too small (few cached blocks left), or requests go where their past is "
            "not. A low ceiling: the prompts have little in common.",
            "percentunit",
            {"hit rate": f"{HIT} / ({PROMPT} > 0)", "ceiling": f"{CEILING} / ({PROMPT} > 0)"},
            width=16,
        ),
        Panel(
            "Of the ceiling",
            "Hits of those possible.",
            "percentunit",
            {"reached": f"{HIT} / ({CEILING} > 0)"},
            Kind.STAT,
            width=8,
        ),
        Panel(
            "Prompt tokens",
            "Prompt tokens a second of requests served, and those of them that were computed.",
            "suffix: tok/s",
            {"prompts": PROMPT, "computed": f"{PROMPT} - {HIT}"},
        ),
        Panel(
            "Pulled from another worker",
            "Prompt tokens a second whose KV came from another worker's cache. They are hits, too.",
            "suffix: tok/s",
            {"{{worker}}": "max by (worker) (rate(baton_kv_pulled_tokens_total{$cluster}[$__rate_interval]))"},
            is_stacked=True,
        ),
        Panel(
            "Hot prefixes",
            "Share of the recent requests that begin with the same block; the five most common. One near 100 % is a "
            "system prompt: every worker should have it.",
            "percentunit",
            {"{{prefix}}": "avg by (prefix) (baton_hot_prefix_share{$cluster})"},
            Kind.BARS,
        ),
        Panel(
            "Cached blocks",
            "Blocks whose content may be hit and that no sequence holds. Near 0: whatever was known is forgotten at "
            "once.",
            "short",
            {"{{worker}}": 'max by (worker) (baton_kv_blocks{$cluster, state="cached"})'},
            is_stacked=True,
        ),
    ),
)

INDEX = Section(
    "Does the index tell the truth?",
    (
        Panel(
            "Stale hints",
            "Share of the placements whose worker held less of the prompt than the index said. Above 5 %: routers are "
            "behind (mirror lag), or caches are so small that blocks go while requests are on their way.",
            "percentunit",
            {
                "stale": "(sum(rate(baton_index_stale_hints_total{$cluster}[$__rate_interval])) or $zero) / "
                "(sum(rate(baton_placements_total{$cluster}[$__rate_interval])) > 0)"
            },
            width=8,
            bad_above=0.05,
        ),
        Panel(
            "Tokens promised in vain",
            "Prompt tokens a second that the index said too much. They were computed.",
            "suffix: tok/s",
            {"stale": "sum(rate(baton_index_stale_tokens_total{$cluster}[$__rate_interval])) or $zero"},
            width=8,
        ),
        Panel(
            "Mirror lag",
            "Age of the newest ownership event that a router has not seen yet. Seconds: Redis or the router is "
            "overloaded; `baton status`, `baton doctor`.",
            "s",
            {"{{router}}": "max by (router) (baton_mirror_lag_seconds{$cluster})"},
            width=8,
            bad_above=5,
        ),
        Panel(
            "Blocks a router believes in, and what workers have",
            "The mirror's view and the workers' own. Apart for minutes: the index is wrong for that worker; restart "
            "the router, or `baton drain WORKER`.",
            "short",
            {
                "mirror {{worker}}": "max by (worker) (baton_mirror_blocks{$cluster})",
                "worker {{worker}}": "sum by (worker) (max by (worker, state) (baton_kv_blocks{$cluster, "
                'state=~"cached|in_use"}))',
            },
            width=24,
        ),
    ),
)

DASHBOARD = Dashboard(
    "prefix-cache",
    "Baton / Prefix cache",
    "Hit rate against its ceiling, hot prefixes, and the index's truth.",
    (MODEL,),
    (HITS, INDEX),
)
