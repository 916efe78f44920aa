"""Pairs that come, break and go for minutes; and what an answer depends on beside its prompt."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

from baton.errors import TransferError
from kvstore.transfer.transport import nccl
from kvstore.transfer.transport.nccl_counts import num_stuck_aborts
from kvstore.transfer.transport.streams import num_shared_streams, own_stream
from tests.gpu.hour.checks import Found, is_rehearsal, judged
from tests.gpu.hour.ends import Side, two
from tests.gpu.hour.models import Answer, answers, engine_of, make_folder, parting, prompts_of, runner_of
from tests.gpu.hour.pairs import move

CHURN_S = 6.0 if is_rehearsal() else 240.0
NOTICED_S = 0.3
"""After this long the session notices that its peer has broken off, and aborts, too."""
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25}


def _churn(side: Side) -> dict[str, Any]:
    """Both sides draw the same: how many messages a pair carries, and which side breaks it off."""
    drawn = random.Random(7)
    ends = time.monotonic() + CHURN_S
    sums: list[int] = []
    num_pairs = num_broken = 0
    with own_stream(side.device):
        while True:
            num_pairs += 1
            name = f"churn-{num_pairs}"
            link = side.open("nccl", name)
            sums += move(side, link, drawn.randrange(1, 20))
            breaker = drawn.choice((0, 1, 2))
            if breaker == side.rank:
                link.abort()
            elif breaker < 2:
                threading.Timer(NOTICED_S, link.abort).start()
            if breaker < 2:
                try:
                    move(side, link, 1)
                except TransferError:
                    num_broken += 1
            goes_on = b"1" if time.monotonic() < ends else b"0"
            if side.sends:
                side.put(f"meet/more-{num_pairs}", goes_on)
            else:
                goes_on = side.get(f"meet/more-{num_pairs}")
            side.meet(f"through-{num_pairs}")
            link.close()
            for what in (name, f"more-{num_pairs}", f"through-{num_pairs}"):
                side.forget(what)
            if goes_on == b"0":
                break
    return {
        "sums": sums,
        "pairs": num_pairs,
        "broken": num_broken,
        "stalls": nccl.num_nccl_stalls(),
        "stuck_aborts": num_stuck_aborts(),
        "shared_streams": num_shared_streams(),
    }


def churn() -> Found:
    """Four minutes of pairs, two of three of which one side breaks off."""
    sent, received = two(_churn, CHURN_S + 40.0)
    same = sent.pop("sums") == received.pop("sums")
    is_right = same and not any(side[what] for side in (sent, received) for what in ("stalls", "stuck_aborts"))
    is_right &= sent["pairs"] > 2 and sent["broken"] > 0
    return judged(is_right, "wrong bytes, or something stalled", same=same, sender=sent, receiver=received)


def variants(dtype: str, temperature: float = 0.0, **settings: Any) -> tuple[list[Answer], dict[str, list[Answer]]]:
    """Answers alone; and beside others, in other chunks, with guesses, and resumed in their middle."""
    runner = runner_of(make_folder(), dtype=dtype, **settings)
    prompts = prompts_of((20, 130, 333, 700) if is_rehearsal() else (20, 130, 333, 700, 1500, 2500))
    num_tokens = 8 if is_rehearsal() else 48
    half = num_tokens // 2

    def run(
        batch: list[list[int]], length: int = num_tokens, *, step_tokens: int = 512, num_drafts: int = 0
    ) -> list[Answer]:
        engine = engine_of(runner, step_tokens=step_tokens, num_drafts=num_drafts)
        return answers(engine, batch, length, scored=True, temperature=temperature)

    alone = [run([prompt])[0] for prompt in prompts]
    resumed = []
    for prompt, answer in zip(prompts, alone, strict=True):
        rest = run([prompt + answer.tokens[:half]], num_tokens - half)[0]
        resumed.append(Answer(answer.tokens[:half] + rest.tokens, [], answer.logprobs[:half] + rest.logprobs))
    others = {
        "beside others": run(prompts),
        "other chunks": run(prompts, step_tokens=96),
        "guesses": run(prompts, num_drafts=6),
        "resumed": resumed,
    }
    return alone, others


def invariance(dtype: str) -> Found:
    """Whether batch, chunks and a resume change an answer; and if so, at near ties alone."""
    alone, others = variants(dtype)
    parted = {
        name: [margin for one, reference in zip(found, alone, strict=True) for _, margin in parting(one, reference)]
        for name, found in others.items()
    }
    worst = max((margin for margins in parted.values() for margin in margins), default=0.0)
    other_bits = {
        name: sum(one.logprobs != reference.logprobs for one, reference in zip(answers, alone, strict=True))
        for name, answers in others.items()
    }
    figures = {"answers": len(alone), "parted_at_margins": parted, "other_log_probabilities": other_bits}
    return judged(worst <= NEAR_TIE[dtype], "answers part where no near tie is", **figures)
