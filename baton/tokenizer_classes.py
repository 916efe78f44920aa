"""Transformers' tokenizer classes: the class of a folder, and its replacements for parts of tokenizer.json.

`AutoTokenizer` (5.23) chooses a class by `tokenizer_class` of tokenizer_config.json, or by the model's type. Most
classes read tokenizer.json unchanged. The classes in `BUILT` use only its vocabulary, merges and post-processor, and
define the normalizer, the pre-tokenizer, the decoder and some special tokens themselves. `generate` and vLLM encode
with them, so this module builds the same.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from baton.errors import ModelLoadError

logger = logging.getLogger(__name__)
FILE = "TokenizersBackend"
"""Class that reads tokenizer.json unchanged."""
_OF_CLASS = {
    "CohereTokenizer": "aya_vision cohere cohere2",
    "GPT2Tokenizer": "dbrx gpt2 jais2 opt phi starcoder2",
    "GPTNeoXTokenizer": "gpt_neox mpt olmo olmoe",
    "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text",
    "Qwen2Tokenizer": "internvl ovis2 qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_vl qwen3_vl_moe",
    FILE: """aria ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe gpt_bigcode
        granite granitemoe granitemoeshared hyperclovax internlm3 llava llava_next mimo_v2_flash minicpm3 minimax_m2
        ministral ministral3 mistral mistral3 mixtral nemotron olmo2 olmo3 persimmon phi3 phimoe smolvlm stablelm
        vipllava""",
}
OF_TYPE = {kind: name for name, kinds in _OF_CLASS.items() for kind in kinds.split()}
"""Model types that have a class. The others get the class that their folder names."""
CORRECTED = frozenset({
    "ernie4_5", "ernie4_5_moe", "fuyu", "hyperclovax", "internlm3", "llava", "llava_next", "minicpm3", "minimax_m2",
    "nemotron", "phi3", "phimoe", "qwen2", "smolvlm", "vipllava",
})  # fmt: skip
"""Types whose class takes precedence over the folder's."""
READ = frozenset((FILE, "PreTrainedTokenizer", "PythonBackend", "ConvBertTokenizer", "FNetTokenizer"))
"""Classes of transformers that read tokenizer.json unchanged, as it is also read for an unknown class name."""
_NAMES = """
    AlbertTokenizer BartTokenizer BarthezTokenizer BartphoTokenizer BertGenerationTokenizer BertJapaneseTokenizer
    BertTokenizer
    BertweetTokenizer BigBirdTokenizer BioGptTokenizer BlenderbotSmallTokenizer BlenderbotTokenizer ByT5Tokenizer
    CLIPTokenizer CTRLTokenizer CamembertTokenizer CanineTokenizer ClvpTokenizer CodeGenTokenizer CpmAntTokenizer
    CpmTokenizer DPRContextEncoderTokenizer DPRQuestionEncoderTokenizer DPRReaderTokenizer DebertaTokenizer
    DebertaV2Tokenizer DiaTokenizer DistilBertTokenizer EsmTokenizer EsmcTokenizer FSMTTokenizer
    FastSpeech2ConformerTokenizer FlaubertTokenizer FunnelTokenizer GPTNeoXJapaneseTokenizer GPTSw3Tokenizer
    HerbertTokenizer LasrTokenizer LayoutLMv2Tokenizer LayoutLMv3Tokenizer LayoutXLMTokenizer LukeTokenizer
    M2M100Tokenizer MBart50Tokenizer MBartTokenizer MLukeTokenizer MPNetTokenizer MarianTokenizer MarkupLMTokenizer
    MgpstrTokenizer MistralCommonBackend MyT5Tokenizer NllbTokenizer NougatTokenizer OpenAIGPTTokenizer
    PLBartTokenizer ParakeetTokenizer PegasusTokenizer PerceiverTokenizer PhobertTokenizer Pop2PianoTokenizer
    ProphetNetTokenizer Qwen3_5Tokenizer RagTokenizer ReformerTokenizer RemBertTokenizer RoCBertTokenizer
    RoFormerTokenizer RobertaTokenizer SeamlessM4TTokenizer SentencePieceBackend Siglip2Tokenizer SiglipTokenizer
    Speech2TextTokenizer SpeechT5Tokenizer SplinterTokenizer T5Tokenizer TapasTokenizer Tipsv2Tokenizer UdopTokenizer
    VideoPrismTokenizer VitsTokenizer Wav2Vec2CTCTokenizer Wav2Vec2PhonemeCTCTokenizer WhisperTokenizer XGLMTokenizer
    LEDTokenizer LxmertTokenizer MobileBertTokenizer MvpTokenizer XLMRobertaTokenizer XLMTokenizer XLNetTokenizer
"""
REFUSED = frozenset(_NAMES.split())
"""Further classes of transformers, of models that Baton does not serve: they read no tokenizer.json, or parts of it."""
END_OF_TEXT = "<|endoftext|>"
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MISTRAL_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenizer of Mistral's tokenizers whose tokenizer.json has an older expression, if `fix_mistral_regex` asks."""
FIXED_TYPES, MIN_FIXED_VOCABULARY = ("ministral", "mistral"), 100_000
INFILLING = {
    "prefix_token": "▁<PRE>",
    "middle_token": "▁<MID>",
    "suffix_token": "▁<SUF>",
    "eot_token": "▁<EOT>",
    "fill_token": "<FILL_ME>",
}

