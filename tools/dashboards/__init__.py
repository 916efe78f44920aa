"""Grafana dashboards as data. `python -m tools.dashboards` writes them to `helm/baton/dashboards`, and the catalogue of
metrics to `docs/metrics.md`; both are committed.

Each dashboard is a module: its panels with titles, expressions, and what to do when one looks bad. `model` has the
vocabulary, `grafana` writes Grafana's JSON. Expressions use two abbreviations:

    $cluster   the labels of one release: `namespace="$namespace", job="$job"`
    or $zero   0, if there is no value but a router is scraped: for counters that appear with their first event

Every router exports the workers' gauges and counters, which it reads from Redis: `max by (worker, ...)` takes each
worker once. Counters of requests are each router's own: `sum`. What the hardware dashboard shows comes
from others: NVIDIA's dcgm-exporter, the kubelet's cAdvisor and kube-state-metrics.
"""

__all__ = [
    "answers",
    "autoscaling",
    "catalogue",
    "grafana",
    "hardware",
    "kv_transfer",
    "model",
    "overview",
    "pools",
    "prefix_cache",
    "tenants",
]
