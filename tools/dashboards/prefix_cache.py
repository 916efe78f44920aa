"""Dashboard of the prefix cache: hit rates, their ceiling, and the accuracy of the index."""

from __future__ import annotations

from tools.dashboards.model import EACH_WORKER, MODEL, OF_MODEL, RELEASE, Dashboard, Kind, Lead, Panel, Section


def tokens(counter: str) -> str:
    return f"sum(rate({counter}{{$cluster, {OF_MODEL}}}[$__rate_interval]))"


PROMPT, HIT, CEILING = (tokens(f"baton_{name}_tokens_total") for name in ("prompt", "prefix_hit", "prefix_ceiling"))

HITS = Section(
    "Hits",
    (
        Panel(
            title="Hit rate and its ceiling",
            description="Share of the prompt tokens found in a cache, and the share that a cache without eviction "
            "would have found. Far below the ceiling: caches are too small (few cached blocks left), or "
            "requests are placed on workers without their prefixes. A low ceiling: the prompts have "
            "little in common.",
            unit="percentunit",
            queries={"hit rate": f"{HIT} / ({PROMPT} > 0)", "ceiling": f"{CEILING} / ({PROMPT} > 0)"},
            width=16,
            leads=(Lead("pools", "KV blocks by state"), Lead("prefix-cache", "Stale hints")),
        ),
        Panel(
            title="Share of the ceiling",
            description="Hits as a share of the possible hits.",
            unit="percentunit",
            queries={"reached": f"{HIT} / ({CEILING} > 0)"},
            kind=Kind.STAT,
            width=8,
        ),
        Panel(
            title="Prompt tokens",
            description="Prompt tokens per second of served requests, and those that were computed.",
            unit="suffix: tok/s",
            queries={"prompts": PROMPT, "computed": f"{PROMPT} - {HIT}"},
        ),
        Panel(
            title="Pulled from another worker",
            description="Prompt tokens per second whose KV came from another worker's cache. They count as hits.",
            unit="suffix: tok/s",
            queries={
                EACH_WORKER: "max by (release, worker, role) (rate("
                f"baton_kv_pulled_tokens_total{{$cluster, {OF_MODEL}}}[$__rate_interval]))"
            },
            is_stacked=True,
        ),
        Panel(
            title="Hot prefixes",
            description="Share of the recent requests that start with the same block, for the five most common "
            "blocks. A share near 100 % is a system prompt: every worker should cache it.",
            unit="percentunit",
            queries={"{{prefix}}": "avg by (prefix) (baton_hot_prefix_share{$cluster})"},
            kind=Kind.BARS,
        ),
        Panel(
            title="Cached blocks",
            description="Blocks that no sequence holds and whose content can be hit. Near 0: content is evicted as "
            "soon as its sequence ends.",
            unit="short",
            queries={
                EACH_WORKER: f'max by (release, worker, role) (baton_kv_blocks{{$cluster, {OF_MODEL}, state="cached"}})'
            },
            is_stacked=True,
            leads=(Lead("pools", "KV blocks by state"), Lead("pools", "KV in use", "worker")),
        ),
    ),
)

INDEX = Section(
    "Accuracy of the index",
    (
        Panel(
            title="Stale hints",
            description="Share of the placements whose worker held a shorter prefix than the index reported. Above 5 "
            "%: routers are behind (mirror lag), or caches are so small that blocks are evicted before "
            "the request arrives.",
            unit="percentunit",
            queries={
                "stale": "(sum(rate(baton_index_stale_hints_total{$cluster}[$__rate_interval])) or $zero) / "
                "(sum(rate(baton_placements_total{$cluster}[$__rate_interval])) > 0)"
            },
            width=8,
            bad_above=0.05,
        ),
        Panel(
            title="Tokens wrongly reported as cached",
            description="Prompt tokens per second that the index wrongly reported as cached. They were computed.",
            unit="suffix: tok/s",
            queries={"stale": "sum(rate(baton_index_stale_tokens_total{$cluster}[$__rate_interval])) or $zero"},
            width=8,
        ),
        Panel(
            title="Mirror lag",
            description="Age of the newest index event that a router has not processed yet. If it reaches seconds, "
            "Redis or the router is overloaded: `baton status`, `baton doctor`.",
            unit="s",
            queries={"{{router}}": "max by (router) (baton_mirror_lag_seconds{$cluster})"},
            width=8,
            bad_above=5,
            leads=(Lead("pools", "Redis"), Lead("hardware", "Processor")),
        ),
        Panel(
            title="Blocks in the mirror and on workers",
            description="Blocks of a worker according to the mirror, and according to the worker. If they differ for "
            "minutes, the index is wrong for that worker: restart the router, or `baton drain WORKER`. Of a model with "
            "states or windows, the mirror has only the blocks after which a sequence can continue.",
            unit="short",
            queries={
                "mirror {{worker}} of {{release}}": "max by (release, worker) "
                f"(baton_mirror_blocks{{$cluster, {OF_MODEL}}})",
                "worker {{worker}} of {{release}}": "sum by (release, worker) (max by (release, worker, state) "
                f'(baton_kv_blocks{{$cluster, {OF_MODEL}, state=~"cached|in_use"}}))',
            },
            width=24,
        ),
    ),
)

DASHBOARD = Dashboard(
    name="prefix-cache",
    title="Baton / Prefix cache",
    description="Hit rate against its ceiling, hot prefixes, and the accuracy of the index.",
    variables=(MODEL, RELEASE),
    sections=(HITS, INDEX),
)
