"""`step.c` under the compiler's address and undefined-behaviour sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.native import build

SANITIZED = Path(__file__).with_name("sanitized.c")
CHECKS = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror")


HERE = next((name for name, needed in build.VARIANTS.items() if needed <= build.cpu_flags()), "")


@pytest.fixture(
    scope="module",
    params=[
        variant if variant == HERE else pytest.param(variant, marks=pytest.mark.chaos) for variant in build.VARIANTS
    ],
)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sanitized program for one variant. It takes 13 s to compile; each case below has its own time to run."""
    variant = request.param
    if not build.VARIANTS[variant] <= build.cpu_flags():
        pytest.skip(f"this CPU has no {variant}")
    arguments = [one for one in build.ARGUMENTS if one not in ("-O3", "-shared")]
    command = ["cc", *arguments, *CHECKS, *build.machine_arguments(variant), "-pthread"]
    program = tmp_path_factory.mktemp("sanitized") / "sanitized"
    place = ["-I", str(build.SOURCE.parent), str(SANITIZED), "-o", str(program), "-lm"]
    made = subprocess.run([*command, *place], capture_output=True, text=True, timeout=240, check=False)
    assert made.returncode == 0, made.stderr
    return program


@pytest.mark.full  # a minute of processor time under sanitizers
@pytest.mark.parametrize("case", ["1 0 0", "3 0 0", "1 1 0", "3 1 0", "1 0 1", "3 1 1", "3 0 2", "1 1 2"])
def test_a_step_reads_and_writes_what_is_its_own_and_gives_the_same_bits(program: Path, case: str) -> None:
    done = subprocess.run(
        [program, *case.split()],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={"ASAN_OPTIONS": "detect_leaks=0"},  # which must trace the process: not every container allows that
    )
    assert (done.returncode, done.stdout) == (0, "the same bits\n"), done.stderr
