"""helm and kubectl as a person runs them, with a home of their own."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.kube.binaries import binaries


class CommandFailed(Exception):
    """It ended with another code than 0. The message is what it wrote to stderr."""


@dataclass(frozen=True, slots=True)
class Commands:
    helm_major: int
    kubeconfig: Path
    home: Path
    """Must be new for each API server: kubectl caches what a server offers by its address."""

    def helm(self, *arguments: str | Path, timeout_s: float = 120) -> str:
        """Returns stdout. Raises CommandFailed."""
        return self._run(binaries(self.helm_major).helm, *arguments, timeout_s=timeout_s)

    def kubectl(self, *arguments: str | Path, stdin: str = "", timeout_s: float = 120) -> str:
        """Returns stdout. Raises CommandFailed."""
        return self._run(binaries(self.helm_major).kubectl, *arguments, stdin=stdin, timeout_s=timeout_s)

    def environment(self) -> dict[str, str]:
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(("HELM_", "KUBE", "XDG_"))}
        return inherited | {"KUBECONFIG": str(self.kubeconfig), "HOME": str(self.home)}

    def _run(self, *command: str | Path, stdin: str = "", timeout_s: float) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            env=self.environment(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode:
            raise CommandFailed(f"{Path(command[0]).name} {command[1]}: {done.stderr}{done.stdout}")
        return done.stdout
