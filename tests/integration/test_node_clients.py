"""The packages of npm that clients in JavaScript use read the streams of each API to their end.

It needs Node 20 and a folder in which `npm install openai @anthropic-ai/sdk ai @ai-sdk/openai @ai-sdk/anthropic
@ai-sdk/openai-compatible` has run, named by NODE_CLIENTS.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster

FOLDER = Path(os.environ.get("NODE_CLIENTS", ""), "node_modules")
PACKAGES = ("openai", "@anthropic-ai/sdk", "ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "@ai-sdk/openai-compatible")
MISSING = [name for name in PACKAGES if "NODE_CLIENTS" not in os.environ or not (FOLDER / name).is_dir()]
NUM_STREAMS = 13


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node 20")
@pytest.mark.skipif(
    bool(MISSING), reason=f"needs a folder, named by NODE_CLIENTS, with npm's packages {', '.join(MISSING)}"
)
def test_nodes_packages_read_the_streams_of_each_api(arithmetic_cluster: Cluster) -> None:
    script = Path(__file__).with_name("node_clients.mjs").read_text()
    # A script that comes from stdin finds packages where it runs.
    command = ["node", "--input-type=module", "-", f"http://{arithmetic_cluster.http}"]
    read = subprocess.run(command, input=script, cwd=FOLDER.parent, capture_output=True, text=True, timeout=240)
    assert read.returncode == 0, read.stdout + read.stderr
    assert len(read.stdout.splitlines()) == NUM_STREAMS, read.stdout
