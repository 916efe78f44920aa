from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from baton.cluster import Role
from baton.config import (
    POOL_SETTINGS,
    SHORT_NAMES,
    ClusterConfig,
    Config,
    EngineConfig,
    PoolConfig,
    PoolsConfig,
    RouterConfig,
    SloClassConfig,
    TransferConfig,
    load,
    process_config,
)
from baton.errors import ConfigError

FIELDS = [
    (section.name, setting.name)
    for section in dataclasses.fields(Config)
    for setting in dataclasses.fields(getattr(Config(), section.name))
]


def from_yaml(folder: Path, text: str, **environ: str) -> Config:
    path = folder / "baton.yaml"
    path.write_text(text)
    return load(path, environ)


def another(name: str, value: Any) -> Any:
    """A valid value that differs from a setting's default; of the same type, unless that is `auto` for a number."""
    match value:
        case bool():
            return not value
        case float() if name in ("target_utilisation", "goodput_target"):  # shares
            return value / 2
        case str() if name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "plan_ahead",
            "nccl_mode",
            "wire_dtype",
            "dtype",
            "attention",
            "kv_dtype",
            "device",
            "kv_cache_gib",
            "runner",
            "speculation",
            "images",
        ):
            other = {
                "nccl_mode": "blocking-lazy",
                "wire_dtype": "int8",
                "dtype": "bfloat16",
                "attention": "flashinfer",
                "kv_dtype": "bfloat16",
                "device": "cuda",
                "kv_cache_gib": 3.5,
                "max_num_seqs": 80,
                "max_num_batched_tokens": 528,
                "plan_ahead": True,
            }
            return (other | {"runner": "transformers", "speculation": "off", "images": "off"})[name]
        case float() if name == "memory_share":
            return 0.5
        case float() | int() if name == "ping_s":  # must not exceed others
            return value + 1
        case str() if name == "faults":
            return "link_drop=0.5"
        case str() if name in ("max_surge", "max_unavailable"):
            return "3"
        case PoolConfig():
            return PoolConfig(engine={"tensor_parallel": 2}, gpus_per_worker=2)
        case str() if name == "vllm_python":
            return "/opt/vllm/bin/python"
        case str():
            other = {
                "full": "off",
                "auto": "disaggregated",
                "info": "debug",
                "text": "json",
                "end": "pass",
                "exact": "int8g",
            }
            return (other | {"off": "optional"}).get(value, value + "x")
        case tuple():
            return ("nccl",) if name == "plaintext_transports" else ("tcp",)
        case dict():
            return {key: dataclasses.replace(item, ttft_ms=item.ttft_ms + 16) for key, item in value.items()}
        case _:
            return value + 16


