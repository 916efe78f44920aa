"""Types of models that tests hold against `generate`, each with the sizes of a tiny one of its type.

The table of docs/models.md is made from these and from the types of the native step.
"""

from __future__ import annotations

from typing import Any

WINDOW = {"sliding_window": 24}
EXPERTS = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "shared_expert_intermediate_size": 32,
    "topk_group": 1,
}
HEADS = {"head_dim": 16}
LATENT = EXPERTS | {
    "kv_lora_rank": 32,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
TURNS = ["sliding_attention", "full_attention"] * 2
BY_LAYER = {"vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 16}
GEMMA4 = HEADS | WINDOW | BY_LAYER
SHARED = {"num_kv_shared_layers": 2, "layer_types": TURNS}
CAPPED = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0, "query_pre_attn_scalar": 16}
LIMITED = HEADS | WINDOW | CAPPED
DBRX = {
    "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10_000.0},
    "d_model": 64,
    "ffn_config": {"ffn_hidden_size": 96, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    "max_seq_len": 512,
    "n_heads": 4,
    "n_layers": 4,
}
SMALL_GPT = {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 512}
OFTEN: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gemma2": LIMITED,
    "gemma3_text": HEADS | WINDOW | {"layer_types": TURNS},
    "gemma4_text": GEMMA4 | SHARED,
    "glm4_moe": EXPERTS | HEADS,
    "glm4_moe_lite": LATENT,
    "gpt2": SMALL_GPT,
    "gpt_oss": EXPERTS | HEADS | WINDOW,
    "mimo_v2_flash": EXPERTS | HEADS | WINDOW,
    "minimax_m2": EXPERTS | HEADS,
    "olmo3": WINDOW,
}
"""One of each kind, and those that are asked for most; `make test-all` has the others."""
OTHERS: dict[str, dict[str, Any]] = {
    "afmoe": EXPERTS | HEADS | WINDOW,
    "apertus": {},
    "biogpt": {},
    "bitnet": {},
    "cohere2_moe": EXPERTS | WINDOW,
    "dbrx": DBRX,
    "dots1": EXPERTS | HEADS,
    "ernie4_5_moe": EXPERTS | HEADS | {"moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1},
    "exaone_moe": EXPERTS | HEADS | WINDOW,
    "gemma3n_text": HEADS | WINDOW | BY_LAYER | SHARED | {"activation_sparsity_pattern": [0.0] * 4},
    "gpt_bigcode": SMALL_GPT,
    "gpt_neox": {},
    "granite_swa": WINDOW,
    "granitemoe": EXPERTS,
    "granitemoe_swa": EXPERTS | WINDOW,
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": EXPERTS | HEADS,
    "hy_v3": EXPERTS | HEADS,
    "jetmoe": EXPERTS | {"kv_channels": 16},
    "laguna": EXPERTS | HEADS,
    "longcat_flash": LATENT | {"head_dim": 8, "moe_topk": 2, "qk_head_dim": 24, "zero_expert_num": 2},
    "minicpm3": LATENT | {"head_dim": 24},
    "minimax_m3_vl_text": EXPERTS | HEADS,
    "ministral3": HEADS,
    "nanochat": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phimoe": EXPERTS,
    "qwen2_moe": EXPERTS,
    "solar_open": EXPERTS | HEADS,
    "vaultgemma": LIMITED,
    "youtu": LATENT,
}
MAMBA = {
    "mamba_chunk_size": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
}
DELTA = HEADS | {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8}
STATE_SPACE = {"conv_kernel": 4, "expand": 2, "state_size": 8}
RECURRENT: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    "granitemoehybrid": EXPERTS | MAMBA | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 64},
    "kimi_linear": LATENT
    | {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "q_lora_rank": None,
    },
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": EXPERTS | CONVOLUTIONS,
    "mamba2": STATE_SPACE | {"chunk_size": 8, "head_dim": 16, "n_groups": 2, "num_heads": 8},
    "nemotron_h": HEADS
    | {
        "chunk_size": 8,
        "hybrid_override_pattern": "M*-*",
        "mamba_head_dim": 16,
        "mamba_num_heads": 8,
        "n_groups": 1,
        "ssm_state_size": 8,
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen3_5_moe_text": EXPERTS | DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_next": EXPERTS | DELTA,
}
"""Types with recurrent layers: hybrids, and models without attention."""
WHOLE_PROMPTS: dict[str, dict[str, Any]] = {
    "falcon_mamba": STATE_SPACE,
    "jamba": EXPERTS
    | {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "mamba": STATE_SPACE,
}
"""Types whose states transformers loses between parts of a prompt."""
KINDS = {kind: OFTEN[kind] for kind in ("olmo3", "gpt_oss", "gemma2", "deepseek_v3", "gemma4_text")}
"""Plain attention with RoPE by type of layer, sinks and a window, limited scores, latents, two groups of heads."""
