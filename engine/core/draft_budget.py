"""Budget of a draft model: bounds the time lost to a model whose drafts do not pay off.

The engine finds out whether a draft model pays off only by running it, and must repeat the test because texts change.
Each test has costs: the model catches up with a prompt, it proposes, and its drafts are checked. This time is recorded
as spent, and the time that accepted tokens save as gained; each step of the worker adds a small share of its own time.
The model may spend only what is in the budget. So the loss stays within that share even if the estimates of a step's
gain are wrong, as in conservative bandits (Wu et al., 2016): a model that loses runs ever more rarely, and a model that
gains is not limited.
"""

from __future__ import annotations

LOSS_SHARE = 0.01
"""Share of all steps' time that may be lost."""
FIRST_STEPS = 100
"""Number of first steps with a larger share, so that a model that pays off is recognized soon after a worker's
start."""
FIRST_LOSS_SHARE = 0.1
"""Share of the time of the first steps that may be lost."""
MOST_STEPS = 256
"""Upper bound of the budget, in steps of the current duration."""


class DraftBudget:
    """Seconds that a draft model may spend without a proven gain."""

    def __init__(self) -> None:
        self.left_s = 0.0
        """Seconds left to spend; negative after something took longer than expected."""
        self._num_steps = 0

    def add(self, step_s: float) -> None:
        """Add a step's share to the budget.

        Args:
            step_s: duration of the step.
        """
        share = LOSS_SHARE if self._num_steps >= FIRST_STEPS else FIRST_LOSS_SHARE
        self._num_steps += 1
        self.left_s = min(self.left_s + share * step_s, MOST_STEPS * step_s)

    def book(self, spent_s: float, gained_s: float) -> None:
        """Record the time that the draft model took of a step and the time that its drafts saved."""
        self.left_s += gained_s - spent_s
