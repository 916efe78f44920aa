"""A worker provides its model's files to members, and a router that has no folder answers from them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.cluster import Role, WorkerInfo
from baton.config import ClusterConfig, Config, EngineConfig, IndexConfig, ModelConfig, TestingConfig, TransferConfig
from baton.errors import Conflict, WorkerFailed
from baton.rpc.member_auth import MemberLink
from baton.rpc.model_files import FileSource, read_model_files
from baton.trust import Principal
from deploy.embedded_redis import EmbeddedRedis
from engine.engines import make_engine
from kvstore.index import RedisConnection
from kvstore.leases import RedisLeases
from router.models.files import ModelFileCache
from router.prompt import Tokenizer
from tests.support.members import keys_of, secret_file
from tests.support.model_folders import TEMPLATE, backend, write
from worker.process import running


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as redis:
        yield redis.url


@pytest.fixture
def config(redis_url: str, tmp_path: Path) -> Config:
    """Settings of a worker with the arithmetic model, whose folder has no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    backend().save(str(folder / "tokenizer.json"))
    write(folder, "config.json", {"model_type": "llama", "max_position_embeddings": 64})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Config(
        model=ModelConfig(path=str(folder), revision=tmp_path.name),
        engine=EngineConfig(num_blocks=8),
        cluster=ClusterConfig(secret=secret_file()),
        index=IndexConfig(redis_url=redis_url),
        transfer=TransferConfig(transports=("tcp",)),
        testing=TestingConfig(arithmetic=True),
    )


@contextlib.asynccontextmanager
async def worker(config: Config) -> AsyncIterator[WorkerInfo]:
    """A running worker, as its lease describes it to a router."""
    async with running(config, Role.DECODE, "worker-0", "127.0.0.1", make_engine(config, Path())) as (control, _):
        member = control.member
        leases = RedisLeases(RedisConnection(config.index.redis_url), member.content_id, keys=keys_of(Principal.ROUTER))
        try:
            (found,) = [each.info for each in await leases.list_workers()]
        finally:
            await leases.close()
        yield found


def source_of(info: WorkerInfo) -> FileSource:
    return FileSource(info.label, info.address, info.incarnation)


async def test_a_router_gets_tokenizer_and_template_from_a_worker(config: Config, tmp_path: Path) -> None:
    cache = ModelFileCache(tmp_path / "cache", MemberLink(keys_of(Principal.ROUTER), None))
    async with worker(config) as info:
        folder = await cache.folder(info.files, [source_of(info)])
        own, got = Tokenizer.load(Path(config.model.path)), Tokenizer.load(folder)
        assert got.encode("a <|im_end|> b") == own.encode("a <|im_end|> b")
        assert got.chat_template.source == TEMPLATE
        assert (got.max_model_len, got.vocab_size) == (64, own.vocab_size)

        (tmp_path / "mine.jinja").write_text("mine")
        config = replace(config, model=replace(config.model, chat_template=str(tmp_path / "mine.jinja")))
    async with worker(config) as info:
        chosen = await cache.folder(info.files, [source_of(info)])
        assert chosen != folder
        assert Tokenizer.load(chosen).chat_template.source == "mine"
    cache.close()


async def test_a_worker_gives_them_to_routers_and_controllers_as_long_as_they_are_the_same(config: Config) -> None:
    async with worker(config) as info:
        for member in Principal:
            link = MemberLink(keys_of(member), None)
            if member in (Principal.ROUTER, Principal.CONTROLLER):
                assert (await read_model_files(source_of(info), info.files, link=link)).digest == info.files
            else:
                with pytest.raises(WorkerFailed, match="accepts calls only from controller, router"):
                    await read_model_files(source_of(info), info.files, link=link)
        link = MemberLink(keys_of(Principal.ROUTER), None)
        (Path(config.model.path) / "chat_template.jinja").write_text("another")
        with pytest.raises(Conflict, match="have changed since this process started"):
            await read_model_files(source_of(info), info.files, link=link)


async def test_a_worker_without_a_tokenizer_announces_none(config: Config) -> None:
    (Path(config.model.path) / "tokenizer.json").rename(Path(config.model.path) / "tokenizer.model")
    async with worker(config) as info:
        assert info.files == ""
        with pytest.raises(Conflict, match="this process provides none"):
            await read_model_files(source_of(info), "", link=MemberLink(keys_of(Principal.ROUTER), None))
