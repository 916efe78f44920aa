"""Overview dashboard: health of the cluster, latency of requests, and the stage to blame for slow ones."""

from __future__ import annotations

from baton.telemetry.request_metrics import DURATION_BOUNDS, ERROR_BOUNDS, STAGE_BOUNDS, TOKEN_BOUNDS, TTFT_BOUNDS
from tools.dashboards import answers
from tools.dashboards.answers import GENERATED
from tools.dashboards.model import (
    FIRING,
    MODEL,
    OF_MODEL,
    OF_REQUESTED,
    RELEASE,
    SLO_CLASS,
    Dashboard,
    Kind,
    Lead,
    Panel,
    Section,
)

OF_CLASS = f'{OF_MODEL}, slo_class=~"$slo_class"'


def requests(outcome: str = "", by: str = "") -> str:
    """Return the rate of finished requests per second.

    Args:
        outcome: a matcher, such as `="met"`.
    """
    labels = f"$cluster, {OF_CLASS}" + (f", outcome{outcome}" if outcome else "")
    total = f"sum by ({by}) " if by else "sum"
    return f"{total}(rate(baton_requests_slo_total{{{labels}}}[$__rate_interval]))"


MET, CANCELLED_APART, REFUSED = requests('="met"'), requests('!="cancelled"'), requests('="rejected"')
MET_BY_CLASS, APART_BY_CLASS = requests('="met"', "slo_class"), requests('!="cancelled"', "slo_class")
TOKENS_MET = f"sum(rate(baton_tokens_slo_met_total{{$cluster, {OF_CLASS}}}[$__rate_interval]))"
MISSES = f"sum by (stage, outcome) (rate(baton_slo_misses_total{{$cluster, {OF_CLASS}}}[$__rate_interval]))"

NOW = Section(
    "Now",
    (
        Panel(
            title="Goodput, requests",
            description="Requests per second that met their objectives. It also falls with the traffic: compare it "
            "with the attainment. If the attainment falls, look at the stage to blame.",
            unit="reqps",
            queries={"met": f"{MET} or $zero"},
            kind=Kind.STAT,
            width=4,
            height=4,
        ),
        Panel(
            title="Goodput, tokens",
            description="Tokens per second of requests that met their objectives.",
            unit="suffix: tok/s",
            queries={"met": f"{TOKENS_MET} or $zero"},
            kind=Kind.STAT,
            width=4,
            height=4,
        ),
        Panel(
            title="SLO attainment",
            description="Share of the requests that met their objectives. Requests that clients cancelled do not "
            "count. Below 99 %: look at the outcomes and at the stage to blame.",
            unit="percentunit",
            queries={"met": f"({MET} or $zero) / ({CANCELLED_APART} > 0)"},
            kind=Kind.STAT,
            width=4,
            height=4,
            bad_below=0.99,
            leads=(Lead("overview", "SLO attainment by class"), Lead("overview", "Misses by stage to blame")),
        ),
        Panel(
            title="Refused",
            description="Requests per second that were refused immediately, because their first token would have "
            "been late. If it lasts, the pools are too small: `baton autoscale --dry-run` shows which "
            "one.",
            unit="reqps",
            queries={"refused": f"{REFUSED} or $zero"},
            kind=Kind.STAT,
            width=4,
            height=4,
            bad_above=0.1,
            leads=(Lead("autoscaling", "Utilisation"), Lead("tenants", "Refused or shed")),
        ),
        Panel(
            title="Ready workers",
            description="Ready workers of all pools, as a share of the desired ones. Empty: the models sleep. Below "
            "100 % for minutes: look at `baton status` and the controller's log.",
            unit="percentunit",
            queries={
                "ready": "sum(max by (release, pool) "
                f'(baton_pool_workers{{$cluster, {OF_MODEL}, state="ready"}})) / (sum(max by (release, pool) '
                f'(baton_pool_workers{{$cluster, {OF_MODEL}, state="desired"}})) > 0)'
            },
            kind=Kind.STAT,
            width=4,
            height=4,
            bad_below=1,
            leads=(
                Lead("pools", "Ready and desired"),
                Lead("models", "Models by state"),
                Lead("pools", "Failures and unplaced workers"),
                Lead("hardware", "Restarts"),
            ),
        ),
        Panel(
            title="Alerts",
            description="Baton alerts that are firing. The `runbook` of each alert says what to do, and its "
            "`runbook_url` links to a page.",
            unit="short",
            queries={"firing": f"count({FIRING}) or $zero"},
            kind=Kind.STAT,
            width=4,
            height=4,
            bad_above=1,
        ),
    ),
)

