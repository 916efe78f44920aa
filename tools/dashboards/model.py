"""Parts of a dashboard, independent of Grafana."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CLUSTER = 'namespace="$namespace", job="$job"'
ZERO = f"on () 0 * max(baton_build_info{{{CLUSTER}}})"
FIRING = 'ALERTS{namespace="$namespace", job=~"$job|", alertname=~"Baton.*", alertstate="firing"}'
"""Baton's firing alerts. Alerts about containers and GPUs have no job."""


class Kind(StrEnum):
    LINES = "timeseries"
    STAT = "stat"
    BARS = "bargauge"
    STATES = "state-timeline"
    TABLE = "table"
    HEAT = "heatmap"


@dataclass(frozen=True, slots=True)
class Lead:
    """Link from a panel to the next panel to look at."""

    dashboard: str
    """Name of the target dashboard."""
    panel: str
    """Title of the target panel."""
    label: str = ""
    """Label of the lines that is also a variable of the target dashboard: a click on a line selects its value there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    description: str
    """The meaning of the panel, and what to do when it looks bad."""
    unit: str
    """Grafana's id of the unit."""
    queries: dict[str, str]
    """Legend -> expression. A line whose legend starts with `objective` or `ceiling` is a limit, and drawn dashed."""
    kind: Kind = Kind.LINES
    width: int = 12
    """Width in columns; a row has 24."""
    height: int = 8
    is_stacked: bool = False
    is_logarithmic: bool = False
    bad_above: float | None = None
    """Value above which the panel is red."""
    bad_below: float | None = None
    leads: tuple[Lead, ...] = ()
    last_bound: float | None = None
    """Last bound of the displayed histogram. A quantile of exactly this value is in fact larger."""

    @property
    def is_instant(self) -> bool:
        """True if only the latest value matters."""
        return self.kind in (Kind.BARS, Kind.TABLE)

    @property
    def format(self) -> str:
        """Grafana's format of the query result."""
        return {Kind.TABLE: "table", Kind.HEAT: "heatmap"}.get(self.kind, "time_series")


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """Selector at the top of a dashboard: the values of a label."""

    name: str
    metric: str
    label: str
    title: str
    has_all: bool = True
    """Several values, or all, can be selected: expressions use `=~`."""
    pattern: str = ""
    """Regular expression whose group is the value. The variable then derives from others, and is hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    name: str
    """Name of the file; the uid is `baton-NAME`."""
    title: str
    description: str
    variables: tuple[Variable, ...]
    sections: tuple[Section, ...]


NAMESPACE = Variable(name="namespace", metric="baton_build_info", label="namespace", title="Namespace", has_all=False)
JOB = Variable(
    name="job", metric='baton_build_info{namespace="$namespace"}', label="job", title="Release", has_all=False
)
MODEL = Variable(name="model", metric="baton_model_share{$cluster}", label="model", title="Model")
RELEASE = Variable(
    name="release",
    metric='baton_model_share{$cluster, model=~"$model"}',
    label="release",
    title="Release of the model",
)
SLO_CLASS = Variable(
    name="slo_class", metric="baton_requests_slo_total{$cluster}", label="slo_class", title="SLO class"
)
OF_MODEL = 'model=~"$model", release=~"$release"'
"""Matchers of the selected models. Series of no model, as other releases of Baton wrote them, match `All`."""
EACH_WORKER = "{{worker}} ({{role}}, {{release}})"
"""Legend of the lines of workers."""
OF_REQUESTED = 'gen_ai_request_model=~"$model", release=~"$release"'
"""Matchers of the selected models in histograms that have the labels of OpenTelemetry's conventions."""
ROLE = Variable(name="role", metric="baton_worker_info{$cluster}", label="role", title="Role")
WORKER = Variable(
    name="worker", metric=f'baton_worker_info{{$cluster, {OF_MODEL}, role=~"$role"}}', label="worker", title="Worker"
)
TENANT = Variable(name="tenant", metric="baton_tenant_requests_total{$cluster}", label="tenant", title="Tenant")


def expanded(expression: str) -> str:
    """Return the expression with `$cluster` and `$zero` replaced."""
    return expression.replace("$zero", ZERO).replace("$cluster", CLUSTER)
