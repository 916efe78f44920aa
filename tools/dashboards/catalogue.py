"""The catalogue of all that can be queried: instruments, recorded series, alerts."""

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

Every router serves `/metrics` on its HTTP port, for Prometheus; where there are tenants, on `telemetry.port` alone,
because metrics name them ([operators](accounts.md#operators)). Routers also report metrics of all workers, which they
read from Redis, so that all routers report the same for a worker: take each worker once, with `max by (worker, ...)`.
Counters of requests are each router's own: `sum` them. Times are differences of one process's monotonic clock.

Histograms end at {TTFT_BOUNDS[-1]:,g} s to the first token, {TOKEN_BOUNDS[-1]:,g} s between tokens and
{DURATION_BOUNDS[-1]:,g} s for stages and requests. For values above, `histogram_quantile` returns that number; the
page, `baton status --watch` and the dashboards show `> {TTFT_BOUNDS[-1]:,g} s`. They begin at {FIRST_BOUND * 1e3:g} ms:
below, the dashboards and `--watch` show `<`. Between, each bound is at most 1.2 times the one before, so that a
quantile is within 20 % of the truth. The objectives of the classes (`router.slo_classes`) are bounds, too: of the time
to the first token, of the times between tokens, and of requests. All routers of a cluster need the same ones, for their
buckets to be added up.

The hardware dashboard, and the last alerts below, read what others export: NVIDIA's dcgm-exporter (the GPU Operator's
list of counters, with `DCGM_FI_PROF_NVLINK_TX_BYTES` and `DCGM_FI_PROF_NVLINK_RX_BYTES` added for NVLink), the
kubelet's cAdvisor, and kube-state-metrics, as kube-prometheus-stack scrapes them. Where one is missing its panels are
empty, and the first row of that dashboard shows which; its alerts are silent.

`python -m tools.dashboards` writes this page, from `baton/telemetry` and `helm/baton/rules`, and the dashboards in
`helm/baton/dashboards`.
"""
ALIASES = """
With `telemetry.vllm_aliases`, for dashboards, autoscalers and gateways made for vLLM:
"""


def definitions(with_aliases: bool = False) -> list[Definition]:
    """Every instrument, as Prometheus shows it.

    Args:
        with_aliases: include those under vLLM's names.
    """
    nobody = ClusterStatus(pools={}, workers=(), routers=(), redis_address="", redis_ok=True, models=())
    return [*Instruments(lambda: nobody, vllm_model="any" if with_aliases else "").catalogue().values()]


def series(definition: Definition) -> tuple[str, ...]:
    """The names that an expression may use."""
    suffixes = ("_bucket", "_sum", "_count") if definition.kind == "histogram" else ("",)
    return tuple(definition.name + suffix for suffix in suffixes)


def catalogue(rules: Path) -> str:
    """The text of docs/metrics.md.

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
    """The rules of one kind, `record` or `alert`."""
    groups = [group for path in sorted(folder.glob("*.yaml")) for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def _alert(rule: dict[str, Any]) -> str:
    notes = rule["annotations"]
    after = f", after {rule['for']}" if "for" in rule else ""
    page = f"[**{rule['alert']}**](runbook/{rule['alert']}.md)"
    return f"{page} ({rule['labels']['severity']}{after}). {notes['description']} *{notes['runbook']}*\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for row in (head, ("---",) * len(head), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
