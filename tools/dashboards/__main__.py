"""Writes the generated files: `python -m tools.dashboards`, in the repository."""

from __future__ import annotations

import json
from pathlib import Path

from tools.dashboards import autoscaling, hardware, kv_transfer, models, overview, pools, prefix_cache, tenants
from tools.dashboards.catalogue import catalogue
from tools.dashboards.grafana import dashboard_json, places
from tools.dashboards.model import Dashboard

DASHBOARDS: tuple[Dashboard, ...] = (
    overview.DASHBOARD,
    models.DASHBOARD,
    pools.DASHBOARD,
    kv_transfer.DASHBOARD,
    prefix_cache.DASHBOARD,
    autoscaling.DASHBOARD,
    tenants.DASHBOARD,
    hardware.DASHBOARD,
)
ROOT = Path(__file__).parents[2]


def generated() -> dict[Path, str]:
    """Return the texts of the generated files, by path relative to the repository's root."""
    targets = places(DASHBOARDS)
    files = {
        Path(f"helm/baton/dashboards/{each.name}.json"): json.dumps(dashboard_json(each, targets), indent=2) + "\n"
        for each in DASHBOARDS
    }
    return {**files, Path("docs/metrics.md"): catalogue(ROOT / "helm/baton/rules")}


if __name__ == "__main__":
    for path, text in generated().items():
        target = ROOT / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
