"""The engines on which the contract suite runs, each with what its model says.

An engine joins the suite with a function that makes it, in `SUBJECTS`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from baton.config import Config, EngineConfig, ModelConfig, TestingConfig, load
from baton.messages import SequenceSpec
from baton.tasks import cancel_and_wait
from deploy.models import cache_dir
from engine.core.outputs import Generated, Preempted
from engine.core.sequence import Purpose
from engine.core.serving import ServedSequence, ServingEngine
from engine.engines import make_engine
from engine.testing import expected_tokens
from tests.support.event_log import EventLog
from tests.support.fake_vllm.environment import fake_vllm, model_without_weights
from tests.support.vllm import vllm_python
from tests.support.waiting import until
from tests.unit.engine.scripted import ScriptedEngine

SOON_S = 20.0
SETTINGS = EngineConfig(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=64, max_waiting=6)


@dataclass(kw_only=True)
class Subject:
    """An engine that the suite tests.

    Attributes:
        expected: (prompt, number of tokens) -> the tokens of a greedy answer.
    """

    engine: ServingEngine
    expected: Callable[[Sequence[int], int], list[int]]
    events: EventLog = field(default_factory=EventLog)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ServingEngine]:
        """Runs the engine, which must be as empty at the end as it was at first."""
        before = self.engine.load().blocks
        task = asyncio.create_task(self.engine.run(self.events))
        try:
            yield self.engine
            await self.is_empty()
            after = self.engine.load()
            assert (after.running, after.waiting, after.blocks.in_use) == (0, 0, before.in_use)
            assert after.blocks.free + after.blocks.cached == before.free + before.cached
            assert self.engine.self_check == "ok"
            assert not task.done(), task
        finally:
            await cancel_and_wait((task,))

    async def is_empty(self) -> None:
        """Waits until the engine has told that it holds nothing."""
        await until(lambda: not self.engine.load().running and self.events.num_idle > 0, SOON_S)

    async def answer(self, spec: SequenceSpec) -> tuple[list[int], list[Generated]]:
        """Returns all tokens of an answer, and the outputs that had them."""
        async with asyncio.timeout(SOON_S), self.engine.sequence(spec, Purpose.GENERATE) as handle:
            return await read(handle)


async def read(handle: ServedSequence) -> tuple[list[int], list[Generated]]:
    """Reads an answer to its end."""
    outputs: list[Generated] = []
    while not outputs or outputs[-1].finish_reason is None:
        for output in (await handle.next(), *handle.take_ready()):
            if not isinstance(output, Preempted):
                assert isinstance(output, Generated), output
                outputs.append(output)
    return [token for output in outputs for token in output.token_ids], outputs


def arithmetic(folder: Path) -> Subject:
    """Baton's own engine over the runner whose tokens can be computed by hand."""
    config = Config(engine=SETTINGS, testing=TestingConfig(arithmetic=True))
    return Subject(engine=make_engine(config, folder), expected=expected_tokens)


def scripted(folder: Path) -> Subject:
    """An engine of another make, which caches nothing and preempts."""
    return Subject(engine=ScriptedEngine(), expected=expected_tokens)


def native(folder: Path) -> Subject:
    """Baton's own engine with the native step."""
    return _own(folder, "native")


def transformers(folder: Path) -> Subject:
    """Baton's own engine with the runner of transformers."""
    return _own(folder, "transformers")


def hosted_arithmetic(folder: Path) -> Subject:
    """Baton's engine over vLLM's process, in which the arithmetic model takes the place of vLLM."""
    config = Config(
        model=model_without_weights(folder / "model"),
        engine=replace(SETTINGS, runner="vllm", vllm_python=fake_vllm(folder)),
    )
    return Subject(engine=make_engine(config, folder), expected=expected_tokens)


def vllm(folder: Path) -> Subject:
    """An unpatched vLLM, in a process and a Python environment of its own."""
    return _own(folder, "vllm", vllm_python=vllm_python(), vllm_args={"enforce_eager": True})


def vllm_pinning_by_request(folder: Path) -> Subject:
    """The same, as if vLLM's block pool could not be reached."""
    testing = TestingConfig(pins_by_request=True)
    return _own(folder, "vllm", testing, vllm_python=vllm_python(), vllm_args={"enforce_eager": True})


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    each.__name__: each
    for each in (arithmetic, scripted, hosted_arithmetic, native, transformers, vllm, vllm_pinning_by_request)
}
OF_REAL_MODELS = {"native", "transformers", "vllm", "vllm_pinning_by_request"}
"""Engines whose models have probabilities, so that seeds matter. They take seconds to load."""
CACHES_NOTHING = {"scripted"}
OF_VLLM = {"vllm", "vllm_pinning_by_request"}
"""Engines that need a real vLLM: `make test-vllm`."""
STARTS_AT_ONCE = {"scripted"}
"""Engines that have no queue."""


def _own(folder: Path, runner: str, testing: TestingConfig | None = None, **settings: Any) -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    tokens = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.25}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens)).eval()
    model.save_pretrained(folder / "model")
    config = Config(
        model=ModelConfig(path=str(folder / "model"), revision="tiny"),
        testing=testing or TestingConfig(),
        engine=EngineConfig(
            runner=runner,
            num_blocks=SETTINGS.num_blocks,
            max_num_seqs=SETTINGS.max_num_seqs,
            max_num_batched_tokens=SETTINGS.max_num_batched_tokens,
            max_waiting=SETTINGS.max_waiting,
            **settings,
        ),
    )

    def expected(prompt: Sequence[int], num_tokens: int) -> list[int]:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(num_tokens):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    cache = cache_dir(load().cluster)  # with the built library of the native step
    return Subject(engine=make_engine(config, cache), expected=expected)