def test_transfers_take_of_a_gpu_what_their_transports_need() -> None:
    mib = 2**20
    assert TransferConfig().gpu_bytes(1) == (2 * 16 * 32 + 1024 + 32 * 42) * mib
    assert TransferConfig(max_connections=2, num_slots=4).gpu_bytes(1) == (2 * 4 * 32 + 1024 + 2 * 42) * mib
    assert TransferConfig().gpu_bytes(2) == (2 * 16 * 32 + 1024) * mib, "several ranks have no nccl"
    assert TransferConfig(transports=("nccl", "tcp")).gpu_bytes(1) == (2 * 16 * 32 + 32 * 42) * mib
    assert TransferConfig(transports=("shm", "tcp")).gpu_bytes(1) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ping_s": 0}, "ping_s must be more than 0"),
        ({"op_timeout_s": -1}, "op_timeout_s must be more than 0"),
        ({"pull_timeout_s": float("nan")}, "pull_timeout_s must be more than 0"),
        ({"op_timeout_s": 1.5}, r"ping_s \(2.0\) must not exceed transfer.op_timeout_s"),
        ({"lease_s": 1}, "must not exceed transfer.lease_s"),
        ({"max_connections": -3}, "max_connections must be 0"),
        ({"slot_bytes": 2**26}, r"gpu_slot_bytes \(33554432\) must not be less than transfer.slot_bytes"),
        ({"transports": ()}, "transports must name at least one"),
        ({"transports": ("shm", "udp")}, "udp"),
    ],
)
def test_transfer_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TransferConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "on_gpu", "on_cpu"),
    [
        ({}, (256, 2048, True), (64, 512, False)),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 512, "plan_ahead": False}, (64, 512, False), (64, 512, False)),
        ({"max_num_seqs": 64}, (64, 2048, True), (64, 512, False)),
        ({"max_num_seqs": 4096}, (4096, 4096, True), (4096, 4096, False)),
        ({"max_num_batched_tokens": 100}, (100, 100, True), (64, 100, False)),
        ({"max_num_batched_tokens": 32}, (32, 32, True), (32, 32, False)),
        ({"plan_ahead": True}, (256, 2048, True), (64, 512, True)),
    ],
)
def test_what_is_auto_depends_on_the_device_and_what_is_set_does_not(
    settings: dict[str, Any], on_gpu: tuple[int, int, bool], on_cpu: tuple[int, int, bool]
) -> None:
    """Also where it is set to what it would be elsewhere."""
    config = Config.from_json(Config(engine=EngineConfig(**settings)).to_json())
    assert config.engine.batch(on_gpu=True) == on_gpu
    assert config.engine.batch(on_gpu=False) == on_cpu


def pools(**by_role: dict[str, Any]) -> PoolsConfig:
    return PoolsConfig(**{role: PoolConfig(engine=engine) for role, engine in by_role.items()})


def test_a_pool_s_engine_is_the_common_one_with_its_own_values() -> None:
    common = EngineConfig(block_size=32, max_num_seqs=8)
    config = Config(engine=common, pools=pools(decode={"tensor_parallel": "2", "kv_dtype": "bfloat16"}))
    assert config.engine_of(Role.PREFILL) == common
    assert config.engine_of(Role.DECODE) == dataclasses.replace(common, tensor_parallel=2, kv_dtype="bfloat16")
    assert config.engine_differences == ("kv_dtype", "tensor_parallel")
    assert Config(pools=pools(prefill={"max_num_seqs": 8}, decode={"max_num_seqs": "8"})).engine_differences == ()
    assert Config(pools=pools(decode={"plan_ahead": "auto"})).engine_differences == ()


def test_workers_get_the_settings_of_their_pool_as_if_there_were_no_other() -> None:
    """So that those of one pool do not change with the other's."""
    decode = PoolConfig(engine={"max_num_seqs": 8}, gpus_per_worker=2)
    config = Config(pools=PoolsConfig(decode=decode), cluster=ClusterConfig(gpus_per_worker=0.5))
    assert json.loads(config.for_pool(Role.PREFILL).to_json()) == {"cluster": {"gpus_per_worker": 0.5}}
    assert json.loads(config.for_pool(Role.DECODE).to_json()) == {
        "engine": {"max_num_seqs": 8},
        "cluster": {"gpus_per_worker": 2},
    }
    more = dataclasses.replace(config, pools=pools(prefill={"num_threads": 2}, decode=decode.engine))
    assert more.for_pool(Role.DECODE).engine == config.for_pool(Role.DECODE).engine
    for_one = dataclasses.replace(config, pools=PoolsConfig(prefill=PoolConfig(gpus_per_worker=1)))
    assert [for_one.gpus_per_worker(pool) for pool in Role] == [1, 0.5]


@pytest.mark.parametrize("name", sorted(EngineConfig.__dataclass_fields__.keys() - POOL_SETTINGS))
def test_what_peers_need_in_common_may_not_differ_between_the_pools(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"pools.prefill.engine.{name} must be the same in both pools; set engine"):
        Config(pools=pools(prefill={name: 16}))


