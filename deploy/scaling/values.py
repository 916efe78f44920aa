"""Values of the autoscaler: sizes, measurements, needs, and the decision with its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from baton.cluster import PoolScaling, Role
from baton.costs import PRIOR, StepCosts


@dataclass(frozen=True, slots=True)
class Sizes:
    """Number of workers in each pool."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def of(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMeasured:
    """Measurements of one pool in a window, from its ready workers."""

    desired: int
    """Current desired size."""
    ready: int
    draining: int = 0
    prompt_load: float = 0.0
    """Time spent on prompts, as a number of fully busy workers."""
    queued_tokens: int = 0
    """Prompt tokens that are not computed at the end of the window."""
    tokens_per_s: float = math.inf
    """Prompt tokens per second of one worker."""
    num_sequences: float = 0.0
    """Mean number of running and waiting sequences."""
    num_context_tokens: float = 0.0
    """Mean context length of one sequence."""
    kv_use: float = 0.0
    """Share of the KV blocks that sequences hold."""
    costs: StepCosts = PRIOR
    """Costs of one worker's steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a window."""

    prefill: PoolMeasured
    decode: PoolMeasured
    met: int = 0
    """Requests that met their objectives."""
    missed: int = 0
    rejected: int = 0

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.prefill.desired, self.decode.desired)

    @property
    def num_requests(self) -> int:
        return self.met + self.missed + self.rejected

    @property
    def goodput(self) -> float:
        """Share of the requests that met their objectives; 1 if there were none."""
        return self.met / self.num_requests if self.num_requests else 1.0


@dataclass(frozen=True, slots=True)
class Needs:
    """Load of the pools, as numbers of fully busy workers."""

    prefill: float
    decode: float
    backlog: float = 0.0
    """Prefill workers needed to clear the queue within the TTFT objective."""

    def utilisation(self, sizes: Sizes) -> float:
        """Return the greater utilisation of the two pools. Without a prefill pool, prompts are load of the other."""
        return max(self.utilisation_by_role(sizes).values())

    def utilisation_by_role(self, sizes: Sizes) -> dict[Role, float]:
        if not sizes.prefill:
            return {Role.PREFILL: 0.0, Role.DECODE: (self.prefill + self.decode) / max(sizes.decode, 1)}
        return {Role.PREFILL: self.prefill / sizes.prefill, Role.DECODE: self.decode / max(sizes.decode, 1)}

    def pressure(self, sizes: Sizes) -> float:
        """Return the utilisation with the backlog counted as prefill work."""
        return replace(self, prefill=self.prefill + self.backlog, backlog=0.0).utilisation(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """Memory between two decisions."""

    acted_s: float = -math.inf
    """Time of the last change."""
    needs: Needs | None = None
    """Smoothed needs."""
    num_windows: int = 0
    """Number of windows in `needs`."""
    quiet_since_s: float = math.inf
    """Time since which the pools have had a surplus worker; infinite: they have none."""
    sizes: Sizes | None = None
    """Sizes in the latest window; None: there was none. `quiet_since_s` restarts when they change."""

    @classmethod
    def fresh(cls, now_s: float) -> PolicyState:
        """Return the memory of a new controller, which does not know earlier changes."""
        return cls(acted_s=now_s)


@dataclass(frozen=True, slots=True)
class Flips:
    """Changes of role."""

    num: int
    role: Role
    """The new role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """Changes to make: first the changes of role (`flips`), then starts and stops until the pools have `sizes`."""

    before: Sizes
    sizes: Sizes
    reasons: tuple[str, ...]
    """Sentences with the measurements, their limits, and the conclusion."""
    needs: Needs
    """Smoothed needs after this window."""
    state: PolicyState
    """The memory for the next decision."""
    may_flip: bool = True
    """False: the pools have different engines, so one pool stops workers and the other one starts as many."""

    @property
    def is_sleep(self) -> bool:
        """True if the model stops all of its workers until a request arrives."""
        return self.before.total > 0 and self.sizes.total == 0

    @property
    def scaling(self) -> tuple[PoolScaling, ...]:
        """Decision for each pool, as shown in the status."""
        utilisation = self.needs.utilisation_by_role(self.before)
        return tuple(PoolScaling(role.value, utilisation[role], self.sizes.of(role)) for role in Role)

    @property
    def flips(self) -> Flips | None:
        """Changes of role: one pool's surplus workers move to the other pool, at most as many as that pool lacks."""
        more_prefill, more_decode = self._more
        if not self.may_flip:
            return None
        if (num := min(more_prefill, -more_decode)) > 0:
            return Flips(num, Role.PREFILL)
        if (num := min(-more_prefill, more_decode)) > 0:
            return Flips(num, Role.DECODE)
        return None

    @property
    def starts(self) -> Sizes:
        """Number of workers to start per pool, after the changes of role."""
        prefill, decode = self._after_flips
        return Sizes(max(0, prefill), max(0, decode))

    @property
    def stops(self) -> Sizes:
        """Number of workers to stop per pool, after the changes of role."""
        prefill, decode = self._after_flips
        return Sizes(max(0, -prefill), max(0, -decode))

    @property
    def num_actions(self) -> int:
        """Number of workers that change."""
        return (self.flips.num if self.flips else 0) + self.starts.total + self.stops.total

    @property
    def _more(self) -> tuple[int, int]:
        return self.sizes.prefill - self.before.prefill, self.sizes.decode - self.before.decode

    @property
    def _after_flips(self) -> tuple[int, int]:
        prefill, decode = self._more
        if (flips := self.flips) is None:
            return prefill, decode
        to_prefill = flips.num if flips.role is Role.PREFILL else -flips.num
        return prefill - to_prefill, decode + to_prefill