Said = Mapping[str, Any]
"""Contents of tokenizer_config.json, or of special_tokens_map.json."""


def _none(_: Said) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A class that builds the tokenizer itself."""

    tokens: Mapping[str, str]
    """Special tokens by name, if the folder names no others."""
    model: Callable[[Said], dict[str, Any]] = field(default=lambda _: {})
    """Options of the BPE."""
    normalizer: Callable[[Said], Any] = _none
    pre_tokenizer: Callable[[Said], Any]
    decoder: Callable[[Said], Any]
    around: Callable[[tokenizers.Tokenizer, Said], None] = lambda _, __: None
    """Replaces the file's post-processor."""
    further: tuple[str, ...] = ()
    """Further special tokens, if the folder lists none."""
    marks_again: bool = False
    """True if its special tokens are finally added as plain ones, without the folder's rules for adjacent spaces."""


def _pieces(scheme: Callable[[Said], str]) -> Callable[[Said], Any]:
    return lambda said: pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme(said), split=False)


def _prefixed(said: Said) -> bool:
    value = said.get("add_prefix_space")
    return True if value is None else bool(value)


def _spaced(said: Said) -> bool:
    return bool(said.get("add_prefix_space"))


def _llama_scheme(said: Said) -> str:
    return "never" if not _prefixed(said) else "always" if said.get("legacy") else "first"


def _pieces_decoder(*, stripped: bool) -> Any:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if stripped else steps)


def _nothing_around(tokenizer: tokenizers.Tokenizer, _: Said) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])


