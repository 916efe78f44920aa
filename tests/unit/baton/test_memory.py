from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.errors import ConfigError
from baton.memory import GIB, Room, available_memory, weights_bytes


def test_a_pool_takes_half_of_what_is_left_and_no_more_than_is_of_use() -> None:
    assert Room(free=9 * GIB, num_pools=2, needed=2 * GIB, others=GIB).pool_gib("auto") == 1.0
    assert Room(free=900 * GIB, num_pools=2, needed=GIB).pool_gib("auto") == 2.0, "a small model"
    assert Room(free=900 * GIB, num_pools=2, needed=30 * GIB).pool_gib("auto") == 30.0, "a large one"
    assert Room(free=50 * GIB, num_pools=1, needed=10 * GIB, on_gpu=True).pool_gib("auto") == pytest.approx(34)


def test_more_than_there_is_room_for_is_refused_with_the_size_that_fits() -> None:
    room = Room(free=11 * GIB, num_pools=2, needed=GIB // 2, others=GIB)
    told = (
        r"2 KV pools of 500 GiB do not fit: 11\.0 GiB are free, of which the model and its processes leave 9\.0; set "
    )
    with pytest.raises(ConfigError, match=told + r"engine\.kv_cache_gib to auto or at most 4\.05") as refusal:
        room.pool_gib(500.0)
    fits = float(re.findall(r"at most (\S+)", str(refusal.value))[0])
    assert room.pool_gib(fits) == fits
    with pytest.raises(ConfigError, match=r"2 KV pools of 4\.4 GiB do not fit"):
        room.pool_gib(4.4)
    with pytest.raises(ConfigError, match="1 KV pool of 3 GiB does not fit"):
        Room(free=3 * GIB, num_pools=1, needed=GIB).pool_gib(3.0)


def test_a_pool_leaves_what_transfers_may_take() -> None:
    estimated = Room(free=50 * GIB, num_pools=1, needed=10 * GIB, on_gpu=True, set_aside=3 * GIB)
    assert estimated.pool_gib("auto") == pytest.approx(0.85 * 37), "the rest is for steps"
    assert replace(estimated, is_measured=True).pool_gib("auto") == pytest.approx(36), "the rest is more than they take"
    small = replace(estimated, free=15 * GIB, is_measured=True)
    assert small.pool_gib("auto") == 2.0
    assert small.pool_gib(2.0) == 2.0
    with pytest.raises(ConfigError, match=r"leave 5\.0, of which 3\.0 for transfers .* auto or at most 2$"):
        small.pool_gib(2.1)
    with pytest.raises(ConfigError, match=r"need 13\.0, of which 3\.0 for transfers \(transfer\.num_slots, "):
        Room(free=13 * GIB, num_pools=1, needed=10 * GIB, on_gpu=True, set_aside=3 * GIB).pool_gib("auto")


@pytest.mark.parametrize("asked", ["auto", 0.001])
def test_a_model_that_leaves_no_room_is_refused(asked: float) -> None:
    with pytest.raises(ConfigError, match=r"no room for KV: of the 8\.0 GiB that are free, .* 3 ranks need 16\.0"):
        Room(free=8 * GIB, num_pools=3, needed=5 * GIB, others=GIB).pool_gib(asked)


def test_an_index_says_which_files_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "part.safetensors").write_bytes(b"x" * 300)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "part.safetensors"}}')
    assert weights_bytes(tmp_path) == 300


def test_weights_count_as_they_are_loaded(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(10, 5, dtype=torch.bfloat16)}, tmp_path / "a.safetensors")
    save_file({"b": torch.zeros(7)}, tmp_path / "b.safetensors", {"format": "pt"})
    assert weights_bytes(tmp_path) == 100 + 28
    assert weights_bytes(tmp_path, "float32") == 200 + 28
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    assert weights_bytes(tmp_path, "float32") == 200, "another copy beside those of the index is not loaded"
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 300)
    assert weights_bytes(tmp_path) == 300, "whoever loads it says what is wrong"


def test_a_cgroups_limit_is_what_memory_there_is(tmp_path: Path) -> None:
    own, cgroups = tmp_path / "own", tmp_path / "cgroup"
    assert available_memory(1.0, (1000, 2000), cgroups, own) == 1000
    limited(cgroups, "max", 300)
    assert available_memory(1.0, (1000, 2000), cgroups, own) == 1000
    limited(cgroups, "700", 300)
    assert available_memory(1.0, (1000, 2000), cgroups, own) == 400 + 50, "what is kept of files can be had"
    assert available_memory(1.0, (100, 2000), cgroups, own) == 100
    own.write_text("1:name=systemd:/\n0::/user/session\n")
    limited(cgroups / "user", "500", 300)
    limited(cgroups / "user" / "session", "max", 300)
    assert available_memory(1.0, (1000, 2000), cgroups, own) == 250, "a limit of a cgroup above binds, too"
    (cgroups / "user" / "memory.current").write_text("900")
    assert available_memory(1.0, (1000, 2000), cgroups, own) == 0


def test_a_share_is_of_all_there_is_and_not_of_what_neighbours_left(tmp_path: Path) -> None:
    """Two workers with half a machine each: the second comes while the first has its half."""
    own, cgroups = tmp_path / "own", tmp_path / "cgroup"
    assert available_memory(0.5, (2000, 2000), cgroups, own) == 1000
    assert available_memory(0.5, (1000, 2000), cgroups, own) == 1000
    assert available_memory(0.5, (900, 2000), cgroups, own) == 900, "somebody else took more than the rest"
    limited(cgroups, "800", 300)
    assert available_memory(0.5, (1000, 2000), cgroups, own) == 400


def test_a_limit_of_the_first_version_of_cgroups_counts_as_well(tmp_path: Path) -> None:
    own, folder = tmp_path / "own", tmp_path / "memory" / "docker" / "c0ffee"
    own.write_text("7:cpu,cpuacct:/docker/c0ffee\n5:memory:/docker/c0ffee\n0::/\n")
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("800\n")
    (folder / "memory.usage_in_bytes").write_text("500\n")
    (folder / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 20\n")
    assert available_memory(1.0, (1000, 2000), tmp_path, own) == 350
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("500\n")
    (tmp_path / "memory" / "memory.stat").write_text("total_inactive_file 30\n")
    assert available_memory(1.0, (1000, 2000), tmp_path, own) == 350, "so large a limit is none"


def limited(folder: Path, limit: str, used: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("anon 200\ninactive_file 30\nactive_file 20\nslab 50\n")
