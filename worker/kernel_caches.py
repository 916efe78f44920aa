"""Folders in which libraries cache compiled kernels; they load cached code without checking its owner."""

from __future__ import annotations

import getpass
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from baton.own_files import why_foreign
from baton.own_folder import own_folder

logger = logging.getLogger(__name__)


def kernel_caches(environ: Mapping[str, str]) -> dict[str, Path]:
    """Return the folders of Triton's, FlashInfer's and Inductor's kernels, by the variable that overrides each."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - it raises nothing where there is no such user
    usual = {
        "TRITON_CACHE_DIR": home / ".triton" / "cache",
        "FLASHINFER_WORKSPACE_BASE": home,
        "TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir()) / f"torchinductor_{_user()}",
    }
    return {name: Path(environ.get(name) or folder) for name, folder in usual.items()}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's number without a name
        return str(os.getuid())


@contextmanager
def own_kernel_caches(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield environment variables that redirect kernel caches to a private folder of this process.

    A cache is redirected only if another user of this machine may have written it.
    """
    foreign = {name: why for name, folder in kernel_caches(environ).items() if (why := why_foreign(folder))}
    if not foreign:
        yield {}
        return
    with own_folder() as folder:
        for name, why in foreign.items():
            logger.warning("compiled kernels are kept for this process alone (%s), since %s", name, why)
        yield {name: str(folder / name.lower()) for name in foreign}