def test_settings_that_may_differ_are_all_in_the_documentation() -> None:
    (described,) = re.findall(
        r"These may differ: (.*?)\.", " ".join(Path("baton/config/pools.py").read_text(encoding="utf-8").split())
    )
    assert described.split(", ") == sorted(POOL_SETTINGS)
    assert EngineConfig.__dataclass_fields__.keys() >= POOL_SETTINGS


@pytest.mark.parametrize(
    ("given", "surge", "unavailable"),
    [("0", 0, 0), ("0%", 0, 0), ("1", 1, 1), ("25%", 16, 16), ("1%", 1, 1), ("100%", 64, 64), ("70", 70, 70)],
)
def test_parts_of_a_pool_are_numbers_or_percentages(given: str, surge: int, unavailable: int) -> None:
    assert ClusterConfig(max_surge=given, max_unavailable="1").num_surge(64) == surge
    assert ClusterConfig(max_unavailable=given).num_unavailable(64) == unavailable


def test_small_pools_replace_one_worker_at_a_time() -> None:
    config = load(environ={"BATON_CLUSTER_MAX_SURGE": "25%"}).cluster
    assert [config.num_surge(number) for number in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [config.num_unavailable(number) for number in (0, 1, 4, 8)] == [1, 1, 1, 2]
    assert [config.num_starting(number) for number in (1, 8, 9, 64)] == [4, 4, 5, 32]
    assert ClusterConfig(starting=1).num_starting(64) == 1


@pytest.mark.parametrize(
    ("settings", "num_groups"),
    [
        ({}, 1),
        ({"prefill": 3, "decode": 4}, 4),
        ({"prefill": 3, "decode": 4, "starting_per_node": 7}, 2),  # four of seven at a time
        ({"prefill": 3, "decode": 4, "starting_per_node": 7, "starting": 7}, 1),
        ({"prefill": 32, "decode": 32, "ray_address": "127.0.0.1:6379"}, 2),
        ({"prefill": 0, "decode": 0}, 1),
    ],
)
def test_a_start_may_take_its_time_for_each_group_of_workers(settings: dict[str, Any], num_groups: int) -> None:
    assert ClusterConfig(start_timeout_s=60.0, **settings).whole_start_timeout_s == 60.0 * num_groups


def test_items_of_a_list_may_have_spaces_around_them() -> None:
    assert load(environ={"BATON_TRANSFER_TRANSPORTS": "shm, tcp"}).transfer.transports == ("shm", "tcp")


def test_nothing_given_gives_the_defaults() -> None:
    assert load(environ={}) == Config()


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_every_setting_can_come_from_the_environment_and_from_a_file(section: str, name: str, tmp_path: Path) -> None:
    default = getattr(getattr(Config(), section), name)
    wanted = another(name, default)
    needed: dict[str, dict[str, Any]] = {
        "expert_parallel": {"tensor_parallel": 2},
        "step_ms": {"arithmetic": True},
        "token_ms": {"arithmetic": True},
        "vllm_python": {"runner": "vllm"},
    }
    others = needed.get(name, {})
    plain, text = wanted, str(wanted)
    if isinstance(wanted, tuple):
        text = ",".join(wanted)
    if isinstance(wanted, dict):
        plain = {key: dataclasses.asdict(item) for key, item in wanted.items()}
        text = json.dumps(plain)
    if isinstance(wanted, PoolConfig):
        plain = dataclasses.asdict(wanted)
        text = json.dumps(plain)
    environ = {f"BATON_{section}_{key}".upper(): str(value) for key, value in (others | {name: text}).items()}
    from_environment = load(environ=environ)
    from_file = from_yaml(tmp_path, json.dumps({section: others | {name: plain}}))
    assert from_environment == from_file
    got = getattr(getattr(from_file, section), name)
    assert got == wanted
    assert type(got) is type(wanted)
    assert Config.from_json(from_file.to_json()) == from_file


def test_a_child_is_told_what_differs_from_the_defaults() -> None:
    """One of the release before refuses a setting that it does not know."""
    assert json.loads(Config().to_json()) == {}
    config = Config(engine=EngineConfig(block_size=32), transfer=TransferConfig(transports=("tcp",)))
    assert json.loads(config.to_json()) == {"engine": {"block_size": 32}, "transfer": {"transports": ["tcp"]}}
    assert Config.from_json(config.to_json()) == config


def test_the_environment_wins_over_the_file_setting_by_setting(tmp_path: Path) -> None:
    text = "engine:\n  block_size: 32\n  max_num_seqs: 5\n"
    config = from_yaml(tmp_path, text, BATON_ENGINE_MAX_NUM_SEQS="7", BATON_CLUSTER_PREFILL="3", HOME="/root")
    assert (config.engine.block_size, config.engine.max_num_seqs, config.cluster.prefill) == (32, 7, 3)


@pytest.mark.parametrize(("name", "place"), SHORT_NAMES.items())
def test_short_names(name: str, place: tuple[str, str]) -> None:
    assert str(getattr(getattr(load(environ={name: "7"}), place[0]), place[1])) == "7"


def test_what_is_not_a_setting_is_left_alone() -> None:
    assert load(environ={"BATON_ADDRESS": "x:1", "BATON_CONFIG_JSON": "{}", "PATH": "/bin", "BATONS": "1"}) == Config()


def test_a_pool_of_nothing_is_one_of_a_size_that_suits(tmp_path: Path) -> None:
    for text in ("auto", "0", "0.0"):
        assert load(environ={"BATON_ENGINE_KV_CACHE_GIB": text}).engine.kv_cache_gib == "auto"
    assert from_yaml(tmp_path, "engine: {kv_cache_gib: 0}").engine.kv_cache_gib == "auto"


@pytest.mark.parametrize("name", ["BATON_ENGINE_BLOCKSIZE", "BATON_NOSUCH_X", "BATON_X", "BATON_", "BATON_ENGINE"])
def test_an_unknown_variable_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the environment variable {name} is not a setting of Baton"):
        load(environ={name: "1"})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("BATON_ENGINE_KV_CACHE_GB", r"did you mean BATON_ENGINE_KV_CACHE_GIB\?$"),
        ("BATON_KV_CACHE_GIB", r"did you mean BATON_ENGINE_KV_CACHE_GIB\?$"),
        ("BATON_GRPCPORT", r"did you mean BATON_GRPC_PORT\?$"),
        ("BATON_XYZQ", "the sections are autoscale, cluster, engine, "),
    ],
)
def test_of_an_unknown_variable_the_nearest_name_is_given(name: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"is not a setting of Baton; {advice}"):
        load(environ={name: "1"})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("enginee: {}", r"unknown setting enginee; did you mean engine\?"),
        ("engine: {blocksize: 16}", r"unknown setting engine.blocksize; did you mean engine.block_size\?$"),
        ("1: {}\nx: {}", "unknown setting 1; known here"),
        ("engine: 5", "engine must be a section of settings"),
        ("- engine", "must hold sections such as 'engine:'"),
        ("engine: {block_size: many}", "engine.block_size must be of type int, got 'many'"),
        ("engine: {block_size: '16.0'}", "engine.block_size must be of type int, got '16.0'"),
        ("engine: {block_size: 16.5}", "engine.block_size must be of type int, got 16.5"),
        ("engine: {block_size: true}", "engine.block_size must be of type int, got True"),
        ("engine: {block_size: }", "engine.block_size must be of type int, got None"),
        ("engine: {block_size: [16]}", r"engine.block_size must be of type int, got \[16\]"),
        ("engine: {num_blocks: .inf}", "engine.num_blocks must be of type int, got inf"),
        ("engine: {kv_cache_gib: big}", "engine.kv_cache_gib must be auto or of type float, got 'big'"),
        ("engine: {kv_cache_gib: -1}", "engine.kv_cache_gib must be auto or more than 0 GiB, got -1.0"),
        ("engine: {kv_cache_gib: .inf}", "engine.kv_cache_gib must be auto or more than 0 GiB, got inf"),
        ("engine: {memory_share: 1.5}", "engine.memory_share must be more than 0 and at most 1, got 1.5"),
        ("model: {dtype: fp16}", "model.dtype must be one of auto, float32, bfloat16, float16; got 'fp16'"),
        ("model: {device: gpu}", "model.device must be one of auto, cpu, cuda; got 'gpu'"),
        ("cluster: {http_port: 70000}", "cluster.http_port must be a port, 0 to 65535, got 70000"),
        ("cluster: {ray_address: 'head:70000'}", "the port of cluster.ray_address must be a number of 0 to 65535$"),
        ("index: {redis_url: 'redis://:pw@r:65536/0'}", "the port of index.redis_url must be a number of 0 to 65535$"),
        ("telemetry: {otlp_endpoint: 'http://c:-1'}", "the port of telemetry.otlp_endpoint must be a number"),
        ("index: {redis_url: [1]}", r"index.redis_url must be of type str, got '\*\*\*'"),
        ("model: {id: [a, b]}", r"model.id must be of type str, got \['a', 'b'\]"),
        ("model: {id: }", "model.id must be of type str, got None"),
        ("transfer: {transports: 5}", "transfer.transports must be a list, got 5"),
        ("transfer: {checksum: Full}", "transfer.checksum must be one of full, off; got 'Full'"),
        ("router: {mode: both}", "router.mode must be one of auto, disaggregated, aggregated; got 'both'"),
        ("engine: {runner: sglang}", "engine.runner must be one of auto, native, transformers, vllm; got 'sglang'"),
        ("engine: {runner: vllm}", "engine.runner vllm needs engine.vllm_python: the Python interpreter of the"),
        ("engine: {block_size: 20}", "engine.block_size must be a multiple of 16, got 20"),
        ("engine: {block_size: 0}", "engine.block_size must be a multiple of 16, got 0"),
        ("engine: {max_num_seqs: 0}", "engine.max_num_seqs must be auto or at least 1, got 0"),
        ("engine: {max_num_batched_tokens: 1.5}", "engine.max_num_batched_tokens must be auto or of type int, got 1.5"),
        ("engine: {plan_ahead: perhaps}", "engine.plan_ahead must be auto or true or false, got 'perhaps'"),
        (
            "engine: {max_num_seqs: 100, max_num_batched_tokens: 99}",
            r"engine.max_num_batched_tokens \(99\) must be at least engine.max_num_seqs \(100\), otherwise some "
            "sequences would never be scheduled",
        ),
        ("router: {max_attempts: 0}", "router.max_attempts must be at least 1, got 0"),
        ("router: {pull_above_tokens: 0}", "router.pull_above_tokens must be at least 1, got 0"),
        ("router: {expected_output_floor: 0}", "router.expected_output_floor must be at least 1, got 0"),
        ("router: {expected_output_default: 0}", "router.expected_output_default must be at least 1, got 0"),
        ("router: {slo_classes: 5}", "router.slo_classes must be a mapping, got 5"),
        ("router: {slo_classes: }", "router.slo_classes must be a mapping, got None"),
        ("router: {slo_classes: [default]}", "router.slo_classes must be a mapping, got "),
        ("router: {slo_classes: {}}", "router.slo_classes must have a class 'default'"),
        ("router: {slo_classes: {fast: {}}}", "router.slo_classes must have a class 'default'"),
        ("router: {slo_classes: {default: 5}}", "router.slo_classes.default must be a section of settings"),
        (
            "router: {slo_classes: {default: {ttft: 5}}}",
            r"unknown setting router.slo_classes.default.ttft; did you mean router.slo_classes.default.ttft_ms\?$",
        ),
        (
            "router: {slo_classes: {default: {ttft_ms: soon}}}",
            "router.slo_classes.default.ttft_ms must be of type float, got 'soon'",
        ),
        ("router: {slo_classes: {default: {ttft_ms: 0}}}", "an objective must be more than 0, got ttft_ms 0.0"),
        ("router: {slo_classes: {default: {itl_ms: .nan}}}", "an objective must be more than 0, got itl_ms nan"),
        ("router: {slo_classes: {default: {e2e_ms: -1}}}", "an objective must be more than 0, got e2e_ms -1.0"),
        ("telemetry: {log_format: xml}", "telemetry.log_format must be one of text, json; got 'xml'"),
        ("router: {slo_classes: {default: {affinity_weight: -1}}}", "affinity_weight must be at least 0, got -1.0"),
        ("router: {slo_classes: {default: {affinity_weight: .inf}}}", "affinity_weight must be at least 0, got inf"),
        ("router: {slo_classes: {default: {interference_weight: .nan}}}", "interference_weight must be at least 0"),
        ("cluster: {routers: 0}", "cluster.routers must be at least 1, got 0"),
        (
            "router: {max_connection_age_s: 0}",
            "router.max_connection_age_s must be more than 0 seconds, got 0.0",
        ),
        (
            "cluster: {drain_timeout_s: 0}",
            "cluster.drain_timeout_s must be more than 0 seconds, and at most 604800, got 0.0",
        ),
        (
            "cluster: {start_timeout_s: -1}",
            "cluster.start_timeout_s must be more than 0 seconds, and at most 604800, got -1.0",
        ),
        (
            "cluster: {stop_timeout_s: .nan}",
            "cluster.stop_timeout_s must be more than 0 seconds, and at most 604800, got nan",
        ),
        ("cluster: {max_surge: 101%}", "cluster.max_surge must be a number of workers, or a percentage up to 100%"),
        ("cluster: {max_surge: -1}", "cluster.max_surge must be a number of workers, or a percentage up to 100%, got"),
        ("cluster: {max_unavailable: some}", "cluster.max_unavailable must be a number of workers, or a percentage"),
        ("cluster: {max_surge: 0, max_unavailable: 0%}", "both 0, .* set cluster.max_unavailable to 1"),
        ("cluster: {starting_per_node: 0}", "cluster.starting_per_node must be at least 1, got 0"),
        ("cluster: {starting: -1}", "cluster.starting must be at least 0, got -1"),
        ("pools: {both: {}}", "unknown setting pools.both; known here: decode, prefill"),
        ("pools: {decode: 5}", "pools.decode must be a section of settings"),
        ("pools: {decode: {gpus_per_worker: -1}}", "pools.decode.gpus_per_worker must be at least 0, got -1.0"),
        ("pools: {decode: {engine: 5}}", "pools.decode.engine must be a mapping, got 5"),
        (
            "pools: {decode: {engine: {tensor_paralel: 2}}}",
            r"unknown setting pools.decode.engine.tensor_paralel; did you mean pools.decode.engine.tensor_parallel\?$",
        ),
        ("pools: {decode: {engine: {x: 2}}}", "unknown setting pools.decode.engine.x; known here: attention, "),
        (
            "pools: {decode: {engine: {tensor_parallel: 0}}}",
            "pools.decode.engine: engine.tensor_parallel must be at least 1, got 0",
        ),
        (
            "{engine: {max_num_seqs: 9}, pools: {decode: {engine: {max_num_batched_tokens: 8}}}}",
            r"pools.decode.engine: engine.max_num_batched_tokens \(8\) must be at least engine.max_num_seqs \(9\)",
        ),
        (
            "pools: {decode: {engine: {kv_dtype: int8}}}",
            "transfer only to pages of the same type, but the prefill pool has auto and the decode pool int8",
        ),
        (
            "{transfer: {wire_dtype: int8}, pools: {prefill: {engine: {kv_dtype: fp8}}}, engine: {kv_dtype: fp8}}",
            "wire_dtype is int8, but pages of pools.prefill.engine.kv_dtype fp8 cannot be converted",
        ),
        (
            "{pools: {decode: {engine: {tensor_parallel: 2}, gpus_per_worker: 1}}}",
            "pools.decode.gpus_per_worker is 1 and pools.decode.engine.tensor_parallel 2: .* set "
            "pools.decode.gpus_per_worker to 0",
        ),
        (
            "{cluster: {gpus_per_worker: 1}, pools: {decode: {engine: {tensor_parallel: 2}}}}",
            "cluster.gpus_per_worker is 1 and pools.decode.engine.tensor_parallel 2: each rank has one GPU",
        ),
        (
            "{testing: {arithmetic: true}, pools: {prefill: {engine: {tensor_parallel: 2}}}}",
            "testing.arithmetic has one rank; set pools.prefill.engine.tensor_parallel to 1",
        ),
        ("cluster: {gpus_per_worker: -0.5}", "cluster.gpus_per_worker must be at least 0, got -0.5"),
        (
            "{cluster: {gpus_per_worker: 1}, engine: {tensor_parallel: 4}}",
            r"cluster.gpus_per_worker is 1 and engine.tensor_parallel 4: each rank has one GPU",
        ),
        ("{testing: {arithmetic: true}, engine: {tensor_parallel: 2}}", "testing.arithmetic has one rank"),
        (
            "engine: {batch_invariant: on, tensor_parallel: 2}",
            "engine.batch_invariant cannot be kept with engine.tensor_parallel 2",
        ),
        (
            "engine: {batch_invariant: on, attention: flashinfer}",
            "engine.batch_invariant cannot be kept with engine.attention flashinfer",
        ),
        ("engine: {tensor_parallel: 0}", "engine.tensor_parallel must be at least 1, got 0"),
        ("engine: {step_timeout_s: 0}", "engine.step_timeout_s must be more than 0 seconds, and at most 604800, got 0"),
        ("transfer: {window: 0}", "transfer.window must be at least 1, got 0"),
        ("engine: {", "cannot read the configuration"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        from_yaml(tmp_path, text)


SLO_CLASSES = """
router:
  slo_classes:
    default: {itl_ms: 100}
    interactive: {ttft_ms: 500, itl_ms: 50, affinity_weight: 0.5}
    7: {ttft_ms: .inf, interference_weight: 0}
"""


def test_slo_classes_come_from_a_file_and_what_they_leave_out_has_defaults(tmp_path: Path) -> None:
    router = from_yaml(tmp_path, SLO_CLASSES).router
    assert router.slo_classes == {
        "default": SloClassConfig(itl_ms=100.0),
        "interactive": SloClassConfig(ttft_ms=500.0, itl_ms=50.0, affinity_weight=0.5),
        "7": SloClassConfig(ttft_ms=math.inf, interference_weight=0.0),
    }
    assert isinstance(router.slo_classes["default"].itl_ms, float)
    assert router.slo_class("") == router.slo_class("default") == SloClassConfig(itl_ms=100.0)
    assert router.slo_class("interactive").ttft_ms == 500
    with pytest.raises(
        ConfigError, match=r"no SLO class is called 'x'; router.slo_classes has default, interactive, 7"
    ):
        router.slo_class("x")


def test_slo_classes_in_the_environment_take_the_place_of_the_files(tmp_path: Path) -> None:
    text = json.dumps({"default": {}, "batch": {"ttft_ms": "60000", "itl_ms": 2000}})
    router = from_yaml(tmp_path, SLO_CLASSES, BATON_ROUTER_SLO_CLASSES=text).router
    assert router.slo_classes == {"default": SloClassConfig(), "batch": SloClassConfig(ttft_ms=60_000.0, itl_ms=2000.0)}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("default: {}", "router.slo_classes must be JSON in the environment"),
        ("", "router.slo_classes must be JSON in the environment"),
        ("[]", r"router.slo_classes must be a mapping, got \[\]"),
        ("null", "router.slo_classes must be a mapping, got None"),
        ('{"default": []}', "router.slo_classes.default must be a section of settings"),
        ('{"default": {"itl_ms": null}}', "router.slo_classes.default.itl_ms must be of type float, got None"),
        ('{"default": {"slo": 1}}', "unknown setting router.slo_classes.default.slo"),
    ],
)
def test_wrong_slo_classes_in_the_environment_are_refused_with_the_place(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(environ={"BATON_ROUTER_SLO_CLASSES": text})


def test_a_child_takes_its_parents_slo_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = from_yaml(tmp_path, SLO_CLASSES)
    monkeypatch.setenv("BATON_CONFIG_JSON", parent.to_json())
    assert process_config() == parent
    assert process_config().router.slo_class("7").ttft_ms == math.inf


def test_a_wrong_file_is_refused_in_the_same_words_when_the_environment_adds_to_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engine must be a section of settings"):
        from_yaml(tmp_path, "engine: 5", BATON_ENGINE_BLOCK_SIZE="32")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*missing\.yaml"):
        load(tmp_path / "missing.yaml", {})
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load(tmp_path / "binary.yaml", {})


@pytest.mark.parametrize("text", ["", "engine:", "# nothing\nengine:\n  # block_size: 32\n"])
def test_empty_files_and_sections_change_nothing(text: str, tmp_path: Path) -> None:
    assert from_yaml(tmp_path, text) == Config()
    assert from_yaml(tmp_path, text, BATON_ENGINE_BLOCK_SIZE="32").engine.block_size == 32


def test_numbers_and_switches_as_yaml_reads_them(tmp_path: Path) -> None:
    text = "engine: {kv_cache_gib: 3, num_blocks: 1000.0}\nmodel: {id: 7}\ntransfer: {checksum: off, transports: [tcp]}"
    config = from_yaml(tmp_path, text)
    assert config.engine.kv_cache_gib == 3.0
    assert isinstance(config.engine.kv_cache_gib, float)
    assert (config.engine.num_blocks, config.model.id) == (1000, "7")
    assert (config.transfer.checksum, config.transfer.transports) == ("off", ("tcp",))


def test_constructing_a_section_validates_it_too() -> None:
    for make in (
        lambda: EngineConfig(block_size=17),
        lambda: RouterConfig(mode="x"),
        lambda: TransferConfig(checksum="x"),
        lambda: SloClassConfig(ttft_ms=-1.0),
        lambda: RouterConfig(slo_classes={}),
    ):
        with pytest.raises(ConfigError):
            make()


def test_a_child_takes_its_parents_configuration_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = load(environ={"BATON_ENGINE_NUM_BLOCKS": "99", "BATON_TRANSFER_TRANSPORTS": "tcp"})
    monkeypatch.setenv("BATON_CONFIG_JSON", parent.to_json())
    monkeypatch.setenv("BATON_ENGINE_NUM_BLOCKS", "5")
    assert process_config() == parent
    monkeypatch.delenv("BATON_CONFIG_JSON")
    assert process_config().engine.num_blocks == 5


def test_settings_of_tests_are_taken_and_not_offered(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "testing: {arithmetic: true, step_ms: 2}").testing.step_ms == 2
    assert load(environ={"BATON_TESTING_FAULTS": "link_drop=.5"}).testing.faults == "link_drop=.5"
    for text in ("nonsense: {}", "testin: {}"):
        with pytest.raises(ConfigError) as caught:
            from_yaml(tmp_path, text)
        assert "testing" not in str(caught.value)
    for variable in ("BATON_TESTING_FAULT", "BATON_X"):
        with pytest.raises(ConfigError) as caught:
            load(environ={variable: "1"})
        assert "testing" not in str(caught.value).lower().replace(variable.lower(), "")


@pytest.mark.parametrize("name", ["step_ms", "token_ms"])
def test_only_the_arithmetic_model_sleeps(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"testing\.{name} needs testing\.arithmetic"):
        load(environ={f"BATON_TESTING_{name}".upper(): "1"})
