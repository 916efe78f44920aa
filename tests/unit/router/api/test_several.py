"""Several prompts of one request: their answers as one's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from functools import partial

import pytest

from baton.api import GenerateChunk, Timing, Usage
from baton.errors import InvalidRequest, Overloaded
from baton.sampling import FinishReason
from router.admission.tenants import Tenant
from router.api.answering import MAX_AT_ONCE, Start, at_once, together


async def answers(prompt: int, num_choices: int = 2, num_tokens: int = 3) -> AsyncGenerator[GenerateChunk]:
    """Every choice's tokens in turns; the last chunk has the usage and the timing."""
    for token in range(num_tokens):
        for choice in range(num_choices):
            await asyncio.sleep(0)
            is_last = (token, choice) == (num_tokens - 1, num_choices - 1)
            yield GenerateChunk(
                request_id=f"r-{prompt}",
                choice_index=choice,
                text=f"{prompt}.{choice}.{token} ",
                finish_reason=FinishReason.LENGTH if token == num_tokens - 1 else None,
                usage=Usage(prompt + 1, num_tokens * num_choices, 1, 2) if is_last else None,
                timing=Timing(ttft_s=prompt + 1.0) if is_last else None,
            )


async def test_every_choice_is_its_prompt_s_and_usage_is_the_sum() -> None:
    starts: list[Start] = [partial(answers, prompt) for prompt in range(3)]
    chunks = [chunk async for chunk in together(starts, 2)]
    texts = {index: "".join(c.text for c in chunks if c.choice_index == index) for index in range(6)}
    assert texts == {
        prompt * 2 + choice: "".join(f"{prompt}.{choice}.{token} " for token in range(3))
        for prompt in range(3)
        for choice in range(2)
    }
    assert chunks[-1].usage == Usage(1 + 2 + 3, 18, 3, 6)
    assert [chunk.timing.ttft_s for chunk in chunks if chunk.timing] == [1.0]
    alone = [chunk async for chunk in together([partial(answers, 1)], 2)]
    assert alone == [chunk async for chunk in answers(1)]


class Served:
    """Prompts that are served until they may end."""

    def __init__(self) -> None:
        self.num_running = self.most = self.num_ended = 0
        self.may_end = asyncio.Event()

    async def answers(self, fails: bool = False) -> AsyncGenerator[GenerateChunk]:
        self.num_running += 1
        self.most = max(self.most, self.num_running)
        try:
            yield GenerateChunk(request_id="r", choice_index=0, text="a")
            if fails:
                raise Overloaded("full")
            await self.may_end.wait()
        finally:
            self.num_running -= 1
            self.num_ended += 1


async def test_not_all_prompts_are_served_at_once() -> None:
    served = Served()
    chunks = together([served.answers] * (3 * MAX_AT_ONCE), 1)
    for _ in range(MAX_AT_ONCE):
        await anext(chunks)
    assert served.num_running == served.most == MAX_AT_ONCE
    served.may_end.set()
    assert len([chunk async for chunk in chunks]) == 2 * MAX_AT_ONCE
    assert served.num_ended == 3 * MAX_AT_ONCE
    assert served.most == MAX_AT_ONCE


@pytest.mark.parametrize(
    ("tenant", "num_answers", "expected"),
    [
        (Tenant(id="t"), 1, MAX_AT_ONCE),
        (Tenant(id="t", max_in_flight=100), 2, MAX_AT_ONCE),
        (Tenant(id="t", max_in_flight=7), 2, 3),
        (Tenant(id="t", max_in_flight=1), 2, 1),  # refused when it arrives
        (Tenant(id="t", requests_per_minute=20), 1, MAX_AT_ONCE),
    ],
)
def test_no_more_prompts_are_served_at_once_than_the_tenant_may_have(
    tenant: Tenant, num_answers: int, expected: int
) -> None:
    assert at_once(tenant, 20, num_answers) == expected


def test_more_prompts_than_a_minute_has_requests_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt holds 21 prompts"):
        at_once(Tenant(id="t", requests_per_minute=20), 21, 1)


async def test_the_other_prompts_follow_as_these_end() -> None:
    served = Served()
    chunks = together([served.answers] * 7, 1, 2)
    for _ in range(2):
        await anext(chunks)
    assert served.num_running == 2
    served.may_end.set()
    assert len([chunk async for chunk in chunks]) == 5
    assert served.most == 2


async def test_one_failure_ends_all() -> None:
    served = Served()
    starts: list[Start] = [served.answers, partial(served.answers, fails=True), served.answers]

    async def read() -> None:
        async for _ in together(starts, 1):
            pass

    with pytest.raises(Overloaded):
        await read()
    assert (served.num_running, served.num_ended) == (0, 3)


async def test_a_reader_that_leaves_ends_all() -> None:
    served = Served()
    async with contextlib.aclosing(together([served.answers] * 3, 1)) as chunks:
        await anext(chunks)
        await anext(chunks)
    assert served.num_running == 0
    assert served.num_ended >= 2
