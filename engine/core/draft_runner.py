"""Runner with a draft model: a second runner with a smaller model and its own KV cache proposes drafts.

    step     | known tokens of some sequences, drafts that are wanted as UNKNOWN_TOKEN |
    draft    | what it lacks of them: draw 1 | draft 1: draw 2 | draft 2: draw 3 |             a round for each draft
    target   | known tokens and drafts: draw, and keep the drafts that are what was drawn      |

The draft model draws with the request's own parameters and the random numbers of the same positions. So both models
draw the same token if their distributions agree, at any temperature, and not only if it is the likeliest token.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from baton.adapters import AdapterFacts
from baton.messages import Adapter
from baton.sampling import SamplingParams
from engine.core.runner import (
    ComputedStep,
    OnLayerDone,
    Proposal,
    Proposed,
    Runner,
    StepInput,
    StepOutput,
    StepPart,
    ignore_layer,
)


class DraftedRunner:
    """`Runner` of the target model with drafts. It returns the target model's tokens exactly.

    Its steps are not planned ahead, because proposals for a step follow the tokens of the step before.

    Args:
        target: computes and draws the tokens that are returned.
        draft: proposes tokens. It has the same vocabulary and its own KV caches, which are not published.
        clock: measures the time of proposing, in seconds.
    """

    runs_ahead = False

    def __init__(self, target: Runner, draft: Runner, clock: Callable[[], float] = time.monotonic) -> None:
        self.target = target
        self.draft = draft
        self.spec = target.spec
        self.num_blocks = target.num_blocks
        self.max_model_len = target.max_model_len
        self.vocab_size = target.vocab_size
        self.eos_token_ids = target.eos_token_ids
        self.name = target.name
        self.sampler = target.sampler
        computes, fallbacks = target.computes, [f"draft model, {each}" for each in draft.computes.fallbacks]
        self.computes = replace(computes, fallbacks=(*computes.fallbacks, *fallbacks))
        self.num_start_tokens = target.num_start_tokens
        self.canvas_length = target.canvas_length
        self.token_s = target.token_s + draft.token_s
        self.max_adapters = target.max_adapters
        self.images = target.images
        self._clock = clock
        self._keys = itertools.count()

    @property
    def expert_tokens(self) -> Sequence[int]:
        """See `Runner.expert_tokens`."""
        return self.target.expert_tokens

    @property
    def caches(self) -> Sequence[Any]:
        """See `Runner.caches`."""
        return self.target.caches

    def prepare(self, params: SamplingParams) -> None:
        """See `Runner.prepare`."""
        self.target.prepare(params)
        self.draft.prepare(params)

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        """See `Runner.execute`."""
        if not any(part.proposal for part in step.parts):
            return self.target.execute(step, on_layer_done)
        parts, proposed = self._proposed(step.parts)
        return replace(self.target.execute(replace(step, parts=parts), on_layer_done), proposed=proposed)

    def launch(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> ComputedStep:
        """See `Runner.launch`."""
        return ComputedStep(self.execute(step, on_layer_done))

    def check_adapter(self, path: str) -> AdapterFacts:
        """See `Runner.check_adapter`. Drafts are made without adapters."""
        return self.target.check_adapter(path)

    def read_adapter(self, adapter: Adapter) -> Callable[[int], None]:
        """See `Runner.read_adapter`."""
        return self.target.read_adapter(adapter)

    def recover(self) -> None:
        """See `Runner.recover`."""
        self.target.recover()
        self.draft.recover()

    def close(self) -> None:
        """See `Runner.close`."""
        self.target.close()
        self.draft.close()

    def _proposed(self, parts: Sequence[StepPart]) -> tuple[tuple[StepPart, ...], Proposed]:
        """Run the draft model on the parts' proposals. Return the parts with its drafts filled in."""
        wanted = {place: part.proposal for place, part in enumerate(parts) if part.proposal}
        drafts: dict[int, list[int]] = {place: [] for place, proposal in wanted.items() if proposal.num_drafts}
        # The history of a key only grows, and a draft may be rejected, so a key lasts for one step.
        asked = {place: each.part._replace(sequence_key=next(self._keys)) for place, each in wanted.items()}
        began_s = self._clock()
        while asked:
            output = self.draft.execute(StepInput(tuple(asked.values())))
            failed = {*(output.failures or ()), *output.too_large}
            drawing = [(place, index) for index, place in enumerate(asked) if place in drafts and index not in failed]
            following = {}
            for place, index in drawing:
                (token_id,) = output.sampled_token_ids[index]
                if self._ends(parts[place], token_id):
                    continue
                drafts[place].append(token_id)
                if len(drafts[place]) < wanted[place].num_drafts:
                    following[place] = _after(asked[place], token_id)
            asked = following
        filled = list(parts)
        for place, token_ids in drafts.items():
            filled[place] = _filled(parts[place], wanted[place], token_ids)
        counts = {place: len(token_ids) for place, token_ids in drafts.items()}
        return tuple(filled), Proposed(counts, self._clock() - began_s)

    def _ends(self, part: StepPart, token_id: int) -> bool:
        """Return whether no draft may be `token_id`, or follow it."""
        asked = part.sampling
        if not isinstance(self.images, str) and token_id == self.images.placeholder:
            return True
        return token_id in asked.stop_token_ids or (token_id in self.eos_token_ids and not asked.ignore_eos)


def _after(part: StepPart, token_id: int) -> StepPart:
    """Return the part that computes a draft drawn after another part."""
    end = part.end
    return part._replace(
        token_ids=(token_id,),
        num_computed_tokens=end,
        num_kv_tokens=(end + 1,) * len(part.block_ids),
        is_decoding=True,
        history=(*part.history, token_id) if part.history else (),
    )


def _filled(part: StepPart, proposal: Proposal, token_ids: Sequence[int]) -> StepPart:
    """Return a part with the proposed drafts filled in."""
    known = part.token_ids[: len(part.token_ids) - proposal.num_drafts]
    return part._replace(
        token_ids=(*known, *token_ids),
        num_kv_tokens=(part.known_end + len(token_ids),) * len(part.block_ids),
        num_drafts=len(token_ids),
        proposal=None,
    )
