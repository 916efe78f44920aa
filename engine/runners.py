"""Selection of a worker's runner."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from baton.cluster import fallback
from baton.config import EngineConfig, ModelConfig
from baton.errors import BatonError, ConfigError, ModelLoadError, NotNative
from baton.gpus import refuse_silent_cpu, sign_of_gpu
from baton.model_files import decoder_start_ids, denoises
from baton.tokenizer_file import read_vocabulary
from engine.core.draft_runner import DraftedRunner
from engine.core.runner import Runner

logger = logging.getLogger(__name__)


def make_runner(model: ModelConfig, engine: EngineConfig, cache: Path, set_aside: int = 0) -> Runner:
    """Return the runner that `engine.runner` names; for `auto` the native one, or transformers if it is not supported.

    The log states in one line which runner is used, and why. Loading takes seconds. With `engine.draft_model` the
    result is a `DraftedRunner`, and the log has one line for each of the two models.

    Args:
        cache: folder in which the built library of the native step is cached.
        set_aside: bytes of each GPU to leave for transfers.

    Raises:
        ModelLoadError, ConfigError: it cannot run as configured, or the draft model does not suit the model.
    """
    if not engine.draft_model:
        return _make_one(model, engine, cache, set_aside)
    if engine.tensor_parallel > 1:
        raise ConfigError("engine.draft_model needs engine.tensor_parallel 1: a draft model has one rank")
    if not Path(engine.draft_model).is_dir():
        raise ModelLoadError(f"engine.draft_model names a folder that does not exist: {engine.draft_model}")
    # Before the target, whose pool takes the remaining memory.
    try:
        draft = _make_one(*_draft_settings(model, engine), cache)
    except (ConfigError, ModelLoadError) as error:
        raise ModelLoadError(f"engine.draft_model {engine.draft_model}: {error}") from error
    try:
        target = _make_one(model, replace(engine, draft_model=""), cache, set_aside)
    except BatonError:
        draft.close()
        raise
    runner = DraftedRunner(target, draft)
    try:
        _require_alike(model, engine, runner)
    except ModelLoadError:
        runner.close()
        raise
    logger.info(
        "engine.draft_model %s proposes drafts, with a KV pool of %d blocks", engine.draft_model, draft.num_blocks[0]
    )
    return runner


def _draft_settings(model: ModelConfig, engine: EngineConfig) -> tuple[ModelConfig, EngineConfig]:
    """Return the settings of the draft model.

    Its KV is not transferred, so its type is the compute type. Its guesses need not be reproducible, and it sees no
    images.
    """
    own = replace(
        engine,
        draft_model="",
        kv_cache_gib=engine.draft_kv_cache_gib,
        num_blocks=0,
        max_model_len=0,
        kv_dtype="auto",
        batch_invariant=False,
        attention="auto",
        max_adapters=0,
        images="off",
    )
    return replace(model, path=engine.draft_model, revision=""), own


def _require_alike(model: ModelConfig, engine: EngineConfig, runner: DraftedRunner) -> None:
    """Raise ModelLoadError unless both models have the same tokens and both can roll back a draft."""
    name, target, draft = engine.draft_model, runner.target, runner.draft
    for which, each in (("the model", target), (f"engine.draft_model {name}", draft)):
        if each.spec.states:
            raise ModelLoadError(f"{which} has recurrent state, which cannot be rolled back after a rejected draft")
        if each.canvas_length:
            raise ModelLoadError(f"{which} draws its response by diffusion, which has no drafts")
    if target.vocab_size != draft.vocab_size:
        sizes = f"{draft.vocab_size} tokens, and the model {target.vocab_size}"
        raise ModelLoadError(f"engine.draft_model {name} has {sizes}: drafts need the same vocabulary")
    if differs := _first_difference(read_vocabulary(Path(name)), read_vocabulary(Path(model.path))):
        raise ModelLoadError(f"engine.draft_model {name} has another tokenizer: {differs}; drafts need the same one")


def _first_difference(draft: Mapping[str, int], target: Mapping[str, int]) -> str:
    """Return a description of the lowest id with different texts in two vocabularies; empty: there is none."""
    texts, others = ({token_id: text for text, token_id in each.items()} for each in (draft, target))
    for token_id in sorted(texts.keys() | others.keys()):
        text, other = texts.get(token_id), others.get(token_id)
        if text != other:
            return f"its token {token_id} is {_quoted(text)}, and the model's is {_quoted(other)}"
    return ""


def _quoted(text: str | None) -> str:
    return "none" if text is None else repr(text)


def _make_one(model: ModelConfig, engine: EngineConfig, cache: Path, set_aside: int = 0) -> Runner:
    # Imported here: torch and transformers take seconds, and a native start may not need the latter.
    import torch

    refuse_silent_cpu(model.device, torch.cuda.is_available(), sign_of_gpu(os.environ))
    why = "engine.runner is transformers"
    if engine.runner != "transformers":
        from engine.native.runner import NativeRunner

        try:
            runner = NativeRunner(model, engine, cache / "native")
        except NotNative as reason:
            if engine.runner == "native":
                raise
            why = str(reason)
        else:
            logger.info("the model runs natively: its type, this machine and the settings allow it")
            return runner
    if decoder_start_ids(Path(model.path)):
        from engine.model.encoder_decoder import EncoderDecoderRunner

        model.require_exact("the model has an encoder and a decoder")
        logger.info("the model has an encoder for the prompt and a decoder for the answer, and runs on transformers")
        return EncoderDecoderRunner(model, engine, set_aside)
    if denoises(Path(model.path)):
        from engine.model.diffusion import WORDS, DiffusionRunner

        model.require_exact(f"it is one of the {WORDS}")
        logger.info("the model draws its response by diffusion, and runs on transformers")
        return DiffusionRunner(model, engine, set_aside)
    if model.weights != "fp8":
        model.require_exact(why)
    from engine.model.transformers_runner import TransformersRunner
    from engine.native.spec import FAMILIES

    logger.info("the model runs on transformers: %s", why)
    # The native step keeps one group for all layers, and workers of both runners exchange KV.
    found = TransformersRunner(model, engine, set_aside, keeps_all=FAMILIES)
    if engine.runner == "auto" and not found.computes.gpu:
        own = found.computes
        found.computes = replace(own, fallbacks=(*own.fallbacks, fallback("the native step is not used", why)))
    return found
