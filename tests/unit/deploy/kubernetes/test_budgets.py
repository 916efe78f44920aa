"""Budgets of pods that Kubernetes cannot count: one less than a pool needs, written when that changes."""

from __future__ import annotations

import pytest
from lightkube import AsyncClient, KubeConfig

from baton.cluster import Role
from deploy.kubernetes import budgets
from deploy.kubernetes.budgets import Budgets, num_staying
from tests.fakekube.apiserver import running_api
from tests.fakekube.store import Key, Object, Resource

PDBS = Resource("policy", "poddisruptionbudgets")
OWN = {Role.PREFILL: "p", Role.DECODE: "d"}
SHARED = {Role.PREFILL: "w", Role.DECODE: "w"}


@pytest.mark.parametrize(
    ("names", "prefill", "decode", "per_pod", "staying"),
    [
        (OWN, 16, 32, 1, {"p": 15, "d": 31}),
        (OWN, 1, 0, 1, {"p": 1, "d": 1}),
        (SHARED, 16, 16, 8, {"w": 3}),
        (SHARED, 4, 5, 8, {"w": 1}),
        ({Role.DECODE: "d"}, 16, 4, 1, {"d": 3}),
    ],
)
def test_all_pods_but_one_stay(
    names: dict[Role, str], prefill: int, decode: int, per_pod: int, staying: dict[str, int]
) -> None:
    assert num_staying(names, {Role.PREFILL: prefill, Role.DECODE: decode}, per_pod) == staying


def budget(name: str, number: int) -> Object:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"minAvailable": number, "selector": {"matchLabels": {"a": "b"}}},
    }


async def test_a_budget_follows_the_size_of_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_api() as api:
        for name in OWN.values():
            api.store.create(Key(PDBS, "default", name), budget(name, 1))

        def numbers() -> list[int]:
            return [api.store.get(Key(PDBS, "default", name))["spec"]["minAvailable"] for name in ("p", "d")]

        async with AsyncClient(KubeConfig.from_file(api.kubeconfig(namespace="default"))) as client:
            kept = Budgets(client, "default", OWN)
            await kept.keep({Role.PREFILL: 3, Role.DECODE: 9})
            assert numbers() == [2, 8]
            api.store.modify(Key(PDBS, "default", "d"), lambda found: found["spec"].update(minAvailable=1))
            await kept.keep({Role.PREFILL: 5, Role.DECODE: 9})
            assert numbers() == [4, 1], "an unchanged number is not written all the time"
            monkeypatch.setattr(budgets, "AGAIN_S", 0.0)
            await kept.keep({Role.PREFILL: 5, Role.DECODE: 9})
            assert numbers() == [4, 8], "but now and then: helm sets it back"
