"""Audits what the images install: known vulnerabilities, licences, and a bill of materials. `make audit`.

    deploy/docker/locks/ ──> pip-audit, which asks PyPI's database and then OSV's  ──┐
                         ──> licences, as the installed packages state them         ─┴─> findings, exit status
                         ──> dist/sbom/IMAGE.cdx.json, in CycloneDX 1.6

Exit status 0: nothing was found. 1: a vulnerability, or a licence that is not allowed. 3: nothing was found, but
packages are left that no database was asked about; the last line says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tools.lock import FOLDER, LockedPackage, read

FOUND, UNSEEN = 1, 3
SBOM_FOLDER = Path("dist/sbom")
IMAGES = {
    "baton-router": ("router",),
    "baton-worker": ("torch-cpu", "worker"),
    "baton-worker-cuda": ("torch-cu130", "worker"),
}
"""Images, and the locks that each installs."""
ALLOWED = {
    *("0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0"),
    *("CNRI-Python", "ISC", "MIT", "MIT-0", "MPL-2.0", "PSF-2.0", "Zlib"),
}
"""Licences whose terms an image keeps by carrying the packages' own notices, which pip installs with them."""
NVIDIA = re.compile(r"nvidia-.*|cuda-(bindings|pathfinder|toolkit)")
"""Packages under NVIDIA's own terms, by which a program may be passed on with these libraries; in CUDA images alone."""
IN_WORDS = {
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
"""What packages without an SPDX expression say, as one."""
SERVICES = ("pypi", "osv")


@dataclass(frozen=True, slots=True)
class Answers:
    """What databases said: identifiers of vulnerabilities, and packages that were looked up, both by name."""

    vulnerabilities: Mapping[str, Sequence[str]] = field(default_factory=dict)
    seen: frozenset[str] = frozenset()
    problem: str = ""
    """Why a database gave no answer at all; empty where it gave one."""


def licence_of(name: str) -> str:
    """The SPDX expression that the installed package states; empty where it is not installed or states none."""
    if NVIDIA.fullmatch(name):
        return "LicenseRef-NVIDIA"
    try:
        metadata: Any = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = [line.rsplit(" :: ", 1)[-1] for line in metadata.get_all("Classifier") or () if "License ::" in line]
    said = [line for line in classifiers if line != "OSI Approved"] or [(metadata.get("License") or "").split("\n")[0]]
    return " AND ".join(IN_WORDS.get(each, each) for each in said)


def is_allowed(expression: str) -> bool:
    """Whether an SPDX expression without brackets lets us pass the package on."""
    allowed = ALLOWED | {"LicenseRef-NVIDIA"}
    return any(all(term in allowed for term in part.split(" AND ")) for part in expression.split(" OR "))


def answers_of(report: str) -> Answers:
    """What pip-audit's JSON says. It counts a package that its database does not have as skipped, not as a failure."""
    try:
        packages = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return Answers(problem="it ended without a report")
    seen = [package for package in packages if "skip_reason" not in package]
    found = {each["name"]: [vuln["id"] for vuln in each["vulns"]] for each in seen if each["vulns"]}
    return Answers(found, frozenset(each["name"] for each in seen))


def ask(pip_audit: Path, service: str, pins: Iterable[LockedPackage]) -> Answers:
    """Asks one database. A build's own version (`+cpu`) is left out: vulnerabilities are of the public version."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{pin.name}=={pin.version.partition('+')[0]}\n" for pin in pins))
        file.flush()
        command = [
            str(pip_audit),
            "-r",
            file.name,
            "--no-deps",
            "--disable-pip",
            "--format=json",
            "--progress-spinner=off",
        ]
        done = subprocess.run([*command, "-s", service], capture_output=True, text=True, check=False)
    found = answers_of(done.stdout)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return Answers(problem=f"{found.problem}: {last[:200]}") if found.problem else found


def sbom(image: str, version: str, pins: Sequence[LockedPackage], licences: Mapping[str, str]) -> dict[str, Any]:
    """The bill of materials of an image, in CycloneDX 1.6: the same for the same lock."""
    components = [_component(pin, licences.get(pin.name, "")) for pin in sorted(pins, key=lambda pin: pin.name)]
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([image, version, components]))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": image, "name": image, "version": version}},
        "components": components,
    }


def _component(pin: LockedPackage, licence: str) -> dict[str, Any]:
    purl = f"pkg:pypi/{pin.name}@{quote(pin.version, safe='.')}"
    found: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": pin.name, "version": pin.version, "purl": purl}
    if pin.hashes:
        found["hashes"] = [{"alg": "SHA-256", "content": each} for each in pin.hashes]
    if licence:
        found["licenses"] = [{"expression": licence}]
    return found


def verdict(
    pins: Sequence[LockedPackage], answers: Sequence[Answers], licences: Mapping[str, str]
) -> tuple[int, list[str]]:
    """The exit status, and what to say.

    Args:
        pins: all packages.
        answers: of each database that was asked.
        licences: SPDX expressions of the packages that an image has, by name.
    """
    lines = []
    versions = {pin.name: pin.version for pin in pins}
    for found in answers:
        lines += [f"{name} {versions[name]}: {', '.join(ids)}" for name, ids in sorted(found.vulnerabilities.items())]
    for name, licence in sorted(licences.items()):
        if not is_allowed(licence):
            lines.append(f"{name} {versions[name]}: its licence is {licence or 'not known here'}, which is not allowed")
    unseen = sorted(set(versions) - {name for found in answers for name in found.seen})
    status = FOUND if lines else UNSEEN if unseen else 0
    if unseen:
        why = "; ".join(found.problem for found in answers if found.problem) or "no database has them"
        which = ", ".join(unseen[:3]) + (f" and {len(unseen) - 3} more" if len(unseen) > 3 else "")
        lines.append(
            f"{len(unseen)} of {len(versions)} packages could be looked up in no database of vulnerabilities "
            f"({which}): {why}"
        )
    return status, lines or [f"{len(versions)} packages: no known vulnerability, and every licence is allowed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pip-audit", type=Path, default=Path("pip-audit"), help="the program that asks databases")
    arguments = parser.parse_args()
    locks = {path.stem: read(path.read_text()) for path in sorted(FOLDER.glob("*.txt"))}
    pins = list({(pin.name, pin.version): pin for every in locks.values() for pin in every}.values())
    images = {image: [pin for name in names for pin in locks[name]] for image, names in IMAGES.items()}
    licences = {pin.name: licence_of(pin.name) for every in images.values() for pin in every}
    version = tomllib.loads(Path("pyproject.toml").read_text())["project"]["version"]
    SBOM_FOLDER.mkdir(parents=True, exist_ok=True)
    for image, every in images.items():
        path = SBOM_FOLDER / f"{image}.cdx.json"
        path.write_text(json.dumps(sbom(image, version, every, licences), indent=1) + "\n")
        print(f"{path}: {len(every)} packages")
    answers: list[Answers] = []
    for service in SERVICES:
        left = [pin for pin in pins if pin.name not in {name for found in answers for name in found.seen}]
        answers += [ask(arguments.pip_audit, service, left)] if left else []
    status, lines = verdict(pins, answers, licences)
    print("\n".join(lines))
    sys.exit(status)


if __name__ == "__main__":
    main()
