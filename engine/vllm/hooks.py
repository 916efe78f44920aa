"""An in-process engine of vLLM, and all code that uses the internals of its scheduler.

Baton uses public parts of vLLM if there are any: `LLMEngine`, its arguments, and the interface of logits processors.
The following parts are not public, and may differ in versions that Baton does not support (`versions.SUPPORTED`):

    scheduler.kv_event_publisher         replaced, so that block events stay in the process
    scheduler.schedule                   wrapped, to record the size of a step
    scheduler.max_num_scheduled_tokens   set, so that steps keep the ITL objectives of their sequences
    kv_cache_manager                     provides events and block tables; caches received blocks
    block_pool                           reports free and cached blocks; a pin adds references to its blocks
    Sampler.gather_logprobs              called once, so that its compiled part is ready
    scheduler._update_from_kv_xfer_finished   called, so that arrived and released KV takes effect without a step
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from io import FileIO
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm import __version__ as version
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus
from vllm.v1.sample.sampler import Sampler

from engine.core.sequence import Purpose
from engine.sampling.structure import Structures
from engine.vllm.connector import DESCRIPTOR, BatonConnector
from engine.vllm.gpu_export import close_all
from engine.vllm.messages import (
    Add,
    Adopt,
    Allocated,
    Counts,
    Failed,
    Group,
    Insert,
    KvMemory,
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
from engine.vllm.sampling import ARGUMENT, BatonSampler, Drawing, is_drawn_by_vllm, structures_of
from engine.vllm.versions import require_supported

logger = logging.getLogger(__name__)
FIRST_PIN = -2
"""Key of the request that keeps the prefix of pin 0. Pin n has the key `FIRST_PIN - n`."""


class HostedVllm:
    """vLLM's engine, with Baton's sampler. One thread calls all methods except `prepare`.

    Args:
        start: arguments and settings of the engine.
        failures: file in which the sampler reports sequences that it cannot draw; see `messages.FAILURES`.
        memory: descriptor of empty memory, into which the KV cache is put if it is shared on CPUs.
        send: takes messages to the worker, also within a step.

    Raises:
        ModelLoadError: this version of vLLM is not supported.
        Exception: of any kind, from vLLM.
    """

    def __init__(self, start: Start, failures: FileIO, memory: int, send: Callable[[Message], None]) -> None:
        require_supported(version)
        arguments = dict(start.arguments)
        if current_platform.is_cpu():
            arguments |= start.cpu_arguments
        is_wanted = current_platform.is_cpu() or (current_platform.is_cuda() and start.exchange_bytes > 0)
        if shares := is_wanted and arguments["tensor_parallel_size"] == 1:
            arguments |= _connected(arguments, memory, start.exchange_bytes)
        self._llm = LLMEngine.from_engine_args(
            EngineArgs(
                **arguments,
                logits_processors=[BatonSampler],
                kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
            )
        )
        core = self._llm.engine_core.engine_core
        self._scheduler = core.scheduler
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._most_tokens = self._scheduler.max_num_scheduled_tokens
        self._num_prompt_tokens = self._most_tokens
        self._is_chunked = bool(self._llm.vllm_config.scheduler_config.enable_chunked_prefill)
        vocab_size = self._llm.vllm_config.model_config.get_vocab_size()
        self._eos_token_ids = tuple(token for token in start.eos_token_ids if token < vocab_size)
        self._failures = failures
        self._size = (0, 0, 0, 0)
        self._num_preempted = 0
        self._first: dict[int, bool] = {}
        """Unfinished sequences, by key -> True if they have no token yet."""
        self._groups = [_group(each) for each in self._scheduler.kv_cache_config.kv_cache_groups]
        self._named_group = next((index for index, group in enumerate(self._groups) if group.kind == "full"), None)
        self._events = Events(self._named_group)
        self._scheduler.kv_event_publisher = self._events
        self._schedule, self._scheduler.schedule = self._scheduler.schedule, self._measured_schedule
        self._ids: dict[int, str] = {}
        """vLLM's request ids, by key, of the sequences that have blocks or will get them."""
        self._pins: dict[int, list[Any]] = {}
        self._send = send
        self._pins_by_request = start.pins_by_request or not all(
            hasattr(self._pool, name) for name in ("get_cached_block", "touch", "free_blocks")
        )
        self._pinned_in_step: list[Pinned] = []
        self._structures().load()  # otherwise the first structure takes seconds, and steps wait
        self._is_stuck = False
        """True if the last step computed nothing, because all sequences wait for KV."""
        self._connector: Any = self._scheduler.connector
        self._beside_model: Any = None
        if shares:
            self._beside_model = get_kv_transfer_group()
        self.descriptors: list[int] = []
        """Descriptors to send with `ready`; the caller closes them."""
        self._llm.collective_rpc(_prepare_logprobs)
        self._why_not_shared = "it has several ranks" if is_wanted and not shares else ""
        self._memory = self._probed() if shares else None
        if self._memory is not None:
            self.descriptors = self._beside_model.descriptors
            self._connector.send = self._beside_model.send = self._send_within_step

    def _probed(self) -> KvMemory | None:
        """Compute a prompt. Return the description of the shared cache, with the blocks of that prompt as its probe."""
        memory: KvMemory | None = self._beside_model.memory
        self._why_not_shared = self._beside_model.why_not_shared if memory is None else self._why_not_sharable()
        if memory is None or self._why_not_shared:
            close_all(self._beside_model.descriptors)
            return None
        sent: list[Message] = []
        self._connector.send = sent.append
        most_tokens = self._llm.vllm_config.model_config.max_model_len - 1  # a longer prompt is refused
        num_tokens = min(self._groups[0].block_size + 1, most_tokens)
        probe = Add(-1, [1] * num_tokens, num_tokens, 1, [], 0, "00", {"temperature": 0}, Purpose.PREFILL.value)
        self.add(probe)
        while self.has_work:
            self.step()
        self.abort(-1)
        self._llm.reset_prefix_cache()
        self._update()
        tables = [message.block_ids for message in sent if isinstance(message, Allocated)]
        return memory._replace(probe=tables[-1])

    def _why_not_sharable(self) -> str:
        if len(self._groups) != 1 or self._named_group is None:
            return "its layers are not all of one kind that keeps every token"
        is_asleep = self._llm.vllm_config.model_config.enable_sleep_mode
        return "vLLM may give its memory up in sleep mode" if is_asleep else ""

    def ready(self) -> Ready:
        """Return the engine's description."""
        config = self._llm.vllm_config
        model, cache = config.model_config, config.cache_config
        attention, isa = self._llm.collective_rpc(_layout_of)[0]
        return Ready(
            version=version,
            groups=self._groups,
            num_blocks=self._pool.num_gpu_blocks - 1,  # one is the null block
            max_model_len=model.max_model_len,
            max_num_batched_tokens=self._most_tokens,
            vocab_size=model.get_vocab_size(),
            device="" if current_platform.is_cpu() else current_platform.get_device_name(),
            dtype=str(model.dtype).removeprefix("torch."),
            kv_dtype=cache.cache_dtype,
            attention=attention,
            quantization=model.quantization or "",
            caches_prefixes=bool(cache.enable_prefix_caching) and self._named_group is not None,
            memory=self._memory,
            # What defines the order of values in a block of vLLM's.
            tag=f"vllm {attention} {isa} {cache.kv_cache_layout} {cache.cache_dtype}",
            why_not_shared=self._why_not_shared,
            pins_by_request=self._pins_by_request,
        )

    @property
    def has_work(self) -> bool:
        """True if a step may compute something."""
        return bool(self._first) and not self._is_stuck

    def prepare(self, asked: Add) -> None:
        """Compile a sequence's structure. Any thread may call this.

        Raises:
            InvalidRequest: the structure is not supported.
        """
        self._structures().prepare(params_of(asked.sampling))

    def _structures(self) -> Structures:
        model = self._llm.vllm_config.model_config
        return structures_of(model.model, model.get_vocab_size(), self._eos_token_ids)

    def add(self, asked: Add) -> None:
        """Add a sequence to vLLM's queue. Any error means that vLLM refuses it."""
        params = params_of(asked.sampling)
        token_ids = asked.token_ids
        if asked.purpose == Purpose.RECEIVE.value and not asked.num_new_tokens:
            # A prefix without output. vLLM always computes the last token; with one more it looks for the whole prefix.
            token_ids = [*token_ids, 0]
        unscored = replace(params, logprobs=None, prompt_logprobs=None)  # vLLM scores the tokens
        drawing = Drawing(asked.key, unscored, asked.choice_index, asked.num_prompt_tokens)
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max(1, asked.num_new_tokens),
            stop_token_ids=asked.stop_token_ids,
            ignore_eos=True,  # the end-of-sequence tokens are among `stop_token_ids`
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=None if is_drawn_by_vllm(params) else {ARGUMENT: drawing},
        )
        prompt = tokens_input(token_ids, cache_salt=asked.salt)
        self._ids[asked.key] = request_id = self._llm.add_request(str(asked.key), prompt, sampling)
        self._first[asked.key] = True
        self._is_stuck = False
        if asked.purpose == Purpose.PREFILL.value:
            self._connector.prefilled[request_id] = asked.key
        elif asked.purpose == Purpose.RECEIVE.value:
            self._connector.received[request_id] = asked.key

    def abort(self, key: int) -> None:
        """End a sequence. Its blocks are free before the next step, also if readers or incoming KV held them."""
        if (request_id := self._ids.pop(key, None)) is None:
            return
        self._is_stuck = False
        request = self._scheduler.requests.get(request_id)
        was_prefilled = self._connector is not None and request_id in self._connector.prefilled
        if self._connector is not None:
            self._connector.forget(request_id)
            self._beside_model.arrived.pop(request_id, None)  # vLLM may soon give its blocks to another sequence
        if self._first.pop(key, None) is not None:
            self._llm.abort_request([str(key)])
            if request is not None and request_id in self._scheduler.requests:  # it has blocks, and waits for KV
                self._finished(finished_recving={request_id})
        elif was_prefilled and request_id in self._scheduler.requests:
            self._finished(finished_sending={request_id})

    def insert(self, asked: Insert) -> None:
        """Continue a RECEIVE sequence, after its KV has arrived."""
        request = self._waiting(asked.key)
        if request is None:
            return
        if asked.first_token >= 0:
            drawing = (request.sampling_params.extra_args or {}).get(ARGUMENT) or Drawing(asked.key)
            request.sampling_params.extra_args = {ARGUMENT: drawing._replace(forced=asked.first_token)}
        if asked.num_tokens >= request.num_tokens - 1:
            self._finished(finished_recving={request.request_id})
        else:
            tables = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
            missing = tables[asked.num_tokens // self._groups[0].block_size :]
            self._beside_model.arrived[request.request_id] = missing
        self._is_stuck = False

    def adopt(self, asked: Adopt) -> None:
        """Add the received KV of a sequence to the prefix cache."""
        if (request := self._waiting(asked.key)) is not None:
            self._scheduler.kv_cache_manager.cache_blocks(request, asked.num_tokens)

    def pin_prefix(self, asked: PinPrefix) -> None:
        """Keep the cached blocks of a prefix, and answer `Pinned`.

        References on the blocks keep them without a step. If vLLM's pool lacks the methods for it, a request with the
        prefix and one more token keeps the blocks. It is slower, and computes blocks again that are no longer cached.
        """
        if not self._pins_by_request:
            self._send(self._pinned(asked))
            return
        key, prompt, drawn = FIRST_PIN - asked.pin_id, [*asked.token_ids, 0], {"temperature": 0}
        try:
            self.add(Add(key, prompt, len(prompt), 1, [], 0, asked.salt, drawn, Purpose.PREFILL.value))
        except Exception:  # for example, vLLM refuses a prefix of the maximum length
            logger.exception("a prefix could not be pinned")
            self._send(Pinned(asked.pin_id, [], 0))

    def _send_within_step(self, message: Message) -> None:
        """Send a message of the connector. Answer for a pinned prefix after the step, which may compute its blocks."""
        if isinstance(message, Allocated) and message.key <= FIRST_PIN:
            if message.num_cached_tokens >= 0:
                num_blocks = message.num_cached_tokens // self._groups[0].block_size
                answer = Pinned(FIRST_PIN - message.key, message.block_ids[:num_blocks], len(message.block_ids))
                self._pinned_in_step.append(answer)
            return
        self._send(message)

    def _pinned(self, asked: PinPrefix) -> Pinned:
        blocks: list[Any] = []
        num_taken = 0
        for name in asked.names:
            found = self._pool.get_cached_block(bytes.fromhex(name), [self._named_group])
            if not found or num_taken + (not found[0].ref_cnt) > asked.num_free:
                break
            num_taken += not found[0].ref_cnt
            blocks += found
        self._pool.touch(blocks)
        self._pins[asked.pin_id] = blocks
        return Pinned(asked.pin_id, [block.block_id for block in blocks], num_taken)

    def unpin(self, pin_id: int) -> None:
        """Release a pin."""
        if self._pins_by_request:
            self.abort(FIRST_PIN - pin_id)
            return
        self._pool.free_blocks(reversed(self._pins.pop(pin_id, [])))
        self._is_stuck = False

    def _waiting(self, key: int) -> Any:
        """Return the request of a sequence that waits for KV; None: the sequence does not wait for KV."""
        request = self._scheduler.requests.get(self._ids.get(key, ""))
        is_waiting = request is not None and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        return request if is_waiting else None

    def _finished(self, **requests: set[str]) -> None:
        self._scheduler._update_from_kv_xfer_finished(KVConnectorOutput(**requests))

    def limit(self, num_prompt_tokens: int) -> None:
        """Limit the prompt tokens of each step from now on."""
        self._num_prompt_tokens = num_prompt_tokens

    def step(self) -> tuple[Stepped, list[Failed]]:
        """Execute a step. Return its results, and the sequences that have failed."""
        if self._is_chunked:
            # vLLM keeps a state at block ends only, so it cannot compute less than a block of a prompt.
            least = max((group.block_size for group in self._groups if group.kind == "state"), default=0)
            limit = len(self._scheduler.running) + max(least, self._num_prompt_tokens)
            self._scheduler.max_num_scheduled_tokens = min(self._most_tokens, limit)
        reports_arrivals = self._beside_model is not None and bool(self._beside_model.arrived)
        began_s = time.perf_counter()
        outputs = self._llm.step()
        took_s = time.perf_counter() - began_s
        self._is_stuck = not self._size[0] and not reports_arrivals
        for answer in self._pinned_in_step:
            self._send(answer)
        self._pinned_in_step = []
        failed = self._failed()
        progress = []
        for output in outputs:
            key = int(output.request_id)
            if key in self._first and (output.outputs[0].token_ids or output.outputs[0].finish_reason):
                progress.append(self._progress(key, output))
        return self._update()._replace(took_s=took_s, size=self._size, progress=progress), failed

    def _update(self) -> Stepped:
        ends = list(self._connector.ends.items()) if self._connector is not None else []
        if events := self._scheduler.kv_cache_manager.take_events():
            self._events.take(events)
        stored, removed = self._events.taken(self._is_cached)
        return Stepped(0.0, (0, 0, 0, 0), [], stored, removed, ends, self.counts())

    def update(self) -> Stepped:
        """Return the changes since the last report, if there was no step."""
        return self._update()._replace(ends=[])

    def counts(self) -> Counts:
        """Return the state of vLLM's scheduler."""
        waiting = sum(request.num_tokens - request.num_computed_tokens for request in self._scheduler.waiting)
        running = sum(request.num_tokens - request.num_computed_tokens for request in self._scheduler.running)
        num_named = len(self._pool.cached_block_hash_to_block) if len(self._groups) == 1 else -1
        return Counts(self._pool.get_num_free_blocks(), waiting + running, self._num_preempted, num_named)

    def close(self) -> None:
        """End vLLM's own processes."""
        with contextlib.suppress(Exception):  # processes that are left end with this one
            self._llm.engine_core.shutdown()

    def _progress(self, key: int, output: Any) -> Progress:
        completion = output.outputs[0]
        is_first, self._first[key] = self._first[key], False
        finish = completion.finish_reason or ""
        if finish:
            del self._first[key]
            if self._connector is None or self._ids[key] not in self._connector.prefilled:
                del self._ids[key]
        logprobs = [
            _pairs(token, found) for token, found in zip(completion.token_ids, completion.logprobs or (), strict=False)
        ]
        of_prompt = []
        if is_first and output.prompt_logprobs:
            of_prompt = [
                _pairs(token, found)
                for token, found in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            ]
        num_cached = (output.num_cached_tokens or 0) if is_first else -1
        return Progress(key, list(completion.token_ids), finish, num_cached, logprobs, of_prompt)

    def _failed(self) -> list[Failed]:
        failed = []
        if lines := (self._failures.read() or b"").splitlines():
            self._failures.seek(0)
            self._failures.truncate()
            for key, reason in map(json.loads, lines):
                self.abort(key)
                failed.append(Failed(key, reason))
        return failed

    def _measured_schedule(self, *arguments: Any, **named: Any) -> Any:
        """Schedule as vLLM does, and record the size of the step."""
        output = self._schedule(*arguments, **named)
        num_new = num_pairs = num_decoding = num_context = 0
        requests = self._scheduler.requests
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = requests[request_id]
            end = request.num_computed_tokens  # it counts this step's tokens already
            num_new += num_tokens
            if num_tokens == 1 and end > request.num_prompt_tokens:
                num_decoding += 1
                num_context += end
            else:
                num_pairs += num_tokens * (2 * end - num_tokens) // 2
        self._size = (num_new, num_pairs, num_decoding, num_context)
        preempted = output.preempted_req_ids or set()
        self._num_preempted += len(preempted)
        if self._connector is not None and not self._connector.prefilled.keys().isdisjoint(preempted):
            # Reservations exclude it. Its blocks are now others', and a worker that copies them would send their KV.
            raise RuntimeError("vLLM has preempted a prompt whose KV is being sent")
        return output

    def _is_cached(self, name: bytes) -> bool:
        return self._named_group is not None and bool(self._pool.get_cached_block(name, [self._named_group]))


def _connected(arguments: Mapping[str, Any], memory: int, exchange_bytes: int) -> dict[str, Any]:
    """Return arguments that add the connector to vLLM, and on a GPU leave `exchange_bytes` of its memory free."""
    connector = KVTransferConfig(
        kv_connector=BatonConnector.__name__,
        kv_connector_module_path=BatonConnector.__module__,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={DESCRIPTOR: memory},
    )
    if current_platform.is_cpu():
        return {"kv_transfer_config": connector}
    share = arguments.get("gpu_memory_utilization", EngineArgs.gpu_memory_utilization)
    left = share - exchange_bytes / current_platform.get_device_total_memory()
    return {"kv_transfer_config": connector, "gpu_memory_utilization": left}


class Events:
    """Replacement of vLLM's event publisher that collects changes of one layer group's prefix cache."""

    def __init__(self, group: int | None) -> None:
        self._group = group
        self._events: list[BlockStored | BlockRemoved] = []

    def publish(self, batch: KVEventBatch) -> None:
        """Take the events of a step."""
        self.take(batch.events)

    def take(self, events: Iterable[Any]) -> None:
        """Take events."""
        if self._group is not None:
            self._events += [event for event in events if getattr(event, "group_idx", None) in (None, self._group)]

    def shutdown(self) -> None:
        """Do nothing: there is no thread."""

    def get_publisher_config(self) -> None:
        """Return None: nothing is published outside of the process."""

    def taken(self, is_cached: Any) -> tuple[list[StoredBlock], list[str]]:
        """Return the blocks that were cached since the last call, and the hashes that are no longer cached.

        vLLM reports a block again when a prompt reuses it. Several blocks may have the same hash. It is removed with
        the last of them.

        Args:
            is_cached: returns whether any block has a given hash now.
        """
        stored: list[StoredBlock] = []
        removed: dict[bytes, None] = {}
        for event in self._events:
            if isinstance(event, BlockRemoved):
                removed |= dict.fromkeys(event.block_hashes)
            elif isinstance(event, BlockStored):
                stored += _blocks_of(event)
        self._events = []
        return stored, [name.hex() for name in removed if not is_cached(name)]


def _blocks_of(event: BlockStored) -> list[StoredBlock]:
    before = event.parent_block_hash.hex() if event.parent_block_hash else ""
    blocks = []
    for index, name in enumerate(event.block_hashes):
        tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
        extra = event.extra_keys[index] if event.extra_keys else None
        blocks.append(StoredBlock(name.hex(), before, tokens, "" if before else _salt_of(extra)))
        before = name.hex()
    return blocks


def _salt_of(extra: Any) -> str:
    """Return the salt among the values that vLLM hashes with a first block's tokens."""
    return next((each for each in extra or () if isinstance(each, str)), "")


def _group(group: Any) -> Group:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    kind = next((name for kind, name in _KINDS.items() if isinstance(spec, kind)), "other")
    window = getattr(spec, "sliding_window", None) or 0
    return Group("window" if kind == "full" and window else kind, len(group.layer_names), spec.block_size, window)


_KINDS: Mapping[type, str] = {SlidingWindowSpec: "window", FullAttentionSpec: "full", MambaSpec: "state"}


def _prepare_logprobs(rank: Any) -> None:
    """Compile the part of the log probabilities that vLLM compiles at their first use.

    That takes seconds, in which all sequences would wait. Without a compiler it fails, and vLLM would end with it: then
    this rank runs such parts uncompiled.
    """
    vocab_size = rank.vllm_config.model_config.get_vocab_size()
    logprobs = torch.zeros(2, vocab_size, device=rank.device)
    try:
        Sampler.gather_logprobs(logprobs, 1, torch.zeros(2, dtype=torch.int64, device=rank.device))
    except TorchDynamoException as error:
        logger.warning("torch cannot compile here, and computes log probabilities uncompiled: %s", error)
        torch.compiler.set_stance("force_eager")


def _layout_of(rank: Any) -> tuple[str, str]:
    """Return the names of a rank's attention backends, and that of the processor's instructions they are laid out for.

    The layers are known to the rank's process alone.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    config = rank.vllm_config
    layers = get_layers_from_vllm_config(config, AttentionLayerBase).values()
    names = dict.fromkeys(layer.get_attn_backend().get_name() for layer in layers)
    every = config.compilation_config.static_forward_context.values()
    isa = next((found for layer in every if (found := getattr(getattr(layer, "impl", layer), "isa", ""))), "")
    return "+".join(names).lower(), isa


def _pairs(token: int, found: Mapping[int, Any]) -> list[tuple[int, float]]:
    """Return a token's log probability, followed by those of the likeliest ones, best first."""
    others = sorted(found.items(), key=lambda each: each[1].rank or 0)
    return [(token, found[token].logprob), *((each, value.logprob) for each, value in others)]
