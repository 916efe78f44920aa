"""What is shipped for Prometheus and Grafana, as it is committed: expressions and the rules' files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from tests.observability.exporters import NAMESPACE
from tools.dashboards.catalogue import rules_in

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "helm/baton/dashboards"
RULES = ROOT / "helm/baton/rules"
JOB = "baton"
BUILT_IN = {"$__rate_interval": "1m", "$__range": "5m", "$namespace": NAMESPACE, "$job": JOB, "$prefix": "baton"}
"""Grafana's, and the variables of which one value is always chosen. All others are at `All`."""


@dataclass(frozen=True, slots=True)
class Shown:
    """An expression of a dashboard."""

    dashboard: str
    panel: str
    legend: str
    expression: str

    def __str__(self) -> str:
        return f"{self.dashboard} / {self.panel} / {self.legend}"


@cache
def dashboards() -> dict[str, Any]:
    """By the name of the file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


def shown() -> list[Shown]:
    return [
        Shown(name, panel["title"], target["legendFormat"], target["expr"])
        for name, dashboard in dashboards().items()
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]


def marks() -> list[str]:
    return [each["expr"] for dashboard in dashboards().values() for each in dashboard["annotations"]["list"]]


def recorded() -> list[dict[str, Any]]:
    return rules_in(RULES, "record")


def alerts() -> list[dict[str, Any]]:
    return rules_in(RULES, "alert")


def cases() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Of the alerts: `firing` and `silent`."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = yaml.safe_load(
        Path(__file__).with_name("alerts.yaml").read_text()
    )
    return found


def substituted(expression: str) -> str:
    """As Grafana sends it."""
    for name, value in BUILT_IN.items():
        expression = expression.replace(name, value)
    return re.sub(r"\$\w+", ".*", expression)


def selectors(expression: str) -> Iterator[tuple[str, list[str]]]:
    """The metrics that an expression reads, each with the aggregations around it, the nearest first.

    Raises:
        ValueError: it is not PromQL.
    """
    around: list[str] = []
    found: list[tuple[str, list[str]]] = []

    def enter(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.AggregateExpr):
            around.insert(0, str(node.op))
        selector = node.vector_selector if isinstance(node, promql_parser.MatrixSelector) else node
        if isinstance(selector, promql_parser.VectorSelector):
            found.append((selector.name or "", list(around)))

    def leave(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.AggregateExpr):
            around.pop(0)

    promql_parser.walk(promql_parser.parse(expression), enter, leave)
    yield from found