GOODPUT = Section(
    "Goodput",
    (
        Panel(
            title="Requests by outcome",
            description="Finished requests per second, by the outcome for their SLO class. ttft_missed, itl_missed "
            "and e2e_missed were late: see the stage to blame. rejected: too much load, or too few "
            "workers.",
            unit="reqps",
            queries={"{{outcome}}": requests(by="outcome")},
            is_stacked=True,
        ),
        Panel(
            title="SLO attainment by class",
            description="Share of a class's requests that met their objectives, without cancelled ones. If only one "
            "class falls, its objectives may be tighter than the model allows: compare them with the "
            "latencies below.",
            unit="percentunit",
            queries={"{{slo_class}}": f"({MET_BY_CLASS} or 0 * {requests(by='slo_class')}) / ({APART_BY_CLASS} > 0)"},
            bad_below=0.99,
            leads=(Lead("overview", "Misses by stage to blame"), Lead("tenants", "Objectives met")),
        ),
        Panel(
            title="Tokens",
            description="Generated tokens per second, and those of requests that met their objectives. The "
            "difference was computed too late.",
            unit="suffix: tok/s",
            queries={"generated": GENERATED, "in time": f"{TOKENS_MET} or $zero"},
        ),
        Panel(
            title="Misses by stage to blame",
            description="Late requests per second, by the stage that exceeded its share of the time the most. queue, "
            "prefill: add prefill workers. decode_admission, decode: add decode workers. transfer: see "
            "the KV transfer dashboard. recovery: workers fail; see the pools dashboard.",
            unit="reqps",
            queries={"{{stage}}, {{outcome}}": f"{MISSES} or $zero"},
            is_stacked=True,
            leads=(
                Lead("pools", "Waiting sequences"),
                Lead("pools", "Running sequences"),
                Lead("kv-transfer", "Stage transfer of requests"),
                Lead("pools", "Takes traffic"),
            ),
        ),
    ),
)


def quantiles(histogram: str, labels: str) -> dict[str, str]:
    """Return the queries of the 50th, 90th and 99th percentile of a histogram."""
    return {
        f"p{percent}": f"histogram_quantile({percent / 100:g}, sum by (le) "
        f"(rate({histogram}_bucket{{$cluster{labels}}}[$__rate_interval])))"
        for percent in (50, 90, 99)
    }


def objective(name: str) -> dict[str, str]:
    return {
        "objective {{slo_class}}": "max by (slo_class) (baton_slo_objective_seconds{$cluster, "
        f'objective="{name}", slo_class=~"$slo_class"}})'
    }


LATENCY = Section(
    "Latency",
    (
        Panel(
            title="Time to first token",
            description="Time from a request's arrival to its first token, with the objectives of the classes. If it "
            "is close to an objective, add prefill workers, or improve the prefix hit rate.",
            unit="s",
            queries={
                **quantiles("gen_ai_server_time_to_first_token_seconds", f", {OF_REQUESTED}"),
                **objective("ttft"),
            },
            width=8,
            is_logarithmic=True,
            last_bound=TTFT_BOUNDS[-1],
            leads=(
                Lead("overview", "First tokens, heat map"),
                Lead("pools", "Waiting sequences"),
                Lead("prefix-cache", "Hit rate and its ceiling"),
            ),
        ),
        Panel(
            title="First tokens, heat map",
            description="Requests by their time to the first token. Two bands: some requests hit a cached prefix, or "
            "some wait. A rising band: a queue grows.",
            unit="s",
            queries=answers.heat("gen_ai_server_time_to_first_token_seconds", f", {OF_REQUESTED}"),
            kind=Kind.HEAT,
            width=8,
            leads=(Lead("overview", "Time to first token"), Lead("overview", "Prompt lengths, heat map")),
        ),
        Panel(
            title="Time per output token",
            description="Mean time between tokens of a request, which its ITL objective limits. If it is close to "
            "the objective, add decode workers.",
            unit="s",
            queries={
                **quantiles("gen_ai_server_time_per_output_token_seconds", f", {OF_REQUESTED}"),
                **objective("itl"),
            },
            width=8,
            is_logarithmic=True,
            last_bound=TOKEN_BOUNDS[-1],
        ),
        Panel(
            title="Gaps between tokens",
            description="Time between two consecutive tokens. A high p99 with a good mean: streams stall because of "
            "preemptions, prompts computed on decode workers, or draining workers.",
            unit="s",
            queries={**quantiles("baton_inter_token_latency_seconds", f", {OF_MODEL}"), **objective("itl")},
            width=8,
            is_logarithmic=True,
            last_bound=TOKEN_BOUNDS[-1],
            leads=(Lead("pools", "Preemptions"), Lead("pools", "KV in use"), Lead("autoscaling", "Placements by mode")),
        ),
        Panel(
            title="Where the time goes",
            description="Mean seconds of a request by stage. The stages add up to the time from arrival to the last "
            "token.",
            unit="s",
            queries={
                "{{stage}}": "sum by (stage) "
                f"(rate(baton_stage_duration_seconds_sum{{$cluster, {OF_MODEL}}}[$__rate_interval])) / "
                f"sum by (stage) (rate(baton_stage_duration_seconds_count{{$cluster, {OF_MODEL}}}[$__rate_interval]))"
            },
            width=8,
            is_stacked=True,
        ),
        Panel(
            title="Stages, p99",
            description="99th percentile of the time that a request spends in a stage.",
            unit="s",
            queries={
                "{{stage}}": "histogram_quantile(0.99, sum by (stage, le) "
                f"(rate(baton_stage_duration_seconds_bucket{{$cluster, {OF_MODEL}}}[$__rate_interval])))"
            },
            width=8,
            is_logarithmic=True,
            last_bound=STAGE_BOUNDS[-1],
        ),
        Panel(
            title="Request duration",
            description="Time from a request's arrival to its last token, which grows with the length of the "
            "response. Classes with an e2e objective show it too.",
            unit="s",
            queries={**quantiles("gen_ai_server_request_duration_seconds", f", {OF_REQUESTED}"), **objective("e2e")},
            width=8,
            is_logarithmic=True,
            last_bound=DURATION_BOUNDS[-1],
        ),
    ),
)

