"""What a check is, and what it reports. Nothing here imports torch: NCCL's environment has to be set before it."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

RESULT, PART = "baton-check: ", "baton-part: "
"""What the lines of a process begin with: its check's result, and that of a part, which is known before."""
REHEARSAL = "BATON_FIRST_HOUR_REHEARSAL"
"""Set if the checks are tried on a CPU, in small; those without a meaning there are not run."""
Status = Literal["pass", "fail", "not run"]
Group = Literal["timed", "right", "memory", "last", "harness"]
"""See `checks.yaml`."""


class NotRun(Exception):
    """A check that has no meaning here; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: a process of its own."""

    name: str
    group: Group
    proves: str
    """What is known once it has passed, in words."""
    expected: str = ""
    """What the figures should be, in words; empty: its parts have such words."""
    cost_s: float
    """Seconds that it is expected to take on an H200. It starts only if so many are left."""
    limit_s: float
    where: str
    """module:function in this package."""
    argument: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    """What it reports on the way, in this order: names, and what is expected of each."""
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


class Fallbacks:
    """The slower ways that this process, and those that it has started, were silently given."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.wanted: set[str] = set()
        """Reasons, or parts of them, that a check has given itself."""

    def note(self, reasons: Iterable[str]) -> None:
        for reason in reasons:
            if reason not in self.taken and not any(part in reason for part in self.wanted):
                self.taken.append(reason)

    def judge(self, found: Found) -> Found:
        """Returns what was found, as a failure if it was found in a slower way than such a device has."""
        if not self.taken or found.status != "pass":
            return found
        return replace(found, status="fail", reason=f"silently slower: {'; '.join(self.taken)}")


FALLBACKS = Fallbacks()


def report_part(name: str, job: Callable[[], Found]) -> Found:
    """Runs a part of a check, and reports it at once: a limit that ends the rest does not end what is known."""
    found = _found(job)
    _write(PART, found, name)
    return found


def run_here(check: Check) -> None:
    """Runs a check in this process, and writes its result as the last line."""
    _write(RESULT, _found(check.call))
    sys.stderr.flush()
    os._exit(0)  # what hangs at the end, as threads of NCCL may, has nothing to say any more


def _found(job: Callable[[], Found]) -> Found:
    try:
        return FALLBACKS.judge(job())
    except NotRun as reason:
        return Found("not run", reason=str(reason))
    except Exception as error:
        traceback.print_exc()
        return Found("fail", reason=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


def _write(kind: str, found: Found, part: str = "") -> None:
    line = {"check": part, "status": found.status, "figures": found.figures, "reason": found.reason}
    print(f"\n{kind}{json.dumps(line)}", flush=True)
