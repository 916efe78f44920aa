"""An adapter is requested by name in every API, and recorded under it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from baton.errors import ModelNotFound
from baton.messages import Adapter, NewTokens
from baton.sampling import FinishReason
from baton.v1 import inference_pb2
from kvstore.leases import Noted, RecordKey
from router.admission import check_model
from router.prompt import Tokenizer
from router.request.resume import digest_of
from router.serve.choice import Choice, ChoiceGroup
from tests.support.builders import registered_adapter, sequence_spec
from tests.unit.router.test_service import MODEL, OneToken, Router, asked, ids, tokenizer

__all__ = ["tokenizer"]
POET = registered_adapter("org/poet")
HI = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [HI]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [HI], "max_tokens": 4},
}
COUNTS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages/count_tokens": {"messages": [HI]},
}


class Keeping(OneToken):
    """Keeps the adapter of each sequence that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters: list[Adapter | None] = []

    async def run(self, group: ChoiceGroup) -> AsyncIterator[tuple[Choice, NewTokens]]:
        self.adapters += [choice.spec.adapter for choice in group.choices]
        async for each in super().run(group):
            yield each


@pytest.fixture
def router(tokenizer: Tokenizer) -> Iterator[Router]:
    found = Router(tokenizer, Keeping())
    found.adapters = {POET.name: POET}
    yield found
    found.close()


def adapters_asked(router: Router) -> list[Adapter | None]:
    assert isinstance(router.driver, Keeping)
    return router.driver.adapters


@pytest.mark.parametrize("path", BODIES)
async def test_each_api_serves_an_adapter_by_its_name(router: Router, path: str) -> None:
    answer = await router.post(path, {**BODIES[path], "model": POET.name})
    assert (answer.status_code, answer.json()["model"]) == (200, POET.name)
    answer = await router.post(path, {**BODIES[path], "model": MODEL})
    assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
    answer = await router.post(path, {**BODIES[path], "model": "org/prose"})
    assert answer.status_code == 404
    assert adapters_asked(router) == [POET.adapter, None]


async def test_streamed_answers_name_it_too(router: Router) -> None:
    answer = await router.post("/v1/chat/completions", {"messages": [HI], "model": POET.name, "stream": True})
    assert f'"model":"{POET.name}"' in answer.text
    assert MODEL not in answer.text


@pytest.mark.parametrize("path", COUNTS)
async def test_tokens_are_counted_for_an_adapter(router: Router, path: str) -> None:
    for model, status in ((POET.name, 200), ("org/prose", 404)):
        assert (await router.post(path, {**COUNTS[path], "model": model})).status_code == status


async def test_grpc_serves_it_and_lists_it(router: Router) -> None:
    async with router.inference() as inference:
        async for _ in inference.Generate(asked(text="hi", model=POET.name), timeout=30):
            pass
        await inference.Tokenize(inference_pb2.TokenizeRequest(text="hi", model=POET.name))
        models = (await inference.ListModels(inference_pb2.ListModelsRequest())).models
    assert adapters_asked(router) == [POET.adapter]
    assert [(each.id, each.parent) for each in models] == [(MODEL, ""), (POET.name, MODEL)]
    assert (models[1].path, models[1].max_model_len, models[1].created) == ("/adapters/org/poet", 8192, 1_700_000_000)


async def test_models_are_listed_until_they_change(router: Router) -> None:
    listed = (await router.get("/v1/models")).json()
    assert [(card["id"], card["parent"]) for card in listed["data"]] == [(MODEL, None), (POET.name, MODEL)]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (MODEL, POET.name, False)
    card = (await router.get(f"/v1/models/{POET.name}")).json()
    assert card == listed["data"][1]
    assert (card["root"], card["created"], card["max_model_len"]) == ("/adapters/org/poet", 1_700_000_000, 8192)
    assert (await router.get("/v1/models/org/prose")).status_code == 404


