"""Catalogue of the metrics: instruments, recorded series, alerts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from baton.cluster import ClusterStatus
from baton.telemetry.instruments import Instruments
from baton.telemetry.prometheus import Definition
from baton.telemetry.request_metrics import DURATION_BOUNDS, FIRST_BOUND, TOKEN_BOUNDS, TTFT_BOUNDS

HEAD = f"""\
# Metrics

Every router serves `/metrics` on its HTTP port for Prometheus. If tenants are configured, it serves them only on
`telemetry.port`, because metrics name the tenants ([operators](accounts.md#operators)). Routers also export the metrics
of all workers, which they read from Redis. All routers report the same values for a worker, so count each worker once
with `max by (worker, ...)`. Counters of requests belong to one router each: use `sum`. Times are differences of one
process's monotonic clock.

The largest bounds of histograms are {TTFT_BOUNDS[-1]:,g} s for the first token, {TOKEN_BOUNDS[-1]:,g} s between tokens
and {DURATION_BOUNDS[-1]:,g} s for stages and requests. For larger values `histogram_quantile` returns that bound; the
page, `baton status --watch` and the dashboards show `> {TTFT_BOUNDS[-1]:,g} s`. The smallest bound is
{FIRST_BOUND * 1e3:g} ms; for smaller values the dashboards and `--watch` show `<`. In between, each bound is at most
1.2 times the previous one, so a quantile is within 20 % of the true value. The objectives of the classes
(`router.slo_classes`) are also bounds: of the time to the first token, of the time between tokens, and of the request
duration. All routers of a cluster need the same objectives, so that their buckets can be summed.

The hardware dashboard, and the last alerts below, need other exporters: NVIDIA's dcgm-exporter (the GPU Operator's list
of counters, plus `DCGM_FI_PROF_NVLINK_TX_BYTES` and `DCGM_FI_PROF_NVLINK_RX_BYTES` for NVLink), the kubelet's cAdvisor,
and kube-state-metrics, as scraped by kube-prometheus-stack. If one of them is missing, its panels are empty, as the
first row of that dashboard shows, and its alerts are silent.

`python -m tools.dashboards` generates this page from `baton/telemetry` and `helm/baton/rules`, and the dashboards in
`helm/baton/dashboards`.
"""
ALIASES = """
With `telemetry.vllm_aliases`, for dashboards, autoscalers and gateways that expect vLLM's metrics:
"""


def definitions(with_aliases: bool = False) -> list[Definition]:
    """Return every instrument, as Prometheus shows it.

    Args:
        with_aliases: include the aliases with vLLM's names.
    """
    nobody = ClusterStatus(pools={}, workers=(), routers=(), redis_address="", redis_ok=True, models=())
    return [*Instruments(lambda: nobody, shows_vllm=with_aliases).catalogue().values()]


def series(definition: Definition) -> tuple[str, ...]:
    """Return the series names of an instrument, for use in expressions."""
    suffixes = ("_bucket", "_sum", "_count") if definition.kind == "histogram" else ("",)
    return tuple(definition.name + suffix for suffix in suffixes)


def catalogue(rules: Path) -> str:
    """Return the text of docs/metrics.md.

    Args:
        rules: the folder of Prometheus' rule files.
    """
    own = definitions()
    sections = [
        HEAD,
        "## Instruments\n",
        *_instruments(own),
        ALIASES,
        *_instruments([each for each in definitions(with_aliases=True) if each not in own]),
        "\n## Recorded series\n",
        *_table(
            ("Series", "Expression"),
            ((f"`{rule['record']}`", f"`{' '.join(rule['expr'].split())}`") for rule in rules_in(rules, "record")),
        ),
        "\n## Alerts\n",
        *(_alert(rule) for rule in rules_in(rules, "alert")),
    ]
    return "\n".join(sections)


def _instruments(found: Iterable[Definition]) -> Iterator[str]:
    return _table(("Metric", "Kind", "What it is"), ((f"`{each.name}`", each.kind, each.description) for each in found))


def rules_in(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the rules of one kind, `record` or `alert`."""
    files = [yaml.load(path.read_text(), yaml.CSafeLoader) for path in sorted(folder.glob("*.yaml"))]
    groups = [group for file in files for group in file["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def _alert(rule: dict[str, Any]) -> str:
    notes = rule["annotations"]
    after = f", after {rule['for']}" if "for" in rule else ""
    page = f"[**{rule['alert']}**](runbook/{rule['alert']}.md)"
    return f"{page} ({rule['labels']['severity']}{after}). {notes['description']} *{notes['runbook']}*\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for row in (head, ("---",) * len(head), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
