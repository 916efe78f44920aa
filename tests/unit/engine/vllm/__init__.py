"""Tests of `engine.vllm` without vLLM: pure parts, and the whole engine over a fake."""
