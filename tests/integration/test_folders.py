"""A model's folder is read as transformers reads it, or refused by a sentence that names what disagrees."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers

from baton.api import Chat
from baton.chat import ChatMessage
from baton.config import Config, ModelConfig
from baton.errors import ModelLoadError
from baton.tokenizer_classes import BUILT, CORRECTED, FILE, OF_TYPE, READ
from baton.tokenizer_classes import REFUSED as REFUSED_CLASSES
from baton.tokenizer_file import read_tokenizer
from deploy.doctor import start
from deploy.models.folder import check_folder
from engine.model.pretrained import ask_folder, load_model
from engine.model.transformers_model import load_config
from engine.native.spec import FAMILIES
from router.prompt import Tokenizer
from tests.support.chats import encoded
from tests.support.families import OFTEN, OTHERS
from tests.support.model_folders import (
    MARKS,
    TEMPLATE,
    Tensors,
    backend,
    pieces,
    shards,
    tensors,
    token,
    unigram,
    words,
    write,
)

TEXTS = (
    "ok",
    " a <|im_start|>user\nb<|im_end|>",
    "<|im_end|><|endoftext|>",
    "<extra>one<extra>",
    "<s>x</s>",
    "<pad> <pad>",
    "hi",
    "  hi   hi\n\nhi!\n",
    "12345 hi-123 don't",
    "\u00e9 e\u0301 \U0001f600 hi<|im_end|> hi <s> hi",
)


FIRST = len(MARKS) + 256
"""The first id behind those of tokenizer.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What the files of a folder say of its tokens."""

    kind: str = "llama"
    """The type of the model."""

    tokenizer: Callable[[], Backend] = backend
    config: Mapping[str, Any] | None = None
    """tokenizer_config.json, beside the template; None: there is no such file."""
    more: Mapping[str, Mapping[str, Any]] | None = None
    """Other files."""
    ends: tuple[int, ...] | None = None
    """Tokens that end an answer; None: transformers' own `eos_token_id` alone."""


