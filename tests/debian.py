"""Programs of Debian's packages, unpacked and not installed: apt downloads them, for which nobody has to be root."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path


def provide(packages: tuple[str, ...], folder: Path, take: Callable[[Path], None]) -> str:
    """Unpacks `packages` and lets `take` move what is wanted of them into `folder`, which exists by then.

    Returns:
        Why that cannot be done; empty: it is done.
    """
    try:
        _provide(packages, folder, take)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    except subprocess.CalledProcessError as error:
        return str(error.stderr or error)
    except subprocess.TimeoutExpired as error:
        return str(error)
    return ""


def _provide(packages: tuple[str, ...], folder: Path, take: Callable[[Path], None]) -> None:
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        root = Path(temporary)
        try:
            _apt(root, "download", *packages)
        except subprocess.CalledProcessError:  # the machine has no list of packages, or an old one: make one of our own
            for name in ("lists/partial", "cache/archives/partial"):
                (root / name).mkdir(parents=True)
            own = ("-o", f"Dir::State::Lists={root}/lists", "-o", f"Dir::Cache={root}/cache")
            _apt(root, *own, "-o", "APT::Sandbox::User=", "update")
            _apt(root, *own, "download", *packages)
        for package in root.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, root], check=True, capture_output=True, text=True)
        take(root)


def _apt(folder: Path, *arguments: str) -> None:
    subprocess.run(
        ["apt-get", "--quiet", *arguments], cwd=folder, check=True, capture_output=True, text=True, timeout=240
    )
