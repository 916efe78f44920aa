"""Which release of which model serves a request."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.api import ModelCard
from baton.errors import InvalidRequest, ModelNotFound
from router.admission.tenants import DEFAULT_TENANT, Tenant
from router.models.table import ModelTable
from tests.support.models import release, table_of

ACME = Tenant(id="acme", models=("llama*", "poet"))


class Service:
    """A service of a model with adapters."""

    def __init__(self, name: str, *adapters: str, max_model_len: int = 100) -> None:
        self.facts = SimpleNamespace(id=name, max_model_len=max_model_len)
        self.adapters = dict.fromkeys(adapters)
        self.is_crowded = False

    def card_of(self, name: str) -> ModelCard:
        return ModelCard(
            id=name or self.facts.id,
            path="",
            max_model_len=self.facts.max_model_len,
            created=0,
            weights="exact",
            kv_dtype="auto",
        )


def never() -> str:
    raise AssertionError("the session of a request matters only if several releases have the name")


def test_a_request_goes_to_the_model_that_it_names() -> None:
    llama, qwen = Service("llama", "poet"), Service("qwen")
    table = table_of(llama, qwen)
    found: list[Any] = [table.service(name, DEFAULT_TENANT, never) for name in ("llama", "qwen", "poet")]
    assert found == [llama, qwen, llama]


def test_a_request_without_a_model_goes_to_the_only_one_or_to_the_default() -> None:
    llama: Any = Service("llama")
    qwen: Any = Service("qwen")
    assert table_of(llama).service("", DEFAULT_TENANT, never) is llama
    assert table_of(llama, qwen, default_model="qwen").service("", DEFAULT_TENANT, never) is qwen
    with pytest.raises(InvalidRequest, match="llama, qwen; name one") as caught:
        table_of(llama, qwen).service("", DEFAULT_TENANT, never)
    assert caught.value.param == "model"
    assert table_of(llama, qwen).service("", ACME, never) is llama, "the only one that the tenant may use"
    with pytest.raises(ModelNotFound):
        table_of().service("", DEFAULT_TENANT, never)


def test_an_unknown_name_is_not_found_and_the_nearest_one_is_named() -> None:
    table = table_of(Service("llama", "poet"), Service("qwen"))
    with pytest.raises(ModelNotFound, match=r"'lama'.*llama"):
        table.service("lama", DEFAULT_TENANT, never)


def test_a_tenant_sees_and_uses_only_its_models() -> None:
    table = table_of(Service("llama", "poet", "cook"), Service("qwen"))
    assert [card.id for card in table.cards(DEFAULT_TENANT)] == ["llama", "cook", "poet", "qwen"]
    assert [card.id for card in table.cards(ACME)] == ["llama", "poet"]
    for hidden in ("qwen", "cook"):
        with pytest.raises(ModelNotFound) as caught:
            table.service(hidden, ACME, never)
        assert "qwen'" not in str(caught.value).replace(f"{hidden!r}", ""), (
            "it names a model that the tenant cannot see"
        )
        with pytest.raises(ModelNotFound):
            table.card(hidden, ACME)
    for near, hidden in (("qwem", "qwen"), ("cooks", "cook")):
        with pytest.raises(ModelNotFound, match=hidden):
            table.service(near, DEFAULT_TENANT, never)
        with pytest.raises(ModelNotFound) as caught:
            table.service(near, ACME, never)
        assert hidden not in str(caught.value).replace(near, "")


def test_a_model_that_leaves_is_not_found() -> None:
    table = table_of(Service("llama"), Service("qwen"))
    before = table.version
    table.drop("content")
    table.drop("content")
    assert [card.id for card in table.cards(DEFAULT_TENANT)] == ["qwen"]
    assert table.version != before
    with pytest.raises(ModelNotFound):
        table.service("llama", DEFAULT_TENANT, never)


def test_the_version_changes_with_adapters_limits_and_names() -> None:
    service = Service("llama")
    table = table_of(service)
    first = table.version
    assert table.version == first
    service.adapters = {"poet": None}
    second = table.version
    assert second != first
    service.facts.max_model_len = 50
    third = table.version
    assert third != second
    table.put(release(service))
    assert table.version == third, "nothing has changed"
    table.put(release(service, name="lama"))
    assert table.version != third


# -- several releases of one name --------------------------------------------------------------------------------------


def canary(share: float, others: float = 9.0, table: ModelTable | None = None) -> tuple[ModelTable, Service, Service]:
    table, new, old = table or table_of(), Service("llama", max_model_len=80), Service("llama")
    table.put(release(new, content_id="new", share=share))
    table.put(release(old, content_id="old", share=others))
    return table, new, old


def drawn(table: ModelTable, num: int = 4000, tenant: Tenant = DEFAULT_TENANT) -> list[Any]:
    return [table.service("llama", tenant, partial("session {}".format, number)) for number in range(num)]


def test_a_canary_of_a_tenth_gets_a_tenth_of_the_sessions_and_a_session_stays() -> None:
    table, new, _ = canary(1.0)
    first = drawn(table)
    assert 0.08 <= Counter(first)[new] / len(first) <= 0.12
    assert drawn(table) == first
    other_router, other_new, _ = canary(1.0)
    assert [each is other_new for each in drawn(other_router)] == [each is new for each in first]


def test_a_changed_share_moves_only_the_sessions_that_it_must() -> None:
    table, new, old = canary(1.0)
    before = drawn(table)
    table.put(release(new, content_id="new", share=3.0))
    after = drawn(table)
    moved = [(was, now) for was, now in zip(before, after, strict=True) if was is not now]
    assert set(moved) == {(old, new)}, "no session leaves the release that grows"
    assert 0.22 <= Counter(after)[new] / len(after) <= 0.28


def test_a_release_without_a_share_gets_no_session_and_a_removed_one_gives_its_own() -> None:
    table, new, old = canary(0.0)
    assert set(drawn(table, 500)) == {old}
    table.drop("old")
    assert set(drawn(table, 500)) == {new}, "a name with one release is served by it, whatever its share"
    table, *both = canary(0.0, 0.0)
    assert set(drawn(table, 500)) == set(both), "all shares are 0, so none is preferred"


def test_one_card_stands_for_all_releases_of_a_name_with_the_shortest_window() -> None:
    table, *_ = canary(1.0)
    (card,) = table.cards(DEFAULT_TENANT)
    assert (card.id, card.max_model_len) == ("llama", 80)


def test_tenants_with_the_same_opening_are_different_sessions() -> None:
    table, *_ = canary(9.0, 9.0)
    mine, theirs = (drawn(table, 200, Tenant(id=name)) for name in ("mine", "theirs"))
    assert mine != theirs


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=5), st.text(max_size=20))
def test_any_release_may_leave_and_only_its_sessions_move(shares: list[float], session: str) -> None:
    table = table_of()
    for number, share in enumerate(shares):
        table.put(release(Service("llama"), content_id=f"c{number}", share=share))
    chosen = table.service("llama", DEFAULT_TENANT, lambda: session)
    for each in table.releases:
        if each.service is not chosen:
            table.drop(each.content_id)
            assert table.service("llama", DEFAULT_TENANT, lambda: session) is chosen


def test_a_tenant_that_may_not_use_the_default_model_gets_its_only_one_and_does_not_see_the_default() -> None:
    llama: Any = Service("llama")
    assert table_of(llama, Service("qwen"), default_model="qwen").service("", ACME, never) is llama
    with pytest.raises(ModelNotFound) as caught:
        table_of(Service("qwen"), default_model="qwen").service("", ACME, never)
    assert "qwen" not in str(caught.value)


def test_an_adapter_is_no_default_because_its_model_would_answer_in_its_place() -> None:
    with pytest.raises(ModelNotFound, match="poet"):
        table_of(Service("llama", "poet"), default_model="poet").service("", ACME, never)


def test_sessions_with_the_same_long_instructions_are_divided() -> None:
    """Agents have system prompts of many thousand characters; what tells their sessions apart comes after those."""
    releases: list[Any] = [Service("llama"), Service("llama")]
    table = table_of(*releases)
    found = Counter(
        releases.index(table.service("llama", DEFAULT_TENANT, partial("{}{}".format, "s" * 9000, number)))
        for number in range(400)
    )
    assert 140 < found[0] < 260