def _bos_before(tokenizer: tokenizers.Tokenizer, said: Said) -> None:
    if (bos := said.get("bos_token")) is None:
        _nothing_around(tokenizer, said)
        return
    text = bos if isinstance(bos, str) else str(bos["content"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{text}:0 $A:0",
        pair=f"{text}:0 $A:0 {text}:1 $B:1",
        special_tokens=[(text, tokenizer.token_to_id(text))],
    )


def _unk(said: Said) -> dict[str, Any]:
    unk = said.get("unk_token")
    return {"unk_token": str(unk.get("content") if isinstance(unk, dict) else unk)}


_OF_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_OF_GPT2 = dict.fromkeys(("unk_token", "bos_token", "eos_token"), END_OF_TEXT)
BUILT = {
    "LlamaTokenizer": Built(
        tokens=_OF_LLAMA,
        model=lambda _: {"fuse_unk": True, "byte_fallback": True},
        pre_tokenizer=_pieces(_llama_scheme),
        decoder=lambda said: _pieces_decoder(stripped=_prefixed(said)),
    ),
    "CodeLlamaTokenizer": Built(
        tokens=_OF_LLAMA | INFILLING,
        model=lambda said: {"fuse_unk": True, "byte_fallback": True, **_unk(said)},
        pre_tokenizer=_pieces(lambda said: "first" if _prefixed(said) else "never"),
        decoder=lambda _: _pieces_decoder(stripped=True),
        around=_bos_before,
        further=tuple(INFILLING.values()),
    ),
    "GemmaTokenizer": Built(
        tokens={
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
        model=lambda said: {"fuse_unk": True, "byte_fallback": True, **_unk(said)},
        normalizer=lambda _: normalizers.Replace(" ", "▁"),
        pre_tokenizer=lambda _: pre_tokenizers.Split(" ", "merged_with_previous"),
        decoder=lambda _: _pieces_decoder(stripped=False),
    ),
    "GPT2Tokenizer": Built(
        tokens=_OF_GPT2,
        pre_tokenizer=lambda said: pre_tokenizers.ByteLevel(add_prefix_space=_spaced(said)),
        decoder=lambda _: decoders.ByteLevel(),
    ),
    "GPTNeoXTokenizer": Built(
        tokens=_OF_GPT2 | {"pad_token": "<|padding|>"},
        normalizer=lambda _: normalizers.NFC(),
        pre_tokenizer=lambda said: pre_tokenizers.ByteLevel(add_prefix_space=_spaced(said)),
        decoder=lambda _: decoders.ByteLevel(),
        around=_nothing_around,
    ),
    "CohereTokenizer": Built(
        tokens={
            "unk_token": "<UNK>",
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "sep_token": "<SEP>",
            "mask_token": "<MASK_TOKEN>",
        },
        normalizer=lambda _: normalizers.NFC(),
        pre_tokenizer=lambda said: pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=_spaced(said)),
            ]
        ),
        decoder=lambda _: decoders.ByteLevel(),
    ),
    "Qwen2Tokenizer": Built(
        tokens=dict.fromkeys(("unk_token", "eos_token", "pad_token"), END_OF_TEXT),
        normalizer=lambda _: normalizers.NFC(),
        pre_tokenizer=lambda said: pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=_spaced(said), use_regex=False),
            ]
        ),
        decoder=lambda _: decoders.ByteLevel(),
        marks_again=True,
    ),
}


@functools.lru_cache
def warn_once(sentence: str) -> None:
    """Log a warning about a folder, once in a process."""
    logger.warning("%s", sentence)


def class_of(folder: Path, model: Said, said: Said, is_byte_level: Callable[[], bool]) -> str:
    """Return the class in `BUILT` for a folder; empty: tokenizer.json is used unchanged.

    Args:
        model: config.json.
        said: tokenizer_config.json.
        is_byte_level: returns whether tokenizer.json has a step of that name.

    Raises:
        ModelLoadError: transformers would use another class.
    """
    path = folder / "tokenizer_config.json"
    declared = said.get("tokenizer_class") or model.get("tokenizer_class") or ""
    if not isinstance(declared, str):
        raise ModelLoadError(f"{path} names {declared!r:.100} as tokenizer_class; it must be a string")
    name, kind = declared.removesuffix("Fast"), str(model.get("model_type"))
    own = OF_TYPE.get(kind, "")
    code = _code(said)
    if code and not own and name not in READ | REFUSED | BUILT.keys():
        warn_once(
            f"{path} names {code} as the tokenizer, which is code of the model's folder; Baton runs none of it, and "
            "reads tokenizer.json, which may hold another one"
        )
    if not code and name == "LlamaTokenizer" and kind not in CORRECTED and is_byte_level():
        return ""
    if not code and name and own and (kind in CORRECTED or own == FILE):
        name = own
    name = name or own
    if name in REFUSED:
        raise ModelLoadError(
            f"{path} names {declared} as tokenizer_class, by which transformers reads parts of tokenizer.json or none; "
            f"Baton reads the whole: if that is the model's tokenizer, name {FILE} as tokenizer_class"
        )
    return name if name in BUILT else ""


