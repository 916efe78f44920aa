"""Which rounds of a benchmark count, and what its gates say."""

from __future__ import annotations

import itertools

import pytest

from tests.bench import any_precision, engine, engine_cases, quality, stats
from tests.bench.engine_cases import Case, Found, Plan
from tests.bench.engine_sides import Measured, Side

QUICKLY, SLOWLY = 1.0, 2.0


class Answering:
    """A side that takes as long as it is asked to."""

    def __init__(self, precision: str, *wall_s: float) -> None:
        self.precision = precision
        self._wall_s = itertools.cycle(wall_s)

    def prefill(self, prompts: list[list[int]]) -> Measured:
        return self.decode(prompts, 1)

    def decode(self, prompts: list[list[int]], num_steps: int) -> Measured:
        wall_s = next(self._wall_s)
        return Measured(num_steps * len(prompts), wall_s, wall_s / 2, tuple(map(tuple, prompts)))


class Machine:
    """How busy others are, one try after the other."""

    def __init__(self, *cores: float) -> None:
        self.to_come = iter(cores)
        self.cores = 0.0

    def __call__(self) -> Machine:
        return self

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *error: object) -> None:
        self.cores = next(self.to_come)


CASE = Case("decode, streams: 1", [[1, 2]], 10)


def sides_of(**walls: float) -> dict[str, Side]:
    return {name: Answering("float32", wall_s) for name, wall_s in walls.items()}


def found_of(foreign_cores: float = 0.0, **walls: float) -> Found:
    runs = {name: [Measured(10, wall_s, wall_s, ((1,),))] * 5 for name, wall_s in walls.items()}
    return Found(CASE, runs, foreign_cores, 1)


@pytest.mark.parametrize(
    ("cores", "least", "load"),
    [
        ((0.1,), 0.1, "0.10"),
        ((0.9, 0.2), 0.2, "0.20, 2 tries"),
        ((0.9, 0.5, 0.3, 0.8, 0.7), 0.3, "0.30, 5 tries, not decided"),
    ],
)
def test_a_case_beside_which_others_were_busy_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, cores: tuple[float, ...], least: float, load: str
) -> None:
    machine = Machine(*cores)
    monkeypatch.setattr(stats, "OtherWork", machine)
    found = engine_cases.measure(CASE, sides_of(ours=1.0, peer=2.0), Plan(5, stats.NUM_TRIES, ("ours",)))
    assert (found.foreign_cores, found.load) == (least, load)
    assert stats.verdict(True, found.foreign_cores) == ("yes" if least <= 0.2 else "not decided")
    assert list(machine.to_come) == []


def test_an_engine_far_behind_the_best_of_others_has_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "OtherWork", Machine(0.0))
    sides = sides_of(ours=1.0, slow_one_of_ours=50.0, best=3.0, near=4.9, far=5.1)
    found = engine_cases.measure(CASE, sides, Plan(5, 1, ("ours", "slow_one_of_ours")))
    assert {name: len(runs) for name, runs in found.runs.items()} == {
        "ours": 5, "slow_one_of_ours": 5, "best": 5, "near": 5, "far": 1,
    }  # fmt: skip
    assert found.best(("best", "near", "far")) == "best"
    assert found.ratio("far", "ours").median == pytest.approx(5.1)
    assert found.cpu_ratio("far", "ours").num_rounds == 1


def test_parts_are_streams_of_a_decode_and_tokens_of_a_prompt() -> None:
    found = engine_cases.cases(range(3000), ("8", "512"), 7)
    assert [(case.name, case.num_steps, len(case.prompts)) for case in found] == [
        ("decode, streams: 8", 7, 8),
        ("prefill, 512 tokens", 0, 1),
    ]
    assert len({tuple(prompt) for prompt in found[0].prompts}) == 8


def test_a_gate_is_kept_by_the_ratio_to_the_best_and_on_a_quiet_machine_alone() -> None:
    sides = sides_of(**{engine.OURS: 1.0, engine.RUNNER: 4.0, "generate": 9.0, "peer": 1.5})
    for cores, kept in ((0.0, ["no", "yes"]), (0.3, ["not decided"] * 2)):
        found = found_of(cores, **{engine.OURS: 1.0, engine.RUNNER: 4.0, "generate": 9.0, "peer": 1.5})
        rows = engine._gates([found], sides).rows
        assert [row[1] for row in rows] == ["peer", engine.RUNNER]
        assert [row[-1] for row in rows] == kept


def test_who_predicts_too_differently_keeps_no_gate() -> None:
    walls = {any_precision.EXACT: 2.1, "near": 1.0, "far": 1.0, "peer": 2.0, "other": 9.0}
    qualities = {"near": quality.Quality([0.01], [0.95]), "far": quality.Quality([0.011], [0.95])}
    rows = any_precision._gates([found_of(**walls)], sides_of(**walls), qualities).rows
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        (f"{CASE.name}: {any_precision.EXACT}", "peer", "no"),
        (f"{CASE.name}: near", "peer", "yes"),
        (f"{CASE.name}: far", "peer", "no"),
    ]
    assert quality.Quality([0.0], [0.949]).is_near is False


def test_exact_weights_have_a_gate_among_all_at_one_stream_alone() -> None:
    walls = {any_precision.EXACT: 1.0, "peer": 2.0}
    many = Found(Case("decode, streams: 8", [[1]] * 8, 10), found_of(**walls).runs, 0.0, 1)
    rows = any_precision._gates([found_of(**walls), many], sides_of(**walls), {}).rows
    assert [row[-1] for row in rows] == ["yes", ""]
