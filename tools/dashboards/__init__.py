"""Grafana dashboards as data. `python -m tools.dashboards` writes them to `helm/baton/dashboards`, and the catalogue of
metrics to `docs/metrics.md`; both are committed.

One module a dashboard says what is on it: titles, expressions, and what to do when a panel looks bad. `model` is their
vocabulary, `grafana` makes Grafana's JSON of it. In expressions two words stand for more:

    $cluster   the labels of one release: `namespace="$namespace", job="$job"`
    or $zero   0, where there is nothing else and a router is scraped: for what is counted only once it has happened

Every router exports the workers' gauges and counters, which it reads from Redis: `max by (worker, ...)` takes each
worker once. Counters of requests are each router's own: `sum`.
"""