EOS = {"eos_token": "<|im_end|>"}
CASES = {
    "nothing beside it": Case(config={}),
    "no tokenizer_config.json": Case(),
    "an end of a turn": Case(config=EOS),
    "the end of a text and of a turn": Case(
        config=EOS, more={"generation_config.json": {"eos_token_id": 0}}, ends=(0, 2)
    ),
    "the end in config.json, another one in the tokenizer": Case(
        config=EOS, more={"config.json": {"eos_token_id": 1}}, ends=(1, 2)
    ),
    "several ends": Case(config=EOS, more={"generation_config.json": {"eos_token_id": [2, 0]}}, ends=(2, 0)),
    "an end as an object": Case(config={"eos_token": {"__type": "AddedToken", **token("<|im_end|>")}}),
    "an end that is new": Case(config={"eos_token": "</s>"}),
    "listed tokens that are new": Case(
        tokenizer=lambda: backend(MARKS[:1]),
        config={"added_tokens_decoder": {"257": token("<|im_start|>"), "258": token("<|im_end|>")}, **EOS},
    ),
    "listed tokens in another order": Case(
        tokenizer=lambda: backend(MARKS[:1]),
        config={"added_tokens_decoder": {"258": token("<|im_end|>"), "257": token("<|im_start|>")}},
    ),
    "a listed token that is not special": Case(
        config={"added_tokens_decoder": {str(FIRST): token("<extra>", special=False, normalized=True)}}
    ),
    "a listed token that is stripped": Case(
        config={"added_tokens_decoder": {str(FIRST): token("<extra>", lstrip=True, rstrip=True)}}
    ),
    "a listed token that is a letter": Case(
        config={"added_tokens_decoder": {str(backend().token_to_id("o")): token("o")}}
    ),
    "listed tokens that are there": Case(
        config={"added_tokens_decoder": {str(i): token(text, special=False) for i, text in enumerate(MARKS)}}
    ),
    "listed tokens, and a map that does not count then": Case(
        config={"added_tokens_decoder": {}, "bos_token": None}, more={"special_tokens_map.json": {"bos_token": "<s>"}}
    ),
    "added_tokens.json": Case(
        tokenizer=lambda: backend(MARKS[:1]), more={"added_tokens.json": {"<|im_start|>": 257, "<|im_end|>": 258}}
    ),
    "added_tokens.json of a special token": Case(
        tokenizer=lambda: backend(MARKS[:1]),
        config=EOS, more={"added_tokens.json": {"<|im_end|>": 258, "<|im_start|>": 257}},
    ),
    "special_tokens_map.json alone": Case(more={"special_tokens_map.json": {"bos_token": "<|endoftext|>", **EOS}}),
    "special_tokens_map.json with a new token": Case(
        config={"bos_token": None}, more={"special_tokens_map.json": {"bos_token": token("<s>")}}
    ),
    "special_tokens_map.json against the configuration": Case(
        config={"eos_token": "<|endoftext|>"}, more={"special_tokens_map.json": EOS}
    ),
    "further special tokens": Case(config={"additional_special_tokens": ["<extra>", "<pad>"]}),
    "further special tokens by a newer name": Case(config={"extra_special_tokens": ["<extra>"], **EOS}),
    "further special tokens with names": Case(config={"extra_special_tokens": {"image_token": "<extra>"}}),
    "further special tokens in the map": Case(
        more={"special_tokens_map.json": {"additional_special_tokens": ["<extra>"]}}
    ),
    "a token of the model's own name": Case(config={"video_token": "<extra>"}),
    "several names for one token": Case(config={"pad_token": "<pad>", "unk_token": "<pad>", **EOS}),
    "new tokens in the order of their names": Case(
        config={"unk_token": "<extra>", "eos_token": "</s>", "bos_token": "<s>"}
    ),
    "marks that are not special": Case(
        tokenizer=lambda: backend(MARKS[:1]), config={"added_tokens_decoder": {
            "257": token("<|im_start|>", special=False), "258": token("<|im_end|>", special=False)}, **EOS}
    ),
    "a beginning that is asked for": Case(config={"bos_token": "<|endoftext|>", "add_bos_token": True}),
    "numerals where JSON has numbers": Case(
        config=EOS, more={"generation_config.json": {"top_k": 50.0, "eos_token_id": [2.0, 0]}}, ends=(2, 0)
    ),
    "an end that is none": Case(config=EOS, more={"generation_config.json": {"eos_token_id": -1}}),
    "added_tokens.json of what is there": Case(more={"added_tokens.json": {"<|im_start|>": 1, "<|im_end|>": 2}}),
    "padding that names a token": Case(tokenizer=lambda: padded(backend(), "<pad>")),
    "a code's name that is not the tokenizer's": Case(config={"auto_map": {"AutoConfig": "code.Config"}}),
    "files of other tokenizers": Case(more={"vocab.json": {"a": 0}, "special_tokens_map.json": {}}),
    "a class that nobody has": Case(config={"tokenizer_class": "OurTokenizer"}),
    "a class that reads the file": Case(config={"tokenizer_class": "TokenizersBackend"}),
    "Llama 2": Case(tokenizer=lambda: pieces("<unk>", "<s>", "</s>"), config={"tokenizer_class": "LlamaTokenizer"}),
    "Llama 2 of the old way": Case(
        tokenizer=lambda: pieces("<unk>", "<s>", "</s>"),
        config={"tokenizer_class": "LlamaTokenizerFast", "legacy": True},
    ),
    "Llama 2 without a space": Case(
        tokenizer=lambda: pieces("<unk>", "<s>", "</s>"),
        config={"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False, "eos_token": None},
    ),
    "Llama 2 as the file has it": Case(
        tokenizer=lambda: pieces("<unk>", "<s>", "</s>"), config={"tokenizer_class": "PreTrainedTokenizerFast"}
    ),
    "Mistral as the file has it": Case(
        kind="mistral", tokenizer=lambda: pieces("<unk>", "<s>", "</s>"), config={"tokenizer_class": "LlamaTokenizer"}
    ),
    "Code Llama": Case(
        tokenizer=lambda: pieces("<unk>", "<s>", "</s>"), config={"tokenizer_class": "CodeLlamaTokenizer"}
    ),
    "Llama 3 with Llama 2's class": Case(tokenizer=words, config={"tokenizer_class": "LlamaTokenizer", **EOS}),
    "Gemma": Case(
        kind="gemma", tokenizer=lambda: pieces("<pad>", "<eos>", "<bos>", "<unk>", prefixed=False),
        config={"tokenizer_class": "GemmaTokenizer"},
    ),
    "Gemma without a configuration": Case(
        kind="gemma", tokenizer=lambda: pieces("<pad>", "<eos>", "<bos>", "<unk>", prefixed=False)
    ),
    "Qwen 2": Case(kind="qwen2", tokenizer=words, config={"tokenizer_class": "Qwen2Tokenizer", **EOS}),
    "Qwen 2, whatever class is named": Case(kind="qwen2", tokenizer=words, config=EOS),
    "Qwen 2 with marks of other flags": Case(
        kind="qwen2", tokenizer=words,
        config={"added_tokens_decoder": {
            str(i): token(text, rstrip=True) for i, text in enumerate(MARKS, words().get_vocab()[MARKS[0]])}, **EOS},
    ),
    "Qwen 3": Case(kind="qwen3", tokenizer=words, config={"tokenizer_class": "Qwen2TokenizerFast", **EOS}),
    "Qwen 3 as the file has it": Case(kind="qwen3", tokenizer=words, config=EOS),
    "OLMo": Case(kind="olmo", tokenizer=words, config={"tokenizer_class": "GPTNeoXTokenizer", **EOS}),
    "Command R": Case(kind="cohere", tokenizer=words, config={"tokenizer_class": "CohereTokenizer", **EOS}),
    "StarCoder 2": Case(
        kind="starcoder2", tokenizer=lambda: words(pre_tokenizers.Digits(individual_digits=True)),
        config={"tokenizer_class": "GPT2Tokenizer"},
    ),
    "Phi 3 as the file has it": Case(
        kind="phi3", tokenizer=lambda: pieces("<unk>", "<s>", "</s>"), config={"tokenizer_class": "LlamaTokenizer"}
    ),
    "a class that config.json names": Case(
        tokenizer=lambda: words(normalizer=normalizers.NFC()),
        more={"config.json": {"tokenizer_class": "GPT2Tokenizer"}},
    ),
    "a class beside code of the folder": Case(
        tokenizer=words, config={"tokenizer_class": "Qwen2Tokenizer", "auto_map": {"AutoTokenizer": ["code.T", None]}}
    ),
    "Mistral with its words fixed": Case(
        kind="mistral", tokenizer=lambda: many(pre_tokenizers.Split(" ", "isolated")),
        config={"fix_mistral_regex": True},
    ),
    "Mistral of a version with whole words": Case(
        kind="mistral", tokenizer=lambda: many(pre_tokenizers.Split(" ", "isolated")),
        config={"fix_mistral_regex": True}, more={"config.json": {"transformers_version": "5.0.0"}},
    ),
    "Unigram": Case(tokenizer=unigram, config={"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}),
}  # fmt: skip
REFUSED = {
    "an id that another list gives another token": (
        Case(more={"added_tokens.json": {"<extra>": 1}}),
        r"gives the id 1 to '<\|im_start\|>', and added_tokens\.json to '<extra>'",
    ),
    "a mark that only tokenizer.json has": (
        Case(kind="qwen3", config={"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {}}),
        r"has the added token '<\|im_start\|>' with the id 1; transformers' Qwen2Tokenizer has it, but not as"
        r" special, because it adds only the tokens that tokenizer_config\.json lists; .* name TokenizersBackend as"
        r" tokenizer_class",
    ),
    "an id that the class gives another token": (
        Case(
            kind="qwen2", tokenizer=lambda: backend(()),
            more={"tokenizer.json": {"added_tokens": [{"id": 300, **token("<a>")}]}},
        ),
        "'<a>' with the id 300; transformers' Qwen2Tokenizer has 256.* whatever tokenizer_config",
    ),
    "Unigram for a class of BPE": (
        Case(tokenizer=unigram, config={"tokenizer_class": "LlamaTokenizer"}),
        "of type Unigram, and transformers' LlamaTokenizer, .* would make a BPE of it",
    ),
    "a class that reads parts of the file": (
        Case(config={"tokenizer_class": "BertTokenizerFast"}), "names BertTokenizerFast as tokenizer_class, by which",
    ),
    "a class that is no text": (Case(config={"tokenizer_class": 7}), "names 7 as tokenizer_class; it must be a string"),
    "marks that are split": (Case(config={"split_special_tokens": True}), "has split_special_tokens"),
    "a tokenizer for each version": (
        Case(config={"fast_tokenizer_files": ["tokenizer.json", "tokenizer.4.0.json"]}), r"names 'tokenizer\.4\.0\.j",
    ),
    "half a number": (Case(more={"generation_config.json": {"top_k": 50.5}}), "50.5 as top_k, which must be a whole"),
    "a text for a number": (Case(more={"generation_config.json": {"top_p": "0.9"}}), "'0.9' as top_p, which must be"),
    "an id that the tokenizer gives another token": (
        Case(config={"added_tokens_decoder": {"7": token("<extra>")}}),
        r"gives the token '<extra>' two ids: tokenizer_config\.json says 7, and by tokenizer\.json it is 259",
    ),
    "another id of a token that is there": (
        Case(config={"added_tokens_decoder": {"1": token("<|im_end|>")}}), "'<|im_end|>' two ids: ",
    ),
    "added_tokens.json with a hole": (
        Case(more={"added_tokens.json": {"<extra>": 300}}), r"'<extra>' two ids: added_tokens\.json says 300",
    ),
    "no token": (Case(config={"added_tokens_decoder": {"0": 5}}), r"Cannot read .*_config\.json: 5 is no token"),
    "no id": (Case(config={"added_tokens_decoder": {"x": token("<extra>")}}), r"_config\.json: invalid literal"),
    "a list of tokens that is no object": (Case(config={"added_tokens_decoder": ["<extra>"]}), "Cannot read "),
    "a name that is no token": (Case(config={"eos_token": ["<|im_end|>"]}), "is no token"),
    "a number in added_tokens.json": (Case(more={"added_tokens.json": {"<extra>": "x"}}), r"added_tokens\.json: "),
}  # fmt: skip


def padded(tokenizer: Backend, text: str) -> Backend:
    tokenizer.enable_padding(pad_token=text, length=8)
    return tokenizer


def many(*pre: pre_tokenizers.PreTokenizer) -> Backend:
    """A tokenizer of more than 100,000 tokens."""
    file = json.loads(words(*pre).to_str())
    first = len(file["model"]["vocab"]) + len(MARKS)
    file["model"]["vocab"] |= {f"~{i}": first + i for i in range(100_000)}
    return Backend.from_str(json.dumps(file))


def made(case: Case, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    case.tokenizer().save(str(folder / "tokenizer.json"))
    write(folder, "config.json", {"model_type": case.kind, "vocab_size": FIRST + 8})
    if case.config is not None:
        write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **case.config})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name, value in (case.more or {}).items():
        before = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        write(folder, name, {**before, **value})
    return folder


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    case = CASES[name]
    folder = made(case, tmp_path / "model")
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    ours = Tokenizer.load(folder)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text, parse_special=True) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode_all(ids) == theirs.decode(ids, skip_special_tokens=False)
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "?"}]
    expected = theirs.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    messages = tuple(ChatMessage(role=each["role"], content=each["content"]) for each in talk)
    assert encoded(ours, Chat(messages=messages, parse_special=True)) == expected
    assert encoded(ours, Chat(messages=messages)) == expected
    ends = case.ends or tuple(each for each in [theirs.eos_token_id] if each is not None)
    assert ours.eos_ids == ends
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1


def test_the_classes_are_those_of_transformers() -> None:
    from transformers.models.auto import tokenization_auto as auto
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES as THEIRS

    named = {str(name).removesuffix("Fast") for name in THEIRS.values() if name is not None}
    assert named <= BUILT.keys() | REFUSED_CLASSES | READ
    for name in BUILT:
        assert "__init__" in vars(auto.tokenizer_class_from_name(name))
    for kind in {*FAMILIES, *OFTEN, *OTHERS, *OF_TYPE} - {"biogpt"}:  # whose class reads no tokenizer.json
        assert OF_TYPE.get(kind) == (FILE if THEIRS.get(kind) == "MistralCommonBackend" else THEIRS.get(kind))
        assert (kind in CORRECTED) == (kind in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS)


def test_what_a_class_has_in_another_way_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read_tokenizer(made(CASES["StarCoder 2"], tmp_path / "model"))
    assert "by GPT2Tokenizer, which has another pre-tokenizer than the file: if tokenizer.json is right" in caplog.text
    caplog.clear()
    read_tokenizer(made(CASES["Gemma"], tmp_path / "gemma"))
    assert "by GemmaTokenizer, which has another pre-tokenizer than the file" in caplog.text


def test_code_of_the_folder_is_left_out_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = {"tokenizer_class": "Ours", "auto_map": {"AutoTokenizer": ["code.Ours", None]}}
    assert Tokenizer.load(made(Case(config=code), tmp_path / "model")).vocab_size == FIRST
    assert "names code.Ours as the tokenizer, which is code of the model's folder; Baton runs none of it" in caplog.text


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_disagree_are_refused_by_name(name: str, tmp_path: Path) -> None:
    case, sentence = REFUSED[name]
    with pytest.raises(ModelLoadError, match=sentence):
        Tokenizer.load(made(case, tmp_path / "model"))


RIGHT, WRONG = tensors(0), tensors(1)
FIRST_HALF = sorted(RIGHT)[:6]
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
PLACED = {name: ONE if name in FIRST_HALF else TWO for name in RIGHT}
HALVES = {ONE: {name: RIGHT[name] for name in FIRST_HALF}, TWO: {n: RIGHT[n] for n in RIGHT if n not in FIRST_HALF}}


SHARDS: dict[str, tuple[Mapping[str, Tensors], Mapping[str, str] | None]] = {
    "one file": ({"model.safetensors": RIGHT}, None),
    "shards and an index": (HALVES, PLACED),
    "a stray file beside the index": (HALVES | {"model.safetensors": WRONG}, PLACED),
    "a stray shard beside the index": (HALVES | {"model-00003-of-00003.safetensors": WRONG}, PLACED),
    "a tensor in two shards, of which the index names the first": (
        HALVES | {TWO: HALVES[TWO] | {name: WRONG[name] for name in FIRST_HALF[:2]}}, PLACED,
    ),
    "a tensor in two shards, of which the index names the second": (
        HALVES | {ONE: HALVES[ONE] | {"model.norm.weight": WRONG["model.norm.weight"]}}, PLACED,
    ),
    "a tensor that the index does not name": (HALVES, {name: PLACED[name] for name in PLACED if name != FIRST_HALF[0]}),
    "shards without an index": (HALVES, None),
    "the whole beside Mistral's own": ({"model.safetensors": RIGHT, "consolidated.safetensors": WRONG}, None),
    "one file of another name": ({"weights.safetensors": RIGHT}, None),
}  # fmt: skip
UNCLEAR: dict[str, tuple[Mapping[str, Tensors], Mapping[str, str] | None, str]] = {
    "a shard is missing": ({ONE: HALVES[ONE]}, PLACED, rf"lacks {TWO}, which model\.safetensors\.index\.json names"),
    "the whole beside an index of shards that are not there": (
        {"model.safetensors": RIGHT}, PLACED, rf"lacks {ONE}, .* and has model\.safetensors, which it does not name",
    ),
    "a shard is missing, without an index": ({TWO: HALVES[TWO]}, None, r"lacks shard 1 of 00002 \(1 missing\)"),
    "a tensor in two shards without an index": (
        HALVES | {TWO: RIGHT}, None, rf"{ONE} and {TWO} both hold '.*', and no model\.safetensors\.index\.json says",
    ),
    "two files of other names": ({"a.safetensors": RIGHT, "b.safetensors": WRONG}, None, "it is not clear which ones"),
    "an index of another model": (
        HALVES, PLACED | {"model.layers.9.x": TWO}, rf"says that 'model\.layers\.9\.x' is in {TWO}, which lacks it",
    ),
    "an index of nothing": (HALVES, {}, "has an empty weight_map"),
    "no weights": ({}, None, "has no .safetensors file"),
}  # fmt: skip


def loaded(folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    config = load_config(str(folder))
    return load_model(folder, config, ask_folder(folder, config), "eager", **options)


@pytest.mark.parametrize("name", SHARDS)
def test_tensors_are_those_that_the_folder_means(name: str, tmp_path: Path) -> None:
    shards(tmp_path, *SHARDS[name])
    check_folder(tmp_path)
    model, report = loaded(tmp_path, dtype=torch.float32)
    assert not any(report.values())
    found = model.state_dict()
    assert found.keys() == RIGHT.keys()
    for each, value in RIGHT.items():
        assert torch.equal(found[each], value), each


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "config.json"])
def test_a_pointer_of_git_lfs_says_what_to_run(name: str, tmp_path: Path) -> None:
    shards(tmp_path, {"model.safetensors": RIGHT}, None)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 135\n")
    config = Config(model=ModelConfig(path=str(tmp_path), device="cpu"))
    refuse = (lambda: start.require_models([config])) if name == "tokenizer.json" else (lambda: check_folder(tmp_path))
    with pytest.raises(ModelLoadError, match="pointer of Git LFS, whose file was not fetched: run `git lfs pull`"):
        refuse()


