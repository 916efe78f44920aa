"""Dashboards, rules and the catalogue of metrics: as they are committed, without a Prometheus."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from functools import cache
from typing import Any

import pytest

from baton.cluster import (
    ControllerInfo,
    PoolScaling,
    PoolStatus,
    PoolTrouble,
    RouterInfo,
    WorkerLoad,
)
from baton.telemetry.instruments import Instruments
from baton.telemetry.prometheus import Histogram
from baton.telemetry.request_metrics import FIRST_BOUND
from tests.observability import exporters
from tests.observability.shipped import (
    DASHBOARDS,
    alerts,
    cases,
    dashboards,
    marks,
    recorded,
    selectors,
    shown,
    substituted,
)
from tests.support.builders import cluster_status, worker
from tools.dashboards.__main__ import ROOT, generated
from tools.dashboards.catalogue import definitions, series

INSTRUMENTS = {name: each.name for each in definitions() for name in series(each)}
"""Series -> its instrument."""
PROMETHEUS_OWN = {"up", "ALERTS"}
FOREIGN = exporters.names()
RECORDED = {rule["record"] for rule in recorded()}
GRAFANA_OWN = {"datasource", "__rate_interval", "__range"}
PARALLEL = {"max", "min", "avg", "count"}
"""What takes each worker once, however many routers tell of it."""


@pytest.mark.parametrize("path", sorted(generated()), ids=str)
def test_committed_files_are_what_the_generator_writes(path: Any) -> None:
    assert (ROOT / path).read_text() == generated()[path], "run `python -m tools.dashboards` and commit the result"


def test_there_are_no_other_dashboards() -> None:
    assert {path.relative_to(ROOT) for path in DASHBOARDS.iterdir()} == {p for p in generated() if p.suffix == ".json"}


@pytest.mark.parametrize("name", dashboards())
def test_a_dashboard_has_the_shape_that_grafana_wants(name: str) -> None:
    dashboard = dashboards()[name]
    assert dashboard["uid"] == f"baton-{name}"
    assert dashboard["tags"] == ["baton"]
    assert dashboard["schemaVersion"] >= 39
    panels = dashboard["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] >= 0, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
    for one, other in itertools.combinations(panels, 2):
        assert not overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])
    titles = Counter(panel["title"] for panel in panels)
    assert max(titles.values()) == 1, titles
    for panel in (panel for panel in panels if panel["type"] != "row"):
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert len({target["legendFormat"] for target in panel["targets"]}) == len(panel["targets"])


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in ("xw", "yh"))


def test_uids_and_titles_are_unique() -> None:
    for field in ("uid", "title"):
        assert len({dashboard[field] for dashboard in dashboards().values()}) == len(dashboards()) == 8


@pytest.mark.parametrize("name", dashboards())
def test_variables_are_declared_before_they_are_used_and_all_serve(name: str) -> None:
    dashboard = dashboards()[name]
    declared = GRAFANA_OWN | {"__all"}
    used = set()
    for variable in dashboard["templating"]["list"]:
        wanted = set(re.findall(r"\$\{?(\w+)", str(variable)))
        assert wanted <= declared, variable["name"]
        used |= wanted
        declared.add(variable["name"])
    for expression in (each.expression for each in shown() if each.dashboard == name):
        wanted = set(re.findall(r"\$\{?(\w+)", expression))
        assert wanted <= declared, expression
        of_one_release = ({"namespace", "job"}, {"namespace", "prefix"})
        assert any(each <= wanted for each in of_one_release), f"another release's series would be in it: {expression}"
        used |= wanted
    links = " ".join(re.findall(r'"url": "([^"]*)"', json.dumps(dashboard)))
    assert {"datasource", "namespace", "job"} == set(re.findall(r"\$\{(\w+):queryparam\}", links))
    assert {variable["name"] for variable in dashboard["templating"]["list"]} <= used | GRAFANA_OWN


def test_the_pods_of_a_release_are_known_by_those_of_its_routers() -> None:
    (prefix,) = (each for each in dashboards()["hardware"]["templating"]["list"] if each["name"] == "prefix")
    found = re.match(prefix["regex"].strip("/"), exporters.PODS[0])
    assert found
    assert found[1] == "baton"
    assert prefix["hide"] == 2, "it follows from the chosen release"
    for each in shown():
        if "$pod" in each.expression:
            assert each.expression.count('pod=~"$pod"') == each.expression.count('pod=~"($prefix-.*)?"') > 0, each


def test_one_of_several_values_is_matched_by_pattern() -> None:
    """`label="$variable"` would match nothing where all are chosen."""
    several = {
        variable["name"]
        for dashboard in dashboards().values()
        for variable in dashboard["templating"]["list"]
        if variable.get("multi")
    }
    assert several >= {"model", "release", "slo_class", "tenant", "worker"}
    for each in shown():
        for operator, name in re.findall(r'(=~?|!=|!~)"\$(\w+)"', each.expression):
            assert (operator == "=~") == (name in several), each


@cache
def expressions() -> dict[str, str]:
    """All that is shipped, by where it stands."""
    rules = {rule.get("record") or rule["alert"]: rule["expr"] for rule in recorded() + alerts()}
    variables = {
        f"{name} / ${variable['name']}": substituted(match[1])
        for name, dashboard in dashboards().items()
        for variable in dashboard["templating"]["list"]
        if (match := re.match(r"label_values\((.*), \w+\)$", variable.get("definition", "")))
    }
    on_dashboards = {str(each): substituted(each.expression) for each in shown()}
    annotations = {f"annotation {number}": substituted(text) for number, text in enumerate(marks())}
    return {**on_dashboards, **variables, **annotations, **rules}


@pytest.mark.parametrize("where", expressions())
def test_an_expression_is_promql_and_reads_what_there_is(where: str) -> None:
    read = {name for name, _ in selectors(expressions()[where])}
    assert read
    assert read <= INSTRUMENTS.keys() | PROMETHEUS_OWN | RECORDED | FOREIGN


def test_every_instrument_is_on_a_dashboard_and_all_that_others_export_here() -> None:
    read = {INSTRUMENTS.get(name) for each in shown() for name, _ in selectors(substituted(each.expression))}
    assert set(INSTRUMENTS.values()) - read == set()
    hardware = {
        name for each in shown() if each.dashboard == "hardware" for name, _ in selectors(expressions()[str(each)])
    }
    assert hardware - INSTRUMENTS.keys() == FOREIGN


def panels_of(dashboard: str) -> list[dict[str, Any]]:
    return [panel for panel in dashboards()[dashboard]["panels"] if panel["type"] != "row"]


def test_links_lead_from_panel_to_panel_and_take_the_release_along() -> None:
    entered, num_choosing = set(), 0
    for name in dashboards():
        for panel in panels_of(name):
            in_lines = panel["fieldConfig"]["defaults"].get("links", [])
            for link in (*panel["links"], *in_lines):
                uid, _, query = link["url"].removeprefix("/d/").partition("?")
                target = uid.removeprefix("baton-")
                (found,) = (each for each in panels_of(target) if f"viewPanel={each['id']}&" in query)
                assert found["title"] == link["title"], (name, panel["title"])
                assert found is not panel
                entered.add(target)
                for variable, label in re.findall(r"var-(\w+)=\$\{__field\.labels\.(\w+)\}", query):
                    assert variable in {each["name"] for each in dashboards()[target]["templating"]["list"]}
                    legends = [each["legendFormat"] for each in panel["targets"]]
                    assert all(f"{{{{{label}}}}}" in legend for legend in legends), "the lines have no such label"
                    num_choosing += 1
            assert all("var-" in link["url"] for link in in_lines)
    assert entered == set(dashboards())
    assert num_choosing > 5


def test_heat_maps_show_the_buckets_of_first_tokens_and_lengths() -> None:
    found = set()
    for panel in itertools.chain.from_iterable(panels_of(name) for name in dashboards()):
        for target in panel["targets"]:
            assert (target["format"] == "heatmap") == (panel["type"] == "heatmap")
            if panel["type"] == "heatmap":
                (histogram,) = {name for name, _ in selectors(substituted(target["expr"]))}
                assert "sum by (le) (increase(" in target["expr"]
                assert panel["options"]["calculate"] is False, "the buckets are Prometheus' own"
                found.add(histogram)
    assert found == {
        f"{name}_bucket"
        for name in (
            *("gen_ai_server_time_to_first_token_seconds", "baton_request_prompt_tokens"),
            "baton_request_generation_tokens",
        )
    }


@cache
def last_bounds() -> dict[str, float]:
    """By histogram, as a router shows it."""
    instruments = Instruments(cluster_status)
    for each in vars(instruments).values():
        if isinstance(each, Histogram):
            each.record(0.0)
    found: dict[str, float] = {}
    for name, bound in re.findall(r'^(\w+)_bucket{le="([\d.]+)"}', instruments.exposition().decode(), re.MULTILINE):
        found[name] = max(found.get(name, 0.0), float(bound))
    return found


def test_a_quantile_above_the_last_bound_is_shown_as_such() -> None:
    """histogram_quantile is the last bound then, and the mean of such values tells nothing."""
    num_checked = 0
    for panel in itertools.chain.from_iterable(dashboard["panels"] for dashboard in dashboards().values()):
        read = {
            re.sub(r"_bucket$", "", name)
            for target in panel.get("targets", ())
            if "histogram_quantile" in target["expr"]
            for name, _ in selectors(substituted(target["expr"]))
        }
        mappings = panel.get("fieldConfig", {"defaults": {}})["defaults"].get("mappings", [])
        if not read:
            assert not mappings, panel["title"]
            continue
        (bound,) = {last_bounds()[name] for name in read}
        text = {"s": f"> {bound:,.0f} s", "percentunit": f"> {bound * 100:.0f}%"}[
            panel["fieldConfig"]["defaults"]["unit"]
        ]
        mapping, below = mappings
        assert mapping["type"] == "value"
        assert below["type"] == "range"
        assert (below["options"]["from"], below["options"]["to"]) == (0, FIRST_BOUND)
        assert below["options"]["result"]["text"].startswith("< 0.")
        assert {key: shown["text"] for key, shown in mapping["options"].items()} == {f"{bound:.0f}": text}
        assert "mean" not in panel["options"]["legend"]["calcs"]
        (limits,) = panel["fieldConfig"]["overrides"]
        assert {"id": "mappings", "value": []} in limits["properties"], "an objective of that value is not above it"
        num_checked += 1
    assert num_checked == 10


def test_every_instrument_is_documented() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    for each in definitions(with_aliases=True):
        assert each.description.endswith((".", "measured")), each
        assert f"| `{each.name}` | {each.kind} | {each.description.replace('|', chr(92) + '|')} |" in page


COMMON = {"baton_redis_evicted_keys_total", "baton_redis_memory_bytes"}
"""What every router reads in the same place, without a label that says whose it is."""


def told_by_every_router() -> set[str]:
    """The series that routers read from Redis, or of one another: each tells the same."""
    trouble = (PoolTrouble("decode", 0, 0),)
    controller = ControllerInfo(pid=1, address="h:2", scaling=(PoolScaling("decode", 0.5, 2),), trouble=trouble)
    status = cluster_status(
        worker("d0", load=WorkerLoad(expert_tokens=(1,))),
        pools={"decode": PoolStatus(1, 1)},
        routers=(RouterInfo(id="r0", pid=1, grpc="h:3", http="h:4", mirror_lag_s=0.1),),
        controller=controller,
        mirrored_blocks={"d0": 1},
    )
    lines = Instruments(lambda: status).exposition().decode().splitlines()
    return COMMON | {line.partition("{")[0] for line in lines if re.search(r'[{,](worker|router|pool)="', line)}


def test_each_worker_is_taken_once_and_each_routers_requests_are_added_up() -> None:
    shared = told_by_every_router()
    assert {"baton_kv_blocks", "baton_pool_workers", "baton_mirror_lag_seconds", "baton_preemptions_total"} <= shared
    counted = {each.name for each in definitions() if each.kind in ("counter", "histogram")}
    num_checked = Counter[str]()
    for where, expression in expressions().items():
        if " / $" in where:
            continue  # values of a label
        for name, around in selectors(expression):
            if name in shared:
                assert around, f"{where}: of which router?"
                assert around[0] in PARALLEL, f"{where}: {name} is told by every router, and would be added up"
                num_checked["shared"] += 1
            elif INSTRUMENTS.get(name) in counted:
                assert around[:1] == ["sum"], f"{where}: {name} is one router's own"
                num_checked["own"] += 1
    assert min(num_checked["shared"], num_checked["own"]) > 40


def test_rules_keep_releases_apart() -> None:
    for rule in recorded() + alerts():
        is_foreign = bool({name for name, _ in selectors(rule["expr"])} & FOREIGN)  # which know no job of ours
        for labels in re.findall(r"\bby \(([^)]*)\)", rule["expr"]):
            assert labels.startswith("namespace" if is_foreign else "namespace, job"), rule
        assert not is_foreign or "and on (namespace) max by (namespace) (baton_build_info)" in rule["expr"]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_says_what_is_wrong_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook", "runbook_url"}
    assert "`" in notes["runbook"], "a command to begin with"
    for name in ("description", "runbook"):
        assert "{{" not in notes[name], "what depends on the input stands in the summary"


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    found = cases()
    assert set(found) == {rule["alert"] for rule in alerts()}
    for name, kinds in found.items():
        assert set(kinds) == {"firing", "silent"}, name
        assert kinds["firing"], name
        assert kinds["silent"], name
        assert all(case["alerts"] for case in kinds["firing"]), name
        assert not any("alerts" in case for case in kinds["silent"]), name


def test_the_cases_have_input_that_the_alerts_read() -> None:
    """Else a silent one says nothing."""
    recorded_from = {rule["record"]: rule["expr"] for rule in recorded()}
    expression_of = {rule["alert"]: rule["expr"] for rule in alerts()}

    def read_by(expression: str) -> set[str]:
        names = {name for name, _ in selectors(expression)}
        return names.union(*(read_by(recorded_from[name]) for name in names & recorded_from.keys()))

    for name, kinds in cases().items():
        for case in itertools.chain(*kinds.values()):
            inputs = {text.partition("{")[0] for text in case["series"]}
            assert inputs <= read_by(expression_of[name]), name
            assert not any(re.search(r"(^|\s)0x", values) for values in case["series"].values()), "0x30 is 48"
