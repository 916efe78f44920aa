"""`step.c` under the compiler's address and undefined-behaviour sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from baton.engine.native import build

SANITIZED = Path(__file__).with_name("sanitized.c")
CHECKS = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror")


@pytest.mark.skipif(not build.VARIANTS["x86-64-v3"] <= build.cpu_flags(), reason="needs AVX2")
def test_a_step_reads_and_writes_what_is_its_own_and_gives_the_same_bits(tmp_path: Path) -> None:
    arguments = [one for one in build.ARGUMENTS if one not in ("-O3", "-shared")]
    variant = build.variant_of(build.cpu_flags())
    command = ["cc", *arguments, *CHECKS, f"-march={variant}", "-pthread"]
    program = tmp_path / "sanitized"
    place = ["-I", str(build.SOURCE.parent), str(SANITIZED), "-o", str(program), "-lm"]
    made = subprocess.run([*command, *place], capture_output=True, text=True, timeout=240, check=False)
    assert made.returncode == 0, made.stderr
    for threads, other in (("1", "0"), ("3", "0"), ("1", "1"), ("3", "1")):
        done = subprocess.run(
            [program, threads, other],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={"ASAN_OPTIONS": "detect_leaks=0"},  # which must trace the process: not every container allows that
        )
        assert (done.returncode, done.stdout) == (0, "the same bits\n"), done.stderr
