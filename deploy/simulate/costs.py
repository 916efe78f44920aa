"""What a step of an engine costs in seconds, and what moving KV does.

A step computes T new tokens and reads the KV of what its sequences hold. It takes the longer of the two:

    compute   s_per_token * T + s_per_pair * (new tokens x tokens that each attends to)
    memory    s_weights + s_per_kv_token * (tokens of context of the sequences that decode)

and `s_overhead` on top. With `s_weights` 0 this is a straight line, as fits a CPU; a GPU has its roofline (Williams,
Waterman and Patterson, 2009), and `roofline` derives one on paper.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """One worker's."""

    s_overhead: float
    s_per_token: float
    s_per_pair: float
    s_weights: float
    s_per_kv_token: float
    transfer_latency_s: float
    transfer_s_per_token: float

    def step_s(self, num_new: int, num_pairs: int, num_kv_tokens: int) -> float:
        """One step.

        Args:
            num_new: tokens to compute.
            num_pairs: for each of them the tokens that it attends to, summed.
            num_kv_tokens: context of the sequences that decode, summed.
        """
        compute_s = self.s_per_token * num_new + self.s_per_pair * num_pairs
        return self.s_overhead + max(compute_s, self.s_weights + self.s_per_kv_token * num_kv_tokens)

    def prefill_s(self, num_tokens: int, num_cached_tokens: int, chunk_tokens: int) -> float:
        """A prompt alone on an idle worker, in chunks."""
        num_new = num_tokens - num_cached_tokens
        num_steps = -(-num_new // chunk_tokens)
        num_pairs = num_new * (num_cached_tokens + num_tokens) // 2
        compute_s = self.s_per_token * num_new + self.s_per_pair * num_pairs
        return num_steps * self.s_overhead + max(compute_s, num_steps * self.s_weights)

    def transfer_s(self, num_tokens: int) -> float:
        """From the first byte of a prompt's KV to the commit."""
        return self.transfer_latency_s + self.transfer_s_per_token * num_tokens

    @property
    def tokens_per_s(self) -> float:
        """Of short prompts, at full speed."""
        return 1 / self.s_per_token


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator, dense figures of its data sheet, and the share of them that serving engines reach."""

    flops: float
    bytes_per_s: float
    network_bytes_per_s: float
    compute_share: float = 0.5
    memory_share: float = 0.7


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder with grouped queries."""

    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_param: float = 2.0
    bytes_per_kv: float = 2.0

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_kv


GPUS = {
    "h200": Gpu(flops=989e12, bytes_per_s=4.8e12, network_bytes_per_s=50e9),
    "h100": Gpu(flops=989e12, bytes_per_s=3.35e12, network_bytes_per_s=50e9),
    "a100": Gpu(flops=312e12, bytes_per_s=2.04e12, network_bytes_per_s=25e9),
}
"""bfloat16 without sparsity; SXM boards; one 400 (200) Gbit/s network card a GPU."""
MODELS = {
    "llama-3-8b": Model(8.03e9, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128),
    "llama-3-70b": Model(70.6e9, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128),
}


def roofline(model: Model, gpu: Gpu, num_gpus: int = 1) -> CostModel:
    """A worker of `num_gpus` GPUs that share the model's tensors evenly.

    A token costs 2 operations a parameter, and 4 a head dimension for each token that it attends to (queries with keys,
    and the weighted sum of values). A step reads all weights once, and the KV of every context that decodes. 0.5 ms of
    overhead is what a scheduler and a launch cost in engines that overlap both.
    """
    flops = gpu.flops * gpu.compute_share * num_gpus
    bytes_per_s = gpu.bytes_per_s * gpu.memory_share * num_gpus
    return CostModel(
        s_overhead=0.5e-3,
        s_per_token=2 * model.num_params / flops,
        s_per_pair=4 * model.num_layers * model.num_heads * model.head_dim / flops,
        s_weights=model.num_params * model.bytes_per_param / bytes_per_s,
        s_per_kv_token=model.kv_bytes_per_token / bytes_per_s,
        transfer_latency_s=2e-3,
        transfer_s_per_token=model.kv_bytes_per_token / (gpu.network_bytes_per_s * num_gpus),
    )


PROFILES = {
    "llama-3-8b@h200": roofline(MODELS["llama-3-8b"], GPUS["h200"]),
    "llama-3-8b@a100": roofline(MODELS["llama-3-8b"], GPUS["a100"]),
    "llama-3-70b@4xh200": roofline(MODELS["llama-3-70b"], GPUS["h200"], 4),
    "llama-3-70b@8xa100": roofline(MODELS["llama-3-70b"], GPUS["a100"], 8),
}
