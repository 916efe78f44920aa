"""`baton doctor --model`: how a model would be read, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.config import Config, ModelConfig
from deploy.cli.app import app
from deploy.doctor import Check, model_checks
from tests.support.model_folders import MARKS, TEMPLATE, shards, tensors, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    shards(folder, {"model.safetensors": tensors()}, None)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write(folder, "tokenizer_config.json", {"eos_token": MARKS[2]})
    write(folder, "generation_config.json", {"eos_token_id": 0, "temperature": 0.6, "top_k": 50.0, "num_beams": 4})
    return folder


def found(folder: Path) -> dict[str, list[Check]]:
    checks: dict[str, list[Check]] = {}
    for check in model_checks(Config(model=ModelConfig(id=str(folder), device="cpu"))):
        checks.setdefault(check.name, []).append(check)
    return checks


def test_it_says_how_a_folder_is_read(folder: Path) -> None:
    checks = found(folder)
    said = {name: [(check.state, check.found) for check in each] for name, each in checks.items()}
    assert said["model"] == [("ok", f"{folder}: LlamaForCausalLM of 1 layers, in {folder}")]
    assert said["weights"] == [("ok", "12 tensors of 0.00 GiB in model.safetensors")]
    assert said["tokenizer"] == [("ok", "259 ids, 3 special tokens; a context window of 64 tokens")]
    assert said["end-of-sequence tokens"] == [("ok", "'<|endoftext|>' (0), '<|im_end|>' (2)")]
    assert said["chat template"] == [("ok", "does not support tools")]
    assert said["default sampling"] == [("ok", "temperature 0.6, top_k 50"), ("warn", "not applied: num_beams 4")]
    assert [state for state, _ in said["settings"]] == ["ok"]
    assert [state for state, _ in said["memory"]] == ["ok"]


def test_it_warns_of_what_a_user_would_miss(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    index = dict.fromkeys(tensors(), "model.safetensors")
    shards(folder, {"model.safetensors": tensors(), "stray.safetensors": tensors(1)}, index)
    checks = found(folder)
    assert [check.state for check in checks["chat template"]] == ["warn"]
    assert [check.state for check in checks["end-of-sequence tokens"]] == ["warn"]
    assert checks["weights"][1].found == "stray.safetensors in the same folder: ignored"


@pytest.mark.parametrize(
    ("name", "content", "check", "sentence"),
    [
        ("config.json", {"model_type": "t5", "is_encoder_decoder": True}, "model", "no file names its decoder_start"),
        ("model.safetensors.index.json", {"weight_map": {"x": "y.safetensors"}}, "model", "lacks y.safetensors"),
        ("tokenizer_config.json", {"eos_token": 3}, "tokenizer", "3 is no token"),
        ("generation_config.json", {"temperature": "warm"}, "tokenizer", "recommends invalid values"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_the_check_that_fails(
    name: str, content: dict[str, object], check: str, sentence: str, folder: Path
) -> None:
    write(folder, name, content)
    (failed,) = [each for checks in found(folder).values() for each in checks if each.state == "fail"]
    assert failed.name == check
    assert sentence in failed.found
    assert failed.fix


def test_a_template_that_is_not_valid_is_one(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for %}")
    assert "template" in found(folder)["tokenizer"][-1].found


def test_the_template_that_the_settings_name_is_the_one(folder: Path, tmp_path: Path) -> None:
    named = tmp_path / "own.jinja"
    named.write_text("{{ messages[0].content }}{{ tools }}")
    (before,) = found(folder)["chat template"]
    config = Config(model=ModelConfig(id=str(folder), device="cpu", chat_template=str(named)))
    (after,) = [check for check in model_checks(config) if check.name == "chat template"]
    assert (before.found, after.found) == ("does not support tools", "supports tools")


def test_the_command_looks_at_the_model_alone(folder: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--model", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    names = [each["name"] for each in json.loads(done.stdout)]
    assert names[0] == "model"
    assert "packages" not in names
    done = CliRunner().invoke(app, ["doctor", "--model", str(folder / "nothing")])
    assert done.exit_code == 1
    assert "does not exist" in done.output
