"""`baton doctor --model MODEL`: can this model be served, and how would its folder be read?

Nothing is started, no weight is loaded, and of a model of the hub only small files are fetched.
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

MEND = "name another model, or correct the file"


def checks(config: Config) -> list[Check]:
    """Every check of `model.id` or `model.path`, in the order in which a start meets them."""
    model = config.model
    is_here = bool(model.path) or model.id in CATALOGUE or is_local(model.id)
    try:
        # Of the hub the small files alone: what its weights are, the commit says.
        folder = resolve(model, cache_dir(config.cluster), weights=is_here).path
    except BatonError as error:
        return [Check("model", "fail", str(error), MEND)]
    found = [Check("model", "ok", f"{model.id or model.path}: {_kind(folder)}, in {folder}")]
    if is_here:
        found += guarded("weights", lambda: _weights(folder), MEND)
    found += guarded("tokenizer", lambda: _tokenizer(folder, model.chat_template), MEND)
    placed = replace(config, model=replace(model, path=str(folder)))
    found += guarded("settings", lambda: _settings(placed), MEND)
    if is_here:
        found += guarded("memory", lambda: _memory(placed), MEND)
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
        yield Check("weights", "warn", f"{names(others)} beside them: ignored", "remove what is not of this model")


def _tokenizer(folder: Path, chat_template: str) -> Iterator[Check]:
    tokenizer = Tokenizer.load(folder, chat_template)
    special, window = len(tokenizer.special_ids), tokenizer.max_model_len
    context = f"a context window of {window:,} tokens" if window else "no context window named"
    yield Check("tokenizer", "ok", f"{tokenizer.vocab_size:,} ids, {special} special tokens; {context}")
    ends = ", ".join(f"{tokenizer.token(token_id) or 'none'!r} ({token_id})" for token_id in tokenizer.eos_ids)
    if ends:
        yield Check("ends of an answer", "ok", ends)
    else:
        fix = "add eos_token_id to generation_config.json, or every answer goes on to max_tokens"
        yield Check("ends of an answer", "warn", "none is named", fix)
    yield _template(tokenizer)
    said = {each.name: getattr(tokenizer.default_sampling, each.name) for each in fields(SamplingParams)}
    neutral = SamplingParams()
    defaults = [f"{name} {value}" for name, value in said.items() if value != getattr(neutral, name)]
    yield Check("default sampling", "ok", ", ".join(defaults) or "none is recommended: temperature 1")
    if unapplied := unapplied_recommendations(folder):
        ignored = ", ".join(f"{name} {value}" for name, value in unapplied.items())
        yield Check("default sampling", "warn", f"not applied: {ignored}", "answers may differ from the authors' own")


def _template(tokenizer: Tokenizer) -> Check:
    template = tokenizer.chat_template
    if not template.source:
        return Check("chat template", "warn", "none: chats are refused, text prompts are served", "add one")
    try:
        Templates(*template.parts)
    except InvalidRequest as error:
        return Check("chat template", "fail", str(error), MEND)
    return Check("chat template", "ok", "reads tools" if template.reads_tools else "reads no tools")


def _settings(config: Config) -> Iterator[Check]:
    preflight.require_heads(config)
    preflight.require_runner(config)
    yield Check("settings", "ok", "fit the model")


def _memory(config: Config) -> Iterator[Check]:
    size = preflight.with_kv_size(config).engine.kv_cache_gib
    pools = "what a GPU has left" if size == "auto" else f"{size:.3g} GiB"
    yield Check("memory", "ok", f"the KV pool of each of {config.cluster.prefill + config.cluster.decode} has {pools}")
