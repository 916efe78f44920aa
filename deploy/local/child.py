"""Child processes of `baton up`, which restarts them when they die. They die with it, even if it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from baton.config import child_environment
from baton.errors import ConfigError
from baton.messages import Failed
from baton.rpc.errors import from_failed
from deploy.local.child_log import ChildLog
from deploy.processes import APART, STABLE_S, module_command, tied

logger = logging.getLogger(__name__)
RESTART_S = 0.5
MAX_RESTART_S = 10.0
MAX_DOUBLINGS = 8
"""Maximum number of times that the wait doubles; by then it has reached MAX_RESTART_S."""


class Child:
    """Child process that runs one of Baton's modules. Every method except `start` may be called before it has started.

    Start it from a thread that lives as long as this process: on Linux the child dies with that thread.

    Args:
        name: name in messages.
        module: Python module to run.
        arguments: arguments of every start.
        environment: variables in addition to those of this process that `child_environment` passes on.
        on_orphaned: signal that the child gets when this process has ended.
        awaits_line: the child reads one line from its standard input, which `tell` sends; otherwise it inherits ours.
        log: log of the child's output; None: the child writes to our own output.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        on_orphaned: signal.Signals = signal.SIGKILL,
        *,
        awaits_line: bool = False,
        log: ChildLog | None = None,
    ) -> None:
        self.name = name
        self._command = module_command(module, *arguments)
        self._environment = {**child_environment(os.environ), **environment}
        self._on_orphaned = on_orphaned
        self._log = log
        self._awaits_line = awaits_line
        self._line = b""
        self._process: asyncio.subprocess.Process | None = None
        self._began_s = 0.0
        self._num_failures = 0

    @property
    def status(self) -> int | None:
        """Exit status of the process; None: it is running, or has not started yet."""
        return self._process.returncode if self._process else None

    async def start(self, *arguments: str, ready_fd: int | None = None) -> None:
        """Start the process.

        Args:
            arguments: additional arguments for this start only.
            ready_fd: descriptor that the process inherits, passed as `--ready-fd`.
        """
        report_to = ("--ready-fd", str(ready_fd)) if ready_fd is not None else ()
        self._began_s = time.monotonic()
        if self._log:
            self._log.follow()
        with self._log.path.open("ab") if self._log else contextlib.nullcontext() as output:
            self._process = await asyncio.create_subprocess_exec(
                *tied([*self._command, *arguments, *report_to], self._on_orphaned, ignored=[signal.SIGTTOU]),
                env=self._environment,
                pass_fds=[ready_fd] if ready_fd is not None else [],
                stdin=asyncio.subprocess.PIPE if self._awaits_line else None,
                stdout=output,
                stderr=output,
                # Ctrl-C must reach this process only, which then stops the children in order. The child is therefore in
                # a separate process group. After `stty tostop` SIGTTOU would stop it at the first line that it writes
                # to our terminal, so the child ignores that signal (`ignored` above).
                process_group=APART,
            )

        if self._line:
            self._give_line()

    def tell(self, line: str) -> None:
        """Send a line to the process, now if it is running, and again at each later start."""
        self._line = f"{line}\n".encode()
        if self._process is not None and self.status is None:
            self._give_line()

    def _give_line(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None, "it awaits no line"
        self._process.stdin.write(self._line)  # cannot block: a line fits into any pipe
        self._process.stdin.close()

    async def start_and_listen(self) -> dict[str, Any]:
        """Start the process, and return its report when it is ready.

        Raises:
            BatonError: the process reported this error instead.
            ConfigError: the process ended without a report.
        """
        reading, writing = os.pipe()
        reader = asyncio.StreamReader()
        with os.fdopen(reading) as reports:
            try:
                await self.start(ready_fd=writing)
            finally:
                os.close(writing)
            protocol = asyncio.StreamReaderProtocol(reader)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, reports)
            try:
                line = await reader.readline()
            finally:
                transport.close()
        if not line:
            raise ConfigError(await self.last_words())
        values: dict[str, Any] = json.loads(line)
        if "kind" in values:
            raise from_failed(Failed(**values), self.name)
        return values

    async def ended(self) -> int:
        """Wait until the process has ended, and return its exit status."""
        assert self._process is not None, "it has not started yet"
        return await self._process.wait()

    def kill_rest(self) -> None:
        """Kill what is left of the process's group after its end: Ray's agents outlive their raylet by a minute."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def last_words(self) -> str:
        """Wait until the process has ended, and return a sentence with its status, last log line and log file."""
        return f"{self.name} ended with status {await self.ended()}{self._log.last_words if self._log else ''}"

    async def pause(self, reason: object) -> None:
        """Wait before the next start. The wait doubles with each consecutive failure."""
        self._num_failures = 0 if time.monotonic() - self._began_s > STABLE_S else self._num_failures + 1
        wait_s = min(RESTART_S * 2 ** min(self._num_failures, MAX_DOUBLINGS), MAX_RESTART_S)
        logger.warning("%s %s; starting it again in %g s", self.name, reason, wait_s)
        await asyncio.sleep(wait_s)

    async def keep(self) -> None:
        """Restart the process whenever it ends, until cancelled."""
        while True:
            await self.pause(f"ended with status {await self.ended()}")
            await self.start()

    async def stop(self, timeout_s: float, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the process, and SIGKILL if it has not ended after `timeout_s`."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()  # ends a child that waits for its line, even if an import loses the signal
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._log:
            await self._log.end()
