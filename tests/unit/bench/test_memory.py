"""How `memory` reads the kernel's list of a process's mappings."""

from __future__ import annotations

from tests.bench.memory import KINDS, memory_of

SMAPS = """\
55e5c0000000-55e5c1000000 rw-p 00000000 00:00 0                          [heap]
Size:               4000 kB
Rss:                3000 kB
Pss:                1000 kB
Pss_Dirty:           900 kB
7f0000000000-7f0001000000 rw-p 00000000 00:00 0
Pss:                2000 kB
7f0002000000-7f0003000000 r--s 00000000 fe:00 131                        /cache/native/weights-a b.packed
Pss:                 500 kB
7f0004000000-7f0005000000 r-xp 00001000 fe:00 132                        /lib/libtorch_cpu.so
Pss:                 250 kB
7f0006000000-7f0007000000 rw-s 00000000 00:01 133                        /memfd:baton-kv (deleted)
Pss:                 125 kB
"""


def test_the_share_of_each_mapping_counts_for_its_kind() -> None:
    found = memory_of(SMAPS.splitlines())
    assert set(found) == set(KINDS)
    assert {kind: round(size * 1e6 / 1024) for kind, size in found.items()} == {
        "weights": 500,
        "other files": 250,
        "shared": 125,
        "private": 3000,
    }
