"""From the chart and code of an earlier commit to today's, and back."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.kube.release import NAME, NEEDS_COMPILER, POOLS, TIMEOUT_S, Release, kube_cluster, load_on
from tests.kube.test_cluster import SETTINGS, is_ready
from tests.support.load import Clients

EARLIER = "0046c148"
"""A commit whose pods count as ready before their workers serve."""
VENV = Path(sys.executable).parent
REPOSITORY = Path(__file__).parents[2]
DEFINITION = "servingpools.baton.dev"

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.integration,
    pytest.mark.timeout(3000),
    NEEDS_COMPILER,
]


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A checkout of the earlier commit."""
    git = ("git", "-C", str(REPOSITORY))
    if subprocess.run([*git, "cat-file", "-e", f"{EARLIER}^{{commit}}"], capture_output=True).returncode:
        pytest.skip(f"needs the repository's history, with commit {EARLIER}")
    archive = subprocess.run([*git, "archive", EARLIER], check=True, capture_output=True).stdout
    folder = tmp_path / "earlier"
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def test_an_earlier_release_is_upgraded_and_rolled_back_under_load(
    earlier: Path, tmp_path: Path, model_dir: Path
) -> None:
    """Every part is replaced, twice, and the pools' definition brought up to date."""
    programs = [str(programs_of(earlier, tmp_path / "programs")), str(VENV)]
    images = {f"earlier/baton-{part}": programs for part in ("router", "worker")}
    names = [f"--set=pools.{role}.name={NAME}-{role}" for role in POOLS]  # the earlier chart has others of its own
    settings = (*SETTINGS, *names, "--set=pools.decode.initialReplicas=2", "--set=config.cluster.start_timeout_s=600")
    with kube_cluster(4, tmp_path, model_dir.parents[1], *settings, more_images=images) as release:
        is_earlier = [f"--set=image.{part}.repository=earlier/baton-{part}" for part in ("router", "worker")]
        # The packages are today's, and not in all versions what the earlier commit wants.
        is_earlier.append("--set=checks.enabled=false")
        before = replace(release, chart=earlier / "helm" / "baton")
        before.install(*is_earlier)
        wait_for_pools(release)
        loses_a_column(release)
        with load_on(release.grpc) as load:
            every_part_is_replaced(release, load, release.upgrade)
            assert columns(release)[-2:] == ["Draining", "Age"], "the definition is still the one before"
            release.helm("test", NAME, f"--timeout={TIMEOUT_S}s")
            # helm cannot roll back to a chart that renders Secrets which the later one leaves to its hook.
            every_part_is_replaced(release, load, partial(before.upgrade, *is_earlier))
        print(f"{load.num_served} requests, none failed")


def programs_of(checkout: Path, folder: Path) -> Path:
    """Those of this environment, with the code of that checkout: what an image of it has."""
    folder.mkdir()
    for name in ("baton", "python", "ray"):
        program = folder / name
        program.write_text(f'#!/bin/sh\nPYTHONPATH={checkout} exec {VENV / name} "$@"\n')
        program.chmod(0o755)
    return folder


def every_part_is_replaced(release: Release, load: Clients, change: Callable[[], object]) -> None:
    """And the pools keep their sizes, and no request fails."""
    before = uids(release)
    change()
    release.wait_for(lambda: all(map(is_ready, pods(release))) and not before & uids(release))
    wait_for_pools(release)
    num_served = load.num_served
    release.wait_for(lambda: load.num_served > num_served + 10)
    assert load.failures == [], f"{len(load.failures)}: {load.failures[:20]}\n{release.picture()}"
    print(f"{load.num_served} requests so far, none failed")


def wait_for_pools(release: Release) -> None:
    for role, size in zip(POOLS, (1, 2), strict=True):
        release.wait_for_pool(role, size)


def pods(release: Release) -> list[dict[str, Any]]:
    """The pods of all parts that run Baton's images."""
    return [pod for part in ("router", "controller", "head", *POOLS) for pod in release.pods(part)]


def uids(release: Release) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods(release)}


def columns(release: Release) -> list[str]:
    """The columns that `kubectl get servingpools` shows."""
    found = json.loads(release.kubectl("get", "customresourcedefinition", DEFINITION, "-o", "json"))
    return [column["name"] for column in found["spec"]["versions"][0]["additionalPrinterColumns"]]


def loses_a_column(release: Release) -> None:
    """The definition is the same in both charts; helm itself would leave this one as it is."""
    place = columns(release).index("Draining")
    change = [{"op": "remove", "path": f"/spec/versions/0/additionalPrinterColumns/{place}"}]
    release.kubectl("patch", "customresourcedefinition", DEFINITION, "--type=json", "--patch", json.dumps(change))
    assert "Draining" not in columns(release)
