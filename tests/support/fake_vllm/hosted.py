"""Takes the place of `engine.vllm.hooks` in a host: a small engine with the interface of `HostedVllm`.

Its model is the arithmetic one (`engine.testing`), in Python alone: K holds the token, V holds (p + 1) * token, in two
layers of 64-bit integers that lie in the memory which the worker maps. The next token comes from what is read there, so
a lost, stale or swapped block changes the answer. Only `stop_token_ids` end an answer.

Some tokens of a prompt cause failures; see the constants.
"""

from __future__ import annotations

import importlib.util
import json
import math
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypedDict

from engine.vllm.messages import (
    Add,
    Adopt,
    Allocated,
    Counts,
    Failed,
    Group,
    Insert,
    KvMemory,
    LayerDone,
    Message,
    Pinned,
    PinPrefix,
    Progress,
    Ready,
    Start,
    Stepped,
    StoredBlock,
    params_of,
)

from .pool import OutOfBlocks, Pool

REFUSED = 40_001
"""vLLM does not take a prompt with this token."""
UNDRAWN = 40_002
"""The sampler draws no token for it."""
FATAL = 40_003
"""A step with it fails."""
DEADLY = 40_004
"""The process ends in a step with it."""
HANGING = 40_005
"""The process stops in a step with it."""
BABBLING = 40_006
"""In a step with it, the host sends what is not a message."""
BABBLE: Any = ("what", "is", "this")
UNCOMPILED, SLOWLY_COMPILED = "uncompiled", "slowly compiled"
"""Choices of a structured output that do not compile, or compile only after a second."""
VOCAB_SIZE, MODEL_LEN, NUM_LAYERS = 49152, 8192, 2
LOG_OF_BEST = math.log(1 - math.exp(-0.1))
"""Log probability of the best token; each one after it has 0.1 less."""


class Invalid(ValueError):
    """An error as pydantic raises it."""

    def errors(self) -> list[dict[str, Any]]:
        return [{"type": "value_error", "msg": "Value error, it is too long"}, {"msg": "Input should be a boolean"}]


class Given(TypedDict, total=False):
    """What a test decides; see `environment.fake_vllm`."""

    fails: str
    """`raises`, `validates`, `exits` or `babbles`: the way in which its start fails."""
    step_s: float
    """Minimum duration of a step, in seconds."""
    token_s: float
    """Additional seconds for each token of a step."""
    layout: str
    """`swapped`: the cache has blocks before layers, although it declares layers before blocks."""
    ready: dict[str, Any]
    """Fields of `Ready` that it reports wrongly."""


@dataclass(eq=False)
class Request:
    """A sequence in the fake."""

    asked: Add
    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    chain: list[StoredBlock] = field(default_factory=list)
    """Its full blocks that are cached."""
    num_computed: int = 0
    num_cached: int = -1
    """Cached tokens of the prompt when it got its first blocks; -1: it has none yet."""
    num_drawn: int = 0
    num_reported: int = 0
    """Number of blocks reported to the worker; for PREFILL sequences."""
    forced: int = -1

    @property
    def awaits_kv(self) -> bool:
        return self.asked.purpose == "receive"

    @property
    def is_prefill(self) -> bool:
        return self.asked.purpose == "prefill"


