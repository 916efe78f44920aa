"""Settings of the model and of one worker's engine."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BeforeValidator, Field

from baton.blocks import HASH_BLOCK
from baton.config.section import (
    NUMBER,
    ON_OFF,
    WHOLE,
    AtLeastOne,
    Float,
    Int,
    Must,
    OneOf,
    Share,
    String,
    Switch,
    Wait,
    section,
)
from baton.errors import ConfigError


def _none_is_auto(value: Any) -> Any:
    """Returns "auto" for 0, also where the environment gives it as text."""
    try:
        return value if isinstance(value, bool) or float(value) else "auto"
    except (TypeError, ValueError):
        return value


GibOrAuto: TypeAlias = Annotated[
    Literal["auto"] | Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER],
    Field(union_mode="left_to_right"),
    BeforeValidator(_none_is_auto),
    Must.be("auto or more than 0 GiB"),
]
CountOrAuto: TypeAlias = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=1), WHOLE],
    Field(union_mode="left_to_right"),
    Must.be("auto or at least 1"),
]
SwitchOrAuto: TypeAlias = Annotated[Literal["auto"] | Switch, Field(union_mode="left_to_right")]


class Batch(NamedTuple):
    """How much a worker does at a time, by its settings and its device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    plans_ahead: bool


ON_GPU, ON_CPU = Batch(256, 2048, True), Batch(64, 512, False)
"""What settings mean that are auto. A GPU needs large steps, and no pause between them. On a CPU a large step of a
prompt holds up all other sequences, and planning ahead was seen to gain nothing."""


@section("model")
class ModelConfig:
    """The model that the cluster serves."""

    id: String = "smollm2-135m-instruct"
    """A model of Baton's own catalogue, a Hugging Face hub id, or a local folder of safetensors."""
    served_name: String = ""
    """The model id that clients use. Empty: the last part of `id`."""
    path: String = ""
    """The resolved local folder; `baton up` fills it in."""
    revision: String = ""
    """Identity of the weights; seeds the block keys. `baton up` fills it in."""
    chat_template: String = ""
    """A file with the chat template that routers use in place of the folder's own. Empty: the folder's. Every router
    must have the same file."""
    dtype: Annotated[str, OneOf("auto", "float32", "bfloat16", "float16")] = "auto"
    """Type of the weights. auto: float32 on a CPU, the model's own on a GPU."""
    device: Annotated[str, OneOf("auto", "cpu", "cuda")] = "auto"
    """Device of the weights and of the KV cache. auto: a GPU where there is one; it is an error if there is
    one that cannot be used. cpu: the CPU, beside whatever GPUs."""
    weights: Annotated[str, OneOf("exact", "bf16", "int8g", "fp8")] = "exact"
    """What the weights are made to before they are used. exact: nothing. bf16: all products are those of bfloat16
    with sums in float32, the fastest for prompts on a CPU with AMX, at a very small loss of quality. int8g: the
    layers' products are those of 8-bit integers in groups of 32, the fastest for few streams, at a small loss of
    quality (docs/native.md). These two run on the native step alone. fp8: the layers' products are those of
    8-bit floats (e4m3), for half of bfloat16's memory, on transformers with a GPU of compute capability 8.9 or more
    alone (docs/gpu.md). Only workers with the same value exchange KV."""

    @property
    def identity(self) -> str:
        """What KV is computed with: the revision, and the weights' mode where they are not exact."""
        return self.revision if self.weights == "exact" else f"{self.revision}\0{self.weights}"

    def require_exact(self, runner: str) -> None:
        """Refuses weights that are to be made to something else.

        Args:
            runner: the engine that cannot do it, in words, perhaps with the reason.

        Raises:
            ConfigError: they are; the message names the setting.
        """
        if self.weights != "exact":
            needed = "transformers on a GPU" if self.weights == "fp8" else "the native step"
            raise ConfigError(f"model.weights {self.weights} needs {needed}: {runner}; set it to exact")


