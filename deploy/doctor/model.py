"""`baton doctor --model MODEL`: checks that a model can be served, and shows how its folder is read.

It starts nothing and loads no weights. For a model of the hub it downloads only small files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from baton.config import Config
from baton.errors import BatonError, InvalidRequest
from baton.memory import GIB, weights_bytes
from baton.model_files import read_json, unapplied_recommendations
from baton.sampling import SamplingParams
from baton.template import Templates
from baton.weights_files import placed_tensors
from deploy.doctor import preflight
from deploy.doctor.checks import Check, guarded, names
from deploy.models import cache_dir, resolve
from deploy.models.catalogue import CATALOGUE
from deploy.models.resolve import is_local
from router.prompt import Tokenizer

FIX = "name another model, or correct the file"


def checks(config: Config) -> list[Check]:
    """Run every check of `model.id` or `model.path`, in the order of a start."""
    model = config.model
    is_here = bool(model.path) or model.id in CATALOGUE or is_local(model.id)
    try:
        # For a model of the hub only the small files: the commit identifies its weights.
        by_vllm = config.engine.runner == "vllm"
        folder = resolve(model, cache_dir(config.cluster), weights=is_here, by_vllm=by_vllm).path
    except BatonError as error:
        return [Check("model", "fail", str(error), FIX)]
    found = [Check("model", "ok", f"{model.id or model.path}: {_kind(folder)}, in {folder}")]
    if is_here:
        found += guarded("weights", lambda: _weights(folder), FIX)
    found += guarded("tokenizer", lambda: _tokenizer(folder, model.chat_template), FIX)
    placed = replace(config, model=replace(model, path=str(folder)))
    found += guarded("settings", lambda: _settings(placed), FIX)
    if is_here:
        found += guarded("memory", lambda: _memory(placed), FIX)
    return found


def _kind(folder: Path) -> str:
    config = read_json(folder / "config.json", required=True)
    architectures = config.get("architectures") or [config["model_type"]]
    return f"{architectures[0]} of {config.get('num_hidden_layers', '?')} layers"


def _weights(folder: Path) -> Iterator[Check]:
    placed = placed_tensors(folder)
    files = {path.name for path, _ in placed.values()}
    others = {path.name for path in folder.glob("*.safetensors")} - files
    found = f"{len(placed)} tensors of {weights_bytes(folder) / GIB:.2f} GiB in {names(files, 2)}"
    yield Check("weights", "ok", found)
    if others:
        fix = "remove files that do not belong to the model"
        yield Check("weights", "warn", f"{names(others)} in the same folder: ignored", fix)


def _tokenizer(folder: Path, chat_template: str) -> Iterator[Check]:
    tokenizer = Tokenizer.load(folder, chat_template)
    special, window = len(tokenizer.special_ids), tokenizer.max_model_len
    context = f"a context window of {window:,} tokens" if window else "no context window given"
    yield Check("tokenizer", "ok", f"{tokenizer.vocab_size:,} ids, {special} special tokens; {context}")
    ends = ", ".join(f"{tokenizer.token(token_id) or 'none'!r} ({token_id})" for token_id in tokenizer.eos_ids)
    if ends:
        yield Check("end-of-sequence tokens", "ok", ends)
    else:
        fix = "add eos_token_id to generation_config.json, or every response continues to max_tokens"
        yield Check("end-of-sequence tokens", "warn", "none", fix)
    yield _template(tokenizer)
    said = {each.name: getattr(tokenizer.default_sampling, each.name) for each in fields(SamplingParams)}
    neutral = SamplingParams()
    defaults = [f"{name} {value}" for name, value in said.items() if value != getattr(neutral, name)]
    yield Check("default sampling", "ok", ", ".join(defaults) or "none is recommended: temperature 1")
    if unapplied := unapplied_recommendations(folder):
        ignored = ", ".join(f"{name} {value}" for name, value in unapplied.items())
        yield Check("default sampling", "warn", f"not applied: {ignored}", "responses may differ from the authors' own")


def _template(tokenizer: Tokenizer) -> Check:
    template = tokenizer.chat_template
    if not template.source:
        return Check(
            "chat template", "warn", "none: chats are rejected, text prompts are served", "add a chat template"
        )
    try:
        Templates(*template.parts)
    except InvalidRequest as error:
        return Check("chat template", "fail", str(error), FIX)
    return Check("chat template", "ok", "supports tools" if template.reads_tools else "does not support tools")


def _settings(config: Config) -> Iterator[Check]:
    preflight.require_heads(config)
    preflight.require_runner(config)
    yield Check("settings", "ok", "suit the model")


def _memory(config: Config) -> Iterator[Check]:
    sizes = preflight.kv_sizes_in_words(preflight.with_kv_size(config))
    num_workers = config.cluster.prefill + config.cluster.decode
    found = sizes or "the free memory of its GPU for each KV pool"
    yield Check("memory", "ok", f"{num_workers} workers, {found}")
