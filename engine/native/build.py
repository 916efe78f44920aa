"""Compiles `step.c` and the parts it includes once with the machine's C compiler, and caches the library in a folder.

    python -m engine.native.build      builds the library of every variant into this package, for an image

The file name of a library is derived from everything it is made of: source, variant, arguments and compiler. It is
written to a temporary file and renamed, so a file of that name is complete. After each build, libraries that have not
been used for a month are removed: those of former sources, compilers and CPUs.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from baton.errors import NotNative
from baton.own_files import ForeignFile, make_own
from engine.native.unused import claim, remove_unused

logger = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("step.c")
BUILT = Path(__file__).with_name("built")
"""Folder of the libraries in an image, created by `python -m engine.native.build`."""
V3 = frozenset({"avx2", "fma", "bmi2", "f16c"})
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
VNNI = V4 | {"avx512_vnni"}
AMX = VNNI | {"avx512_bf16", "amx_tile", "amx_bf16"}
VARIANTS = {
    "x86-64-v4+avx512vnni+avx512bf16+amx-tile+amx-bf16": AMX,
    "x86-64-v4+avx512vnni": VNNI,
    "x86-64-v4": V4,
    "x86-64-v3": V3,
}
"""Instruction sets, best first, with the CPU flags that each needs. The compiler uses the same names: a level, and
extensions to it."""
COMPILERS = ("gcc", "cc", "clang")
"""Compilers, in order of preference: clang 14 compiles `step.c` to the same results at 2 to 4 times the run time."""
ARGUMENTS = (
    "-std=gnu11", "-O3", "-fno-gcse", "-fno-tree-pre", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fPIC", "-shared",
)  # fmt: skip
"""Compiler arguments. Results must not depend on contraction or reordering by the compiler: `step.c` defines the order
of each sum. The two disabled passes for redundancy elimination take a seventh of a build, and make no step faster."""
TIMEOUT_S = 300
NAMES = re.compile(r"step-[\w+-]+-[0-9a-f]{20}(\.so|-\w+\.part)")
"""Names of libraries, and of temporary files left by a killed compiler."""


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the flags of this machine's CPU; empty if the system does not report them."""
    if not path.exists():
        return frozenset()
    lines = [line for line in path.read_text().splitlines() if line.startswith("flags")]
    return frozenset(lines[0].partition(":")[2].split()) if lines else frozenset()


def variant_of(flags: Collection[str]) -> str:
    """Return the best variant that a CPU with these flags can run.

    Raises:
        NotNative: the CPU can run none.
    """
    for name, needed in VARIANTS.items():
        if needed.issubset(flags):
            return name
    raise NotNative("this CPU has neither AVX-512 nor AVX2 with FMA")


def machine_arguments(variant: str) -> list[str]:
    """Return the compiler's arguments for a variant."""
    level, *extensions = variant.split("+")
    return [f"-march={level}", *(f"-m{extension}" for extension in extensions)]


def library(folder: Path, variant: str) -> Path:
    """Return the library of a variant: the image's, or the one in `folder`, which is built if it is missing.

    Raises:
        ForeignFile: another user of this machine may have written the folder.
        NotNative: there is no C compiler, it fails, or the folder cannot be written.
    """
    if (prebuilt := BUILT / _name(variant, "")).exists():
        return prebuilt
    compiler = _compiler()
    path = folder / _name(variant, _identity(compiler))
    try:
        make_own(folder)
        if _is_there(path):
            return path
        with (folder / "build.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_there(path):
                _compile(compiler, variant, path)
                remove_unused(folder, NAMES, time.time())
    except ForeignFile:
        raise
    except OSError as error:
        raise NotNative(f"the folder of built libraries cannot be written: {error}") from error
    return path


def _is_there(path: Path) -> bool:
    try:
        return claim(path)
    except ForeignFile as error:
        logger.warning("the native step is built anew, since %s", error)
        return False


def _compiler() -> str:
    for name in COMPILERS:
        if found := shutil.which(name):
            return found
    raise NotNative(f"there is no C compiler ({', '.join(COMPILERS)}) on the path, which building step.c needs")


def _name(variant: str, compiler: str) -> str:
    parts = [path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]"))]
    made_of = repr((parts, variant, ARGUMENTS, compiler))
    return f"step-{variant}-{hashlib.blake2b(made_of.encode(), digest_size=10).hexdigest()}.so"


def _identity(compiler: str) -> str:
    found = Path(compiler).resolve()
    state = found.stat()
    return f"{found} {state.st_size} {state.st_mtime_ns}"


def _compile(compiler: str, variant: str, path: Path) -> None:
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".part")
    os.close(handle)
    try:
        command = [compiler, *ARGUMENTS, *machine_arguments(variant), "-pthread", str(SOURCE), "-o", made, "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            said = " ".join(done.stderr.split())[:300]
            raise NotNative(f"{compiler} cannot build step.c: {said}")
        Path(made).chmod(0o755)
        Path(made).replace(path)
        logger.info("built the native step for %s with %s: %s", variant, compiler, path)
    except subprocess.TimeoutExpired as error:
        raise NotNative(f"{compiler} takes longer than {TIMEOUT_S} s to build step.c") from error
    finally:
        Path(made).unlink(missing_ok=True)


def main(folder: Path) -> None:
    """Build every variant into `folder`, under the names by which `library` looks for an image's libraries.

    There are variants for x86-64 only. On another processor nothing is built.

    Raises:
        NotNative: a variant cannot be built.
    """
    if platform.machine() != "x86_64":
        logger.warning("no native step is built for %s: models run on transformers", platform.machine())
        return
    folder.mkdir(parents=True, exist_ok=True)
    compiler = _compiler()
    for variant in VARIANTS:
        _compile(compiler, variant, folder / _name(variant, ""))


if __name__ == "__main__":
    main(BUILT)
