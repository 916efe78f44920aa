"""The overview: whether the cluster is well, how fast requests are, and which stage is to blame for slow ones."""

from __future__ import annotations

from baton.telemetry.request_metrics import DURATION_BOUNDS, ERROR_BOUNDS, STAGE_BOUNDS, TOKEN_BOUNDS, TTFT_BOUNDS
from tools.dashboards import answers
from tools.dashboards.answers import GENERATED, OF_MODEL
from tools.dashboards.model import FIRING, MODEL, SLO_CLASS, Dashboard, Kind, Lead, Panel, Section

OF_CLASS = 'model=~"$model", slo_class=~"$slo_class"'


def requests(outcome: str = "", by: str = "") -> str:
    """Finished requests a second.

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
            description="Requests a second that met their objectives. It falls with the traffic, too: look at the "
            "attainment "
            "beside it. If that falls, look at the stage to blame.",
            unit="reqps",
            queries={"met": f"{MET} or $zero"},
            kind=Kind.STAT,
            width=4,
            height=4,
        ),
        Panel(
            title="Goodput, tokens",
            description="Tokens a second of requests that met their objectives.",
            unit="suffix: tok/s",
            queries={"met": f"{TOKENS_MET} or $zero"},
            kind=Kind.STAT,
            width=4,
            height=4,
        ),
        Panel(
            title="SLO attainment",
            description="Share of the requests that met their objectives; those that clients cancelled do not "
            "count. Below 99 %: "
            "look at the outcomes and at the stage to blame.",
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
            description="Requests a second that were refused at once, because their first token would have come "
            "too late. If it "
            "lasts, the pools are too small: `baton autoscale --dry-run` shows which one.",
            unit="reqps",
            queries={"refused": f"{REFUSED} or $zero"},
            kind=Kind.STAT,
            width=4,
            height=4,
            bad_above=0.1,
            leads=(Lead("autoscaling", "Utilisation"), Lead("tenants", "Refused or made way")),
        ),
        Panel(
            title="Ready workers",
            description="Ready workers of both pools, as a share of those desired. Below 100 % for minutes: look at "
            "`baton status` and the logs of the head.",
            unit="percentunit",
            queries={
                "ready": 'sum(max by (pool) (baton_pool_workers{$cluster, state="ready"})) / '
                'sum(max by (pool) (baton_pool_workers{$cluster, state="desired"}))'
            },
            kind=Kind.STAT,
            width=4,
            height=4,
            bad_below=1,
            leads=(
                Lead("pools", "Ready and desired"),
                Lead("pools", "Failures and room"),
                Lead("hardware", "Restarts"),
            ),
        ),
        Panel(
            title="Alerts",
            description="Baton's alerts that fire now. The `runbook` of each says what to do, and its `runbook_url` "
            "leads to a page.",
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
            description="Finished requests a second, by the outcome for their SLO class. ttft_missed, itl_missed and "
            "e2e_missed were answered too late: see the stage to blame. rejected: too much load, or too "
            "few workers.",
            unit="reqps",
            queries={"{{outcome}}": requests(by="outcome")},
            is_stacked=True,
        ),
        Panel(
            title="SLO attainment by class",
            description="Share of a class's requests that met their objectives, without those cancelled. If one "
            "class falls alone, "
            "its objectives may be tighter than the model allows: compare with the latencies below.",
            unit="percentunit",
            queries={"{{slo_class}}": f"({MET_BY_CLASS} or 0 * {requests(by='slo_class')}) / ({APART_BY_CLASS} > 0)"},
            bad_below=0.99,
            leads=(Lead("overview", "Misses by stage to blame"), Lead("tenants", "Objectives met")),
        ),
        Panel(
            title="Tokens",
            description="Tokens a second that were generated, and those of requests that met their objectives. The "
            "difference was computed too late.",
            unit="suffix: tok/s",
            queries={"generated": GENERATED, "in time": f"{TOKENS_MET} or $zero"},
        ),
        Panel(
            title="Misses by stage to blame",
            description="Requests a second that were too late, by the stage that took most more than it should. "
            "queue, prefill: "
            "more prefill workers. decode_admission, decode: more decode workers. transfer: see the KV transfer's "
            "dashboard. recovery: workers fail; see the pools'.",
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
    """The median, and what one in ten and one in a hundred wait longer than."""
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
            description="Time from a request's arrival to its first token, with the objectives of the classes. Near "
            "an objective: add prefill workers, or improve the prefix hit rate.",
            unit="s",
            queries={**quantiles("gen_ai_server_time_to_first_token_seconds", f", {OF_MODEL}"), **objective("ttft")},
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
            description="Requests by their time to the first token. Two bands: some find their prefix in a cache, or "
            "some "
            "wait. A band that rises: a queue grows.",
            unit="s",
            queries=answers.heat("gen_ai_server_time_to_first_token_seconds", f", {OF_MODEL}"),
            kind=Kind.HEAT,
            width=8,
            leads=(Lead("overview", "Time to first token"), Lead("overview", "Prompt lengths, heat map")),
        ),
        Panel(
            title="Time per output token",
            description="A request's mean time between tokens, which its ITL objective limits. Near the objective: "
            "add decode workers.",
            unit="s",
            queries={**quantiles("gen_ai_server_time_per_output_token_seconds", f", {OF_MODEL}"), **objective("itl")},
            width=8,
            is_logarithmic=True,
            last_bound=TOKEN_BOUNDS[-1],
        ),
        Panel(
            title="Gaps between tokens",
            description="Time between two consecutive tokens. A high p99 with a good mean: streams stall, because of "
            "preemptions, prompts computed on decode workers, or workers that leave.",
            unit="s",
            queries={**quantiles("baton_inter_token_latency_seconds", ""), **objective("itl")},
            width=8,
            is_logarithmic=True,
            last_bound=TOKEN_BOUNDS[-1],
            leads=(Lead("pools", "Preemptions"), Lead("pools", "KV in use"), Lead("autoscaling", "Placements by mode")),
        ),
        Panel(
            title="Where the time goes",
            description="Mean seconds of a request by stage; the stages add up to its time from arrival to last token.",
            unit="s",
            queries={
                "{{stage}}": "sum by (stage) (rate(baton_stage_duration_seconds_sum{$cluster}[$__rate_interval])) / "
                "sum by (stage) (rate(baton_stage_duration_seconds_count{$cluster}[$__rate_interval]))"
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
                "(rate(baton_stage_duration_seconds_bucket{$cluster}[$__rate_interval])))"
            },
            width=8,
            is_logarithmic=True,
            last_bound=STAGE_BOUNDS[-1],
        ),
        Panel(
            title="Request duration",
            description="Time from a request's arrival to its last token, which grows with the answer's length. "
            "Shown with the e2e objectives of the classes that have one.",
            unit="s",
            queries={**quantiles("gen_ai_server_request_duration_seconds", f", {OF_MODEL}"), **objective("e2e")},
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
            description="Requests a second that were refused at once (429), with the seconds after which to retry. "
            "They need more workers, or there are too many requests: `baton autoscale --dry-run` shows "
            "what the load needs.",
            unit="reqps",
            queries={"{{slo_class}}": requests('="rejected"', by="slo_class") + " or $zero"},
            width=8,
        ),
        Panel(
            title="Fields refused and ignored",
            description="Requests a second that were refused for a field, and fields a second that were ignored "
            "because they change no answer, by name. A client that is refused in each request shows here.",
            unit="ops",
            queries={
                f"{word} {{{{field}}}}": f"sum by (field) (rate(baton_{word}_fields_total{{$cluster}}"
                "[$__rate_interval]))"
                for word in ("refused", "ignored")
            },
        ),
        Panel(
            title="Ended by an error",
            description="Requests by the error that ended them; cancelled is a client that left. InvalidRequest is "
            "the client's, "
            "with a message that says what to change; WorkerFailed and TransferError are ours: see the pools' and "
            "the KV transfer's dashboards.",
            unit="reqps",
            queries={
                "{{error_type}}": "sum by (error_type) (rate(gen_ai_server_request_duration_seconds_count{$cluster, "
                'error_type!="", gen_ai_request_model=~"$model"}[$__rate_interval])) or $zero'
            },
            width=8,
            leads=(Lead("pools", "Takes traffic"), Lead("kv-transfer", "Failures by reason")),
        ),
        Panel(
            title="Placed again",
            description="Choices that failed on a worker and continued elsewhere, by the kind of failure. Clients "
            "see only a delay. `baton status` shows the workers, `baton status --explain REQUEST` one "
            "request.",
            unit="reqps",
            queries={"{{error}}": "sum by (error) (rate(baton_retries_total{$cluster}[$__rate_interval])) or $zero"},
            width=8,
            leads=(Lead("pools", "Failures and room"), Lead("kv-transfer", "Failures by worker")),
        ),
        Panel(
            title="Made way",
            description="Admitted requests that were shed before their first token, in favour of tenants with less "
            "in the queue. The cluster is overloaded.",
            unit="reqps",
            queries={"shed": "sum(rate(baton_admission_shed_total{$cluster}[$__rate_interval])) or $zero"},
            width=8,
        ),
        Panel(
            title="Error of predictions, p90",
            description="|predicted - measured| / measured, for the time to first token and for the prefill. "
            "Placement and admission rely on these predictions. Above 1 they are guesses, as after a "
            "change of model until the costs are learned.",
            unit="percentunit",
            queries={
                "{{of}}": "histogram_quantile(0.9, sum by (of, le) "
                "(rate(baton_placement_prediction_error_bucket{$cluster}[$__rate_interval])))"
            },
            width=8,
            last_bound=ERROR_BOUNDS[-1],
        ),
        Panel(
            title="All requests by outcome",
            description="All requests a second, including those refused as invalid, which have no SLO.",
            unit="reqps",
            queries={
                "{{outcome}}": 'sum by (outcome) (rate(baton_requests_total{$cluster, model=~"$model"}'
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
    variables=(MODEL, SLO_CLASS),
    sections=(NOW, GOODPUT, LATENCY, TROUBLE, answers.SECTION),
)
