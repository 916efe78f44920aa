"""What `engine` and `any_precision` measure of their sides: decoding at several batches, and long prompts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from tests.bench.engine_peers import PeerSide
from tests.bench.engine_sides import PROMPT_TOKENS, TEXT, Measured, Side
from tests.bench.report import Table
from tests.bench.stats import NUM_TRIES, Spread, describe_load, interleaved, ratio, spread, until_quiet

NUM_STREAMS = (1, 8, 16)
LONG_PROMPTS = (512, 2048)
PARTS = tuple(str(size) for size in (*NUM_STREAMS, *LONG_PROMPTS))
"""Streams of a decode, tokens of a prefill."""
LONG_TEXT = TEXT * 60
FAR_BEHIND = 0.6
"""The share of the best engine of others below which another is measured once, and no gate depends on it."""


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts, and for how many steps they are answered; none of a prefill."""

    name: str
    prompts: list[list[int]]
    num_steps: int

    @property
    def size(self) -> int:
        """Streams of a decode, tokens of a prefill."""
        return len(self.prompts) if self.num_steps else len(self.prompts[0])

    def measure(self, side: Side) -> Measured:
        return side.decode(self.prompts, self.num_steps) if self.num_steps else side.prefill(self.prompts)

    def warm_up(self, side: Side) -> None:
        """Computes every shape of the case once."""
        if self.num_steps:
            side.decode(self.prompts, 2)
        else:
            side.prefill(self.prompts)


@dataclass(frozen=True, slots=True)
class Plan:
    """How often a case is measured, and which sides are in every round, however far behind."""

    num_rounds: int
    num_tries: int
    always: Collection[str]

    @classmethod
    def of(cls, quick: bool, always: Collection[str]) -> Plan:
        return cls(2, 1, always) if quick else cls(5, NUM_TRIES, always)


@dataclass(frozen=True, slots=True)
class Found:
    """What a case's rounds gave each side, and how busy others were meanwhile."""

    case: Case
    runs: Mapping[str, Sequence[Measured]]
    """What each side took, by its name: a side that fell far behind has its first round alone."""
    foreign_cores: float
    num_tries: int

    @property
    def load(self) -> str:
        return describe_load(self.foreign_cores, self.num_tries)

    def rates(self, side: str) -> list[float]:
        return [run.tokens_per_s for run in self.runs[side]]

    def ratio(self, side: str, ours: str) -> Spread:
        """Ours to another's, within each round that both have."""
        return ratio(*self._shared(self.rates(ours), self.rates(side)))

    def cpu_ratio(self, side: str, ours: str) -> Spread:
        """The same by CPU time, which a busy machine hardly changes."""
        costs = {name: [run.cpu_ms_per_token for run in self.runs[name]] for name in (side, ours)}
        return ratio(*self._shared(costs[side], costs[ours]))

    @staticmethod
    def _shared(ours: list[float], theirs: list[float]) -> tuple[list[float], list[float]]:
        count = min(len(ours), len(theirs))
        return ours[:count], theirs[:count]

    def best(self, sides: Collection[str]) -> str:
        return max(sides, key=lambda side: spread(self.rates(side)).median)


def cases(ids: Sequence[int], parts: Collection[str], num_steps: int) -> list[Case]:
    """Returns the cases of the named parts.

    Args:
        ids: tokens of a text that is longer than the longest prompt.
    """
    decodes = [
        Case(f"decode, streams: {count}", [list(ids[7 * i :][:PROMPT_TOKENS]) for i in range(count)], num_steps)
        for count in NUM_STREAMS
    ]
    prefills = [Case(f"prefill, {count} tokens", [list(ids[:count])], 0) for count in LONG_PROMPTS]
    return [case for case in (*decodes, *prefills) if str(case.size) in parts]


def measure(case: Case, sides: Mapping[str, Side], plan: Plan) -> Found:
    """Measures all sides, again while others are busy, and returns the quietest try."""
    for side in sides.values():
        case.warm_up(side)
    tries: list[tuple[float, dict[str, list[Measured]]]] = []
    for others in until_quiet(plan.num_tries):
        with others:
            runs = _rounds(case, sides, plan)
        tries.append((others.cores, runs))
    cores, runs = min(tries, key=itemgetter(0))
    return Found(case, runs, cores, len(tries))


def _rounds(case: Case, sides: Mapping[str, Side], plan: Plan) -> dict[str, list[Measured]]:
    runs = {name: [case.measure(side)] for name, side in sides.items()}
    rivals = [name for name in sides if name not in plan.always]
    best = max((runs[name][0].tokens_per_s for name in rivals), default=0.0)
    ahead = [name for name in sides if name in plan.always or runs[name][0].tokens_per_s >= FAR_BEHIND * best]
    for name in interleaved(tuple(reversed(ahead)), plan.num_rounds - 1):
        runs[name].append(case.measure(sides[name]))
    return runs


def measurements(title: str, found: Sequence[Found], sides: Mapping[str, Side], ours: str, expected: str) -> Table:
    """Returns a row for each case and side.

    Args:
        ours: the side whose multiple of each is shown.
        expected: the side whose tokens are compared with each other's.
    """
    columns = ("", "precision", "tokens/s", "ours to it", "CPU ms/token", f"tokens of {expected}", "other work, cores")
    table = Table(title, columns)
    for of_case in found:
        answers = of_case.runs[expected][0].answers
        for name, side in sides.items():
            runs = of_case.runs[name]
            num_same = sum(a == b for a, b in zip(runs[0].answers, answers, strict=True))
            table.rows.append((
                f"{of_case.case.name}: {name}",
                side.precision,
                spread(of_case.rates(name)),
                of_case.ratio(name, ours),
                spread([run.cpu_ms_per_token for run in runs]),
                f"{num_same} of {len(answers)}",
                of_case.load,
            ))  # fmt: skip
    names = [f"{name} is {side.name}" for name, side in sides.items() if isinstance(side, PeerSide)]
    once = f"An engine with less than {FAR_BEHIND} of the best other's rate has one round."
    table.note = "; ".join([f"Ours is {ours}", *names]) + f". {once}"
    return table
