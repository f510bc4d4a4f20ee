"""Fields of other servers: accepted where they ask for nothing, or refused with what does the same.

IGNORED are hints on where and for whom a request runs, what is kept of it and what caches hold: no
value of them changes what an answer means, so each is accepted, named in the response's header
x-kvasir-ignored, and counted. NO_OPS are accepted with these values, which ask for nothing.
"""

from __future__ import annotations

from typing import Any

IGNORED = frozenset(
    (
        *("user", "safety_identifier", "metadata", "client_metadata", "session_id", "request_id"),
        *("store", "service_tier", "provider", "keep_alive", "id_slot", "slot_id"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_prompt"),
        *("num_ctx", "num_batch", "num_keep", "num_thread", "num_gpu", "main_gpu", "low_vram"),
        *("numa", "f16_kv", "use_mmap", "use_mlock", "mirostat_tau", "mirostat_eta"),
    )
)
NO_OPS: dict[str, list[Any]] = {
    name: values
    for names, values in (
        ("best_of", [1]),
        ("suffix", [""]),
        ("response_format", [{"type": "text"}]),
        ("top_logprobs", [0]),
        ("modalities", [["text"]]),
        ("verbosity", ["medium"]),
        ("length_penalty", [1.0]),
        ("tool_choice function_call reasoning_effort", ["none"]),
        ("tools functions bad_words", [[]]),
        ("parallel_tool_calls include_reasoning detokenize", [True]),
        ("skip_special_tokens spaces_between_special_tokens use_activation", [True]),
        ("echo stream include_obfuscation watermark", [False]),
        ("use_beam_search early_stopping include_stop_str_in_output", [False]),
        ("return_token_ids return_tokens_as_token_ids", [False]),
        ("logits_all vocab_only embedding_only truncate shift _debug_render_only", [False]),
        ("template system", [""]),
        ("context images", [[]]),
        ("mirostat", [0]),
        ("tfs_z", [1.0]),
        ("repeat_last_n", [-1, 64]),
        ("penalize_newline", [True]),
    )
    for name in names.split()
}

# Fields of other servers, and ours that do the same.
_SCHEMA = "response_format (in /v1/responses text.format, in /v1/messages output_config.format)"
_LENGTH = "max_tokens (in /v1/responses max_output_tokens)"
USED_HERE = {
    **dict.fromkeys(("guided_json", "json_schema", "structured_outputs"), _SCHEMA),
    "repeat_penalty": "repetition_penalty",
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), _LENGTH),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
    "ignore_eos_token": "ignore_eos",
    "typical": "typical_p",
    "context": "messages of /api/chat",
    "best_of": "n",
    "use_beam_search": "num_beams",
    "forced_bos_token_id": "target_language",
    **dict.fromkeys(("src_lang", "source_lang"), "source_language"),
    **dict.fromkeys(("tgt_lang", "target_lang"), "target_language"),
}


def no_op_schema(name: str) -> dict[str, Any]:
    """Return the JSON schema of a field's values, without objects in an enumeration.

    Generators of clients take no such enumeration.
    """
    return {"anyOf": [*map(_only, NO_OPS[name]), {"type": "null"}]}


def _only(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        properties = {name: _only(inner) for name, inner in value.items()}
        closed = {"required": [*value], "additionalProperties": False}
        return {"type": "object", "properties": properties} | closed
    if isinstance(value, list):
        items = _only(value[0]) if value else {}
        return {"type": "array", "items": items, "minItems": len(value), "maxItems": len(value)}
    if isinstance(value, bool):  # of which generators know no constant
        return {"type": "boolean", "enum": [value]}
    return {"const": value}


def is_no_op(name: str, value: object) -> bool:
    """Return whether a field with this value asks for nothing."""
    return any(
        value == no_op and isinstance(value, bool) is isinstance(no_op, bool)
        for no_op in NO_OPS.get(name, ())
    )
