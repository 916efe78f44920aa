"""The engine: token ids in, token ids out.

`core` decides what each step computes and who owns which blocks, without tensors; `sampling` draws tokens from logits;
`model` holds the KV cache and the runners that compute; `native` is a runner in C; `engines` makes a worker's engine,
for which `runners` chooses a runner; `vllm` is an engine whose model vLLM computes; `testing` is a runner whose output
can be computed by hand; `uploads` brings numbers to a device; `gpu_memory` has the calls with which processes share a
GPU's memory. The engine sees no text, gRPC, Redis or Ray.
"""

__all__ = ["core", "engines", "gpu_memory", "model", "native", "runners", "sampling", "testing", "uploads", "vllm"]
