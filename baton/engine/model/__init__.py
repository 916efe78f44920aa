"""The KV cache in tensors and the runners that compute steps on it: transformers' models, and an arithmetic model."""
