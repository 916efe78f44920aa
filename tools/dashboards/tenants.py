"""Dashboard of the tenants: load and SLO attainment of each."""

from __future__ import annotations

from tools.dashboards.model import TENANT, Dashboard, Kind, Lead, Panel, Section


def tokens(kinds: str) -> str:
    labels = f'$cluster, tenant=~"$tenant", kind=~"{kinds}"'
    return f"sum by (tenant) (rate(baton_tenant_tokens_total{{{labels}}}[$__rate_interval]))"


def requests(outcome: str = "", by: str = "tenant") -> str:
    """Return the rate of a tenant's requests; `outcome` is a matcher, such as `="met"`."""
    labels = '$cluster, tenant=~"$tenant"' + (f", outcome{outcome}" if outcome else "")
    return f"sum by ({by}) (rate(baton_tenant_requests_total{{{labels}}}[$__rate_interval]))"


MET, COUNTED, REFUSED = requests('="met"'), requests('!~"cancelled|invalid|limited"'), requests('="rejected"')
SHED = 'sum by (tenant) (rate(baton_admission_shed_total{$cluster, tenant=~"$tenant"}[$__rate_interval]))'
LIMITED = 'sum by (tenant, limit) (rate(baton_tenant_refusals_total{$cluster, tenant=~"$tenant"}[$__rate_interval]))'
READS, RECORDS = (
    f"sum by (outcome) (increase(baton_{what}_total{{$cluster}}[$__rate_interval]))"
    for what in ("tenants_file_reads", "usage_records")
)
UNSERVED = {
    what: f"sum by (field) (increase(baton_{what}_fields_total{{$cluster}}[$__rate_interval]))"
    for what in ("refused", "ignored")
}

REQUESTS = Section(
    "Requests",
    (
        Panel(
            title="Requests by tenant",
            description="Finished requests per second. When the cluster is full, tenants above their weighted share "
            "are refused first.",
            unit="reqps",
            queries={"{{tenant}}": requests()},
            is_stacked=True,
        ),
        Panel(
            title="Requests by outcome",
            description="Requests of the selected tenants. rejected: above the tenant's share while the cluster is "
            "full; limited: beyond one of the tenant's limits.",
            unit="reqps",
            queries={"{{outcome}}": requests(by="outcome")},
            is_stacked=True,
        ),
        Panel(
            title="Objectives met",
            description="Share of a tenant's requests that met their objectives. Cancelled and invalid requests do "
            "not count. If only one tenant is low, its class may be too tight for its prompts, or its "
            "weight too small for its load.",
            unit="percentunit",
            queries={"{{tenant}}": f"({MET} or 0 * {requests()}) / ({COUNTED} > 0)"},
            bad_below=0.99,
            leads=(Lead("overview", "SLO attainment by class"), Lead("tenants", "Refused or shed", "tenant")),
        ),
        Panel(
            title="Refused or shed",
            description="Requests per second of a tenant that were refused, and those that were admitted and then "
            "preempted in favour of other tenants. Raise its `weight` in the tenants' file, or enlarge "
            "the pools.",
            unit="reqps",
            queries={"refused {{tenant}}": f"{REFUSED} or $zero", "shed {{tenant}}": f"{SHED} or $zero"},
        ),
        Panel(
            title="Refused by limit",
            description="Requests per second that were refused because their tenant had used up a limit, by the "
            "limit's name in the tenants' file.",
            unit="reqps",
            queries={"{{tenant}}, {{limit}}": LIMITED},
            leads=(Lead("tenants", "Requests by tenant", "tenant"),),
        ),
        Panel(
            title="Unsupported fields",
            description="Fields of HTTP request bodies within the last minutes. refused: the request failed because "
            "of the field. ignored: the field had no effect. other: names that no API has.",
            unit="short",
            queries={"refused {{field}}": UNSERVED["refused"], "ignored {{field}}": UNSERVED["ignored"]},
        ),
        Panel(
            title="Tenants' file and usage log",
            description="Changes of the tenants' file that the routers adopted or refused, and usage records written "
            "or failed, within the last minutes. refused: the file is invalid, and the previous entries "
            "stay in force. failed: the records are lost.",
            unit="short",
            queries={
                "tenants' file {{outcome}}": READS,
                "usage records {{outcome}}": RECORDS,
            },
        ),
    ),
)

TOKENS = Section(
    "Tokens",
    (
        Panel(
            title="Generated",
            description="Generated tokens per second by tenant.",
            unit="suffix: tok/s",
            queries={"{{tenant}}": tokens("generated")},
            width=8,
            is_stacked=True,
        ),
        Panel(
            title="Prompts",
            description="Prompt tokens per second by tenant, including cached ones.",
            unit="suffix: tok/s",
            queries={"{{tenant}}": tokens("prompt")},
            width=8,
            is_stacked=True,
        ),
        Panel(
            title="Found in a cache",
            description="Share of a tenant's prompt tokens that were cached. Tenants with the same `cache_scope` "
            "share their prefixes.",
            unit="percentunit",
            queries={"{{tenant}}": f"({tokens('cached')} or 0 * {tokens('prompt')}) / ({tokens('prompt')} > 0)"},
            width=8,
        ),
        Panel(
            title="Top tenants by tokens",
            description="The tenants with the most tokens, in prompts and computed for responses, within the "
            "selected time range.",
            unit="short",
            queries={
                "{{tenant}}": "topk(20, sum by (tenant) (increase(baton_tenant_tokens_total{$cluster, "
                'tenant=~"$tenant", kind=~"prompt|computed"}[$__range])))'
            },
            kind=Kind.BARS,
            width=24,
        ),
    ),
)

DASHBOARD = Dashboard(
    name="tenants",
    title="Baton / Tenants",
    description="Load and SLO attainment by tenant.",
    variables=(TENANT,),
    sections=(REQUESTS, TOKENS),
)
