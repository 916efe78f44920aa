"""Pods that listen on all addresses: a small library makes that the pod's own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("wildcard.c")


def environment(folder: Path) -> dict[str, str]:
    """Variables that every process of a pod needs, beside MACHINE_POD_IP. Builds the library.

    Without a C compiler there are none, and no two pods can listen on all addresses at the same port.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        return {}
    library = folder / "wildcard.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}
