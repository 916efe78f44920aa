"""What a sequence must be for an engine to compute it. In the step it would be an error of the whole batch, on a GPU of
the whole process.
"""

from __future__ import annotations

from baton.errors import InvalidRequest, TransferRefused
from baton.messages import SequenceSpec
from engine.core.runner import Runner
from engine.core.sequence import Purpose


def require_computable(spec: SequenceSpec, runner: Runner) -> None:
    """Raises InvalidRequest unless a sequence fits and all token ids that it names are the vocabulary's."""
    if not 0 < len(spec.token_ids) < runner.max_model_len:
        raise InvalidRequest(
            f"{len(spec.token_ids)} tokens do not fit; this worker takes 1 to {runner.max_model_len - 1}"
        )
    begun = (beam.token_ids for beam in (*spec.hypotheses.running, *spec.hypotheses.finished))
    for ids in (spec.token_ids, *spec.sampling.named_token_ids.values(), *begun):
        if ids and not (min(ids) >= 0 and max(ids) < runner.vocab_size):
            bad = next(token for token in ids if not 0 <= token < runner.vocab_size)
            raise InvalidRequest(
                f"token id {bad} is outside the model's vocabulary, whose ids are 0 to {runner.vocab_size - 1}"
            )


def require_searchable(spec: SequenceSpec, purpose: Purpose, runner: Runner, most: int) -> None:
    """Requires that a beam search can be computed here, of which a step has `most` beams at the most.

    Raises:
        InvalidRequest: it has more.
        TransferRefused: it would go on from a state that comes from elsewhere.
    """
    if most < (width := spec.sampling.num_beams):
        raise InvalidRequest(f"a search with {width} beams does not fit; this worker computes {most} at a time")
    if purpose is Purpose.RECEIVE and runner.spec.states:
        raise TransferRefused("beams go on from no state that is transferred: it is ahead of their first tokens")
