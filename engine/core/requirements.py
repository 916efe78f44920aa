"""Checks that a sequence can be computed, before it enters a step.

In a step the same fault would fail the whole batch, and on a GPU the whole process.
"""

from __future__ import annotations

from baton.errors import InvalidRequest, TransferRefused
from baton.messages import SequenceSpec
from engine.core.runner import Runner
from engine.core.sequence import Purpose


def require_computable(spec: SequenceSpec, runner: Runner) -> None:
    """Raise InvalidRequest unless a sequence fits and all its token ids are in the vocabulary."""
    if not 0 < len(spec.token_ids) < runner.max_model_len:
        raise InvalidRequest(
            f"{len(spec.token_ids)} tokens do not fit; this worker takes 1 to {runner.max_model_len - 1}"
        )
    if runner.spec.num_start_tokens:
        if spec.sampling.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs needs a model that continues its prompt; this one encodes it")
        if spec.num_prompt_tokens <= runner.spec.num_start_tokens:
            raise InvalidRequest("the prompt is empty; send at least one token")
    begun = (beam.token_ids for beam in (*spec.hypotheses.running, *spec.hypotheses.finished))
    for ids in (spec.token_ids, *spec.sampling.named_token_ids.values(), *begun):
        if ids and not (min(ids) >= 0 and max(ids) < runner.vocab_size):
            bad = next(token for token in ids if not 0 <= token < runner.vocab_size)
            raise InvalidRequest(
                f"token id {bad} is outside the model's vocabulary, whose ids are 0 to {runner.vocab_size - 1}"
            )


def require_searchable(spec: SequenceSpec, purpose: Purpose, runner: Runner, most: int) -> None:
    """Require that a beam search can be computed here; at most `most` beams run.

    Raises:
        InvalidRequest: it has more beams.
        TransferRefused: it would continue from a state that was computed by another worker.
    """
    if most < (width := spec.sampling.num_beams):
        raise InvalidRequest(f"num_beams {width} is too large; this worker computes at most {most} beams at a time")
    if purpose is Purpose.RECEIVE and runner.spec.states:
        raise TransferRefused("a beam search cannot continue from a transferred state: it is ahead of the first tokens")
