"""Hand-overs between members with certificates: the whole way, control stream and connection."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from baton.config import ClusterConfig
from baton.errors import BatonError
from baton.tls import Tls, member_tls
from tests.support.certificates import Authority, cluster_settings
from tests.unit.kvstore.transfer.peers import CONFIG, decode_side, hand_over, prefill_side

OVER_TCP = dataclasses.replace(CONFIG, links=("tcp",))


def _member(authority: Authority, name: str) -> Tls:
    found = member_tls(ClusterConfig(**cluster_settings(authority.sign(name))))
    assert found is not None
    return found


async def test_blocks_arrive_and_new_certificates_break_nothing(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    sending, receiving = _member(authority, "prefill"), _member(authority, "decode")
    async with prefill_side(OVER_TCP, tls=sending) as prefill:
        for incarnation in (1, 2):  # the second one needs a connection of its own
            async with decode_side(OVER_TCP, incarnation=incarnation, tls=receiving) as decode:
                await hand_over(prefill, decode, [1, 2, 3], [6, 5, 4])
                authority.sign("prefill")
                authority.sign("decode")
                await hand_over(prefill, decode, [1, 2, 3], [4, 5, 6], name="after")
                assert prefill.sender.open_kinds[-1] == "tcp"


@pytest.mark.parametrize("strangers", ["plain", "another authority's"])
async def test_a_stranger_gets_no_connection(tmp_path: Path, strangers: str) -> None:
    authority, other = Authority.make(tmp_path), Authority.make(tmp_path, "other")
    stranger = None if strangers == "plain" else _member(other, "stranger")
    async with (
        prefill_side(OVER_TCP, tls=stranger) as prefill,
        decode_side(OVER_TCP, tls=_member(authority, "decode")) as decode,
    ):
        with pytest.raises(BatonError):
            await hand_over(prefill, decode, [1, 2, 3], [6, 5, 4])
        assert decode.num_pairs_ever == 0
