"""What the test API server fills in."""

from __future__ import annotations

from tests.fakekube.defaults import fill


def test_quantities_are_text_however_they_were_written() -> None:
    """So that a template that a client writes back as it has read it is the same one, and rolls nothing out."""
    resources = {"limits": {"nvidia.com/gpu": 1, "memory": "1Gi"}, "requests": {"cpu": 2}}
    pod = {"kind": "Pod", "spec": {"containers": [{"name": "a", "resources": resources}]}}
    fill(pod)
    assert resources["limits"] == {"nvidia.com/gpu": "1", "memory": "1Gi"}
    assert resources["requests"] == {"nvidia.com/gpu": "1", "memory": "1Gi", "cpu": "2"}
