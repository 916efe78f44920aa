"""Programs that run in a checkout only: what they read and write is not in a wheel or an image.

dashboards   Grafana dashboards and the catalogue of metrics, from the instruments
chart_docs   the chart's schema and table of values, from the settings
"""

__all__ = ["chart_docs", "dashboards", "mutants", "walk"]
