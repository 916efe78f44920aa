"""Twice what the cluster can bear.

The arithmetic engine sleeps as long as computing would take, so that the machine's own load says little;
`tests/bench/overload.py` does the same with the real model.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from tests.bench.overload import TTFT_S, measured, write_tenants
from tests.chaos.fleet import running_fleet

pytestmark = pytest.mark.clock


def test_twice_the_load_costs_nobody_what_it_has(tmp_path: Path) -> None:
    router = RouterConfig(tenants_file=write_tenants(tmp_path))
    with running_fleet(TransferConfig(), router, step_ms=10.0, token_ms=2.0) as fleet:
        capacity, overload, preemptions = measured(fleet.fill(*Role), 6.0, 15.0, (8,))
    assert preemptions == 0, "room to decode was there before the prompts were computed"
    assert [o.error for o in overload.outcomes if o.error] == [], "a refusal is the only failure"
    assert overload.count(lambda o: o.was_refused) > 0, "else this was no overload"
    assert overload.longest_wait_s < 2.0 * TTFT_S + 1.0, "everybody is answered within twice its objective"
    assert overload.good_per_s > 0.8 * capacity.served_per_s, "work is not thrown away"
    small, large = overload.of("small"), overload.of("large")
    share_of_small = small.count(lambda o: o.is_good) / len(small.outcomes)
    share_of_large = large.count(lambda o: o.is_good) / len(large.outcomes)
    assert share_of_small >= min(0.9, share_of_large), "nobody is starved"
