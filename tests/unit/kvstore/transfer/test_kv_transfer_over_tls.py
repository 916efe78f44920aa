"""KV transfers between members with certificates: the whole way, control stream and connection."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from baton.config import ClusterConfig
from baton.errors import BatonError
from baton.tls import Tls, member_tls
from engine.model.kv_cache import KVCache
from tests.fakes.gpu import fake_gpus
from tests.fakes.nccl import fake_nccl
from tests.support.certificates import Authority, cluster_settings
from tests.support.waiting import until
from tests.unit.kvstore.transfer.peers import (
    CONFIG,
    NUM_BLOCKS,
    SOON_S,
    SPEC,
    decode_side,
    filled_cache,
    kv_transfer,
    prefill_side,
)

OVER_TCP = dataclasses.replace(CONFIG, transports=("tcp",))


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
                await kv_transfer(prefill, decode, [1, 2, 3], [6, 5, 4])
                authority.sign("prefill")
                authority.sign("decode")
                await kv_transfer(prefill, decode, [1, 2, 3], [4, 5, 6], name="after")
                assert prefill.sender.open_kinds[-1] == "tcp"


@pytest.mark.parametrize("allowed", [(), ("prefill",), ("decode",), ("prefill", "decode")])
async def test_nccl_leaves_a_machine_only_where_both_workers_name_its_network_as_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("kvstore.transfer.sender.host_id", lambda: "another host")
    authority = Authority.make(tmp_path)
    configs = [
        dataclasses.replace(CONFIG, transports=("nccl", "tcp"), plaintext_transports=("nccl",) * (side in allowed))
        for side in ("prefill", "decode")
    ]
    with fake_nccl(monkeypatch), fake_gpus(2) as (here, there):
        source, target = filled_cache(1), KVCache(SPEC, NUM_BLOCKS, 8)
        source.device, target.device = here.device, there.device
        async with (
            prefill_side(configs[0], caches=[source], tls=_member(authority, "prefill")) as prefill,
            decode_side(configs[1], caches=[target], tls=_member(authority, "decode")) as decode,
        ):
            await kv_transfer(prefill, decode, [1, 2, 3], [6, 5, 4])
            if len(allowed) == 2:
                await until(lambda: prefill.sender.open_kinds == ["nccl"], SOON_S)
                await kv_transfer(prefill, decode, [1, 2, 3], [4, 5, 6], name="over nccl")
                return
            await until(lambda: "no nccl transport" in caplog.text, SOON_S)
            assert prefill.sender.open_kinds == ["tcp"]
    silent = " and ".join(side for side in ("prefill-0", "decode-0") if side[:-2] not in allowed)
    assert (
        "is on another host, to which KV goes encrypted, since the cluster has certificates (cluster.tls_certificate): "
        f"nccl cannot encrypt, and transfer.plaintext_transports of worker {silent} does not name it"
    ) in caplog.text


@pytest.mark.parametrize("strangers", ["plain", "another authority's"])
async def test_a_stranger_gets_no_connection(tmp_path: Path, strangers: str) -> None:
    authority, other = Authority.make(tmp_path), Authority.make(tmp_path, "other")
    stranger = None if strangers == "plain" else _member(other, "stranger")
    async with (
        prefill_side(OVER_TCP, tls=stranger) as prefill,
        decode_side(OVER_TCP, tls=_member(authority, "decode")) as decode,
    ):
        with pytest.raises(BatonError):
            await kv_transfer(prefill, decode, [1, 2, 3], [6, 5, 4])
        assert decode.num_pairs_ever == 0