TROUBLE = Section(
    "Refusals and errors",
    (
        Panel(
            title="Refused by class",
            description="Requests per second that were refused immediately (429), with a retry time. The load needs "
            "more workers, or fewer requests: `baton autoscale --dry-run` shows the sizes that the load "
            "needs.",
            unit="reqps",
            queries={"{{slo_class}}": requests('="rejected"', by="slo_class") + " or $zero"},
            width=8,
        ),
        Panel(
            title="Fields refused and ignored",
            description="Requests per second that were refused because of a field, and fields per second that were "
            "ignored because they do not change the response, by name. It shows clients whose every "
            "request is refused.",
            unit="ops",
            queries={
                f"{word} {{{{field}}}}": f"sum by (field) (rate(baton_{word}_fields_total{{$cluster}}"
                "[$__rate_interval]))"
                for word in ("refused", "ignored")
            },
        ),
        Panel(
            title="Errors by type",
            description="Requests by the error that ended them; cancelled: the client left. InvalidRequest is a "
            "client's error, and its message says what to change. WorkerFailed and TransferError are the "
            "cluster's: see the pools and the KV transfer dashboards.",
            unit="reqps",
            queries={
                "{{error_type}}": "sum by (error_type) (rate(gen_ai_server_request_duration_seconds_count{$cluster, "
                f'error_type!="", {OF_REQUESTED}}}[$__rate_interval])) or $zero'
            },
            width=8,
            leads=(Lead("pools", "Takes traffic"), Lead("kv-transfer", "Failures by reason")),
        ),
        Panel(
            title="Retries",
            description="Choices that failed on a worker and continued on another, by the kind of failure. Clients "
            "see only a delay. `baton status` shows the workers, `baton status --explain REQUEST` a "
            "single request.",
            unit="reqps",
            queries={
                "{{error}}": "sum by (error) "
                f"(rate(baton_retries_total{{$cluster, {OF_MODEL}}}[$__rate_interval])) or $zero"
            },
            width=8,
            leads=(Lead("pools", "Failures and unplaced workers"), Lead("kv-transfer", "Failures by worker")),
        ),
        Panel(
            title="Shed requests",
            description="Admitted requests that were preempted before their first token in favour of tenants with "
            "fewer queued requests. The cluster is overloaded.",
            unit="reqps",
            queries={
                "shed": f"sum(rate(baton_admission_shed_total{{$cluster, {OF_MODEL}}}[$__rate_interval])) or $zero"
            },
            width=8,
        ),
        Panel(
            title="Error of predictions, p90",
            description="|predicted - measured| / measured, for the time to first token and for the prefill. "
            "Placement and admission rely on these predictions. Above 1 they are guesses, for instance "
            "after a change of model until the cost model is fitted.",
            unit="percentunit",
            queries={
                "{{of}}": "histogram_quantile(0.9, sum by (of, le) "
                f"(rate(baton_placement_prediction_error_bucket{{$cluster, {OF_MODEL}}}[$__rate_interval])))"
            },
            width=8,
            last_bound=ERROR_BOUNDS[-1],
        ),
        Panel(
            title="All requests by outcome",
            description="All requests per second, including those refused as invalid, which have no SLO.",
            unit="reqps",
            queries={
                "{{outcome}}": f"sum by (outcome) (rate(baton_requests_total{{$cluster, {OF_MODEL}}}"
                "[$__rate_interval]))"
            },
            width=8,
            is_stacked=True,
        ),
    ),
)

DASHBOARD = Dashboard(
    name="overview",
    title="Baton / Overview",
    description="Goodput, SLO attainment, latency and the stage to blame.",
    variables=(MODEL, RELEASE, SLO_CLASS),
    sections=(NOW, GOODPUT, LATENCY, TROUBLE, answers.SECTION),
)
