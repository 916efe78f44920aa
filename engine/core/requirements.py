"""Checks that a sequence can be computed, before it enters a step.

In a step the same fault would fail the whole batch, and on a GPU the whole process.
"""

from __future__ import annotations

from baton.errors import InvalidRequest, TransferRefused, Unsupported
from baton.messages import SequenceSpec
from baton.sampling import SamplingParams
from engine.core.image_store import ImageStore
from engine.core.runner import Runner
from engine.core.sequence import Purpose

NEUTRAL = SamplingParams()
ONE_BY_ONE = (
    "top_k", "top_p", "min_p", "typical_p", "logprobs", "logprob_token_ids", "prompt_logprobs", "min_tokens",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_word_ids", "allowed_token_ids",
    "dry_multiplier", "xtc_probability", "structured_outputs", "thinking_budget", "use_beam_search",
)  # fmt: skip
"""Sampling parameters without a meaning for a canvas, whose tokens are drawn together."""
ASKED_BY = {
    "logprobs": "best_of above n asks for them",
    "structured_outputs": "response_format, and tool_choice other than auto and none, ask for them",
}
"""Other fields of a request that set such a parameter, as the end of a sentence, by the parameter's name."""


def require_computable(spec: SequenceSpec, runner: Runner) -> None:
    """Require that a sequence fits, and that all its token ids are in the vocabulary.

    Raises:
        InvalidRequest: it does not fit, has an id that is not in the vocabulary, or images in the wrong places.
        Unsupported: it has images, and the runner takes none.
    """
    if not 0 < len(spec.token_ids) < runner.max_model_len:
        raise InvalidRequest(
            f"{len(spec.token_ids)} tokens do not fit; this worker takes 1 to {runner.max_model_len - 1}"
        )
    if runner.num_start_tokens:
        if spec.sampling.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs needs a model that continues its prompt; this one encodes it")
        if spec.num_prompt_tokens <= runner.num_start_tokens:
            raise InvalidRequest("the prompt is empty; send at least one token")
    if runner.canvas_length:
        _require_drawn_together(spec.sampling, runner.canvas_length)
    begun = (beam.token_ids for beam in (*spec.hypotheses.running, *spec.hypotheses.finished))
    for ids in (spec.token_ids, *spec.sampling.named_token_ids.values(), *begun):
        if ids and not (min(ids) >= 0 and max(ids) < runner.vocab_size):
            bad = next(token for token in ids if not 0 <= token < runner.vocab_size)
            raise InvalidRequest(
                f"token id {bad} is outside the model's vocabulary, whose ids are 0 to {runner.vocab_size - 1}"
            )
    if spec.images:
        images_of(runner).require_placed(spec)


def _require_drawn_together(params: SamplingParams, canvas_length: int) -> None:
    """Raise InvalidRequest for parameters that need tokens to be drawn one after another."""
    for name in ONE_BY_ONE:
        if getattr(params, name) != getattr(NEUTRAL, name):
            also = f" ({ASKED_BY[name]})" if name in ASKED_BY else ""
            raise InvalidRequest(
                f"{name} needs a model that draws one token after another; this one draws {canvas_length} together, "
                f"and takes temperature, seed, stop and lengths{also}"
            )


def images_of(runner: Runner) -> ImageStore:
    """Return the images of a runner. Raise Unsupported if it takes none."""
    if isinstance(runner.images, str):
        raise Unsupported(f"this model takes no images here: {runner.images}")
    return runner.images


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