@section("engine")
class EveryEngineConfig:
    """Settings of one worker's engine, of whatever make."""

    runner: Annotated[str, OneOf("auto", "native", "transformers", "arithmetic")] = "auto"
    """What computes. native: C code of our own, in float32 on CPUs, for the model types that it knows; it is built by
    the machine's C compiler. transformers: the library's own models. auto: native where it can, otherwise transformers;
    the log says which and why. arithmetic: a model whose answers can be worked out by hand, for tests and
    benchmarks."""
    block_size: Int = 16
    """Tokens per KV block; a multiple of 16."""
    kv_cache_gib: GibOrAuto = "auto"
    """Memory of the KV pool, in GiB, per rank. auto, or 0: a share of the memory that is free. On a GPU it is 90 % of
    what the weights and the largest step leave, or less where transfers may take more than the rest
    (`transfer.gpu_rings_mib`); of several ranks, whose pools exist before they load, 85 % of what weights and transfers
    leave by an estimate. On a CPU it is half of the machine's, divided among its workers, and at most 2 GiB or the size
    of weights and process, whichever is more. A value above the free memory is refused."""
    memory_share: Share = 1.0
    """Share of the memory of its machine, or of its GPU, that a worker takes as its own where `kv_cache_gib` is auto;
    the rest is left to other programs. Workers of one Ray node divide the node's memory evenly by themselves; on GPUs
    each has the part of a GPU that Ray assigns to it (`cluster.gpus_per_worker`)."""
    num_blocks: Int = 0
    """Blocks of the KV pool; 0: as many as fit into `kv_cache_gib`."""
    max_num_seqs: CountOrAuto = "auto"
    """Sequences that may hold blocks at a time: those in the running batch, and those reserved for incoming KV. auto:
    256 on a GPU and 64 on CPUs, or `max_num_batched_tokens` if that is set and less."""
    max_num_batched_tokens: CountOrAuto = "auto"
    """Tokens per step; longer prompts are prefilled in chunks. auto: 2,048 on a GPU and 512 on CPUs, or `max_num_seqs`
    if that is set and more."""
    max_model_len: Int = 0
    """Longest prompt plus answer, in tokens; 0: the model's own limit, or what the KV pool can hold if that is less."""
    tensor_parallel: AtLeastOne = 1
    """Ranks per worker: processes on one machine that share the model's weights and KV heads and compute every step
    together, each with its own GPU where there are GPUs. Must divide the number of KV heads."""

    def __post_init__(self) -> None:
        if self.runner in ("arithmetic", "native") and self.tensor_parallel > 1:
            raise ConfigError(f"engine.runner {self.runner} has one rank; set engine.tensor_parallel to 1")
        if self.max_model_len and self.max_model_len < HASH_BLOCK:
            raise ConfigError(
                f"engine.max_model_len must be 0 or at least {HASH_BLOCK} tokens, got {self.max_model_len}"
            )
        most, sequences = self.max_num_batched_tokens, self.max_num_seqs
        if most != "auto" and sequences != "auto" and most < sequences:
            raise ConfigError(
                f"engine.max_num_batched_tokens ({most}) must be at least engine.max_num_seqs ({sequences}), or some "
                "sequences would never get a turn"
            )
        if self.block_size < HASH_BLOCK or self.block_size % HASH_BLOCK:
            raise ConfigError(f"engine.block_size must be a multiple of {HASH_BLOCK}, got {self.block_size}")


