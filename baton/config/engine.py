"""Settings of the model and of one worker's engine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BeforeValidator, Field

from baton.blocks import HASH_BLOCK
from baton.config.section import (
    JSON,
    NUMBER,
    ON_OFF,
    WHOLE,
    AtLeastOne,
    Int,
    Must,
    NotNegative,
    OneOf,
    Share,
    String,
    Switch,
    Wait,
    section,
)
from baton.errors import ConfigError
from baton.spelling import nearest


def _none_is_auto(value: Any) -> Any:
    """Return "auto" for 0, which the environment gives as text, and any other value unchanged."""
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
    """Limits on the work of one step, resolved for a worker's device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    plans_ahead: bool


ON_GPU, ON_CPU = Batch(256, 2048, True), Batch(64, 512, False)
"""Values of the settings that are auto. A GPU needs large steps without pauses between them. On a CPU a large prefill
step delays all other sequences, and planning ahead gained nothing in measurements."""


@section("model")
class ModelConfig:
    """Model that the cluster serves."""

    id: String = "smollm2-135m-instruct"
    """Model from Baton's catalogue, a Hugging Face hub id, or a local folder of safetensors."""
    served_name: String = ""
    """Model id that clients use. Empty: the last part of `id`."""
    release: String = ""
    """Name of this release of the model in metrics and in `baton status`, unique at its endpoint. Empty: `served_name`
    with the first digits of the content id."""
    share: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False), NUMBER, Must.be("0 to 1000000")] = 1.0
    """Share of the sessions of `served_name`, relative to the other releases that serve the same name; 0: none. With 1
    and 9, a tenth of the sessions goes to the first one."""
    path: String = ""
    """Resolved local folder; set by `baton up`."""
    revision: String = ""
    """Identity of the weights, from which the block keys are derived; set by `baton up`."""
    chat_template: String = ""
    """File with a chat template that routers use instead of the model's own. Empty: the model's own. The file must be
    the same on all workers, which provide it to routers. It must also be on routers that have this model in their own
    configuration."""
    dtype: Annotated[str, OneOf("auto", "float32", "bfloat16", "float16")] = "auto"
    """Type of the weights. auto: float32 on a CPU, the model's own type on a GPU."""
    device: Annotated[str, OneOf("auto", "cpu", "cuda")] = "auto"
    """Device of the weights and of the KV cache. auto: a GPU if the machine has one; a GPU that cannot be used is an
    error. cpu: the CPU, even if there are GPUs."""
    weights: Annotated[str, OneOf("exact", "bf16", "int8g", "fp8")] = "exact"
    """Weight format used for computation. exact: as loaded. bf16: matrix products in bfloat16 with float32
    accumulation, the fastest format for prompts on a CPU with AMX, at a very small loss of quality. int8g: the products
    of the layers in 8-bit integers with groups of 32, the fastest format for few concurrent sequences, at a small loss
    of quality (docs/native.md). bf16 and int8g require the native step. fp8: the products of the layers in 8-bit floats
    (e4m3), which take half of bfloat16's memory; it requires the transformers runner and a GPU of compute capability
    8.9 or higher (docs/gpu.md). Only workers with the same value exchange KV."""

    @property
    def identity(self) -> str:
        """Identity of the weights that compute KV: the revision, plus the weight format unless it is exact."""
        return self.revision if self.weights == "exact" else f"{self.revision}\0{self.weights}"

    def require_exact(self, runner: str) -> None:
        """Refuse every weight format but exact.

        Args:
            runner: sentence about the engine that supports no other format, perhaps with the reason.

        Raises:
            ConfigError: `weights` is not exact; the message names the setting.
        """
        if self.weights != "exact":
            needed = "transformers on a GPU" if self.weights == "fp8" else "the native step"
            raise ConfigError(f"model.weights {self.weights} needs {needed}: {runner}; set it to exact")


