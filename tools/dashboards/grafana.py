"""Writer of Grafana's dashboard JSON (schema 39: Grafana 10.4 and newer)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from string import ascii_uppercase
from typing import Any

from baton.telemetry.request_metrics import FIRST_BOUND
from tools.dashboards.model import FIRING, JOB, NAMESPACE, Dashboard, Kind, Lead, Panel, Section, Variable, expanded

Json = dict[str, Any]

COLUMNS = 24
Places = dict[tuple[str, str], int]
"""Number of each panel, by its dashboard's name and its own title."""
KEPT = "${__url_time_range}&${datasource:queryparam}&${namespace:queryparam}&${job:queryparam}"
"""Variables that a link keeps: the time range and the release."""
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}


def places(dashboards: tuple[Dashboard, ...]) -> Places:
    """Return the numbers of the panels of all dashboards, for links to them."""
    return {
        (dashboard.name, panel["title"]): panel["id"]
        for dashboard in dashboards
        for panel in _numbered(dashboard.sections)
    }


def dashboard_json(dashboard: Dashboard, targets: Places) -> Json:
    """Return a dashboard as Grafana's JSON. Raises KeyError if a panel links to one that does not exist."""
    return {
        "uid": f"baton-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["baton"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [_other_dashboards()],
        "annotations": {"list": [_alerts()]},
        "templating": {
            "list": [_datasource(), *(_variable(each) for each in (NAMESPACE, JOB, *dashboard.variables))],
        },
        "panels": list(_laid_out(dashboard.sections, targets)),
    }


def _numbered(sections: tuple[Section, ...]) -> Iterator[Json]:
    """Yield titles and numbers in the order of the layout."""
    titles = (title for section in sections for title in (section.title, *(panel.title for panel in section.panels)))
    return ({"id": number, "title": title} for number, title in enumerate(titles, 1))


def _laid_out(sections: tuple[Section, ...], targets: Places) -> Iterator[Json]:
    """Place panels from left to right. A line is as high as its highest panel, and each section starts a new line."""
    ids, y = count(1), 0
    for section in sections:
        yield {
            "id": next(ids),
            "type": "row",
            "title": section.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
        }
        x, y, height = 0, y + 1, 0
        for panel in section.panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            position = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            yield {"id": next(ids), "gridPos": position, **_panel(panel, targets)}
            x, height = x + panel.width, max(height, panel.height)
        y += height


def _panel(panel: Panel, targets: Places) -> Json:
    return {
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "targets": [
            _target(panel, ref_id, *query)
            for ref_id, query in zip(ascii_uppercase, panel.queries.items(), strict=False)
        ],
        "links": [_link(lead, targets) for lead in panel.leads],
        "fieldConfig": {
            "defaults": _field(panel) | _data_links(panel, targets),
            "overrides": [_limits()] if panel.kind is Kind.LINES else [],
        },
        "options": _options(panel),
        "transformations": [_columns()] if panel.kind is Kind.TABLE else [],
    }


def _link(lead: Lead, targets: Places, more: str = "") -> Json:
    number = targets[lead.dashboard, lead.panel]
    url = f"/d/baton-{lead.dashboard}?viewPanel={number}&{KEPT}{more}"
    return {"title": lead.panel, "url": url, "targetBlank": False}


def _data_links(panel: Panel, targets: Places) -> Json:
    """Return the links of a line, which select its worker, tenant or class on the other dashboard."""
    labelled = [lead for lead in panel.leads if lead.label]
    links = [_link(each, targets, f"&var-{each.label}=${{__field.labels.{each.label}}}") for each in labelled]
    return {"links": links} if links else {}


def _target(panel: Panel, ref_id: str, legend: str, expression: str) -> Json:
    return {
        "refId": ref_id,
        "datasource": DATASOURCE,
        "expr": expanded(expression),
        "legendFormat": legend,
        "editorMode": "code",
        "instant": panel.is_instant,
        "range": not panel.is_instant,
        "format": panel.format,
    }


