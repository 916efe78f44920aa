"""Runs each check in a process of its own, with a limit, and writes one line of JSON a check at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import IO, Any

from tests.gpu.hour.checks import RESULT, Check, is_rehearsal

SLOT_S = 570.0
"""A slot takes no longer than this; what has not begun by then is not run."""
LEAST_S = 5.0
SCRIPT = "tests.gpu.first_hour"
PROBE_S = 120.0
PROBE = (
    "import json, torch, torch.distributed as d; print(json.dumps({'torch': torch.__version__, "
    "'cuda': torch.version.cuda or '', 'gpus': torch.cuda.device_count()}))"
)


def machine() -> dict[str, Any]:
    """What torch sees, asked in a process of its own: this one must not touch CUDA."""
    try:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_S)
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"torch": "", "cuda": "", "gpus": 0, "error": f"torch cannot be asked: {error!r}"}
    return found


def why_not(check: Check, found: dict[str, Any]) -> str:
    """Why a check is not begun at all; empty: it is."""
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


def run_all(checks: Iterable[Check], environment: dict[str, str], out: IO[str] = sys.stdout) -> int:
    """Runs them one after the other. Returns the number of those that failed."""
    found = machine()
    num_failed, slot, ends = 0, -1, 0.0
    for check in checks:
        began = time.monotonic()
        if check.slot != slot:
            slot, ends = check.slot, began + SLOT_S
        reason = why_not(check, found) or ("the slot's time is up" if ends - began < LEAST_S else "")
        limited = replace(check, limit_s=min(check.limit_s, ends - began))
        line = {"status": "not run", "figures": {}, "reason": reason} if reason else run(limited, environment)
        num_failed += line["status"] == "fail"
        took = round(time.monotonic() - began, 2)
        head = {"slot": check.slot, "check": check.name, "status": line["status"], "seconds": took}
        tail = {"expected": check.expected, "figures": line["figures"], "reason": line["reason"]}
        print(json.dumps({**head, **tail}), file=out, flush=True)
    return num_failed


def run(check: Check, environment: dict[str, str]) -> dict[str, Any]:
    """Runs one check, and everything that it starts, no longer than its limit."""
    command = [sys.executable, "-m", SCRIPT, "--check", check.name]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, env={**os.environ, **environment}, start_new_session=True
        )
        try:
            code = process.wait(check.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        said, complained = _read(output), _read(errors)
    results = [line for line in said.splitlines() if line.startswith(RESULT)]
    if results:
        found: dict[str, Any] = json.loads(results[-1].removeprefix(RESULT))
        if found["status"] == "fail" and complained:
            found["figures"]["stderr"] = complained[-1500:]
        return found
    if code is None:
        why = f"not through after its limit of {check.limit_s:g} s"
    elif code < 0:
        why = f"the process was ended by {signal.Signals(-code).name}"
    else:
        why = f"the process ended with {code} and said nothing"
    return {"status": "fail", "figures": {"stderr": complained[-1500:]}, "reason": why}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the session that the check began: stopped processes, too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
