from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
from opentelemetry.context import Context

from baton.errors import StoreUnavailable, WorkerFailed
from baton.sampling import FinishReason, SamplingParams
from baton.structure import StructuredOutputs
from baton.tasks import cancel_and_wait
from kvstore.index import MemoryStore
from kvstore.leases import MemoryRecords, Noted, RecordEnd, RecordEntry, RecordKey
from router.admission.tenants import Tenant
from router.prompt import SequenceBuilder
from router.request.resume import READ_S, Call, Journal, digest_of, only_delivered, with_delivered
from router.serve.choice import Choice, ChoiceGroup
from tests.support.builders import sequence_spec
from tests.unit.router.serve.scripted_workers import CLAIM, new_choice

KEY = RecordKey("acme", "r")
DIGEST = b"d" * 16
SAMPLING = SamplingParams(max_tokens=50, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=7, stop_token_ids=(4,))
SPEC = sequence_spec((1, 2, 3), sampling=SAMPLING)


class Records(MemoryRecords):
    """Counts what is written, and can be away or hang."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.written: list[tuple[Sequence[RecordEntry], Sequence[RecordEnd]]] = []
        self.is_away = self.hangs = False
        self.tried = asyncio.Event()

    async def write(self, entries: Sequence[RecordEntry], ended: Sequence[RecordEnd]) -> None:
        self.written.append((entries, ended))
        self.tried.set()
        if self.is_away:
            raise StoreUnavailable("away")
        await super().write(entries, ended)

    async def read(self, key: RecordKey, digest: bytes) -> dict[int, Noted]:
        if self.is_away:
            raise StoreUnavailable("away")
        if self.hangs:
            await asyncio.Event().wait()
        return await super().read(key, digest)


@pytest.fixture
def records() -> Records:
    return Records(MemoryStore())


@pytest.fixture
def journal(records: Records) -> Journal:
    return Journal(records)


def begun(journal: Journal, choice: Choice) -> Any:
    return journal.noting(KEY, DIGEST, [choice])


async def test_another_router_finds_what_this_one_noted(journal: Journal, records: Records) -> None:
    record = new_choice()
    with begun(journal, record):
        await journal.flush()
        assert records.written == [], "nothing has come yet"
        for tokens in ([5, 6], [7], []):
            record.emitted += tokens
            await journal.flush()
        assert len(records.written) == 2, "nothing new, nothing written"
        assert await Journal(records).recall(KEY, DIGEST) == {0: Noted((5, 6, 7))}
        assert [list(part.token_ids) for entries, _ in records.written for part in entries[0].parts] == [[5, 6], [7]]


async def test_the_end_is_noted_with_the_last_token(journal: Journal, records: Records) -> None:
    with journal.noting(KEY, DIGEST, [new_choice([5], FinishReason.STOP), new_choice([6])]):
        await journal.flush()
        assert await journal.recall(KEY, DIGEST) == {0: Noted((5,), FinishReason.STOP), 1: Noted((6,))}


async def test_the_sampler_is_noted_of_what_it_has_drawn(journal: Journal) -> None:
    choices = [new_choice([5]), new_choice([6])]
    greedy = replace(SPEC, sampling=replace(SPEC.sampling, temperature=0.0))
    for choice, spec in zip(choices, (greedy, SPEC), strict=True):
        choice.spec, choice.sampler = spec, "a"
    with journal.noting(KEY, DIGEST, choices):
        await journal.flush()
        assert await journal.recall(KEY, DIGEST) == {0: Noted((5,)), 1: Noted((6,), sampler="a")}


async def test_a_request_that_has_ended_is_forgotten(journal: Journal, records: Records) -> None:
    with begun(journal, new_choice(emitted=[5])):
        await journal.flush()
    await journal.flush()
    assert await journal.recall(KEY, DIGEST) == {}


async def test_a_short_request_never_meets_the_store(journal: Journal, records: Records) -> None:
    with begun(journal, record := new_choice()):
        record.emitted += [5, 6]
    await journal.flush()
    assert records.written == []


async def test_what_another_router_noted_is_forgotten_too(journal: Journal, records: Records) -> None:
    with begun(Journal(records), new_choice(emitted=[5])):
        pass
    dead = Journal(records)
    with begun(dead, new_choice(emitted=[5])):
        await dead.flush()
        with begun(journal, new_choice(emitted=[5])):
            pass  # continued, and over before the first flush
        await journal.flush()
        assert await journal.recall(KEY, DIGEST) == {}


@pytest.mark.parametrize("leaving", [WorkerFailed("gone"), GeneratorExit(), asyncio.CancelledError()])
async def test_what_failed_or_was_left_stays(journal: Journal, leaving: BaseException) -> None:
    with contextlib.suppress(type(leaving)), begun(journal, new_choice(emitted=[5])):
        await journal.flush()
        raise leaving
    await journal.flush()
    assert await journal.recall(KEY, DIGEST) == {0: Noted((5,))}
    with begun(journal, new_choice(emitted=[5, 6])):
        await journal.flush()
    await journal.flush()
    assert await journal.recall(KEY, DIGEST) == {}, "this one was answered to its end"


async def test_while_the_store_is_away_nothing_piles_up_and_then_all_is_written(
    journal: Journal, records: Records
) -> None:
    record = new_choice(emitted=[5])
    with begun(journal, record):
        await journal.flush()
        records.is_away = True
        for number in range(100):
            with journal.noting(RecordKey("acme", f"r-{number}"), DIGEST, [new_choice(emitted=[1])]):
                record.emitted.append(number)
                with pytest.raises(StoreUnavailable):
                    await journal.flush()
        assert await journal.recall(KEY, DIGEST) == {}
        assert max(len(ended) for _, ended in records.written) <= 1
        records.is_away = False
        records._store.records.clear()
        await journal.flush()
        assert await journal.recall(KEY, DIGEST) == {0: Noted((5, *range(100)))}


async def test_it_runs_by_itself_and_outlives_the_stores_absence(journal: Journal, records: Records) -> None:
    record = new_choice(emitted=[5])
    records.is_away = True
    with begun(journal, record):
        running = asyncio.create_task(journal.run())
        async with asyncio.timeout(10):
            await records.tried.wait()
            records.is_away = False
            records.tried.clear()
            await records.tried.wait()
        assert await journal.recall(KEY, DIGEST) == {0: Noted((5,))}
        await cancel_and_wait((running,))


async def test_nobody_waits_long_for_a_store_that_hangs(journal: Journal, records: Records) -> None:
    records.hangs = True
    async with asyncio.timeout(READ_S + 5):
        assert await journal.recall(KEY, DIGEST) == {}


OTHER_SAMPLING: dict[str, Any] = {
    "max_tokens": 51,
    "temperature": 0.8,
    "top_k": 6,
    "top_p": 0.8,
    "min_p": 0.2,
    "seed": 8,
    "stop": ("x",),
    "stop_token_ids": (4, 5),
    "n": 2,
    "ignore_eos": True,
    "logprobs": 2,
    "logprob_token_ids": (4,),
    "min_tokens": 3,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": ((4, 1.0),),
    "bad_words": ("x",),
    "bad_word_ids": ((4, 5),),
    "allowed_token_ids": (4, 5),
    "typical_p": 0.9,
    "dry_multiplier": 0.8,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_range": 100,
    "dry_sequence_breakers": ("x",),
    "dry_breaker_ids": (4,),
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "xtc_exempt_token_ids": (4,),
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "structured_outputs": StructuredOutputs(json_object=True),
    "reasoning_end_ids": (4,),
    "thinking_budget": 5,
    "reasoning_begin_id": 6,
    "best_of": 2,
    "prompt_logprobs": 3,
    "use_beam_search": True,
    "beam_width": 4,
    "length_penalty": 2.0,
    "early_stopping": "never",
}


SEARCH: dict[str, Any] = {
    "use_beam_search": True,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "stop": (),
}
ALONG_WITH: dict[str, dict[str, Any]] = {
    "reasoning_begin_id": {"reasoning_end_ids": (5,)},
    **dict.fromkeys(("use_beam_search", "beam_width", "length_penalty", "early_stopping"), SEARCH),
}


def test_whatever_determines_the_tokens_is_in_the_digest() -> None:
    assert OTHER_SAMPLING.keys() == {field.name for field in fields(SamplingParams)}
    changed = [replace(SPEC, token_ids=(1, 2, 4)), replace(SPEC, token_ids=(1, 2, 3, 3), num_prompt_tokens=4)]
    changed += [
        replace(SPEC, sampling=replace(SPEC.sampling, **{name: value} | ALONG_WITH.get(name, {})))
        for name, value in OTHER_SAMPLING.items()
    ]
    digests = {digest_of("content", spec) for spec in (SPEC, *changed)}
    assert len(digests) == 1 + len(changed)


def test_what_does_not_determine_the_tokens_is_not_in_the_digest() -> None:
    assert digest_of("content", replace(SPEC, priority=3, attempt=2)) == digest_of("content", SPEC)
    assert digest_of("other content", SPEC) != digest_of("content", SPEC)


def test_a_request_without_a_seed_has_the_same_one_on_every_router() -> None:
    def seed(request_id: str, secret: str = "secret", tenant: str = "acme", given: int | None = None) -> int:
        sequences = SequenceBuilder("content", vocab_size=100, cache_secret=secret)
        params = SamplingParams(max_tokens=5, seed=given)
        return sequences.build(request_id, (1,), params, Tenant(id=tenant)).seed

    assert seed("r") == seed("r")
    assert len({seed("r"), seed("s"), seed("r", "other"), seed("r", tenant="zeta"), seed("")}) == 5
    assert (seed("r", given=7), seed("s", given=-1)) == (7, -1)
    assert abs(seed("r")) < 2**63


async def test_a_call_that_is_taken_over_says_what_has_drawn_its_answers() -> None:
    noted = {0: Noted((4,), None, "a"), 2: Noted((5,), FinishReason.STOP, "b")}
    group = ChoiceGroup.begin(SPEC, CLAIM, Context(), 3, noted)
    task = asyncio.current_task()
    assert task is not None
    call = Call(driver=task)
    assert call.noted() == {}
    call.begin(b"digest", group)
    assert call.noted() == {**noted, 1: Noted()}
    assert [choice.is_continued for choice in group.choices] == [True, False, True]
    greedy = replace(SPEC, sampling=replace(SPEC.sampling, temperature=0.0))
    call.begin(b"digest", ChoiceGroup.begin(greedy, CLAIM, Context(), 3, noted))
    assert call.noted()[0] == Noted((4,)), "any sampler may go on with it"


def test_a_choice_of_which_the_client_has_tokens_is_continued_though_nothing_is_noted() -> None:
    noted = {0: Noted((4,), None, "a")}
    assert with_delivered(noted, {0: 1, 1: 3, 2: 0}) == {**noted, 1: Noted()}
    assert with_delivered({}, {}) == {}


def test_tokens_whose_scores_a_client_lacks_are_generated_again() -> None:
    noted = {0: Noted((4, 5, 6), FinishReason.STOP, "a"), 1: Noted((7,), FinishReason.STOP, "b"), 2: Noted((8,))}
    assert only_delivered(noted, {0: 2, 1: 1}) == {
        0: Noted((4, 5), None, "a"),
        1: Noted((7,), FinishReason.STOP, "b"),
        2: Noted(),
    }
    assert only_delivered(noted, {0: 9})[0] == noted[0]
