"""Nothing leaves that the operator's judge has not allowed, however tokens come and wherever a stream goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api import GenerateChunk, GenerateRequest, Text
from baton.config import RouterConfig
from baton.errors import ConfigError, InvalidRequest
from baton.sampling import FinishReason, SamplingParams
from baton.scores import TokenScores
from baton.telemetry.instruments import Instruments
from router.answer import AnswerChunks, AnswerWriter, Channels, Mark, Reasoning, ReasoningReader, SentAnswer
from router.prompt import Tokenizer
from router.request.moderation import MAX_THREADS, AnswerSoFar, Judge, ModeratedAnswer, Moderator, load_judge
from tests.support.builders import cluster_status

EVERY = 4


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


def moderator_of(judge: Judge, **settings: Any) -> Moderator:
    config = RouterConfig(moderation="given:here", moderation_tokens=EVERY, **settings)
    return Moderator(judge, config, Instruments(cluster_status))


def answer_of(
    tokenizer: Tokenizer, moderator: Moderator | None, num_delivered: int = 0, stop: tuple[str, ...] = ()
) -> SentAnswer:
    writer = AnswerWriter(tokenizer, (), SamplingParams(stop=stop), num_delivered=num_delivered)
    chunks = AnswerChunks(writer, GenerateRequest(prompt=Text(""), model=""), request_id="one", choice_index=3)
    return SentAnswer(chunks) if moderator is None else ModeratedAnswer(chunks, moderator, tokenizer, "acme")


def edges(num_tokens: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise([0, *sorted(cut % (num_tokens + 1) for cut in cuts), num_tokens]))


async def heard(
    answer: SentAnswer, token_ids: Sequence[int], cuts: Sequence[int] = (), finish: FinishReason | None = None
) -> list[GenerateChunk]:
    """All that comes of tokens, grouped by `cuts`; the last group has the engine's word on the end."""
    found: list[GenerateChunk] = []
    groups = edges(len(token_ids), cuts)
    for number, (begin, end) in enumerate(groups):
        scores = TokenScores(tuple(map(float, range(begin, end))))
        found += await answer.write(token_ids[begin:end], finish if number == len(groups) - 1 else None, scores)
        if answer.has_ended:
            break
    return found


