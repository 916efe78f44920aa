"""What a draft model may lose: a bound on the price of asking one whose drafts are not worth their time.

Whether a draft model gains is found out by asking it, and it is found out again, since texts change. Asking costs: it
catches up with a prompt, proposes, and its drafts are checked. All of that is recorded as spent, and the tokens that it
gives as gained; each step of the worker adds a small share of its time. What is not there is not spent. So whatever
the estimates say by which a step expects a gain, the loss stays within that share, as in conservative bandits (Wu et
al., 2016): a model that loses is asked ever more rarely, and one that gains does not notice.
"""

from __future__ import annotations

LOSS_SHARE = 0.01
"""Share of all steps' time that may be lost."""
FIRST_STEPS = 100
"""Steps of which more may be lost, so that a model that gains is found out soon after a worker's start."""
FIRST_LOSS_SHARE = 0.1
"""Share of the time of those."""
MOST_STEPS = 256
"""Steps whose time is there at most, whatever was gained before."""


class DraftBudget:
    """Seconds that a draft model may take for what may prove in vain."""

    def __init__(self) -> None:
        self.left_s = 0.0
        """What may be spent now; less than nothing after something took longer than was expected."""
        self._num_steps = 0

    def add(self, step_s: float) -> None:
        """Adds the share of a step.

        Args:
            step_s: what the step took.
        """
        share = LOSS_SHARE if self._num_steps >= FIRST_STEPS else FIRST_LOSS_SHARE
        self._num_steps += 1
        self.left_s = min(self.left_s + share * step_s, MOST_STEPS * step_s)

    def book(self, spent_s: float, gained_s: float) -> None:
        """Notes what the draft model has taken of a step's time, and what its drafts have spared."""
        self.left_s += gained_s - spent_s