VLLM_ARGS = {
    "quantization": "quantization method of the checkpoint, if its folder does not name it",
    "load_format": "format from which vLLM loads the weights",
    "model_impl": "vLLM's own implementation of the model, or that of transformers",
    "enforce_eager": "run without compilation and without CUDA graphs",
    "optimization_level": "how much vLLM compiles at its start",
    "compilation_config": "details of the compilation",
    "cudagraph_capture_sizes": "batch sizes with a CUDA graph",
    "gpu_memory_utilization": "share of a GPU's memory for weights, steps and KV; Baton's `memory_share` scales it",
    "cpu_offload_gb": "GiB of the weights that are kept in main memory instead of the GPU's",
    "kv_cache_dtype": "data type of the KV cache",
    "mamba_cache_dtype": "data type of the convolution states",
    "mamba_ssm_cache_dtype": "data type of the recurrent states",
    "attention_backend": "attention implementation",
    "moe_backend": "implementation of the experts",
    "linear_backend": "implementation of the matrix products",
    "enable_eplb": "balance the load of the experts",
    "disable_custom_all_reduce": "use only NCCL to reduce between GPUs",
    "enable_prefix_caching": "reuse cached prefixes; by default vLLM decides it for the model",
    "hf_overrides": "values that replace those of config.json",
}
"""Arguments of vLLM's engine that `engine.vllm_args` may contain, with what each decides."""
VLLM_ARGS_OF_MODEL = frozenset({"quantization", "hf_overrides"})
"""Names in `VLLM_ARGS` with which vLLM computes another model from the same folder."""


@section("engine")
class EveryEngineConfig:
    """Settings of one worker's engine that every engine supports."""

    runner: Annotated[str, OneOf("auto", "native", "transformers", "vllm")] = "auto"
    """Engine that computes the model. native: Baton's C code, in float32 on CPUs, for supported model types; the
    machine's C compiler builds it. transformers: the models of the transformers library. auto: native if it supports
    the model, otherwise transformers; the log shows which and why. vllm: an unpatched vLLM, installed in
    an environment of its own (`vllm_python`). docs/engines.md compares the engines."""
    block_size: Int = 16
    """Tokens per KV block; a multiple of 16."""
    kv_cache_gib: GibOrAuto = "auto"
    """Size of the KV pool of each rank, in GiB. auto or 0: a share of the free memory. On a GPU it is 90 % of what
    remains after the weights and the largest step, or less if transfers need more than the remaining 10 %
    (`transfer.gpu_rings_mib`). With several ranks, whose pools are allocated before the weights load, it is 85 % of the
    estimated remainder after weights and transfers. On a CPU it is half of the machine's memory, divided among its
    workers, but at most 2 GiB or the size of the weights and the process, whichever is larger. A value above the free
    memory is refused."""
    memory_share: Share = 1.0
    """Share of the memory of its machine or GPU that a worker uses if `kv_cache_gib` is auto; the rest stays free for
    other programs. Workers on one Ray node divide the node's memory evenly without this setting; on GPUs each uses the
    fraction of a GPU that Ray assigns to it (`cluster.gpus_per_worker`)."""
    num_blocks: Int = 0
    """Number of blocks in the KV pool; 0: as many as fit into `kv_cache_gib`."""
    max_num_seqs: CountOrAuto = "auto"
    """Maximum number of sequences that hold blocks at a time: those in the running batch, and those reserved for
    incoming KV. auto: 256 on a GPU and 64 on CPUs, or `max_num_batched_tokens` if that is set and smaller."""
    max_num_batched_tokens: CountOrAuto = "auto"
    """Maximum number of tokens per step; longer prompts are prefilled in chunks. auto: 2,048 on a GPU and 512 on CPUs,
    or `max_num_seqs` if that is set and larger."""
    max_model_len: Int = 0
    """Maximum length of prompt plus output, in tokens; 0: the model's own limit, or the capacity of the KV pool if that
    is smaller."""
    tensor_parallel: AtLeastOne = 1
    """Ranks per worker. The ranks are processes on one machine that share the model's weights and KV heads and compute
    every step together; on GPUs each rank has its own. Must divide the number of KV heads, unless transformers computes
    the attention of the model's type whole on each rank."""

    def __post_init__(self) -> None:
        if self.runner == "native" and self.tensor_parallel > 1:
            raise ConfigError("engine.runner native has one rank; set engine.tensor_parallel to 1")
        if self.max_model_len and self.max_model_len < HASH_BLOCK:
            raise ConfigError(
                f"engine.max_model_len must be 0 or at least {HASH_BLOCK} tokens, got {self.max_model_len}"
            )
        most, sequences = self.max_num_batched_tokens, self.max_num_seqs
        if most != "auto" and sequences != "auto" and most < sequences:
            raise ConfigError(
                f"engine.max_num_batched_tokens ({most}) must be at least engine.max_num_seqs ({sequences}), otherwise "
                "some sequences would never be scheduled"
            )
        if self.block_size < HASH_BLOCK or self.block_size % HASH_BLOCK:
            raise ConfigError(f"engine.block_size must be a multiple of {HASH_BLOCK}, got {self.block_size}")


