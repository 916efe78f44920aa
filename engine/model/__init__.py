"""The KV cache in tensors, and the runners that compute steps on it. Needs torch, as `sampling` does; `core` does not.

`transformers_runner` runs a Hugging Face model with paged attention (`attention`; on a GPU `kernel_attention`, with
decodes by `flashinfer_attention` if configured), on several ranks if configured (`ranks`). Which models it can run and
what their layers keep, it asks the model (`asking`), and checks with the weights (`self_check`). It is a `Runner` of
`engine.core`. Images are decoded in `image_reader`, and computed in `images`. Two more runners have passes of their own
and read K and V by position (`pages`): `encoder_decoder`, and `diffusion`, which denoises canvases (`canvas`).
`logits_runner` is the part that all of them share with `engine.native`.
"""

__all__ = [
    "adapters",
    "asking",
    "attention",
    "attention_choice",
    "attention_probe",
    "attention_step",
    "batch_invariance",
    "canvas",
    "decode_graphs",
    "device_memory",
    "diffusion",
    "encoder_decoder",
    "expert_load",
    "flashinfer_attention",
    "fp8_kernels",
    "fp8_linear",
    "fused_kernels",
    "fused_model",
    "fused_modules",
    "fused_parts",
    "fused_probe",
    "image_reader",
    "images",
    "invariant_kernels",
    "kernel_attention",
    "kernels",
    "kv_cache",
    "latent",
    "logits_runner",
    "pages",
    "pretrained",
    "rank_step",
    "ranks",
    "recurrent",
    "self_check",
    "shapes",
    "table_rows",
    "tilings",
    "transformers_model",
    "transformers_runner",
]
