"""A tenant is charged for the tokens that were computed for it, whoever got them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.api import GenerateChunk, GenerateRequest, TokenIds
from baton.errors import InvalidRequest, WorkerFailed
from baton.messages import NewTokens
from baton.sampling import FinishReason
from baton.telemetry.instruments import Instruments
from router.admission.account import LedgerEntry
from router.admission.limits import Limits
from router.admission.tenants import Tenant
from router.prompt import Tokenizer
from router.serve.choice import Choice, ChoiceGroup
from router.timeline.usage_log import UsageBook, UsageFile
from router.timeline.usage_marks import MemoryMarks
from tests.support.builders import cluster_status
from tests.unit.router.test_service import MODEL, OneToken, Router

ACME = Tenant(id="acme", tokens_per_day=10**6)
PROMPT = TokenIds((1, 2, 3))


class Computes(OneToken):
    """A driver whose answers all have the same tokens, several to a message.

    Attributes:
        answer: of every choice.
        error: raised where the answers should end.
    """

    def __init__(self, answer: list[int], step: int = 1) -> None:
        super().__init__()
        self.answer = answer
        self.error: Exception | None = None
        self._step = step

    async def run(self, group: ChoiceGroup) -> AsyncIterator[tuple[Choice, NewTokens]]:
        for choice in group.choices:
            for begin in range(len(choice.emitted), len(self.answer), self._step):
                token_ids = tuple(self.answer[begin : begin + self._step])
                is_last = begin + self._step >= len(self.answer)
                if is_last and self.error is not None:
                    raise self.error
                choice.emitted += token_ids
                choice.timeline.num_computed += len(token_ids)
                choice.finish_reason = FinishReason.LENGTH if is_last else None
                yield choice, NewTokens(token_ids=token_ids, finish_reason=choice.finish_reason)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture
def workers(tokenizer: Tokenizer) -> Computes:
    return Computes(tokenizer.encode("one two three four five six seven eight")[:8])


@pytest.fixture
def router(tokenizer: Tokenizer, workers: Computes) -> Iterator[Router]:
    found = Router(tokenizer, workers)
    yield found
    found.close()


def asked(**more: Any) -> GenerateRequest:
    sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **more.pop("sampling", {})}
    return GenerateRequest(prompt=PROMPT, sampling=sampling, **more)


async def read(
    router: Router, request: GenerateRequest, most: int = 1000, tenant: Tenant = ACME
) -> list[GenerateChunk]:
    """The chunks of an answer, of which so many are read."""
    found: list[GenerateChunk] = []
    async with aclosing(router.service.generate(request, tenant=tenant)) as chunks:
        async for chunk in chunks:
            found.append(chunk)
            if len(found) == most:
                break
    return found


async def charged(router: Router) -> int:
    """The tokens of answers that the tenant has been charged."""
    await router.accounts.flush()
    (answer,) = await router.ledger.book([LedgerEntry(tenant_id="acme", limits=(10**9, 10**9, 10**9))])
    return answer.used[2] - len(PROMPT.ids)


async def test_all_answers_are_charged_of_which_the_best_are_given(router: Router) -> None:
    chunks = await read(router, asked(sampling={"best_of": 4, "temperature": 1.0, "seed": 1}))
    assert [len(chunk.token_ids) for chunk in chunks] == [8]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 32
    assert await charged(router) == 32


async def test_every_choice_is_charged(router: Router) -> None:
    chunks = await read(router, asked(sampling={"n": 3}))
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == await charged(router) == 24


async def test_a_client_that_comes_back_with_no_token_has_one_usage_record(router: Router, tmp_path: Path) -> None:
    log = tmp_path / "usage.jsonl"
    book = UsageBook(UsageFile(str(log)), MemoryMarks(), Instruments(cluster_status))
    router.front.requests.usage_book = book
    await read(router, asked(request_id="again"), most=3)
    await read(router, asked(request_id="again", resume_from={0: 0}))
    await book.close()
    (record,) = map(json.loads, log.read_text().splitlines())
    assert (record["completion_tokens"], record["is_resumption"]) == (8, True)


async def test_what_a_client_claims_to_have_and_nobody_has_recorded_is_charged(router: Router) -> None:
    chunks = await read(router, asked(request_id="never-was", resume_from={0: 7}))
    assert sum(len(chunk.token_ids) for chunk in chunks) == 1
    assert await charged(router) == 8


async def test_a_claim_beyond_the_answer_is_refused_and_what_it_took_is_charged(router: Router) -> None:
    with pytest.raises(InvalidRequest, match="the tokens of choice 0 by 1"):
        await read(router, asked(request_id="never-was", resume_from={0: 9}, sampling={"max_tokens": 9}))
    assert await charged(router) == 8


async def test_what_a_router_has_recorded_is_charged_once(router: Router) -> None:
    request = asked(request_id="breaks")
    stream = router.service.generate(request, tenant=ACME)
    for _ in range(3):
        await anext(stream)
    await router.journal.flush()
    await stream.aclose()
    assert await charged(router) == 3
    chunks = await read(router, asked(request_id="breaks", resume_from={0: 3}))
    assert sum(len(chunk.token_ids) for chunk in chunks) == 5
    assert await charged(router) == len(PROMPT.ids) + 8, "which is another request, with its prompt"


async def test_who_leaves_is_charged_what_was_computed_until_then(router: Router) -> None:
    await read(router, asked(), most=2)
    assert await charged(router) == 2


async def test_tokens_behind_a_stop_string_are_charged(tokenizer: Tokenizer, workers: Computes) -> None:
    router = Router(tokenizer, Computes(workers.answer, step=8))
    chunks = await read(router, asked(sampling={"stop": ("three",)}))
    assert sum(len(chunk.token_ids) for chunk in chunks) == 3
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    assert await charged(router) == 8
    router.close()


async def test_what_was_computed_of_an_answer_that_fails_is_charged(router: Router, workers: Computes) -> None:
    workers.error = WorkerFailed("all of them")
    with pytest.raises(WorkerFailed):
        await read(router, asked())
    assert await charged(router) == 7


@pytest.mark.parametrize(
    ("sampling", "num_reserved"),
    [
        ({"max_tokens": 8}, 8),
        ({"max_tokens": 8, "n": 3}, 24),
        ({"max_tokens": 8, "best_of": 4, "n": 2, "temperature": 1.0}, 32),
        ({"max_tokens": 8, "use_beam_search": True, "beam_width": 5}, 40),
        ({"max_tokens": None, "ignore_eos": False}, 256),
        ({"max_tokens": None, "n": 2, "ignore_eos": True}, 2 * (8192 - 3)),
    ],
)
async def test_what_can_be_computed_is_reserved_and_headers_say_so(
    router: Router, sampling: dict[str, Any], num_reserved: int
) -> None:
    wanted = {"ignore_eos": False, "temperature": 0.0} | sampling
    request = GenerateRequest(
        prompt=PROMPT, sampling={name: value for name, value in wanted.items() if value is not None}
    )
    (first, *_) = await read(router, request)
    assert first.quota is not None
    assert first.quota.tokens is not None
    assert first.quota.tokens.remaining == 10**6 - len(PROMPT.ids) - num_reserved
    await router.accounts.flush()
    entry = LedgerEntry(tenant_id="acme", limits=(10**9, 10**9, 10**9))
    (answer,) = await router.ledger.book([entry])
    assert answer.num_reserved == 0


async def test_a_request_is_charged_to_the_model_under_the_name_that_is_served(router: Router) -> None:
    """Also if the client names none."""
    limits = Limits(tokens_per_day=100, max_answer_tokens=8)
    tenant = replace(ACME, model_limits=(("smollm2*", limits),))
    for model in ("", MODEL):
        await read(router, replace(asked(), model=model), tenant=tenant)
    await router.accounts.flush()
    (answer,) = await router.ledger.book([LedgerEntry(tenant_id="acme", model=MODEL, limits=limits.windows)])
    assert answer.used[2] == 2 * (len(PROMPT.ids) + 8)
    with pytest.raises(InvalidRequest, match="max_tokens must be at most 8 with this API key, got 9"):
        await read(router, asked(sampling={"max_tokens": 9}), tenant=tenant)


async def test_the_metric_of_a_tenants_tokens_has_what_was_computed(router: Router) -> None:
    await read(router, asked(sampling={"best_of": 2, "temperature": 1.0, "seed": 1}))
    shown = router.instruments.exposition().decode()
    assert 'baton_tenant_tokens_total{kind="computed",tenant="acme"} 16.0' in shown
    assert 'baton_tenant_tokens_total{kind="generated",tenant="acme"} 8.0' in shown
