from __future__ import annotations

import math
from dataclasses import replace

import pytest

from baton.api import GenerateRequest, Text
from baton.config import DEFAULT_CLASS, RouterConfig, SloClassConfig
from baton.errors import ConfigError, InvalidRequest
from router.admission import Claim, claim_of
from router.admission.tenants import DEFAULT_TENANT, Tenant
from router.admission.validate import CUSTOM_CLASS
from router.placement import DEFAULT_WEIGHTS, Objective, Weights

CONFIG = RouterConfig(
    slo_classes={
        DEFAULT_CLASS: SloClassConfig(ttft_ms=10_000.0, itl_ms=200.0, affinity_weight=2.0, interference_weight=0.05),
        "interactive": SloClassConfig(ttft_ms=500.0, itl_ms=50.0, affinity_weight=0.5, interference_weight=0.25),
    }
)
REQUEST = GenerateRequest(prompt=Text("hello"))
ACME = Tenant(id="acme", slo_class="interactive", max_priority=5)


def test_without_anything_said_the_default_class_holds() -> None:
    expected = Claim(
        tenant=DEFAULT_TENANT,
        priority=0,
        slo_class="default",
        objective=Objective(10.0, 0.2),
        weights=Weights(2.0, 0.05),
        arrived_s=7.0,
    )
    assert claim_of(REQUEST, DEFAULT_TENANT, CONFIG, 7.0) == expected


def test_a_tenant_names_its_class() -> None:
    claim = claim_of(REQUEST, ACME, CONFIG, 7.0)
    assert claim == Claim(
        tenant=ACME,
        priority=0,
        slo_class="interactive",
        objective=Objective(0.5, 0.05),
        weights=Weights(0.5, 0.25),
        arrived_s=7.0,
    )


@pytest.mark.parametrize(
    ("asked", "objective"),
    [
        ({"ttft_ms": 2000.0}, Objective(2.0, 0.05)),
        ({"itl_ms": 20.0}, Objective(0.5, 0.02)),
        ({"ttft_ms": 1.0, "itl_ms": 1e6}, Objective(0.001, 1000.0)),
        ({"e2e_ms": 3000.0}, Objective(0.5, 0.05, 3.0)),
    ],
)
def test_what_a_request_sets_goes_before_and_the_rest_is_its_class(
    asked: dict[str, float], objective: Objective
) -> None:
    request = replace(REQUEST, ttft_ms=asked.get("ttft_ms"), itl_ms=asked.get("itl_ms"), e2e_ms=asked.get("e2e_ms"))
    claim = claim_of(request, ACME, CONFIG, 0.0)
    assert (claim.slo_class, claim.objective, claim.weights) == (CUSTOM_CLASS, objective, Weights(0.5, 0.25))


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["ttft_ms", "itl_ms", "e2e_ms"])
def test_an_objective_is_a_positive_number(name: str, value: float) -> None:
    asked: dict[str, float] = {name: value}
    request = GenerateRequest(prompt=Text("hello"), **asked)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=rf"slo\.{name} must be a positive number of milliseconds") as refusal:
        claim_of(request, ACME, CONFIG, 0.0)
    assert refusal.value.param == f"slo.{name}"


def test_a_tenant_asks_for_no_more_priority_than_it_has() -> None:
    for tenant, highest in ((ACME, 5), (DEFAULT_TENANT, 0)):
        assert claim_of(replace(REQUEST, priority=highest), tenant, CONFIG, 0.0).priority == highest
        assert claim_of(replace(REQUEST, priority=-7), tenant, CONFIG, 0.0).priority == -7, "others may go first"
        with pytest.raises(InvalidRequest, match=f"priority must be at most {highest} for '{tenant.id}'") as refusal:
            claim_of(replace(REQUEST, priority=highest + 1), tenant, CONFIG, 0.0)
        assert refusal.value.param == "priority"


def test_there_is_a_lowest_priority() -> None:
    assert claim_of(replace(REQUEST, priority=-1000), ACME, CONFIG, 0.0).priority == -1000
    with pytest.raises(InvalidRequest, match="priority must be at least -1000, got -1001") as refusal:
        claim_of(replace(REQUEST, priority=-1001), ACME, CONFIG, 0.0)
    assert refusal.value.param == "priority"


def test_a_class_that_nobody_configured_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no SLO class is called 'batch'; router\.slo_classes has default, interact"):
        claim_of(REQUEST, Tenant(id="b", slo_class="batch"), CONFIG, 0.0)


def test_the_settings_weights_are_those_of_placement() -> None:
    assert claim_of(REQUEST, DEFAULT_TENANT, RouterConfig(), 0.0).weights == DEFAULT_WEIGHTS