@section("engine")
class EngineConfig(EveryEngineConfig):
    """The engine of one worker."""

    # Known to Baton's own engine alone:
    arithmetic_step_ms: Float = 0.0
    """Minimum duration of a step of the arithmetic model, in milliseconds; it sleeps to reach it."""
    arithmetic_token_ms: Float = 0.0
    """Additional minimum duration for each token that a step of the arithmetic model computes, in milliseconds."""
    max_waiting: AtLeastOne = 1024
    """Sequences that may wait for blocks before a worker refuses more."""
    output_reservation: Int = 512
    """Answer tokens for which a decode worker reserves blocks up front; longer answers grow block by block."""
    plan_ahead: SwitchOrAuto = "auto"
    """Whether a step is planned while the one before it runs, so that the model need not wait for the engine's books.
    Answers are the same token for token. auto: on a GPU."""
    num_threads: AtLeastOne = 1
    """Compute threads per rank. Two contended threads can be 40 times slower than one."""
    kv_dtype: Annotated[str, OneOf("auto", "float32", "bfloat16", "int8", "fp8")] = "auto"
    """Type of the KV pages. auto: that of the arithmetic. bfloat16 takes half of float32's memory and reads. int8 takes
    little more than a quarter, with a scale for each token and head, in the native step alone; fp8 (e4m3, without a
    scale) a quarter, on transformers alone, meant for GPUs. Pages of these two go to workers that have the same, with
    transfer.wire_dtype auto. All change answers a little: docs/native.md and docs/gpu.md say how much."""
    attention: Annotated[str, OneOf("auto", "flashinfer")] = "auto"
    """What attends on a GPU. auto: the project's own kernels where they run and prove right, torch's otherwise.
    flashinfer: FlashInfer, which is to be installed beside Baton, for decodes, and the project's kernels for all else,
    on transformers alone; a worker where it is not there, cannot, or does not prove right refuses to start."""
    batch_invariant: Switch = False
    """Whether an answer and its log probabilities are the same to the bit alone or beside others, in whatever chunks
    its prompt is computed, and when it goes on in another worker with the same kind of GPU. On a GPU products and
    attention then have one way to add up, which takes longer (docs/gpu.md); a model, a device or a setting that cannot
    keep it is refused by name. The native step is so anyway. Only workers with the same value exchange KV."""
    speculation: Annotated[str, OneOf("off", "ngram"), ON_OFF] = "ngram"
    """Whether steps check guesses at the tokens that follow. ngram: what has followed the last tokens before, in the
    prompt or the answer, where that is expected to gain time. Answers are the same token for token."""
    max_draft_tokens: AtLeastOne = 12
    """Guesses that a step checks for each sequence at most."""
    draft_model: String = ""
    """Folder of a smaller model with the same vocabulary, which guesses where look-up does not and where that is
    expected to gain time (docs/scheduling.md). Workers that start in the decode pool load it, unless `speculation` is
    off; it has one rank. Empty: there is none."""
    draft_kv_cache_gib: Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER, Must.be("more than 0 GiB")] = 0.25
    """Memory of the draft model's own KV pool, in GiB. A sequence that does not fit into it has no guesses of the
    model."""
    step_timeout_s: Wait = 60.0
    """Longest step, in seconds, unless 20 times what such a step is expected to take is more. A longer one means that
    the device, or one of several ranks, hangs: the worker's requests go on in other workers, and its process ends."""

    def __post_init__(self) -> None:
        EveryEngineConfig.__post_init__(self)
        if self.batch_invariant and self.tensor_parallel > 1:
            raise ConfigError(
                f"engine.batch_invariant cannot be kept with engine.tensor_parallel {self.tensor_parallel}: in which "
                "order ranks are added up depends on how many rows there are; set one of them to its default"
            )
        if self.batch_invariant and self.attention == "flashinfer":
            raise ConfigError(
                "engine.batch_invariant cannot be kept with engine.attention flashinfer, which divides a batch by what "
                "is in it; set one of them to its default"
            )

    def batch(self, *, on_gpu: bool) -> Batch:
        """Returns what the settings mean for a worker; what is set counts on every device.

        Args:
            on_gpu: whether its model computes on a GPU.
        """
        sequences, tokens, plans_ahead = ON_GPU if on_gpu else ON_CPU
        if self.max_num_batched_tokens != "auto":
            tokens = self.max_num_batched_tokens
            sequences = min(sequences, tokens)
        if self.max_num_seqs != "auto":
            sequences = self.max_num_seqs
            tokens = max(sequences, tokens)
        return Batch(sequences, tokens, plans_ahead if self.plan_ahead == "auto" else self.plan_ahead)

    def refuse_unknown(self, unknown: Collection[str]) -> None:
        """Refuses what an engine does not know.

        Args:
            unknown: names of settings.

        Raises:
            ConfigError: one of them differs from its default; the message names it.
        """
        defaults = EngineConfig()
        found = [f"engine.{name}" for name in sorted(unknown) if getattr(self, name) != getattr(defaults, name)]
        if found:
            unset = f"unset {'it' if len(found) == 1 else 'them'}"
            raise ConfigError(f"engine.runner {self.runner} does not know {' and '.join(found)}; {unset}")


OWN_SETTINGS = frozenset(EngineConfig.__annotations__)
"""Settings that Baton's own engine alone knows. An engine of another make refuses them, and what else it cannot do."""
