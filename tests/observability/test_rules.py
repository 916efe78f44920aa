"""The recording rules and alerts under promtool: real evaluation, in virtual time."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Any

import yaml

from baton.config import SloClassConfig
from baton.telemetry.instruments import Instruments
from baton.telemetry.request_metrics import DURATION_BOUNDS, ERROR_BOUNDS, STAGE_BOUNDS, TOKEN_BOUNDS, TTFT_BOUNDS
from tests.observability.prometheus import binaries
from tests.observability.shipped import RULES, alerts, cases, dashboards, recorded, selectors
from tests.support.builders import cluster_status

LABELS = 'job="baton", slo_class="chat"'


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run([binaries().promtool, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def run(tests: list[dict[str, Any]], folder: Path) -> None:
    promtool("test", "rules", written(tests, sorted(RULES.glob("*.yaml"), reverse=True), folder / "tests.yaml"))


def written(tests: list[dict[str, Any]], files: list[Path], path: Path) -> Path:
    """The file of promtool's tests, once it is written.

    Args:
        files: rules in the order in which they are evaluated: recording.yaml comes before alerts.yaml.
    """
    groups = [group["name"] for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    whole = {
        "rule_files": [str(file) for file in files],
        "group_eval_order": groups,
        "evaluation_interval": "1m",
        "tests": tests,
    }
    path.write_text(yaml.safe_dump(whole))
    return path


def read_by(rule: dict[str, Any]) -> list[dict[str, Any]]:
    """The rule, after the recorded ones that it reads, and those that they read."""
    names = {name for name, _ in selectors(rule["expr"])}
    before = [each for one in recorded() if one["record"] in names for each in read_by(one)]
    return [*before, rule]


def given(series: dict[str, str]) -> dict[str, Any]:
    return {"interval": "1m", "input_series": [{"series": name, "values": values} for name, values in series.items()]}


def test_prometheus_accepts_the_rules() -> None:
    promtool("check", "rules", *sorted(RULES.glob("*.yaml")))


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    """Neither a minute earlier. Each alert is evaluated alone, with what it reads: all of them take minutes."""
    rules, files = {rule["alert"]: rule for rule in alerts()}, []
    for name, kinds in cases().items():
        tests = []
        for kind, case in ((kind, case) for kind, each in kinds.items() for case in each):
            expected = [_fired(rules[name], alert) for alert in case.get("alerts", [])]
            asked = [
                {"alertname": name, "eval_time": f"{case['at']}m", "exp_alerts": expected},
                {"alertname": name, "eval_time": f"{case['at'] - 1}m", "exp_alerts": []},
            ]
            tests.append({"name": f"{name}: {kind}", **given(case["series"]), "alert_rule_test": asked})
        alone = tmp_path / f"{name}.yaml"
        alone.write_text(yaml.safe_dump({"groups": [{"name": name, "rules": read_by(rules[name])}]}))
        files.append(written(tests, [alone], tmp_path / f"tests-{name}.yaml"))
    promtool("test", "rules", *files)


def _fired(rule: dict[str, Any], alert: dict[str, Any]) -> dict[str, Any]:
    """The case tells what depends on the input. The rest is a text that stands in the rule."""
    return {
        "exp_labels": {**alert["labels"], **rule["labels"]},
        "exp_annotations": {**rule["annotations"], "summary": alert["summary"]},
    }


def test_what_is_recorded(tmp_path: Path) -> None:
    """Two routers add up, each worker counts once, and what was never recorded is 0."""
    slo, tokens = "baton_requests_slo_total", "baton_tokens_slo_met_total"
    blocks, transfers, own = "baton_kv_blocks", "baton_kv_transfers_total", 'model="m", release="m-1"'
    series = {
        f'{slo}{{{LABELS}, instance="a", model="m", outcome="met"}}': "0+60x400",
        f'{slo}{{{LABELS}, instance="b", model="m", outcome="met"}}': "0+60x400",
        f'{slo}{{{LABELS}, instance="b", model="m", outcome="itl_missed"}}': "0+120x400",
        f'{slo}{{{LABELS}, instance="b", model="m", outcome="cancelled"}}': "0+240x400",
        f'{slo}{{job="baton", slo_class="batch", outcome="met"}}': "0+60x400",
        f'{slo}{{job="baton", slo_class="hopeless", outcome="error"}}': "0+60x400",
        f'{tokens}{{{LABELS}, instance="a", model="m"}}': "0+600x400",
        f'{tokens}{{{LABELS}, instance="b", model="m"}}': "0+600x400",
        'baton_prompt_tokens_total{model="m"}': "0+240x400",
        'baton_prefix_hit_tokens_total{model="m"}': "0+60x400",
        'baton_prefix_ceiling_tokens_total{model="m"}': "0+120x400",
        'gen_ai_server_time_to_first_token_seconds_bucket{le="0.5"}': "0+60x400",
        'gen_ai_server_time_to_first_token_seconds_bucket{le="+Inf"}': "0+60x400",
        'gen_ai_server_time_per_output_token_seconds_bucket{le="0.25"}': "0+60x400",
        'gen_ai_server_time_per_output_token_seconds_bucket{le="+Inf"}': "0+60x400",
        'baton_stage_duration_seconds_sum{stage="decode"}': "0+30x400",
        'baton_stage_duration_seconds_count{stage="decode"}': "0+60x400",
        'baton_index_stale_hints_total{instance="a"}': "0+60x400",
        'baton_placements_total{instance="a", mode="disaggregated"}': "0+240x400",
    }
    for instance in "ab":
        for state, number in (("in_use", 24), ("cached", 6), ("free", 2)):
            series[f'{blocks}{{{own}, instance="{instance}", worker="d0", role="decode", state="{state}"}}'] = (
                f"{number}x400"
            )
        for worker, running in (("d0", 3), ("d1", 4)):
            labels = f'{own}, instance="{instance}", worker="{worker}", role="decode"'
            series[f'baton_worker_sequences{{{labels}, state="running"}}'] = f"{running}x400"
        for outcome, number in (("committed", 180), ("failed", 60)):
            labels = (
                f'{own}, instance="{instance}", worker="d0", role="decode", direction="received", outcome="{outcome}"'
            )
            series[f"{transfers}{{{labels}}}"] = f"0+{number}x400"
    of_model = f'{LABELS}, model="m"'
    expected = {
        f"baton:goodput_requests:rate5m{{{of_model}}}": 2,
        f"baton:goodput_tokens:rate5m{{{of_model}}}": 20,
        f'baton:requests:rate5m{{{of_model}, outcome="cancelled"}}': 4,
        **{
            f'baton:slo_missed:ratio_rate{window}{{job="baton", slo_class="{slo_class}"}}': share
            for window in ("5m", "30m", "1h", "6h")
            for slo_class, share in (("chat", 0.5), ("batch", 0), ("hopeless", 1))
        },
        "baton:time_to_first_token_seconds:p99_rate5m": 0.495,
        "baton:time_per_output_token_seconds:p99_rate5m": 0.2475,
        'baton:stage_duration_seconds:mean_rate5m{stage="decode"}': 0.5,
        f'baton:kv_in_use:ratio{{{own}, worker="d0", role="decode"}}': 0.75,
        f'baton:sequences:sum{{{own}, role="decode", state="running"}}': 7,
        f'baton:kv_transfers:rate5m{{{own}, direction="received", outcome="failed"}}': 1,
        f"baton:kv_transfers_failed:ratio_rate5m{{{own}}}": 0.25,
        'baton:prefix_hit:ratio_rate5m{model="m"}': 0.25,
        'baton:prefix_ceiling:ratio_rate5m{model="m"}': 0.5,
        "baton:index_stale_hints:ratio_rate5m": 0.25,
    }
    # promtool compares floats exactly.
    asked = [
        {
            "expr": f"round({name}, 1e-6)",
            "eval_time": "395m",
            "exp_samples": [{"labels": "{" + name.partition("{")[2] if "{" in name else "{}", "value": value}],
        }
        for name, value in expected.items()
    ]
    run([{**given(series), "promql_expr_test": asked}], tmp_path)
    told = {name.partition("{")[0] for name in expected}
    assert told == {rule["record"] for rule in recorded()}


def test_a_quantile_above_the_last_bound_is_exactly_that_bound(tmp_path: Path) -> None:
    """By which the dashboards know it, and show that it is above."""
    bounds = {
        "gen_ai_server_time_to_first_token_seconds": TTFT_BOUNDS,
        "baton_inter_token_latency_seconds": TOKEN_BOUNDS,
        "baton_stage_duration_seconds": STAGE_BOUNDS,
        "gen_ai_server_request_duration_seconds": DURATION_BOUNDS,
        "baton_placement_prediction_error": ERROR_BOUNDS,
    }
    series, asked = {}, []
    for name, ends in bounds.items():
        for bound, count in ((ends[-2], 30), (ends[-1], 60), (math.inf, 100)):
            series[f'{name}_bucket{{le="{"+Inf" if bound == math.inf else bound}"}}'] = f"0+{count}x20"
        for q in (0.61, 0.99):
            expression = f"histogram_quantile({q}, sum by (le) (rate({name}_bucket[5m])))"
            samples = [{"labels": "{}", "value": ends[-1]}]
            asked.append({"expr": expression, "eval_time": "15m", "exp_samples": samples})
    run([{**given(series), "promql_expr_test": asked}], tmp_path)


def quantiles_of(title: str) -> dict[str, str]:
    """The quantiles of a panel, as Grafana asks for them."""
    panels = [panel for dashboard in dashboards().values() for panel in dashboard["panels"]]
    (panel,) = (panel for panel in panels if panel["title"] == title)
    found = {target["legendFormat"]: target["expr"] for target in panel["targets"] if "_bucket" in target["expr"]}
    values = {"$namespace": "n", "$job": "baton", "$model": ".*", "$release": ".*", "$__rate_interval": "5m"}
    for name, value in values.items():
        found = {legend: expression.replace(name, value) for legend, expression in found.items()}
    return found


def test_dashboards_show_late_first_tokens_within_a_fifth_of_what_clients_saw(tmp_path: Path) -> None:
    """Two routers, whose clients wait 30 s and longer, and one in ten 40 s and longer."""
    seen = sorted([30 + number / 10 for number in range(90)] + [40 + number / 2 for number in range(10)])
    instruments = Instruments(cluster_status, {"default": SloClassConfig()})
    for value in seen:
        instruments.time_to_first_token.record(value, {"gen_ai.request.model": "m"})
    (metric,) = instruments.time_to_first_token.collect()
    series = {}
    for sample in metric.samples:
        if sample.name.endswith("_bucket"):
            for router in ("a", "b"):
                labels = {**sample.labels, "namespace": "n", "job": "baton", "instance": router}
                named = ", ".join(f'{name}="{value}"' for name, value in labels.items())
                series[f"{sample.name}{{{named}}}"] = f"0+{sample.value:g}x20"
    asked = [
        {
            "expr": f"abs(({expression}) / {seen[math.ceil(int(legend[1:]) / 100 * len(seen)) - 1]} - 1) <= bool 0.2",
            "eval_time": "15m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for legend, expression in quantiles_of("Time to first token").items()
    ]
    assert len(asked) == 3
    run([{**given(series), "promql_expr_test": asked}], tmp_path)
