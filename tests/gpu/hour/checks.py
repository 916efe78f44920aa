"""What a check is, and what it says. Nothing here imports torch: NCCL's environment has to be set before it."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

RESULT = "baton-check: "
REHEARSAL = "BATON_FIRST_HOUR_REHEARSAL"
"""Set where the checks are tried on a CPU, in small; what has no meaning there is not run."""
Status = Literal["pass", "fail", "not run"]


class NotRun(Exception):
    """A check that has no meaning here; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of a slot."""

    name: str
    slot: int
    expected: str
    """What the figures should be, in words."""
    limit_s: float
    where: str
    """module:function in this package."""
    argument: str = ""
    needs: Literal["gpu", "cuda build", "nothing"] = "gpu"
    rehearses: bool = False
    """Whether it says something on a CPU, too."""

    def call(self) -> Found:
        module, _, function = self.where.partition(":")
        run: Callable[..., Found] = getattr(importlib.import_module(f"tests.gpu.hour.{module}"), function)
        return run(self.argument) if self.argument else run()


@dataclass(frozen=True)
class Found:
    """What a check found."""

    status: Status
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


def judged(is_right: bool, reason: str = "", **figures: Any) -> Found:
    """A check that was run. The reason says what is wrong, where it is."""
    return Found("pass" if is_right else "fail", figures, "" if is_right else reason)


def is_rehearsal() -> bool:
    return os.environ.get(REHEARSAL) == "1"


def run_here(check: Check) -> None:
    """Runs a check in this process, and writes its result as the last line."""
    try:
        found = check.call()
    except NotRun as reason:
        found = Found("not run", reason=str(reason))
    except Exception as error:
        traceback.print_exc()
        found = Found("fail", reason=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
    line = {"status": found.status, "figures": found.figures, "reason": found.reason}
    print(f"\n{RESULT}{json.dumps(line)}", flush=True)
    sys.stderr.flush()
    os._exit(0)  # what hangs at the end, as threads of NCCL may, has nothing to say any more
