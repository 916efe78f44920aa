"""What a call that continues a request finds of the one before it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from opentelemetry.context import Context

from baton.sampling import FinishReason
from kvstore.leases import Noted
from router.dispatch.choice import ChoiceGroup
from router.request.resume import Call, with_delivered
from tests.unit.router.dispatch.scripted_workers import CLAIM, SPEC

DRAWN = replace(SPEC, sampling=replace(SPEC.sampling, temperature=1.0))


async def test_a_call_that_is_taken_over_says_what_has_drawn_its_answers() -> None:
    noted = {0: Noted((4,), None, "a"), 2: Noted((5,), FinishReason.STOP, "b")}
    group = ChoiceGroup.begin(DRAWN, CLAIM, Context(), 3, noted)
    task = asyncio.current_task()
    assert task is not None
    call = Call(driver=task)
    assert call.noted() == {}
    call.begin(b"digest", group)
    assert call.noted() == {**noted, 1: Noted()}
    assert [choice.is_continued for choice in group.choices] == [True, False, True]
    greedy = ChoiceGroup.begin(SPEC, CLAIM, Context(), 3, noted)
    call.begin(b"digest", greedy)
    assert call.noted()[0] == Noted((4,)), "any sampler may go on with it"


def test_a_choice_of_which_the_client_has_tokens_is_continued_though_nothing_is_noted() -> None:
    noted = {0: Noted((4,), None, "a")}
    assert with_delivered(noted, {0: 1, 1: 3, 2: 0}) == {**noted, 1: Noted()}
    assert with_delivered({}, {}) == {}
