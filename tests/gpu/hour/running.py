"""Runs checks within a budget of time, each in a process of its own, and writes a line of JSON as soon as one ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from tests.gpu.hour.checks import PART, RESULT, Check, Group, is_rehearsal

MOST_BESIDE, CPUS_A_CHECK = 4, 2
"""How many checks of the group `right` run at a time; fewer where there are not so many processors for each."""
LEAST_S = 5.0
"""No check starts with less."""
LOOK_S = 0.1
SCRIPT = "tests.gpu.first_hour"
PROBE_S = 120.0
PROBE = (
    "import json, torch; gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]; "
    "print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda or '', 'gpus': gpus}))"
)
SHARED_MEMORY, LEAST_FREE = Path("/dev/shm"), 40 * 2**30
Line = dict[str, Any]
OnPart = Callable[[str, Line], None]
"""Takes the name of a part, and what was found."""


@contextlib.contextmanager
def scratch() -> Iterator[str]:
    """A folder for models and other temporary files, which goes with them: in shared memory if that has room."""
    has_room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= LEAST_FREE
    parent = str(SHARED_MEMORY) if has_room else None
    with tempfile.TemporaryDirectory(prefix="baton-hour-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield folder


def machine() -> dict[str, Any]:
    """What torch sees, asked in a process of its own: this one must not touch CUDA."""
    try:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_S)
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"torch": "", "cuda": "", "gpus": [], "error": f"torch cannot be asked: {error!r}"}
    return found


def why_not(check: Check, found: dict[str, Any]) -> str:
    """Why a check has no meaning here; empty: it has one."""
    if is_rehearsal():
        return "" if check.rehearses else "says nothing on a CPU"
    if check.needs == "nothing":
        return ""
    if "error" in found:
        return str(found["error"])
    if not found["cuda"]:
        return f"torch {found['torch']} is a build without CUDA"
    if check.needs == "gpu" and not found["gpus"]:
        return f"torch {found['torch']} sees no GPU here"
    return ""


def num_beside(group: Group, num_cpus: int) -> int:
    """Returns how many checks of a group run at a time: those that are timed do alone."""
    return max(1, min(MOST_BESIDE, num_cpus // CPUS_A_CHECK)) if group == "right" else 1


class Processes:
    """Runs checks, each in a process of its own with everything that it starts. Any thread may use it.

    Args:
        environment: of the processes.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, check: Check, limit_s: float, on_part: OnPart) -> Line:
        """Runs a check no longer than a limit; reports its parts as they come, and returns what it found."""
        command = [sys.executable, "-m", SCRIPT, "--check", check.name]
        ends = time.monotonic() + limit_s
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command, stdout=output, stderr=errors, env={**os.environ, **self._environment}, start_new_session=True
            )
            with self._lock:
                self._running.add(process)
            code, result, place = None, "", 0
            try:
                while code is None and time.monotonic() < ends:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        code = process.wait(LOOK_S)
                    for line in _lines_from(output, place):
                        place += len(line)
                        text = line.decode(errors="replace")
                        if text.startswith(PART):
                            found: Line = json.loads(text.removeprefix(PART))
                            on_part(found.pop("check"), found)
                        elif text.startswith(RESULT):
                            result = text.removeprefix(RESULT)
            finally:
                _end(process)
                with self._lock:
                    self._running.discard(process)
            errors.seek(0)
            complained = errors.read()[-1500:]
        if result:
            whole: Line = json.loads(result)
            if whole["status"] == "fail" and complained:
                whole["figures"]["stderr"] = complained
            return whole
        if code is None:
            why = f"not through after its limit of {limit_s:.3g} s"
        elif code < 0:
            why = f"the process was ended by {signal.Signals(-code).name}"
        else:
            why = f"the process ended with {code} and said nothing"
        return {"status": "fail", "figures": {"stderr": complained}, "reason": why}

    def end(self) -> None:
        """Ends all that run."""
        with self._lock:
            for process in self._running:
                _end(process)


class Run:
    """One run of checks in their order.

    Args:
        budget_s: what all of them may take; no check starts that is expected to take longer than what is left.
        processes: what runs a check.
        found: what torch sees of the machine; see `machine`.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        budget_s: float,
        processes: Processes,
        found: Line,
        out: IO[str] = sys.stdout,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lines: list[Line] = []
        self._ends = now() + budget_s
        self._processes = processes
        self._machine = found
        self._out = out
        self._now = now
        self._lock = threading.Lock()

    def run(self, checks: Sequence[Check]) -> None:
        """Runs neighbours of a group as many at a time as the group allows."""
        for group, members in groupby(checks, key=lambda check: check.group):
            with ThreadPoolExecutor(num_beside(group, os.cpu_count() or 1)) as pool:
                done = [pool.submit(self._run, check) for check in members]
                try:
                    for each in done:
                        each.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    self._processes.end()
                    raise

    def _run(self, check: Check) -> None:
        began = self._now()
        reported: set[str] = set()

        def on_part(name: str, found: Line) -> None:
            reported.add(name)
            self._emit(name, check.parts.get(name, ""), found, self._now() - began)

        left_s = self._ends - began
        reason = why_not(check, self._machine)
        if not reason and left_s < max(check.cost_s, LEAST_S):
            reason = f"budget: {max(0.0, left_s):.0f} s were left, and it takes {check.cost_s:g}"
        found = _not_run(reason) if reason else self._processes.run(check, min(check.limit_s, left_s), on_part)
        for name, expected in check.parts.items():
            if name not in reported:
                self._emit(name, expected, _not_run(found["reason"] or "its check ended before"), 0.0)
        self._emit(check.name, check.expected, found, self._now() - began)

    def _emit(self, name: str, expected: str, found: Line, took_s: float) -> None:
        head = {"check": name, "status": found["status"], "seconds": round(took_s, 2)}
        line = {**head, "expected": expected, "figures": found["figures"], "reason": found["reason"]}
        with self._lock:
            self.lines.append(line)
            print(json.dumps(line), file=self._out, flush=True)


def _not_run(reason: str) -> Line:
    return {"status": "not run", "figures": {}, "reason": reason}


def table(lines: Iterable[Line], width: int = 118) -> str:
    """Returns lines as text: check, status, seconds, and what there is to say."""
    rows = []
    for line in lines:
        short = {name: value for name, value in line["figures"].items() if not isinstance(value, dict | list | str)}
        told = line["reason"] or ", ".join(f"{name} {value}" for name, value in short.items())
        rows.append(f"{line['check']:24} {line['status']:8} {line['seconds']:7.1f} s  {told}"[:width].rstrip())
    return "\n".join(rows)


def _lines_from(file: IO[str], place: int) -> list[bytes]:
    """Returns the whole lines of a file that its writer goes on with, from a place on."""
    told = os.pread(file.fileno(), os.fstat(file.fileno()).st_size - place, place)
    return told[: told.rfind(b"\n") + 1].splitlines(keepends=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the session that the check began: stopped processes, too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
