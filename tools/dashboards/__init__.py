"""Grafana dashboards as data. `python -m tools.dashboards` writes them to `helm/baton/dashboards`, and the catalogue of
metrics to `docs/metrics.md`; both are committed.

Each dashboard is a module with its panels: titles, expressions, and advice for bad values. `model` has the types,
`grafana` writes Grafana's JSON. Expressions use two abbreviations:

    $cluster   the labels of one release: `namespace="$namespace", job="$job"`
    or $zero   0 if there is no value but a router is scraped: for counters that appear with their first event

Every router exports the workers' gauges and counters, which it reads from Redis: `max by (release, worker, ...)` counts
each worker once. Workers of different models may have the same id. Counters of requests belong to one router each: use
`sum`. The hardware dashboard uses other exporters: NVIDIA's dcgm-exporter, the kubelet's cAdvisor and
kube-state-metrics.
"""

__all__ = [
    "answers",
    "autoscaling",
    "catalogue",
    "grafana",
    "hardware",
    "kv_transfer",
    "model",
    "models",
    "overview",
    "pools",
    "prefix_cache",
    "tenants",
]
