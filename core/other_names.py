"""What other engines call the options and parameters that headrace calls otherwise, or does not need."""

import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from .errors import RequestError
from .suggest import did_you_mean

_OURS: dict[str, str] = {
    # options of vLLM, llama.cpp, transformers
    "gpu_memory_utilization": "kv_memory", "kv_cache_memory_bytes": "kv_memory",
    "max_seq_len": "max_model_len", "ctx_size": "max_model_len", "c": "max_model_len", "n_ctx": "max_model_len",
    "context_length": "max_model_len",
    "tp": "tensor_parallel_size", "tensor_split": "tensor_parallel_size", "split_mode": "tensor_parallel_size",
    "n_gpu_layers": "device", "ngl": "device", "gpu_layers": "device", "device_map": "device", "main_gpu": "device",
    "torch_dtype": "dtype",
    "quantization": "quantize", "q": "quantize", "load_in_8bit": "quantize", "load_in_4bit": "quantize",
    "quantization_config": "quantize",
    "kv_cache_dtype": "kv_dtype", "cache_type_k": "kv_dtype", "cache_type_v": "kv_dtype", "ctk": "kv_dtype",
    "ctv": "kv_dtype",
    "enable_prefix_caching": "prefix_caching", "no_enable_prefix_caching": "prefix_caching",
    "speculative_config": "speculative", "speculative_model": "speculative", "num_speculative_tokens": "speculative",
    "model_draft": "speculative", "md": "speculative", "draft_max": "speculative",
    "n_threads": "threads", "t": "threads", "threads_batch": "threads", "tb": "threads",
    "batch_size": "max_num_batched_tokens", "b": "max_num_batched_tokens", "n_batch": "max_num_batched_tokens",
    "ubatch_size": "max_num_batched_tokens", "ub": "max_num_batched_tokens",
    "parallel": "max_num_seqs", "np": "max_num_seqs", "n_parallel": "max_num_seqs",
    "alias": "served_model_name", "scheduling_policy": "policy",
    "attn_implementation": "op_providers", "attention_backend": "op_providers", "flash_attn": "op_providers",
    "fa": "op_providers",
    "uvicorn_log_level": "log_level", "verbose": "log_level", "disable_log_requests": "log_level",
    "disable_log_stats": "log_level", "enable_log_requests": "log_level",
    "allowed_origins": "cors_origins", "ssl_certfile": "tls_cert", "ssl_keyfile": "tls_key",
    "ssl_cert_file": "tls_cert", "ssl_key_file": "tls_key",
    "limit_mm_per_prompt": "max_images", "language_model_only": "images",
    "task": "pooling", "runner": "pooling", "convert": "pooling", "embedding": "pooling",
    "embeddings": "pooling", "override_pooler_config": "pooling", "pooler_config": "pooling",
    "lora_modules": "lora", "lora_request": "lora", "lora_scaled": "lora",
    "chat_template_file": "chat_template", "timeout": "request_timeout_s",
    # parameters of a request
    "max_new_tokens": "max_tokens", "max_length": "max_tokens", "n_predict": "max_tokens", "predict": "max_tokens",
    "n": "max_tokens", "num_predict": "max_tokens", "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens", "min_length": "min_tokens",
    "do_sample": "temperature", "temp": "temperature",
    "num_return_sequences": "n", "best_of": "n",
    "repeat_penalty": "repetition_penalty", "stop_strings": "stop", "stop_sequences": "stop", "eos_token_id":
    "stop_token_ids", "reverse_prompt": "stop", "r": "stop", "bad_words_ids": "bad_words",
    "suppress_tokens": "logit_bias",
    "no_repeat_ngram_size": "logits_processors", "guided_decoding": "structured_output",
    "structured_outputs": "structured_output", "grammar": "structured_output", "json_schema": "structured_output",
    "output_scores": "logprobs", "n_probs": "logprobs",
}  # fmt: skip
"""Their name -> ours."""
_CHOSEN = "it is chosen by the device's platform"
_FROM_MODEL = "it is read from the model's files"
_ABSENT = "headrace has nothing like it"
_NONE: dict[str, str] = {
    "enforce_eager": _CHOSEN, "compilation_config": _CHOSEN, "max_seq_len_to_capture": _CHOSEN, "numa": _CHOSEN,
    "disable_custom_all_reduce": _CHOSEN, "distributed_executor_backend": _CHOSEN, "mlock": _CHOSEN,
    "no_mmap": _CHOSEN, "use_mmap": _CHOSEN,
    "tool_call_parser": _FROM_MODEL, "enable_auto_tool_choice": _FROM_MODEL, "reasoning_parser": _FROM_MODEL,
    "jinja": _FROM_MODEL, "tokenizer_mode": _FROM_MODEL, "mmproj": _FROM_MODEL, "mm": _FROM_MODEL,
    "chat_template_content_format": _FROM_MODEL, "reasoning_format": _FROM_MODEL, "rope_scaling": _FROM_MODEL,
    "rope_freq_base": _FROM_MODEL, "generation_config": _FROM_MODEL, "hf_overrides": _FROM_MODEL,
    "enable_chunked_prefill": "it is always on", "cont_batching": "it is always on", "use_cache": "it is always on",
    "swap_space": "a request that gives up its memory is computed again", "cpu_offload_gb": _ABSENT,
    "pipeline_parallel_size": _ABSENT, "pp": _ABSENT, "data_parallel_size": _ABSENT, "dp": _ABSENT,
    "enable_lora": "it is enough to give adapters: lora", "typical_p": _ABSENT, "mirostat": _ABSENT,
    "xtc_probability": _ABSENT, "dry_multiplier": _ABSENT, "tfs_z": _ABSENT,
    "num_beams": "it is LLM.beam_search", "use_beam_search": "it is LLM.beam_search",
    "m": "the model is an argument, or the option model", "model": "the model is an argument, or the option model",
    "hf": "the model is an argument, or the option model", "hf_repo": "the model is an argument, or the option model",
    "p": "the prompt is an argument", "prompt": "the prompt is an argument",
    "download_dir": "the cache is the hub's: HF_HOME", "hf_token": "set HF_TOKEN", "tokenizer_revision": _ABSENT,
}  # fmt: skip
"""Their name -> why there is none of ours."""

_Class = TypeVar("_Class", bound=type[Any])


def other_name(theirs: str, spell: Callable[[str], str] = str) -> str:
    """`"; headrace calls it kv_memory"`, or why it is not needed; "" for a name that nobody has. spell: our name as
    users write it there."""
    theirs = theirs.lstrip("-").partition("=")[0].replace("-", "_").lower()
    if theirs in _OURS:
        return f"; headrace calls it {spell(_OURS[theirs])}"
    return f"; {_NONE[theirs]}" if theirs in _NONE else ""


def known_names(cls: _Class) -> _Class:
    """Make a dataclass of a request's parameters raise RequestError for a name that it has not."""
    names, original = {field.name for field in dataclasses.fields(cls)}, cls.__init__

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() - names:
            hint = other_name(name) or did_you_mean(name, names)
            raise RequestError(f"{cls.__name__} has no {name}{hint}", code="invalid_sampling_params")
        original(self, *args, **kwargs)

    cls.__init__ = init
    return cls
