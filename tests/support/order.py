"""In which order the tests run, and which of them in one process: what `conftest.py` tells pytest and xdist."""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadFileScheduling

ONE_CLUSTER = {
    f"tests/integration/test_{name}.py" for name in ("plumbing", "doctor", "explain", "live", "surroundings")
}
"""Files that share a cluster, and so a process. (xdist's own groups have no effect with pytest 9.2.)"""


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Keeps the tests of a file, or of all that share a cluster, in one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "one cluster" if file in ONE_CLUSTER else file


def put_first(items: list[pytest.Item]) -> None:
    """What is marked `first` comes first, and otherwise nothing changes places."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
