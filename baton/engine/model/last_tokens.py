"""The tokens that a step has sampled, for the one that was planned before they were known."""

from __future__ import annotations

from baton.engine.core.runner import UNKNOWN_TOKEN, StepInput, StepOutput


class LastTokens:
    """Those of the last step that was executed."""

    def __init__(self) -> None:
        self._last: tuple[StepInput, StepOutput] | None = None

    def keep(self, step: StepInput, output: StepOutput) -> None:
        """Takes what came of a step."""
        self._last = step, output

    def filled(self, step: StepInput) -> StepInput:
        """Returns the next step with all its tokens. Those of the step before are forgotten: they are of no other."""
        last, self._last = self._last, None
        if not any(part.token_ids[-1] == UNKNOWN_TOKEN for part in step.parts):
            return step
        assert last is not None, "a step has unknown tokens, and none was executed before it"
        sampled = {
            part.sequence_key: token_ids
            for part, token_ids in zip(last[0].parts, last[1].sampled_token_ids, strict=True)
        }
        parts = [
            part._replace(token_ids=(*part.token_ids[:-1], sampled[part.sequence_key][-1]))
            if part.token_ids[-1] == UNKNOWN_TOKEN
            else part
            for part in step.parts
        ]
        return StepInput(tuple(parts), step.copies)
