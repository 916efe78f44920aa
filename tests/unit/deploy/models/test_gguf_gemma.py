"""A tiny model of Gemma's architecture: every weight under its name, and the tokens that SentencePiece gives."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from baton.errors import ModelLoadError
from deploy.models import gguf_folder, ignore_progress
from deploy.models.gguf_folder import write_folder
from deploy.models.gguf_sentencepiece import SPACE, merges
from deploy.models.safetensors_file import write_float32
from router.prompt import Tokenizer

Array = npt.NDArray[np.float32]

LAYERS, HIDDEN, HEADS, HEAD_DIM, INNER = 7, 64, 4, 32, 96
CONTROLS = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn>"]
DEFINED = ["\n", "\n\n", "  ", "   ", "<h1>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = [
    f"{SPACE}a", "ab", "aa", "aaa", "ba", f"{SPACE}ab", "bab", "abab", "h1", "1h1", "b1",
    *f"{SPACE}abh1<>ü",
]  # fmt: skip
"""The best first. No piece holds a user-defined token."""
TOKENS = [*CONTROLS, *DEFINED, *BYTES, *PIECES]
KINDS = [3] * len(CONTROLS) + [4] * len(DEFINED) + [6] * len(BYTES) + [1] * len(PIECES)
SCORES = [-1000.0] * (len(CONTROLS) + len(DEFINED)) + [0.0] * len(BYTES) + [-float(i) for i in range(len(PIECES))]
LAYER = {
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (HEAD_DIM, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (HEAD_DIM, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
    "attn_q_norm": ("self_attn.q_norm", (HEAD_DIM,)),
    "attn_k_norm": ("self_attn.k_norm", (HEAD_DIM,)),
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "post_attention_norm": ("post_attention_layernorm", (HIDDEN,)),
    "ffn_norm": ("pre_feedforward_layernorm", (HIDDEN,)),
    "post_ffw_norm": ("post_feedforward_layernorm", (HIDDEN,)),
    "ffn_gate": ("mlp.gate_proj", (INNER, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INNER, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INNER)),
}


def write_gemma(path: Path, *, add_space: bool = False) -> dict[str, Array]:
    """Return the weights by Hugging Face's names, as transformers' model has them."""
    random = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(24)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_scores(SCORES)
    writer.add_token_types(KINDS)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(add_space)
    weights: dict[str, Array] = {}
    shapes = {"token_embd": ("embed_tokens", (len(TOKENS), HIDDEN)), "output_norm": ("norm", (HIDDEN,))}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": (f"layers.{layer}.{of}", shape) for name, (of, shape) in LAYER.items()}
    for name, (hugging_face_name, shape) in shapes.items():
        weight = random.standard_normal(shape, dtype=np.float32).astype(np.float16).astype(np.float32)
        weights[f"model.{hugging_face_name}.weight"] = weight
        writer.add_tensor(f"{name}.weight", weight + 1 if name.endswith("_norm") else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    write_gemma(folder / "a.gguf")
    write_folder(folder / "a.gguf", folder / "model", {}, ignore_progress)
    return folder / "model"


def test_every_weight_arrives_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And as the model has it: its norms without the 1 that llama.cpp adds. Tensors come in parts of a few rows."""
    monkeypatch.setattr(gguf_folder, "PART_NUMBERS", 5 * HIDDEN)
    expected = write_gemma(tmp_path / "a.gguf")
    write_folder(tmp_path / "a.gguf", tmp_path / "model", {}, ignore_progress)
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=1e-6 if "norm" in name else 0, err_msg=name)


def test_the_configuration_is_gemmas(gemma: Path) -> None:
    config = json.loads((gemma / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert config["rope_parameters"] == {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert (config["sliding_window"], config["head_dim"], config["query_pre_attn_scalar"]) == (24, 32, 32)
    assert (config["num_key_value_heads"], config["tie_word_embeddings"]) == (1, True)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (2, 1, 0)


@pytest.mark.parametrize("shapes", [{}, {"a": (2,)}, {"ab": (2,)}, {"b": (3, 5), "a.é": (7,), "c": ()}])
def test_the_file_is_as_the_library_writes_it(tmp_path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    weights = {name: np.random.default_rng(2).random(shape).astype(np.float32) for name, shape in shapes.items()}
    save_file({name: np.asarray(weight) for name, weight in weights.items()}, tmp_path / "a", metadata={"format": "pt"})
    write_float32(tmp_path / "b", shapes, lambda name: np.array_split(np.atleast_1d(weights[name]), 2))
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def test_parts_that_do_not_make_the_shape_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a has 4 numbers, and its shape is"):
        write_float32(tmp_path / "b", {"a": (5,)}, lambda _: [np.zeros(4, dtype=np.float32)])


def slowly(text: str) -> list[str]:
    """Tokens as SentencePiece makes them: it joins the pair of the best score, of equal ones the first."""
    text = text.replace(" ", SPACE)
    defined = sorted((token.replace(" ", SPACE) for token in DEFINED), key=len, reverse=True)
    parts: list[tuple[str, bool]] = []
    while text:
        found = next((token for token in defined if text.startswith(token)), "")
        parts.append((found or text[0], bool(found)))
        text = text[len(found or "x") :]
    while True:
        pairs = [
            (PIECES.index(left + right), place)
            for place, ((left, is_whole), (right, is_also)) in enumerate(pairwise(parts))
            if not is_whole and not is_also and left + right in PIECES
        ]
        if not pairs:
            break
        _, place = min(pairs)
        parts[place : place + 2] = [(parts[place][0] + parts[place + 1][0], False)]
    known = [
        [part] if is_whole or part in PIECES else [f"<0x{b:02X}>" for b in part.encode()] for part, is_whole in parts
    ]
    return [token for tokens in known for token in tokens]


@example(text="b1h1")
@given(text=st.text(alphabet="aab bh1<>\nüé😀"))
def test_text_has_sentencepieces_tokens(gemma: Path, text: str) -> None:
    tokenizer = Tokenizer.load(gemma)
    names = [token.replace(" ", SPACE) for token in TOKENS]
    ids = [names.index(token) for token in slowly(text)]
    assert tokenizer.encode(text) == [CONTROLS.index("<bos>"), *ids]
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_found_where_they_may_be(gemma: Path) -> None:
    tokenizer = Tokenizer.load(gemma)
    assert tokenizer.encode("<turn>ab", parse_special=True)[1:] == [TOKENS.index("<turn>"), TOKENS.index("ab")]
    assert TOKENS.index("<turn>") not in tokenizer.encode("<turn>ab")
    assert tokenizer.special_ids == set(range(len(CONTROLS)))
    assert tokenizer.eos_ids == (1,)


def test_defined_tokens_have_sentencepieces_names(gemma: Path) -> None:
    """llama.cpp wrote their spaces as spaces."""
    vocabulary = json.loads((gemma / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocabulary[2 * SPACE] == TOKENS.index("  ")
    assert vocabulary["\n\n"] == TOKENS.index("\n\n")


def test_a_better_token_comes_first_and_its_longest_left_part() -> None:
    assert merges({"a": -3.0, "aa": -1.0, "aaa": -2.0}) == [("a", "a"), ("aa", "a"), ("a", "aa")]


def test_a_tokenizer_that_adds_a_space_is_refused(tmp_path: Path) -> None:
    write_gemma(tmp_path / "a.gguf", add_space=True)
    with pytest.raises(ModelLoadError, match="adds a space before the text"):
        write_folder(tmp_path / "a.gguf", tmp_path / "model", {}, ignore_progress)