def advice(model: Said) -> str:
    """Return advice for the case that tokenizer.json is right, and the class of its folder is not."""
    kind = str(model.get("model_type"))
    if kind in CORRECTED:
        return f"models of type {kind} have that class, whatever tokenizer_config.json names"
    return f"if tokenizer.json is right, name {FILE} as tokenizer_class in tokenizer_config.json"


def _code(said: Said) -> str:
    """Return the custom code that is named as the folder's tokenizer; empty: none."""
    named = said.get("auto_map")
    if isinstance(named, dict):
        named = named.get("AutoTokenizer")
    if isinstance(named, list):
        named = next((each for each in reversed(named) if each), None)
    return f"{named!s:.100}" if named else ""


def build(name: str, file: Mapping[str, Any], said: Said, advice: str) -> tokenizers.Tokenizer:
    """Return the tokenizer that a class creates from tokenizer.json, without any added token.

    Args:
        advice: what to do if the file is not such a tokenizer.

    Raises:
        ValueError: the file contains no BPE.
    """
    model = file["model"]
    kind = model.get("type") or ("BPE" if "merges" in model else "none")
    if kind != "BPE" or not isinstance(model.get("vocab"), dict):
        raise ValueError(
            f"its model is of type {kind}, and transformers' {name}, the class of this folder, would make a BPE of it: "
            f"{advice}"
        )
    merges: Any = [tuple(each.split(" ") if isinstance(each, str) else each) for each in model.get("merges") or ()]
    made = BUILT[name]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, **made.model(said)))
    if (post_processor := _without_vocabulary(file).post_processor) is not None:
        tokenizer.post_processor = post_processor
    if (normalizer := made.normalizer(said)) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = made.pre_tokenizer(said)
    tokenizer.decoder = made.decoder(said)
    return tokenizer


def finish(name: str, tokenizer: tokenizers.Tokenizer, said: Said, special: Sequence[str]) -> None:
    """Apply a class's changes to its tokenizer after all tokens are added."""
    if BUILT[name].marks_again:
        tokenizer.add_tokens([AddedToken(text, special=True) for text in special])
    BUILT[name].around(tokenizer, said)


def fix_words(tokenizer: tokenizers.Tokenizer, model: Said, said: Said) -> None:
    """Make a tokenizer of Mistral's pre-tokenize texts as in transformers if tokenizer_config.json asks for it.

    Args:
        model: config.json.
    """
    version = str(model.get("transformers_version") or "4").partition(".")[0]
    is_older = not version.isdigit() or int(version) < 5
    before = tokenizer.pre_tokenizer
    if (
        said.get("fix_mistral_regex") is not True
        or model.get("model_type") not in FIXED_TYPES
        or not is_older
        or before is None
        or tokenizer.get_vocab_size() <= MIN_FIXED_VOCABULARY
    ):
        return
    words = pre_tokenizers.Split(Regex(MISTRAL_WORDS), "isolated")
    if isinstance(before, pre_tokenizers.Sequence):
        before[0] = words
        tokenizer.pre_tokenizer = before
        return
    if isinstance(before, pre_tokenizers.Metaspace):
        before = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, before])


def replaced_parts(tokenizer: tokenizers.Tokenizer, file: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts that encode texts differently from the parts of tokenizer.json."""
    before, after = _without_vocabulary(file), tokenizer
    return [
        name.replace("_", "-")
        for name in ("normalizer", "pre_tokenizer")
        if _plain(getattr(before, name)) != _plain(getattr(after, name))
    ]


def _without_vocabulary(file: Mapping[str, Any]) -> tokenizers.Tokenizer:
    model = {**file["model"], "vocab": {}, "merges": []}
    return tokenizers.Tokenizer.from_str(json.dumps({**file, "model": model, "added_tokens": []}))


def _plain(part: Any) -> str:
    """Return a part as JSON, without fields that concern only offsets."""
    return re.sub(rb'"trim_offsets":\w+,?', b"", part.__getstate__()).decode() if part is not None else ""
