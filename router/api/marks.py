"""Names of fields that clients and gateways put into requests for their own use, or for other services."""

from __future__ import annotations

MARKS = frozenset(
    (
        # ids and names of the client's own things
        "id", "opts", "uuid", "key", "client", "client_info", "client_metadata", "client_request_id", "metadata",
        "meta", "extra", "extra_metadata", "provider_specific_fields", "model_info", "user_agent", "app", "source",
        "tags", "labels", "title", "timestamp", "timestamps", "created", "created_at", "updated_at", "date", "status",
        "phase", "object", "owner", "author", "session", "conversation_title", "end_user", "customer_identifier",
        "ip_address", "tenant", "type", "model", "index", "weight", "recipient", "channel", "agent",
        "additional_kwargs", "createdAt", "updatedAt", "ts", "done", "sources", "statusHistory", "childrenIds",
        "lastSentence", "modelName", "modelIdx", "followUps", "display_name", "displayName", "artifact", "tool_name",
        "extras", "verbosity", "betas", "anthropic_beta", "anthropic_version", "providerOptions", "provider_options",
        "providerMetadata", "experimental_providerMetadata", "internal_chat_message_metadata_passthrough",
        # hints for caches
        "cache_control", "cache", "cache_prompt", "cache_salt", "caching", "cache_key", "prompt_cache_breakpoint",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "use_cache", "no_cache", "ttl",
        "keep_alive", "id_slot", "slot_id", "safety_identifier", "user", "user_id",
        # tracing, logging and billing
        "trace", "traceparent", "tracestate", "trace_metadata", "trace_name", "trace_user_id", "span_id",
        "generation_name", "langfuse_prompt", "litellm_metadata", "litellm_params", "litellm_trace_id",
        "litellm_logging_obj", "litellm_session_id", "no-log", "logger_fn", "verbose", "spend_logs_metadata",
        "proxy_server_request", "disable_log",
        # how the client or a gateway in front of this cluster sends the request
        "provider", "route", "transforms", "models", "fallbacks", "timeout", "request_timeout", "stream_timeout",
        "max_retries", "num_retries", "drop_params", "allowed_openai_params", "additional_drop_params",
        "custom_llm_provider", "api_base", "api_version", "base_url", "organization", "extra_headers", "headers",
        "deployment_id", "service_tier", "speculative", "kv_transfer_params", "data_parallel_rank", "routing_key",
        "prediction",
        # fields of another service's reasoning or answer, except its text
        "thinking_blocks", "reasoning_details", "reasoning_signature", "thought_signature", "signature", "citations",
        "annotations", "encrypted_content", "finish_reason", "stop_reason", "logprobs_content", "token_count",
        "tokens", "usage", "cost", "latency", "timings", "extra_content", "parsed", "parsed_arguments", "thought",
        "reasoning_text", "reasoning_opaque", "copilot_cache_control", "end_turn", "stop_sequence",
        # parameters of samplers; enabling such a sampler is refused by name
        "mirostat_tau", "mirostat_eta", "repeat_last_n",
        # additional output that does not exist here
        "include", "include_usage", "timings_per_token", "return_progress", "return_hidden_states",
        "return_routed_experts", "return_meta_info", "usage_include", "include_obfuscation", "stream_usage",
        "prompt_filter_results", "post_sampling_probs", "return_images", "return_related_questions",
        "return_citations", "outputSchema", "output_schema", "input_examples", "defer_loading", "eager_input_streaming",
    )
)  # fmt: skip
"""Names of fields that change no answer, whatever they hold."""
CHOOSES = frozenset(
    ("adapter_id", "lora_id", "model_id", "prompt_id", "template_id", "voice_id", "previous_response_id")
)
"""Names that end like an id, but do affect the answer."""


def is_mark(name: str) -> bool:
    """Return whether an unknown field changes no answer, judging by its name."""
    if name in MARKS:
        return True
    is_id = name.endswith(("_id", "Id", "_metadata")) or name.startswith(("x-", "x_", "_"))
    return is_id and name not in CHOOSES and not name.endswith("token_id")
