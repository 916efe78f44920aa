"""The audit of what images install: nothing that was not looked at counts as well."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools import audit
from tools.audit import FOUND, UNSEEN, Answers, answers_of, ask, is_allowed, licence_of, sbom, verdict
from tools.lock import FOLDER, LockedPackage, read

ROOT = Path(__file__).parents[3]
TORCH, H11 = LockedPackage("torch", "2.13.0+cpu", ("a" * 64,)), LockedPackage("h11", "0.16.0", ("b" * 64, "c" * 64))
PINS = [TORCH, H11]
LICENCES = {"torch": "BSD-3-Clause", "h11": "MIT"}
SEEN = Answers(seen=frozenset({"torch", "h11"}))


def test_all_is_well_only_where_every_package_was_looked_up() -> None:
    assert verdict(PINS, [SEEN], LICENCES) == (0, ["2 packages: no known vulnerability, and every licence is allowed"])
    status, (line,) = verdict(PINS, [Answers(seen=frozenset({"h11"})), Answers(problem="no route")], LICENCES)
    assert (status, line) == (
        UNSEEN,
        "1 of 2 packages could be looked up in no database of vulnerabilities (torch): no route",
    )
    assert verdict(PINS, [Answers(seen=frozenset({"h11"})), Answers(seen=frozenset({"torch"}))], LICENCES)[0] == 0


def test_a_vulnerability_counts_more_than_a_database_out_of_reach() -> None:
    status, lines = verdict(PINS, [Answers({"h11": ["CVE-1", "CVE-2"]}, frozenset({"h11"}))], LICENCES)
    assert (status, lines[0]) == (FOUND, "h11 0.16.0: CVE-1, CVE-2")
    assert lines[1].startswith("1 of 2 packages could be looked up in no database of vulnerabilities (torch)")


@pytest.mark.parametrize("licence", ["GPL-3.0-only", ""])
def test_a_licence_that_is_not_allowed_is_found(licence: str) -> None:
    status, (line,) = verdict(PINS, [SEEN], LICENCES | {"h11": licence})
    assert (status, line) == (FOUND, f"h11 0.16.0: its licence is {licence or 'not known here'}, which is not allowed")


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0", True),
        ("Apache-2.0 AND GPL-3.0-only", False),
        ("GPL-3.0-only OR Apache-2.0", True),
        ("GPL-3.0-only OR Apache-2.0 AND AGPL-3.0-only", False),
        ("", False),
    ],
)
def test_every_part_of_an_expression_counts(expression: str, allowed: bool) -> None:
    assert is_allowed(expression) == allowed


def test_the_licences_of_what_images_have_are_allowed() -> None:
    for names in audit.IMAGES.values():
        for pin in (pin for name in names for pin in read((ROOT / FOLDER / f"{name}.txt").read_text())):
            assert is_allowed(licence_of(pin.name)), f"{pin.name}: {licence_of(pin.name)}"
    assert licence_of("no-such-package") == ""


def test_a_package_that_the_database_lacks_was_not_looked_up() -> None:
    """pip-audit ends with status 0 and "No known vulnerabilities found" where it could look up nothing."""
    packages = [{"name": "h11", "skip_reason": "not found on PyPI"}, {"name": "torch", "version": "2", "vulns": []}]
    assert answers_of(json.dumps({"dependencies": packages})) == Answers({}, frozenset({"torch"}))
    for text in ("", "{}", "[]", "null"):
        assert answers_of(text) == Answers(problem="it ended without a report")


PIP_AUDIT = """#!{python}
import json, sys
if sys.argv[-1] == "osv":
    sys.exit("Traceback\\nConnectionError: no route to host")
lines = open(sys.argv[2]).read().split()
print(json.dumps({{"dependencies": [
    {{"name": line.split("==")[0], "version": line.split("==")[1], "vulns": [{{"id": line}}]}} for line in lines]}}))
sys.exit(1)
"""


def test_a_build_of_torch_is_looked_up_as_the_public_version(tmp_path: Path) -> None:
    path = tmp_path / "pip-audit"
    path.write_text(PIP_AUDIT.format(python=sys.executable))
    path.chmod(0o755)
    assert ask(path, "pypi", PINS).vulnerabilities == {"torch": ["torch==2.13.0"], "h11": ["h11==0.16.0"]}
    assert ask(path, "osv", PINS) == Answers(problem="it ended without a report: ConnectionError: no route to host")


def test_the_bill_of_materials_names_each_package_with_its_files() -> None:
    found = sbom("baton-worker", "0.1.0", PINS, LICENCES)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert found["metadata"]["component"]["name"] == "baton-worker"
    h11, torch = found["components"]
    assert torch["purl"] == torch["bom-ref"] == "pkg:pypi/torch@2.13.0%2Bcpu"
    assert [each["content"] for each in h11["hashes"]] == list(H11.hashes)
    assert {each["alg"] for each in h11["hashes"]} == {"SHA-256"}
    assert h11["licenses"] == [{"expression": "MIT"}]
    assert sbom("baton-worker", "0.1.0", PINS[::-1], LICENCES) == found, "the same for the same lock"
    assert sbom("baton-worker", "0.1.1", PINS, LICENCES)["serialNumber"] != found["serialNumber"]
    assert "licenses" not in sbom("x", "1", [TORCH], {})["components"][0]