def _field(panel: Panel) -> Json:
    if panel.kind is Kind.HEAT:
        return {"unit": "short", "custom": {"scaleDistribution": {"type": "linear"}}}
    color = "palette-classic" if panel.kind is Kind.LINES else "thresholds"
    field: Json = {"unit": panel.unit, "color": {"mode": color}, "thresholds": _thresholds(panel)}
    if panel.last_bound is not None:
        field["mappings"] = [_above(panel.last_bound, panel.unit), _below(panel.unit)]
    if not panel.is_logarithmic:
        field["min"] = 0
    if panel.kind is Kind.BARS and panel.unit == "percentunit":
        field["max"] = 1
    if panel.kind is Kind.LINES:
        field["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 40 if panel.is_stacked else 8,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
            "scaleDistribution": {"type": "log", "log": 10} if panel.is_logarithmic else {"type": "linear"},
            "thresholdsStyle": {"mode": "dashed" if _is_limited(panel) else "off"},
        }
    if panel.kind is Kind.STATES:
        field["custom"] = {"fillOpacity": 70, "lineWidth": 0}
    return field


def _above(bound: float, unit: str) -> Json:
    """Mark values in the last bucket, for which histogram_quantile returns exactly the last finite bound."""
    text = f"> {bound:.0%}" if unit == "percentunit" else f"> {bound:,g} {unit}"
    return {"type": "value", "options": {f"{bound:g}": {"text": text, "index": 0}}}


def _below(unit: str) -> Json:
    """Mark values in the first bucket, whose exact value is not known."""
    text = f"< {FIRST_BOUND:.1%}" if unit == "percentunit" else f"< {FIRST_BOUND:g} {unit}"
    return {"type": "range", "options": {"from": 0, "to": FIRST_BOUND, "result": {"text": text, "index": 1}}}


def _is_limited(panel: Panel) -> bool:
    return panel.bad_above is not None or panel.bad_below is not None


def _thresholds(panel: Panel) -> Json:
    if panel.bad_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.bad_below}]
    elif panel.bad_above is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.bad_above}]
    else:
        steps = [{"color": "green", "value": None}]
    return {"mode": "absolute", "steps": steps}


def _limits() -> Json:
    """Return the style of limits: lines with which others are compared."""
    return {
        "matcher": {"id": "byRegexp", "options": "/^(objective|ceiling)/"},
        "properties": [
            {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}},
            {"id": "custom.fillOpacity", "value": 0},
            {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}},
            {"id": "mappings", "value": []},
        ],
    }


def _options(panel: Panel) -> Json:
    reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    match panel.kind:
        case Kind.LINES:
            # A mean over values that are only known to exceed a bound would hide that fact.
            calcs = ["mean" if panel.last_bound is None else "lastNotNull", "max"]
            return {
                "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": calcs},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case Kind.STAT:
            return {"colorMode": "value", "graphMode": "area", "justifyMode": "auto", "reduceOptions": reduced}
        case Kind.BARS:
            return {"displayMode": "gradient", "orientation": "horizontal", "reduceOptions": reduced}
        case Kind.STATES:
            return {"mergeValues": True, "showValue": "never", "legend": {"showLegend": False}}
        case Kind.TABLE:
            return {"showHeader": True, "cellHeight": "sm"}
        case Kind.HEAT:
            return {
                "calculate": False,
                "cellGap": 1,
                "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "scale": "exponential", "exponent": 0.5},
                "filterValues": {"le": 1e-9},
                "legend": {"show": True},
                "rowsFrame": {"layout": "auto"},
                "tooltip": {"mode": "single", "yHistogram": True},
                "yAxis": {"axisPlacement": "left", "unit": panel.unit},
            }


def _columns() -> Json:
    """Return the columns of a table: the labels, without the time, which is the same everywhere."""
    return {"id": "organize", "options": {"excludeByName": {"Time": True}}}


def _datasource() -> Json:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}


def _variable(variable: Variable) -> Json:
    """Return a variable. An unset one matches a label without a value, such as the namespace outside Kubernetes."""
    query = f"label_values({expanded(variable.metric)}, {variable.label})"
    every: Json = {
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
    one: Json = {"includeAll": False, "multi": False, "current": {}}
    return {
        "name": variable.name,
        "label": variable.title,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
        "regex": variable.pattern,
        "hide": 2 if variable.pattern else 0,
        **(every if variable.has_all else one),
    }


def _other_dashboards() -> Json:
    return {
        "type": "dashboards",
        "title": "Baton",
        "tags": ["baton"],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
    }


def _alerts() -> Json:
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": FIRING,
        "titleFormat": "{{alertname}}",
        "textFormat": "{{worker}} {{pool}} {{slo_class}} {{pod}} {{container}}",
        "step": "30s",
    }
