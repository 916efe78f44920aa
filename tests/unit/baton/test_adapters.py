"""Folders of adapters: what they hold, and what is refused with a sentence."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from baton.adapters import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    MAX_WEIGHTS_BYTES,
    PREFIX,
    WEIGHTS_FILE,
    AdapterTarget,
    load_adapter,
    load_registered,
    read_adapter,
)
from baton.errors import AdapterUnreadable, InvalidRequest
from baton.memory import adapters_bytes
from tests.support.adapters import ONE, registered, save_adapter, save_config, save_tensors

Q, V = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
TWO = {Q: (8, 16), V: (8, 4)}


def test_a_folder_says_rank_shapes_and_scaling_of_each_target(tmp_path: Path) -> None:
    save_adapter(tmp_path, TWO, 4, lora_alpha=6)
    facts = read_adapter(str(tmp_path))
    assert facts.targets == (
        AdapterTarget(module=Q, rank=4, num_in=8, num_out=16, scaling=1.5),
        AdapterTarget(module=V, rank=4, num_in=8, num_out=4, scaling=1.5),
    )
    assert (facts.rank, facts.path, len(facts.digest)) == (4, str(tmp_path), 32)
    assert facts.num_bytes == (tmp_path / WEIGHTS_FILE).stat().st_size
    assert facts.targets[0].names == (f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight")
    assert load_adapter(str(tmp_path)) == (facts, (tmp_path / WEIGHTS_FILE).read_bytes())


@pytest.mark.parametrize(
    ("config", "scalings"),
    [
        ({"lora_alpha": 16, "use_rslora": True}, (8.0, 8.0)),
        ({"lora_alpha": 16, "alpha_pattern": {"q_proj": 2}}, (0.5, 4.0)),
        ({"lora_alpha": 16, "alpha_pattern": {"1.self_attn.v_proj": 2, "v_proj": 4}}, (4.0, 0.5)),
        ({"lora_alpha": 16, "alpha_pattern": {"v_proj": 4, "1.self_attn.v_proj": 2}}, (4.0, 1.0)),
        ({"lora_alpha": 16, "alpha_pattern": {f"^{Q}": 2, "^self_attn.v_proj": 3}}, (0.5, 4.0)),
        ({"lora_alpha": 16, "alpha_pattern": {"proj": 2}}, (4.0, 4.0)),
        ({}, (2.0, 2.0)),
    ],
)
def test_the_scaling_is_that_of_peft(config: dict[str, Any], scalings: tuple[float, ...], tmp_path: Path) -> None:
    save_adapter(tmp_path, TWO, 4, **config)
    assert tuple(target.scaling for target in read_adapter(str(tmp_path)).targets) == scalings


def test_the_matrices_of_adapters_are_part_of_the_need_of_memory(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        f"{Q}.weight": ((4, 8), bytes(128)),
        "model.norm.weight": ((8,), bytes(32)),
        "model.embed_tokens.weight": ((4, 8), bytes(128)),
    }
    save_tensors(tmp_path, tensors)
    assert adapters_bytes(tmp_path, 3, 16, "bfloat16") == 3 * 16 * (4 + 8) * 2
    assert adapters_bytes(tmp_path, 0, 16, "bfloat16") == 0


def test_a_rank_may_differ_by_module(tmp_path: Path) -> None:
    save_adapter(tmp_path, TWO, 4, rank_pattern={V: 9}, lora_alpha=18, use_rslora=True)
    facts = read_adapter(str(tmp_path))
    assert [(target.rank, target.scaling) for target in facts.targets] == [(4, 9.0), (9, 6.0)]
    assert facts.rank == 9


def test_the_digest_is_of_weights_and_scaling_and_of_nothing_else(tmp_path: Path) -> None:
    first = save_adapter(tmp_path / "a", TWO)
    assert save_adapter(tmp_path / "b", TWO, lora_dropout=0.5, base_model_name_or_path="x").digest == first.digest
    others = [
        save_adapter(tmp_path / "c", TWO, seed=1),
        save_adapter(tmp_path / "d", TWO, lora_alpha=9),
        save_adapter(tmp_path / "e", ONE),
    ]
    assert len({first.digest, *(other.digest for other in others)}) == 4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other kind": ({"peft_type": "LOHA"}, "says peft_type LOHA; Baton computes adapters of type LORA"),
    "no kind": ({"peft_type": None}, "says peft_type None"),
    "dora": ({"use_dora": True}, "it is a DoRA.*use_dora"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "it replaces whole modules .modules_to_save"),
    "biases": ({"bias": "all"}, "it changes biases"),
    "lora bias": ({"lora_bias": True}, "its matrices have biases"),
    "parameters": ({"target_parameters": ["mlp.experts.down_proj"]}, "such as the weights of experts"),
    "tokens": ({"trainable_token_indices": [1]}, "it changes embeddings"),
    "layers": ({"layer_replication": [[0, 2]]}, "it repeats layers"),
    "transposed": ({"fan_in_fan_out": True}, "its base weights are transposed"),
    "activated": ({"alora_invocation_tokens": [1]}, "it applies only after some tokens"),
    "other base": (
        {"init_lora_weights": "pissa"},
        "its training began with other weights .*init_lora_weights is pissa",
    ),
    "unknown": ({"use_something_new": 3}, "has the field use_something_new, which Baton does not know"),
    "rank": ({"r": 5}, "says rank 5 for model.layers.0.self_attn.q_proj, whose matrices have rank 4"),
    "no rank": ({"r": "four"}, "says four as r; it must be a number above 0"),
    "no alpha": ({"lora_alpha": 0}, "says 0 as lora_alpha"),
    "huge alpha": ({"lora_alpha": 1e300}, "as lora_alpha; it must be a number above 0"),
    "no pattern": ({"alpha_pattern": [1]}, "as alpha_pattern; it must be a JSON object"),
    "expression": ({"alpha_pattern": {"(a+)+$": 2}}, "no other regular expressions"),
    "pattern's value": ({"alpha_pattern": {"q_proj": True}}, "says True as q_proj"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_computed_otherwise_is_refused(case: str, tmp_path: Path) -> None:
    changes, sentence = REFUSED[case]
    save_adapter(tmp_path)
    save_config(tmp_path, **changes)
    with pytest.raises(InvalidRequest, match=sentence) as refusal:
        read_adapter(str(tmp_path))
    assert "\n" not in str(refusal.value)


def test_what_concerns_training_alone_is_accepted(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    digest = read_adapter(str(tmp_path)).digest
    more: dict[str, Any] = {
        "use_dora": False,
        "modules_to_save": None,
        "layer_replication": [],
        "lora_bias": False,
        "unknown": None,
    }
    save_config(tmp_path, lora_dropout=0.3, init_lora_weights="gaussian", loftq_config={}, inference_mode=True, **more)
    assert read_adapter(str(tmp_path)).digest == digest


NAMES: dict[str, tuple[str, str]] = {
    "experts": (f"{PREFIX}model.layers.0.mlp.experts.1.up_proj.lora_{{}}.weight", "changes weights of experts"),
    "latents": (f"{PREFIX}model.layers.0.self_attn.kv_b_proj.lora_{{}}.weight", "changes kv_b_proj"),
    "output": (f"{PREFIX}lm_head.lora_{{}}.weight", "changes lm_head"),
    "embedding": (f"{PREFIX}model.embed_tokens.lora_embedding_{{}}", "holds adapters of embeddings"),
    "no prefix": (f"{Q}.lora_{{}}.weight", "which is no matrix of a LoRA in PEFT's format"),
    "other tensor": (f"{PREFIX}{Q}.other_{{}}", "which is no matrix of a LoRA in PEFT's format"),
    "dora": (f"{PREFIX}{Q}.lora_magnitude_vector_{{}}", "holds DoRA"),
    "bias": (f"{PREFIX}{Q}.lora_{{}}.bias", "holds biases"),
}


@pytest.mark.parametrize("case", NAMES)
def test_tensors_that_are_not_computed_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, sentence = NAMES[case]
    save_tensors(tmp_path, {name.format(which): ((4, 4), bytes(64)) for which in "AB"})
    save_config(tmp_path)
    with pytest.raises(InvalidRequest, match=sentence):
        read_adapter(str(tmp_path))


def test_matrices_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    a, b = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"
    cases: list[tuple[dict[str, Any], str]] = [
        ({a: ((4, 8), bytes(128))}, "holds only one of the two matrices"),
        ({a: ((4, 8), bytes(128)), b: ((8, 2), bytes(64))}, "have ranks 4 and 2"),
        ({a: ((32,), bytes(128)), b: ((8, 4), bytes(128))}, "must be a matrix of 16-bit or 32-bit floats"),
        ({a: ((4, 8), bytes(32)), b: ((8, 4), bytes(32))}, "must be a matrix of 16-bit or 32-bit floats"),
        ({}, "holds no matrices of an adapter"),
    ]
    save_config(tmp_path)
    for tensors, sentence in cases:
        save_tensors(tmp_path, tensors)
        with pytest.raises(InvalidRequest, match=sentence):
            read_adapter(str(tmp_path))


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder on this worker"):
        read_adapter(str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match=CONFIG_FILE):
        read_adapter(str(tmp_path))
    save_adapter(tmp_path)
    (tmp_path / CONFIG_FILE).write_text("[1]")
    with pytest.raises(InvalidRequest, match="must contain a JSON object"):
        read_adapter(str(tmp_path))
    (tmp_path / CONFIG_FILE).write_text("{")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_adapter(str(tmp_path))
    save_config(tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"version https://git-lfs")
    with pytest.raises(InvalidRequest, match="is damaged: it is a pointer of Git LFS"):
        read_adapter(str(tmp_path))
    (tmp_path / WEIGHTS_FILE).unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(InvalidRequest, match=r"holds adapter_model\.bin, and Baton reads adapters only from"):
        read_adapter(str(tmp_path))


def test_files_that_are_too_long_links_to_others_and_pipes_are_not_read(tmp_path: Path) -> None:
    one = tmp_path / "one"
    save_adapter(one)
    os.truncate(one / WEIGHTS_FILE, MAX_WEIGHTS_BYTES + 1)
    with pytest.raises(OSError, match="the limit is 4,294,967,296"):
        read_adapter(str(one))
    save_adapter(one)
    (one / CONFIG_FILE).write_text(" " * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(OSError, match="the limit is 1,048,576"):
        read_adapter(str(one))
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        save_adapter(one)
        (one / name).rename(tmp_path / "secret")
        (one / name).symlink_to(tmp_path / "secret")
        with pytest.raises(OSError, match=r"is a link to .*secret, which is outside this folder"):
            read_adapter(str(one))
        (one / name).unlink()
        os.mkfifo(one / name)
        with pytest.raises(OSError, match="not a regular file"):
            read_adapter(str(one))
        (one / name).unlink()


def test_a_folder_in_the_hubs_cache_is_read(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    adapter = save_adapter(blobs)
    folder.mkdir(parents=True)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (blobs / name).rename(blobs / f"{name}-hash")
        (folder / name).symlink_to(blobs / f"{name}-hash")
    assert read_adapter(str(folder)).digest == adapter.digest


def test_only_what_was_registered_is_loaded(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "one")
    facts, content = load_registered(adapter)
    assert (facts.digest, len(content)) == (adapter.digest, facts.num_bytes)
    save_adapter(tmp_path / "one", seed=1)
    with pytest.raises(InvalidRequest, match="holds other weights than those that were registered"):
        load_registered(adapter)
    save_config(tmp_path / "one", use_dora=True)
    with pytest.raises(InvalidRequest, match=r"the folder of adapter one has changed: .*DoRA"):
        load_registered(adapter)
    (tmp_path / "one" / CONFIG_FILE).unlink()
    with pytest.raises(AdapterUnreadable, match="this worker cannot read the folder of adapter one") as raised:
        load_registered(adapter)
    assert str(tmp_path) not in str(raised.value), "clients see the message"
    assert str(tmp_path) in str(raised.value.__cause__)


def test_a_long_pattern_takes_no_long_time(tmp_path: Path) -> None:
    pattern = {f"name-{number}": 2 for number in range(20_000)}
    shapes = {f"model.layers.{number}.q_proj": (2, 2) for number in range(500)}
    save_adapter(tmp_path, shapes, 1, alpha_pattern=pattern)
    assert len(read_adapter(str(tmp_path)).targets) == 500
    assert math.isclose(read_adapter(str(tmp_path)).targets[0].scaling, 8.0)
    assert registered(tmp_path).rank == 1
    assert len(json.loads((tmp_path / CONFIG_FILE).read_text())["alpha_pattern"]) == 20_000
