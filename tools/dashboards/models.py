"""Dashboard of the models: their states, and the releases of a model side by side."""

from __future__ import annotations

from baton.telemetry.request_metrics import TOKEN_BOUNDS, TTFT_BOUNDS
from tools.dashboards.model import MODEL, OF_MODEL, OF_REQUESTED, RELEASE, Dashboard, Kind, Lead, Panel, Section

SHARE = f"max by (model, release) (baton_model_share{{$cluster, {OF_MODEL}}})"


def requests(outcome: str = "", by: str = "model, release") -> str:
    """Return the rate of finished requests by release; `outcome` is a matcher, such as `="met"`."""
    labels = f"$cluster, {OF_MODEL}" + (f", outcome{outcome}" if outcome else "")
    return f"sum by ({by}) (rate(baton_requests_slo_total{{{labels}}}[$__rate_interval]))"


COUNTED = requests('!="cancelled"')


def of_all(part: str, whole: str) -> str:
    """Return a share of the requests that were not cancelled, 0 if there are none of the kind."""
    return f"({part} or 0 * {whole}) / ({COUNTED} > 0)"


def p90(histogram: str, labels: str) -> str:
    return (
        f"histogram_quantile(0.9, sum by (release, le) (rate({histogram}_bucket{{$cluster, {labels}}}"
        "[$__rate_interval])))"
    )


STATES = Section(
    "States",
    (
        Panel(
            title="Models by state",
            description="Number of models in each state. asleep: no workers, and a request wakes it. waking: its "
            "workers start. down: no decode worker is ready; see the pools dashboard. leaving: its controller ends "
            "its workers.",
            unit="short",
            queries={
                "{{state}}": f"sum by (state) (max by (release, state) (baton_model_state{{$cluster, {OF_MODEL}}}))"
            },
            is_stacked=True,
            leads=(Lead("pools", "Ready and desired"), Lead("pools", "Controller")),
        ),
        Panel(
            title="State of each model",
            description="The state that each model is in now. `baton status` also shows its workers and controller.",
            unit="short",
            queries={"": f"max by (model, release, state) (baton_model_state{{$cluster, {OF_MODEL}}}) == 1"},
            kind=Kind.TABLE,
        ),
        Panel(
            title="Held requests",
            description="Requests that wait until their model is awake. Growing for longer than a start takes: its "
            "workers do not start, and the controller's log says why. Above router.max_held a router refuses more.",
            unit="short",
            queries={"{{release}}": f"max by (release) (baton_held_requests{{$cluster, {OF_MODEL}}})"},
            leads=(Lead("pools", "Failures and unplaced workers"), Lead("pools", "Ready and desired", "release")),
        ),
        Panel(
            title="Wake time",
            description="Time from the request for a model's latest wake-up to its first ready decode worker; 0: it "
            "has not been woken. Near router.wake_wait_s, clients give up: let the model sleep later "
            "(autoscale.idle_s), or not at all.",
            unit="s",
            queries={"{{release}}": f"max by (release) (baton_model_wake_seconds{{$cluster, {OF_MODEL}}})"},
        ),
    ),
)

SIDE_BY_SIDE = Section(
    "Releases side by side",
    (
        Panel(
            title="Share of sessions",
            description="Configured share of the sessions of its model that a release gets (model.share), relative to "
            "the model's other releases.",
            unit="percentunit",
            queries={
                "{{model}}: {{release}}": f"{SHARE} / on (model) group_left () (sum by (model) ({SHARE}) > 0)",
            },
            is_stacked=True,
        ),
        Panel(
            title="Requests by release",
            description="Finished requests per second. Sessions differ in length, so the rates follow the shares only "
            "roughly.",
            unit="reqps",
            queries={"{{model}}: {{release}}": requests()},
            is_stacked=True,
        ),
        Panel(
            title="First tokens by release, p90",
            description="90th percentile of the time to first token. A new release above the old one: its cache is "
            "cold, or its pools are small for its share. Lower model.share until they are equal.",
            unit="s",
            queries={"{{release}}": p90("gen_ai_server_time_to_first_token_seconds", OF_REQUESTED)},
            is_logarithmic=True,
            last_bound=TTFT_BOUNDS[-1],
            leads=(
                Lead("overview", "Time to first token", "release"),
                Lead("prefix-cache", "Hit rate and its ceiling"),
            ),
        ),
        Panel(
            title="Gaps between tokens by release, p90",
            description="90th percentile of the time between two consecutive tokens. A new release above the old one: "
            "its decode pool is small for its share, or its model is slower.",
            unit="s",
            queries={"{{release}}": p90("baton_inter_token_latency_seconds", OF_MODEL)},
            is_logarithmic=True,
            last_bound=TOKEN_BOUNDS[-1],
            leads=(Lead("pools", "Running sequences", "release"),),
        ),
        Panel(
            title="Errors by release",
            description="Share of the requests that ended with an error, without cancelled ones. If only the new "
            "release has errors, set its model.share to 0.",
            unit="percentunit",
            queries={"{{model}}: {{release}}": of_all(requests('="error"'), requests())},
            bad_above=0.01,
            leads=(Lead("overview", "Errors by type", "release"), Lead("pools", "Takes traffic", "release")),
        ),
        Panel(
            title="Goodput by release",
            description="Share of the requests that met their objectives, without cancelled ones.",
            unit="percentunit",
            queries={"{{model}}: {{release}}": of_all(requests('="met"'), requests())},
            bad_below=0.99,
            leads=(Lead("overview", "Misses by stage to blame", "release"),),
        ),
    ),
)

DASHBOARD = Dashboard(
    name="models",
    title="Baton / Models",
    description="States of the models, held requests, and the releases of a model side by side.",
    variables=(MODEL, RELEASE),
    sections=(STATES, SIDE_BY_SIDE),
)
