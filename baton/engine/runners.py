"""Chooses the runner of a worker."""

from __future__ import annotations

import logging
from pathlib import Path

from baton.config import EngineConfig, ModelConfig
from baton.engine.core.runner import Runner
from baton.errors import NotNative

logger = logging.getLogger(__name__)
ARITHMETIC_LAYERS = 2
ARITHMETIC_BLOCKS = 4096
ARITHMETIC_MODEL_LEN = 8192


def make_runner(model: ModelConfig, engine: EngineConfig, cache: Path) -> Runner:
    """Returns the runner that `engine.runner` names; of `auto` the native one, or transformers where it is none for it.

    The log says in one line which one it is, and why. It takes seconds.

    Args:
        cache: folder in which the library of the native step is kept once it is built.

    Raises:
        ModelLoadError, ConfigError: it cannot run as configured, or does not know a setting that is set.
    """
    if engine.runner == "arithmetic":
        return _arithmetic(model, engine)
    # Imported on use: torch and transformers take seconds, and a native start may do without the latter.
    from baton.engine.model.logits_runner import LogitsRunner

    engine.refuse_unknown(LogitsRunner.unknown_settings)
    why = "engine.runner is transformers"
    if engine.runner != "transformers":
        from baton.engine.native.runner import NativeRunner

        try:
            runner = NativeRunner(model, engine, cache / "native")
        except NotNative as reason:
            if engine.runner == "native":
                raise
            why = str(reason)
        else:
            logger.info("the model runs natively: its type, this machine and the settings allow it")
            return runner
    model.require_exact(why)
    from baton.engine.model.transformers_runner import TransformersRunner

    logger.info("the model runs on transformers: %s", why)
    return TransformersRunner(model, engine)


def _arithmetic(model: ModelConfig, engine: EngineConfig) -> Runner:
    from baton.engine.model.arithmetic import ArithmeticRunner

    engine.refuse_unknown(ArithmeticRunner.unknown_settings)
    model.require_exact("engine.runner is arithmetic")
    return ArithmeticRunner(
        engine.num_blocks or ARITHMETIC_BLOCKS,
        engine.block_size,
        max_model_len=engine.max_model_len or ARITHMETIC_MODEL_LEN,
        max_num_seqs=engine.max_num_seqs,
        num_layers=ARITHMETIC_LAYERS,
        layer_s=engine.arithmetic_step_ms / 1e3 / ARITHMETIC_LAYERS,
        token_s=engine.arithmetic_token_ms / 1e3,
        tokenizer=Path(model.path) / "tokenizer.json" if model.path else None,
    )