@section("engine")
class EngineConfig(EveryEngineConfig):
    """Engine of one worker."""

    vllm_python: String = ""
    """Absolute path of the Python interpreter of the environment in which vLLM is installed, such as
    /opt/vllm/bin/python. Required if `runner` is vllm. Baton need not be installed there."""
    vllm_args: Annotated[dict[str, Any], JSON] = field(default_factory=dict)
    """Arguments of vLLM's engine that Baton passes on if `runner` is vllm, by vLLM's names, such as
    {quantization: awq, gpu_memory_utilization: 0.85}. docs/engines.md lists them. Baton sets all others itself."""
    max_waiting: AtLeastOne = 1024
    """Maximum number of sequences that wait for blocks; a worker refuses further ones."""
    output_reservation: Int = 512
    """Output tokens for which a decode worker reserves blocks at the start; longer outputs grow block by block."""
    snapshot_tokens: AtLeastOne = 1024
    """Tokens between two snapshots of recurrent layers' states, rounded up to whole blocks. A later prompt continues
    from the last snapshot in the start that it shares with this one. A snapshot takes the memory of one sequence's
    states in the KV pool. Models without recurrent layers ignore this setting."""
    plan_ahead: SwitchOrAuto = "auto"
    """Plan a step while the previous one runs, so that the model does not wait for the scheduler. The generated tokens
    are the same. auto: on a GPU."""
    num_threads: AtLeastOne = 1
    """Compute threads per rank. Two threads that compete for a core can be 40 times slower than one."""
    kv_dtype: Annotated[str, OneOf("auto", "float32", "bfloat16", "int8", "fp8")] = "auto"
    """Type of the KV pages. auto: the compute type. bfloat16 takes half the memory and bandwidth of float32. int8, with
    a scale per token and head, takes little more than a quarter and requires the native step. fp8 (e4m3, without
    scales) takes a quarter and requires the transformers runner; it is meant for GPUs. int8 and fp8 pages transfer only
    between workers with the same kv_dtype, and only with transfer.wire_dtype auto. A type narrower than the compute
    type changes the output slightly; docs/native.md and docs/gpu.md give measurements."""
    attention: Annotated[str, OneOf("auto", "flashinfer")] = "auto"
    """Attention implementation on a GPU. auto: Baton's own kernels if they run and pass their self-test, otherwise
    torch's. flashinfer: FlashInfer for decode steps and Baton's kernels for all other steps. It requires the
    transformers runner and an installed flashinfer-python; a worker refuses to start if FlashInfer is missing,
    unsupported or fails its self-test."""
    batch_invariant: Switch = False
    """Make outputs and log probabilities bitwise reproducible: independent of the other requests in the batch, of how
    the prompt is chunked, and of a migration to another worker with the same kind of GPU. On a GPU matrix products and
    attention then use one fixed order of summation, which is slower (docs/gpu.md). A model, device or setting that
    cannot guarantee this is refused by name. The native step is always batch-invariant. Only workers with the same
    value exchange KV."""
    speculation: Annotated[str, OneOf("off", "ngram"), ON_OFF] = "ngram"
    """Speculative decoding. ngram: propose the tokens that followed the same n-gram earlier in the prompt or the
    output, if that is expected to save time. The generated tokens are the same. off: none."""
    max_draft_tokens: AtLeastOne = 12
    """Maximum number of draft tokens per sequence and step."""
    draft_model: String = ""
    """Folder of a smaller model with the same vocabulary. It proposes draft tokens when n-gram lookup has none and when
    that is expected to save time (docs/scheduling.md). Workers that start in the decode pool load it, unless
    `speculation` is off; it has one rank. Empty: no draft model."""
    draft_kv_cache_gib: Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER, Must.be("more than 0 GiB")] = 0.25
    """Size of the draft model's own KV pool, in GiB. A sequence that does not fit into it gets no drafts from the
    model."""
    expert_parallel: bool = False
    """True: each rank of a worker has some experts of a mixture-of-experts model, and has them whole. False: each rank
    has a slice of every expert. Needs `tensor_parallel` above 1, which must divide the number of experts."""
    max_adapters: NotNegative = 0
    """Maximum number of LoRA adapters that a worker holds at a time. It loads one when a request needs it, and drops
    the one that was not used for the longest time. 0: none, and requests for adapters are refused. Workers with
    adapters compute with transformers, not with the native step (docs/adapters.md)."""
    max_adapter_rank: AtLeastOne = 64
    """Largest rank of an adapter. A GPU worker reserves the memory of `max_adapters` adapters of this rank at its
    start; on a CPU they take memory only when they are loaded."""
    images: Annotated[str, OneOf("auto", "off"), ON_OFF] = "auto"
    """Images in prompts, for models that take them. auto: on if the model's folder describes its image processor, and
    the model computes a test image over the KV cache as transformers does; the log says why it is off. Such a model
    runs on transformers, with the weights of its vision encoder. off: text only."""
    image_cache_gib: Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER, Must.be("more than 0 GiB")] = 0.5
    """Size of each of a worker's two image caches in the host's memory, in GiB: received images with their pixels, and
    the embeddings that the encoder has computed from them."""
    max_image_pixels: AtLeastOne = 25_000_000
    """Maximum width times height of an image, in pixels; larger images are refused before they are decoded."""
    max_image_tokens: Int = 0
    """Maximum number of prompt tokens that one image may take; 0: as many as fit into a sequence."""
    step_timeout_s: Wait = 60.0
    """Timeout of a step, in seconds, or 20 times its expected duration if that is longer. A step that exceeds it means
    that the device or one of several ranks hangs: the worker's process exits, and its requests migrate to other
    workers."""

    def __post_init__(self) -> None:
        EveryEngineConfig.__post_init__(self)
        self._check_vllm()
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ConfigError(
                "engine.expert_parallel divides experts among ranks, and engine.tensor_parallel is 1; set it to the "
                "number of ranks"
            )
        if self.max_adapters and self.runner == "native":
            raise ConfigError(
                f"engine.runner native computes no adapters, and engine.max_adapters is {self.max_adapters}; set "
                "engine.runner to auto or engine.max_adapters to 0"
            )
        if self.max_adapters and self.batch_invariant:
            raise ConfigError(
                f"engine.batch_invariant cannot be kept with engine.max_adapters {self.max_adapters}: the products of "
                "an adapter depend on how many rows of a step have it; set one of them to its default"
            )
        if self.batch_invariant and self.tensor_parallel > 1:
            raise ConfigError(
                f"engine.batch_invariant cannot be kept with engine.tensor_parallel {self.tensor_parallel}: the order "
                "in which ranks are summed depends on the number of rows; set one of them to its default"
            )
        if self.batch_invariant and self.attention == "flashinfer":
            raise ConfigError(
                "engine.batch_invariant cannot be kept with engine.attention flashinfer, which partitions a batch "
                "depending on its content; set one of them to its default"
            )

    def _check_vllm(self) -> None:
        if self.runner != "vllm":
            if self.vllm_python or self.vllm_args:
                raise ConfigError(
                    "engine.vllm_python and engine.vllm_args are for engine.runner vllm, and engine.runner is "
                    f"{self.runner}; set it to vllm, or unset them"
                )
            return
        if not self.vllm_python:
            raise ConfigError(
                "engine.runner vllm needs engine.vllm_python: the Python interpreter of the environment in which vLLM "
                "is installed"
            )
        if not Path(self.vllm_python).is_absolute():
            raise ConfigError(f"engine.vllm_python must be an absolute path, got {self.vllm_python!r}")
        for name in self.vllm_args.keys() - VLLM_ARGS.keys():
            meant = nearest(name, sorted(VLLM_ARGS))
            advice = f"did you mean {meant}?" if meant else f"Baton passes on: {', '.join(sorted(VLLM_ARGS))}"
            if name in {each.name for each in fields(self)}:
                advice = f"set engine.{name}"
            raise ConfigError(f"engine.vllm_args has {name}, which Baton does not pass on to vLLM; {advice}")
        share = self.vllm_args.get("gpu_memory_utilization", 1.0)
        if not (isinstance(share, (int, float)) and 0 < share <= 1):
            raise ConfigError(
                f"gpu_memory_utilization in engine.vllm_args must be greater than 0 and at most 1, got {share!r}"
            )
        self.refuse_unknown(UNKNOWN_TO_VLLM, "engine.runner vllm")

    def batch(self, *, on_gpu: bool) -> Batch:
        """Return the limits of a worker. A value that is set holds on every device; auto depends on the device.

        Args:
            on_gpu: the worker's model computes on a GPU.
        """
        sequences, tokens, plans_ahead = ON_GPU if on_gpu else ON_CPU
        if self.max_num_batched_tokens != "auto":
            tokens = self.max_num_batched_tokens
            sequences = min(sequences, tokens)
        if self.max_num_seqs != "auto":
            sequences = self.max_num_seqs
            tokens = max(sequences, tokens)
        return Batch(sequences, tokens, plans_ahead if self.plan_ahead == "auto" else self.plan_ahead)

    def refuse_unknown(self, unknown: Collection[str], setting: str) -> None:
        """Refuse settings that an engine does not support.

        Args:
            unknown: names of the settings that it does not support.
            setting: the setting that selects the engine, for the message.

        Raises:
            ConfigError: one of them differs from its default; the message names it.
        """
        defaults = EngineConfig()
        found = [f"engine.{name}" for name in sorted(unknown) if getattr(self, name) != getattr(defaults, name)]
        if found:
            are, unset = ("is", "unset it") if len(found) == 1 else ("are", "unset them")
            raise ConfigError(f"{' and '.join(found)} {are} not supported by {setting}; {unset}")


UNKNOWN_TO_VLLM = frozenset(
    {
        *("snapshot_tokens", "plan_ahead", "kv_dtype", "attention", "batch_invariant", "speculation"),
        *("max_draft_tokens", "draft_model", "draft_kv_cache_gib", "max_adapters", "max_adapter_rank"),
        *("images", "image_cache_gib", "max_image_pixels", "max_image_tokens"),
    }
)
"""Settings that `runner` vllm refuses."""
OWN_SETTINGS = frozenset(EngineConfig.__annotations__)
"""Settings that only Baton's own engine supports. Other engines refuse them, and any other value that they lack."""