class HostedVllm:
    """See `engine.vllm.hooks.HostedVllm`."""

    def __init__(self, start: Start, failures: Any, memory: int, tell: Callable[[Message], None]) -> None:
        self._given: Given = json.loads((Path(sys.prefix) / "given.json").read_text())
        write_report(start)
        match self._given.get("fails"):
            case "raises":
                raise ValueError("there is no such architecture")
            case "validates":
                raise Invalid("2 validation errors for ModelConfig\n  Value error, ... [input_value=ArgsKwargs(...)]")
            case "exits":
                os._exit(7)
            case "babbles":
                tell(BABBLE)
        arguments = start.arguments | start.cpu_arguments
        self._block_size: int = arguments["block_size"]
        self._max_num_seqs: int = arguments["max_num_seqs"]
        self._most_tokens = self._num_prompt_tokens = int(arguments["max_num_batched_tokens"])
        num_blocks: int = arguments.get("num_gpu_blocks_override", 257) - 1
        asked_len = arguments["max_model_len"]
        self._max_model_len = min(MODEL_LEN if asked_len < 0 else asked_len, num_blocks * self._block_size)
        self._pool = Pool(num_blocks)
        self._shares = arguments["tensor_parallel_size"] == 1
        os.ftruncate(memory, NUM_LAYERS * (num_blocks + 1) * 2 * self._block_size * 8)
        self._map = mmap.mmap(memory, 0)
        self._values = memoryview(self._map).cast("q")
        self._tell = tell
        self._requests: dict[int, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._arriving: list[Request] = []
        """RECEIVE sequences with blocks, whose KV has not arrived."""
        self._kept: list[Request] = []
        """PREFILL sequences that have finished."""
        self._pins: dict[int, list[int]] = {}
        self._num_preempted = 0
        self._size = (0, 0, 0, 0)
        self._ends: list[tuple[int, int]] = []
        self._is_stuck = False
        self._memory = self._probed()
        self.descriptors: list[int] = []

    def _probed(self) -> KvMemory | None:
        if not self._shares:
            return None
        told: list[Message] = []
        self._tell, tell = told.append, self._tell
        num_tokens = min(self._block_size + 1, self._max_model_len - 1)
        self.add(Add(-1, [1] * num_tokens, num_tokens, 1, [], 0, "00", {"temperature": 0}, "prefill"))
        while self.has_work:
            self.step()
        self.abort(-1)
        self._pool.clear()
        self.update()
        self._tell = tell
        (probe,) = {tuple(message.block_ids) for message in told if isinstance(message, Allocated)}
        return KvMemory(NUM_LAYERS, self._pool.num_blocks + 1, 2 * self._block_size, "int64", list(probe))

    def ready(self) -> Ready:
        import torch

        ready = Ready(
            version="0.33.7",
            groups=[Group("full", NUM_LAYERS, self._block_size, 0)],
            num_blocks=self._pool.num_blocks,
            max_model_len=self._max_model_len,
            max_num_batched_tokens=self._most_tokens,
            vocab_size=VOCAB_SIZE,
            device="",
            dtype="int64",
            kv_dtype="auto",
            attention=f"arithmetic+torch:{torch.__version__}",
            quantization="",
            caches_prefixes=True,
            memory=self._memory,
            tag="arithmetic",
        )
        return ready._replace(**self._given.get("ready", {}))

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._arriving) and not self._is_stuck

    def prepare(self, asked: Add) -> None:
        structure = params_of(asked.sampling).structured_outputs
        assert structure is not None
        if UNCOMPILED in structure.choice:
            raise ValueError("there is no such structure")
        time.sleep(SLOWLY_COMPILED in structure.choice)

    def add(self, asked: Add) -> None:
        has_scores = asked.purpose != "receive" or params_of(asked.sampling).prompt_logprobs is None
        assert has_scores, "vLLM computes a prompt that it scores, and does not ask for its KV"
        if REFUSED in asked.token_ids:
            raise ValueError("vLLM refuses this prompt")
        assert asked.key not in self._requests, "a name is used twice"
        is_mere_prefix = asked.purpose == "receive" and not asked.num_new_tokens
        request = Request(asked, [*asked.token_ids, 0] if is_mere_prefix else list(asked.token_ids))
        assert len(request.token_ids) + asked.num_new_tokens <= self._max_model_len + is_mere_prefix, "it is too long"
        self._requests[asked.key] = request
        self._waiting.append(request)
        self._is_stuck = False

    def abort(self, key: int) -> None:
        if (request := self._requests.pop(key, None)) is None:
            return
        for place in (self._waiting, self._running, self._arriving, self._kept):
            if request in place:
                place.remove(request)
        self._pool.give_back(request.blocks)
        self._is_stuck = False

    def insert(self, asked: Insert) -> None:
        request = self._requests[asked.key]
        self._arriving.remove(request)
        request.forced = asked.first_token
        if asked.num_tokens >= len(request.token_ids) - 1:
            request.num_computed = len(request.token_ids) - 1
            self._cache(request, len(request.token_ids))
        else:
            request.num_computed = asked.num_tokens // self._block_size * self._block_size
        request.asked = request.asked._replace(purpose="generate")
        self._running.append(request)
        self._is_stuck = False

    def adopt(self, asked: Adopt) -> None:
        self._cache(self._requests[asked.key], asked.num_tokens)

    def pin_prefix(self, asked: PinPrefix) -> None:
        blocks: list[int] = []
        num_taken = 0
        for name in asked.names:
            block = self._pool.find(name)
            if block is None or num_taken + self._pool.is_free(block) > asked.num_free:
                break
            num_taken += self._pool.is_free(block)
            blocks.append(block)
        self._pool.touch(blocks)
        self._pins[asked.pin_id] = blocks
        self._tell(Pinned(asked.pin_id, blocks, num_taken))

    def unpin(self, pin_id: int) -> None:
        self._pool.give_back(self._pins.pop(pin_id))
        self._is_stuck = False

    def limit(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self) -> tuple[Stepped, list[Failed]]:
        began_s = time.perf_counter()
        scheduled = self._scheduled()
        for request, _ in scheduled:
            self._suffer(request)
        self._compute(scheduled)
        progress, failed = [], []
        for request, number in scheduled:
            request.num_computed += number
            self._cache(request, request.num_computed)
            if request.num_computed < len(request.token_ids):
                continue
            if UNDRAWN in request.asked.token_ids:
                self.abort(request.asked.key)
                failed.append(Failed(request.asked.key, "no token can be drawn"))
                continue
            progress.append(self._drawn(request))
        self._is_stuck = not scheduled
        self._check()
        least_s = self._given.get("step_s", 0.0) + self._given.get("token_s", 0.0) * sum(n for _, n in scheduled)
        time.sleep(max(0.0, began_s + least_s - time.perf_counter()))
        took_s = time.perf_counter() - began_s
        return self._update()._replace(took_s=took_s, size=self._size, progress=progress), failed

    def _scheduled(self) -> list[tuple[Request, int]]:
        """Returns the requests that compute something in this step, each with its number of tokens."""
        budget = min(self._most_tokens, len(self._running) + self._num_prompt_tokens)
        scheduled: list[tuple[Request, int]] = []
        num_preempted = self._num_preempted
        for request in list(self._running):
            if request not in self._running:
                continue  # it was preempted for one before it
            number = min(len(request.token_ids) - request.num_computed, budget)
            while number and not self._grow(request, request.num_computed + number):
                victim = self._running[-1]
                self._preempt(victim)
                budget += sum(each for one, each in scheduled if one is victim)
                scheduled = [each for each in scheduled if each[0] is not victim]
                number = number if victim is not request else 0
            if number:
                scheduled.append((request, number))
                budget -= number
        while self._waiting and num_preempted == self._num_preempted:
            request = self._waiting[0]
            if request.awaits_kv:
                if not self._start(request, None):
                    break
                self._arriving.append(self._waiting.pop(0))
                self._tell(Allocated(request.asked.key, request.blocks, request.num_cached))
                continue
            if not budget or len(self._running) >= self._max_num_seqs or not self._start(request, budget):
                break
            number = min(len(request.token_ids) - request.num_computed, budget)
            self._running.append(self._waiting.pop(0))
            scheduled.append((request, number))
            budget -= number
        self._measure(scheduled)
        return scheduled

    def _start(self, request: Request, budget: int | None) -> bool:
        """Gives a request its first blocks. False: there are too few, which counts as a preemption."""
        hits = self._hits(request)
        self._pool.touch([block for block, _ in hits])
        num_cached = len(hits) * self._block_size
        request.blocks, request.chain = [block for block, _ in hits], [stored for _, stored in hits]
        end = len(request.token_ids) if budget is None else min(len(request.token_ids), num_cached + budget)
        if not self._grow(request, end):
            self._pool.give_back(request.blocks)
            request.blocks, request.chain = [], []
            self._num_preempted += 1
            return False
        for block, stored in hits:
            self._pool.store(block, stored)  # vLLM reports it again
        request.num_computed = num_cached
        request.num_cached = num_cached if request.num_cached < 0 else request.num_cached
        return True

    def _hits(self, request: Request) -> list[tuple[int, StoredBlock]]:
        """Returns the cached blocks of its start. The last token is computed in any case."""
        hits: list[tuple[int, StoredBlock]] = []
        chain: list[StoredBlock] = []
        for _ in range((len(request.token_ids) - 1) // self._block_size):
            stored = self._named(request, chain)
            if (block := self._pool.find(stored.name)) is None:
                break
            chain.append(stored)
            hits.append((block, stored))
        return hits

    def _named(self, request: Request, chain: list[StoredBlock]) -> StoredBlock:
        """Returns the block after these ones."""
        begin = len(chain) * self._block_size
        token_ids = request.token_ids[begin : begin + self._block_size]
        before, salt = (chain[-1].name, "") if chain else ("", request.asked.salt)
        name = blake2b(f"{before} {salt} {token_ids}".encode(), digest_size=32).hexdigest()
        return StoredBlock(name, before, token_ids, salt)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        missing = -(-num_tokens // self._block_size) - len(request.blocks)
        try:
            request.blocks += self._pool.take(max(0, missing))
        except OutOfBlocks:
            return False
        return True

    def _preempt(self, request: Request) -> None:
        self._num_preempted += 1
        self._running.remove(request)
        self._waiting.insert(0, request)
        self._pool.give_back(request.blocks)
        request.blocks, request.chain, request.num_computed = [], [], 0

    def _cache(self, request: Request, num_tokens: int) -> None:
        while (len(request.chain) + 1) * self._block_size <= num_tokens:
            stored = self._named(request, request.chain)
            self._pool.store(request.blocks[len(request.chain)], stored)
            request.chain.append(stored)

    def _measure(self, scheduled: list[tuple[Request, int]]) -> None:
        """Records the size of a step, as the hooks do."""
        num_pairs = num_decoding = num_context = 0
        for request, number in scheduled:
            end = request.num_computed + number
            if number == 1 and end > len(request.asked.token_ids):
                num_decoding += 1
                num_context += end
            else:
                num_pairs += number * (2 * end - number) // 2
        self._size = (sum(number for _, number in scheduled), num_pairs, num_decoding, num_context)

    def _suffer(self, request: Request) -> None:
        """Applies the special tokens of a prompt."""
        if FATAL in request.asked.token_ids:
            raise RuntimeError("the model has failed")
        if DEADLY in request.asked.token_ids:
            os._exit(3)
        if HANGING in request.asked.token_ids:
            os.kill(os.getpid(), signal.SIGSTOP)
        if BABBLING in request.asked.token_ids:
            self._tell(BABBLE)

    # -- the model -----------------------------------------------------------------------------------------------------

    def _compute(self, scheduled: list[tuple[Request, int]]) -> None:
        """Writes KV, layer by layer, and reports it for PREFILL sequences."""
        prefills = [(request, number) for request, number in scheduled if request.is_prefill]
        self._ends = [(request.asked.key, request.num_computed + number) for request, number in prefills]
        for request, _ in prefills:
            if len(request.blocks) > request.num_reported:
                num_cached = -1 if request.num_reported else request.num_cached
                self._tell(Allocated(request.asked.key, request.blocks, num_cached))
                request.num_reported = len(request.blocks)
        for layer in range(NUM_LAYERS):
            for request, number in scheduled:
                for position in range(request.num_computed, request.num_computed + number):
                    token, place = request.token_ids[position], position % self._block_size
                    row = self._row(layer, request.blocks[position // self._block_size])
                    self._values[row + place] = token
                    self._values[row + self._block_size + place] = (position + 1) * token
            if self._ends and layer + 1 < NUM_LAYERS:
                self._tell(LayerDone(layer + 1, self._ends))

    def _row(self, layer: int, block: int) -> int:
        """Returns where a block of a layer begins."""
        if self._given.get("layout") == "swapped":
            return (block * NUM_LAYERS + layer) * 2 * self._block_size
        return (layer * (self._pool.num_blocks + 1) + block) * 2 * self._block_size

    def _next_token(self, request: Request) -> int:
        """Returns the next token: the sum of what is in the first layer, and one for each place that disagrees."""
        num_tokens, size = len(request.token_ids), self._block_size
        expected: list[int] = []
        num_wrong = 0
        for layer in range(NUM_LAYERS):
            keys: list[int] = []
            values: list[int] = []
            for block in request.blocks[: -(-num_tokens // size)]:
                row = self._row(layer, block)
                keys += self._values[row : row + size].tolist()
                values += self._values[row + size : row + 2 * size].tolist()
            expected = expected or [(position + 1) * token for position, token in enumerate(keys[:num_tokens])]
            weighted = [(position + 1) * token for position, token in enumerate(keys[:num_tokens])]
            num_wrong += sum(one != other for one, other in zip(weighted, expected, strict=True))
            num_wrong += sum(one != other for one, other in zip(values, expected, strict=False))
        return (sum(expected) + num_wrong) % MODULUS

    def _drawn(self, request: Request) -> Progress:
        """Returns the next token of a request, which may end with it."""
        asked, params = request.asked, params_of(request.asked.sampling)
        best = self._next_token(request)
        token = best if request.forced < 0 or request.num_drawn else request.forced
        request.token_ids.append(token)
        request.num_drawn += 1
        is_first = request.num_drawn == 1
        finish = "stop" if token in asked.stop_token_ids else ""
        if request.num_drawn >= max(1, asked.num_new_tokens) or len(request.token_ids) >= self._max_model_len:
            finish = finish or "length"
        if finish:
            self._running.remove(request)
            if request.is_prefill:
                self._kept.append(request)
            else:
                del self._requests[asked.key]
                self._pool.give_back(request.blocks)
        num_top, of_prompt = params.logprobs, params.prompt_logprobs
        return Progress(
            asked.key,
            [token],
            finish,
            request.num_cached if is_first else -1,
            [] if num_top is None else [self._scored(token, best, num_top)],
            [self._scored(each, each, of_prompt or 0) for each in asked.token_ids[1:]]
            if of_prompt is not None and is_first
            else [],
        )

    def _scored(self, token: int, best: int, num_top: int) -> list[tuple[int, float]]:
        """Returns a token with its log probability, and the likeliest ones."""
        tops = [((best + index) % MODULUS, LOG_OF_BEST - 0.1 * index) for index in range(num_top)]
        return [(token, LOG_OF_BEST - 0.1 * ((token - best) % MODULUS)), *tops]

    # -- reports -------------------------------------------------------------------------------------------------------

    def _update(self) -> Stepped:
        stored, removed = self._pool.taken()
        return Stepped(0.0, (0, 0, 0, 0), [], stored, removed, self._ends, self._counts())

    def update(self) -> Stepped:
        self._check()
        return self._update()._replace(ends=[])

    def _counts(self) -> Counts:
        unfinished = (*self._waiting, *self._running)
        num_uncomputed = sum(len(request.token_ids) - request.num_computed for request in unfinished)
        return Counts(self._pool.num_free, num_uncomputed, self._num_preempted, self._pool.num_named)

    def _check(self) -> None:
        """Every block is accounted for; a fault here is the fake's own, and ends the host."""
        self._pool.check([*(request.blocks for request in self._requests.values()), *self._pins.values()])

    def close(self) -> None:
        self._values.release()
        self._map.close()


def _largest_prime(at_most: int) -> int:
    return next(n for n in range(at_most, 1, -1) if all(n % d for d in range(2, math.isqrt(n) + 1)))


MODULUS = _largest_prime(VOCAB_SIZE)


def write_report(start: Start) -> None:
    """Writes a report for tests: the packages, environment, descriptors and arguments of this process."""
    names = ("torch", "numpy", "pydantic", "grpc", "redis", "xxhash", "hypothesis")
    found = {name: spec.origin for name in names if (spec := importlib.util.find_spec(name)) is not None}
    links = {}
    for each in Path("/proc/self/fd").iterdir():
        try:
            links[each.name] = str(each.readlink())
        except FileNotFoundError:
            continue  # the descriptor with which this loop lists the folder
    report = {
        "pid": os.getpid(),
        "folder": str(Path.cwd()),
        "found": found,
        "modules": sorted(sys.modules),
        "environment": dict(os.environ),
        "descriptors": links,
        "arguments": start.arguments,
        "cpu_arguments": start.cpu_arguments,
        "eos_token_ids": start.eos_token_ids,
    }
    written = Path(sys.prefix) / "host.json.new"
    written.write_text(json.dumps(report))
    written.rename(Path(sys.prefix) / "host.json")