@pytest.mark.parametrize("name", UNCLEAR)
def test_weights_that_are_not_clear_are_refused_by_both(name: str, tmp_path: Path) -> None:
    *files, sentence = UNCLEAR[name]
    shards(tmp_path, *files)  # type: ignore[arg-type]
    for refuse in (check_folder, loaded):
        with pytest.raises(ModelLoadError, match=sentence):
            refuse(tmp_path)


def test_the_reference_is_transformers_where_it_is_right(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for name in ("one file", "shards and an index", "a tensor that the index does not name"):
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        shards(folder, *SHARDS[name])
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
        assert all(torch.equal(value, RIGHT[each]) for each, value in model.state_dict().items())
    assert load_file(tmp_path / "one-file" / "model.safetensors").keys() == RIGHT.keys()


CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "foreign keys": {"": 1, "foo": {"a": []}, "num_foo": None, "unsloth_version": "1", "pretraining_tp": 2},
    "code": {"auto_map": {"AutoModelForCausalLM": "code.Model"}, "_name_or_path": "else/where"},
    "no quantization": {"quantization_config": None},
    "no RoPE of its own": {"rope_scaling": None, "rope_parameters": None, "text_config": None, "head_dim": None},
    "ids that are none": {"bos_token_id": -1, "eos_token_id": None, "pad_token_id": None},
    "several ends": {"eos_token_id": [1, 2]},
}
NO_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "a whole number with a point": ({"num_hidden_layers": 1.0}, "says 1.0 as num_hidden_layers; it must be a whole "),
    "a text for a number": ({"hidden_size": "32"}, "says 32 as hidden_size"),
    "an end with a point": ({"eos_token_id": 2.0}, "'eos_token_id' with value 2.0"),
    "a part for text": ({"text_config": {"eos_token_id": 2}}, "has text_config, .* models of type 'llama' have none"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    shards(tmp_path, {"model.safetensors": RIGHT}, None)
    write(tmp_path, "config.json", json.loads((tmp_path / "config.json").read_text()) | CONFIGS[name])
    check_folder(tmp_path)
    theirs, ours = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False), load_config(str(tmp_path))
    said = [
        {field: value for field, value in each.to_dict().items() if value is not None and field != "_name_or_path"}
        for each in (theirs, ours)
    ]
    assert said[0] == said[1]


@pytest.mark.parametrize("name", NO_CONFIGS)
def test_configurations_that_transformers_refuses_are_refused(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    said, sentence = NO_CONFIGS[name]
    shards(tmp_path, {"model.safetensors": RIGHT}, None)
    write(tmp_path, "config.json", json.loads((tmp_path / "config.json").read_text()) | said)
    with pytest.raises(Exception, match=r"Validation|to_dict"):
        AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)
    with pytest.raises(ModelLoadError, match=sentence):
        load_config(str(tmp_path))
