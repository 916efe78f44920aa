"""In which order the tests run, and which of them in one process: what `conftest.py` tells pytest and xdist."""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadFileScheduling

ONE_CLUSTER = {
    f"tests/integration/test_{name}.py"
    for name in ("plumbing", "doctor", "explain", "live", "node_clients", "dependencies")
}
ONE_REAL_CLUSTER = {f"tests/integration/test_{name}.py" for name in ("real_model", "responses")}
ONE_CHART = {f"tests/helm/test_{name}.py" for name in ("config", "keys", "policy", "reach", "relations", "render")}
"""Which ask for the same charts, each of which a process renders once."""
ONE_INTERPRETER = {
    f"tests/unit/engine/model/test_{name}.py" for name in ("batch_invariance", "decode_graphs", "fused", "kernels")
} | {"tests/unit/kvstore/transfer/copy/test_copy_kernels.py"}
ONE_SYNTAX = {f"tests/unit/test_{name}.py" for name in ("house", "security", "words")}
"""Which read the syntax of every file of the product."""
SCOPES = (
    dict.fromkeys(ONE_CLUSTER, "one cluster")
    | dict.fromkeys(ONE_REAL_CLUSTER, "one real cluster")
    | dict.fromkeys(ONE_CHART, "one chart")
    | dict.fromkeys(ONE_INTERPRETER, "one interpreter")
    | dict.fromkeys(ONE_SYNTAX, "one syntax")
)
"""What files share, and so a process. (xdist's own groups have no effect with pytest 9.2.)"""

IN_PARTS = {"tests/integration/test_admission.py"}
"""Files in which each parameter has a cluster of its own, and may have a process of its own."""


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Keeps the tests of a file, or of all files that share something, in one process."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if file in IN_PARTS:
            return file + test[test.find("[") :]
        return SCOPES.get(file, file)


def put_first(items: list[pytest.Item]) -> None:
    """What is marked `first` comes first, and otherwise nothing changes places."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
