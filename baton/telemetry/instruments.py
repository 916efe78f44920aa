"""All metrics of a router, and their Prometheus exposition.

request_metrics    events of requests, recorded as they happen
observed           the cluster, read at every scrape
trouble            impending failures of the cluster, read likewise
process            the router's own process
vllm               some of both once more, under vLLM's names
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import partial

from prometheus_client import CollectorRegistry, generate_latest

from baton.config import SloClassConfig
from baton.telemetry.observed import OBSERVED, Observe, StatusNow, objectives
from baton.telemetry.prefixes import PrefixBook
from baton.telemetry.process import PROCESS
from baton.telemetry.prometheus import Collector, Definition, Instrument, Observation, Observed
from baton.telemetry.request_metrics import RequestMetrics
from baton.telemetry.trouble import TROUBLE
from baton.telemetry.vllm import aliases


class Instruments(RequestMetrics):
    """The router's instruments and their Prometheus exposition.

    Args:
        slo_classes: the SLO classes whose objectives are shown, by name. The objectives are also bounds of the
            histograms, so the number of requests that met them is exactly a bucket's count.
        shows_vllm: True if metrics are also shown with vLLM's names.
    """

    def __init__(
        self,
        status: StatusNow,
        slo_classes: Mapping[str, SloClassConfig] | None = None,
        shows_vllm: bool = False,
    ) -> None:
        super().__init__()
        classes = (slo_classes or {}).values()
        self.time_to_first_token.divide(each.ttft_ms / 1e3 for each in classes)
        self.time_per_output_token.divide(each.itl_ms / 1e3 for each in classes)
        self.inter_token_latency.divide(each.itl_ms / 1e3 for each in classes)
        self.request_duration.divide(each.e2e_ms / 1e3 for each in classes)
        self._status = status
        self.prefixes = PrefixBook()
        instruments: list[Instrument] = [getattr(self, field.name) for field in fields(RequestMetrics)]
        for each in (*OBSERVED, *TROUBLE, *PROCESS):
            observe = partial(self._observed, each.observe)
            instruments.append(Observed(each.name, each.description, observe, each.unit, is_counter=each.is_counter))
        instruments.append(
            Observed(
                "baton.hot_prefix_share",
                "Share of the last 1024 prompts that start with a block, for the 5 most common first blocks that more "
                "than one prompt has. prefix: the first 8 hexadecimal digits of the block's key.",
                self._hottest_prefixes,
            )
        )
        shown = objectives(slo_classes or {})
        instruments.append(
            Observed(
                "baton.slo_objective",
                "Objectives of the SLO classes: ttft, itl and e2e. A request's own objectives take precedence.",
                lambda: shown,
                "s",
            )
        )
        if shows_vllm:
            instruments += aliases(self, status)
        self._instruments = instruments
        self._registry = CollectorRegistry()
        self._registry.register(Collector(instruments))

    def catalogue(self) -> dict[str, Definition]:
        """Return every metric by the name that Prometheus shows, including those without a value."""
        return {one.definition.name: one.definition for one in self._instruments}

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _observed(self, observe: Observe) -> Iterable[Observation]:
        return observe(self._status())

    def _hottest_prefixes(self) -> Iterable[Observation]:
        return [Observation(share, {"prefix": prefix}) for prefix, share in self.prefixes.hottest()]