async def test_the_list_follows_what_is_registered(router: Router) -> None:
    async with router._http() as client:
        for names in ([POET.name], ["a", "b"], []):
            router.adapters = {name: registered_adapter(name) for name in names}
            listed = (await client.get("/v1/models")).json()
            assert [card["id"] for card in listed["data"]] == [MODEL, *names]


async def test_a_removed_adapter_is_not_found(router: Router) -> None:
    router.adapters = {}
    code, sentence = await router.refusal(asked(text="a", model=POET.name))
    assert (code.name, "does not exist" in sentence) == ("NOT_FOUND", True)


async def test_metrics_name_only_what_is_registered(router: Router) -> None:
    for model in ("", MODEL, POET.name, "org/prose", "x" * 500):
        await router.post("/v1/completions", {"prompt": "hi", "model": model})
    assert router.instruments.requests.totals("model") == {(MODEL,): 4, (POET.name,): 1}


def test_the_one_place_that_checks_names(router: Router) -> None:
    facts, adapters = router.service.facts, router.adapters
    assert check_model("", facts, adapters) is None
    assert check_model(MODEL, facts, adapters) is None
    assert check_model(POET.name, facts, adapters) == POET.adapter
    with pytest.raises(ModelNotFound, match="'org/prose' does not exist; did you mean 'org/poet'"):
        check_model("org/prose", facts, adapters)
    with pytest.raises(ModelNotFound, match=f"use '{MODEL}'$"):
        check_model(POET.name, facts)


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_an_answers_digest_depends_on_the_weights_and_not_on_their_name() -> None:
    def digest(adapter: Adapter | None) -> bytes:
        return digest_of("content", sequence_spec(adapter=adapter))

    other = replace(POET.adapter, digest="cd" * 32)
    assert len({digest(None), digest(POET.adapter), digest(other)}) == 3
    assert digest(POET.adapter) == digest(replace(POET.adapter, name="poet-2", path="/elsewhere"))


class Interrupted(OneToken):
    """Keeps what each choice had when it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.emitted: list[list[int]] = []

    async def run(self, group: ChoiceGroup) -> AsyncIterator[tuple[Choice, NewTokens]]:
        self.emitted += [list(choice.emitted) for choice in group.choices]
        for choice in group.choices:
            reason = None if len(choice.emitted) + 1 < 4 else FinishReason.LENGTH
            choice.emitted.append(7)
            yield choice, NewTokens(token_ids=(7,), finish_reason=reason)
            while choice.finish_reason is None and len(choice.emitted) < 4:
                choice.emitted.append(7)
                reason = FinishReason.LENGTH if len(choice.emitted) == 4 else None
                yield choice, NewTokens(token_ids=(7,), finish_reason=reason)


@pytest.mark.parametrize("has_other_weights", [False, True])
async def test_a_resumed_answer_is_not_spliced_from_two_adapters_of_one_name(
    tokenizer: Tokenizer,
    has_other_weights: bool,
) -> None:
    """Another router has recorded two tokens; then an operator replaced the weights under the name."""
    driver = Interrupted()
    router = Router(tokenizer, driver)
    router.adapters = {POET.name: POET}
    request = asked(token_ids=ids(3, 4), model=POET.name, request_id="r", sampling={"max_tokens": 4, "seed": 1})
    digests: list[bytes] = []

    async def recall(key: RecordKey, digest: bytes) -> dict[int, Noted]:
        digests.append(digest)
        return {0: Noted((5, 6))} if digest == digests[0] else {}

    router.journal.recall = recall  # type: ignore[method-assign]
    request.resume_from[0] = 2
    try:
        await _served(router, request)
        if has_other_weights:
            router.adapters = {POET.name: registered_adapter(POET.name, "cd" * 32)}
        await _served(router, request)
    finally:
        router.close()
    assert driver.emitted == [[5, 6], [] if has_other_weights else [5, 6]]


async def _served(router: Router, request: inference_pb2.GenerateRequest) -> None:
    async with router.inference() as inference:
        async for _ in inference.Generate(request, timeout=30):
            pass
