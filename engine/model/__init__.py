"""The KV cache in tensors, and the runners that compute steps on it. Needs torch, as `sampling` does; `core` does not.

`transformers_runner` runs a Hugging Face model with paged attention (`attention`; on a GPU `kernel_attention`, with
decodes by `flashinfer_attention` if configured), on several ranks if configured (`ranks`). It is a `Runner` of
`engine.core`. `logits_runner` is the part that it shares with `engine.native`.
"""

__all__ = [
    "attention",
    "attention_choice",
    "attention_probe",
    "attention_step",
    "batch_invariance",
    "decode_graphs",
    "device_memory",
    "flashinfer_attention",
    "fp8_kernels",
    "fp8_linear",
    "fused_kernels",
    "fused_model",
    "fused_modules",
    "fused_parts",
    "fused_probe",
    "invariant_kernels",
    "kernel_attention",
    "kernels",
    "kv_cache",
    "last_tokens",
    "logits_runner",
    "pretrained",
    "rank_step",
    "ranks",
    "rows",
    "shapes",
    "smaller_steps",
    "table_rows",
    "tilings",
    "transformers_model",
    "transformers_runner",
]