def text_of(chunks: Sequence[GenerateChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def ids_of(chunks: Sequence[GenerateChunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


@settings(max_examples=150)
@given(data=st.data())
def test_what_leaves_ends_at_the_last_point_that_was_allowed(tokenizer: Tokenizer, data: st.DataObject) -> None:
    token_ids = tokenizer.encode(data.draw(st.text(st.sampled_from("abc dé🐈\n"), min_size=1, max_size=60)))
    worst = data.draw(st.integers(0, len(token_ids) + 2))
    cuts = data.draw(st.lists(st.integers(0, 100), max_size=6))
    num_delivered = data.draw(st.integers(0, worst // EVERY * EVERY))
    points = [*range(EVERY, len(token_ids), EVERY), len(token_ids)]
    vetoed = next((point for point in points if point >= worst), None) if worst <= len(token_ids) else None
    kept = len(token_ids) if vetoed is None else max([0, *(point for point in points if point < vetoed)])
    num_delivered = min(num_delivered, kept)

    def judge(answer: AnswerSoFar) -> bool:
        assert answer.text == tokenizer.decode_all(token_ids[: answer.num_tokens])
        assert (answer.tenant, answer.request_id, answer.choice_index) == ("acme", "one", 3)
        return answer.num_tokens < worst

    async def run() -> None:
        whole = await heard(answer_of(tokenizer, None), token_ids[:kept])
        answer = answer_of(tokenizer, moderator_of(judge), num_delivered)
        found = await heard(answer, token_ids, cuts, FinishReason.LENGTH)
        assert ids_of(found) == token_ids[num_delivered:kept]
        reason = FinishReason.LENGTH if vetoed is None else FinishReason.CONTENT_FILTER
        assert found[-1].finish_reason is reason
        assert [chunk.finish_reason for chunk in found[:-1]] == [None] * (len(found) - 1)
        scores = [logprob for chunk in found for logprob in chunk.scores.logprobs]
        assert scores == list(map(float, range(num_delivered, kept)))
        if not num_delivered and vetoed is not None:
            assert text_of(found) == text_of(whole)

    asyncio.run(run())


async def test_tokens_wait_for_the_verdict_and_it_is_asked_at_fixed_counts(tokenizer: Tokenizer) -> None:
    asked: list[tuple[int, bool]] = []

    def judge(answer: AnswerSoFar) -> bool:
        asked.append((answer.num_tokens, answer.has_ended))
        return True

    answer = answer_of(tokenizer, moderator_of(judge))
    token_ids = tokenizer.encode("one two three four five six seven eight nine")[:9]
    assert await answer.write(token_ids[:3], None) == []
    assert ids_of(await answer.write(token_ids[3:6], None)) == token_ids[:4]
    assert ids_of(await answer.write(token_ids[6:], FinishReason.LENGTH)) == token_ids[4:]
    assert asked == [(4, False), (8, False), (9, True)]


async def test_what_stands_behind_a_stop_string_is_not_judged(tokenizer: Tokenizer) -> None:
    texts: list[str] = []

    def judge(answer: AnswerSoFar) -> bool:
        texts.append(answer.text)
        return "bad" not in answer.text

    answer = answer_of(tokenizer, moderator_of(judge), stop=(" end",))
    found = await answer.write(tokenizer.encode("fine end bad"), None)
    assert found[-1].finish_reason is FinishReason.STOP
    assert texts == ["fine end"]


async def test_a_continued_answer_is_judged_from_its_begin(tokenizer: Tokenizer) -> None:
    """The client may claim to have what never left: it does not get what follows."""
    token_ids = tokenizer.encode("one two three four five six seven eight nine ten")[:10]
    moderator = moderator_of(lambda answer: answer.num_tokens not in (4, 8))
    answer = answer_of(tokenizer, moderator, num_delivered=6)
    with pytest.raises(InvalidRequest, match="the tokens of choice 3 by 2"):
        async for _ in answer.replay(token_ids, None):
            pass


async def test_a_replay_passes_the_judge_too(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("word " * 150)[:150]
    answer = answer_of(tokenizer, moderator_of(lambda answer: answer.num_tokens < 100), num_delivered=70)
    found = [chunk async for chunks in answer.replay(token_ids, None) for chunk in chunks]
    assert ids_of(found) == token_ids[70:96]
    assert found[-1].finish_reason is FinishReason.CONTENT_FILTER
    assert answer.has_ended


async def test_a_vetoed_answer_has_the_reasoning_that_left(tokenizer: Tokenizer) -> None:
    mark = Mark.of({"open": "</think>"}, "open")
    channels = Channels(ReasoningReader(Reasoning(mark, mark), is_open=True))
    writer = AnswerWriter(tokenizer, (), SamplingParams(), channels=channels)
    chunks = AnswerChunks(writer, GenerateRequest(prompt=Text(""), model=""), request_id="one", choice_index=0)
    answer = ModeratedAnswer(chunks, moderator_of(lambda answer: answer.num_tokens < 8), tokenizer, "acme")
    found = await heard(answer, tokenizer.encode("one two three four five six seven eight nine ten")[:10])
    assert [chunk.num_reasoning_tokens for chunk in found if chunk.finish_reason] == [4]


def plain(answer: AnswerSoFar) -> bool:
    return threading.current_thread() is not threading.main_thread() and answer.num_tokens < 5


async def coroutine(answer: AnswerSoFar) -> bool:
    return threading.current_thread() is threading.main_thread() and answer.num_tokens < 5


class Callee:
    async def __call__(self, answer: AnswerSoFar) -> bool:
        return await coroutine(answer)


@pytest.mark.parametrize("judge", [plain, coroutine, Callee()])
async def test_functions_are_asked_on_threads_and_coroutines_on_the_loop(tokenizer: Tokenizer, judge: Judge) -> None:
    found = await heard(answer_of(tokenizer, moderator_of(judge)), tokenizer.encode("a b c d e f g h i j")[:10])
    assert len(ids_of(found)) == 4
    assert found[-1].finish_reason is FinishReason.CONTENT_FILTER


def hangs(answer: AnswerSoFar) -> bool:
    time.sleep(60)
    return True


async def never_answers(answer: AnswerSoFar) -> bool:
    await asyncio.Event().wait()
    return True


def raises(answer: AnswerSoFar) -> bool:
    raise OSError("no opinion")


def exits(answer: AnswerSoFar) -> bool:
    raise SystemExit(1)


def says_nothing(answer: AnswerSoFar) -> Any:
    return None


async def async_raises(answer: AnswerSoFar) -> bool:
    return raises(answer)


FAILING: list[Callable[[AnswerSoFar], bool | Awaitable[bool]]] = [
    hangs, never_answers, raises, exits, says_nothing, async_raises
]  # fmt: skip


@pytest.mark.parametrize("judge", FAILING)
@pytest.mark.parametrize("on_failure", ["end", "pass"])
async def test_a_setting_says_what_holds_where_the_judge_fails(
    tokenizer: Tokenizer, judge: Judge, on_failure: str
) -> None:
    moderator = moderator_of(judge, moderation_on_failure=on_failure, moderation_timeout_s=0.1)
    token_ids = tokenizer.encode("a b c d e f")[:6]
    found = await heard(answer_of(tokenizer, moderator), token_ids, [], FinishReason.LENGTH)
    passes = on_failure == "pass"
    assert ids_of(found) == (token_ids if passes else [])
    assert found[-1].finish_reason is (FinishReason.LENGTH if passes else FinishReason.CONTENT_FILTER)


async def test_judges_that_hang_keep_no_more_than_so_many_threads(tokenizer: Tokenizer) -> None:
    is_over = threading.Event()
    num_before = threading.active_count()

    def waits(answer: AnswerSoFar) -> bool:
        return is_over.wait(60)

    moderator = moderator_of(waits, moderation_timeout_s=0.05)
    so_far = AnswerSoFar(tenant="", request_id="", choice_index=0, text="", num_tokens=1, has_ended=False)
    try:
        verdicts = await asyncio.gather(*(moderator.allows(so_far) for _ in range(3 * MAX_THREADS)))
        assert verdicts == [False] * len(verdicts)
        assert threading.active_count() <= num_before + MAX_THREADS
    finally:
        is_over.set()
    assert await moderator_of(waits).allows(so_far)


async def test_answers_of_one_tenant_at_which_judges_hang_leave_a_thread_for_the_others() -> None:
    is_over = threading.Event()

    def judge(answer: AnswerSoFar) -> bool:
        return answer.tenant == "other" or is_over.wait(60)

    moderator = moderator_of(judge, moderation_timeout_s=30.0)
    so_far = AnswerSoFar(tenant="hangs", request_id="", choice_index=0, text="", num_tokens=1, has_ended=False)
    hanging = [asyncio.create_task(moderator.allows(so_far)) for _ in range(2 * MAX_THREADS)]
    try:
        await asyncio.sleep(0)
        assert await moderator.allows(replace(so_far, tenant="other"))
        assert not any(task.done() for task in hanging)
    finally:
        is_over.set()
    assert await asyncio.gather(*hanging) == [True] * len(hanging)


async def test_seats_of_judges_that_ended_late_are_free_again(tokenizer: Tokenizer) -> None:
    is_over = threading.Event()
    moderator = moderator_of(lambda answer: is_over.wait(60), moderation_timeout_s=0.05)
    so_far = AnswerSoFar(tenant="", request_id="", choice_index=0, text="", num_tokens=1, has_ended=False)
    await asyncio.gather(*(moderator.allows(so_far) for _ in range(MAX_THREADS)))
    assert not await moderator.allows(so_far)
    is_over.set()
    verdicts = [await moderator.allows(so_far) for _ in range(100)]  # a thread may be slow to begin
    assert any(verdicts)


def test_the_function_is_found_by_its_name() -> None:
    from tests.support.judges import judge

    assert load_judge("tests.support.judges:judge") is judge


@pytest.mark.parametrize(
    "name", ["nowhere:judge", "tests.support.judges:nothing", "tests.support.judges:NO_JUDGE", "judge", ":", "a b:c"]
)
def test_what_cannot_be_loaded_is_an_error_of_the_settings(name: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.moderation"):
        load_judge(name)
