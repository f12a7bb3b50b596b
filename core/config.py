"""Every setting of the engine, grouped by the stage that reads it.

A field made with `option()` is a public option: `--its-name` on the command line if `cli` is true, a TOML key
and HEADRACE_ITS_NAME always, and a keyword of `LLM`. Names are unique over all groups.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from .errors import ConfigError
from .other_names import other_name
from .suggest import did_you_mean
from .units import parse_bytes

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("int8",)
"""What a KV cache may hold beside activations: see ops.attention.Integers."""
DEFAULT_STEP_TOKENS = 2048
"""Tokens of the largest step, where a device does not say better."""
DRAFT_TOKENS, MOST_DRAFT_TOKENS = 4, 32
"""Drafts of a row that a step verifies: unless a number is given, and at most."""
MOST_SEQS = 65536
"""Requests that may run at the same time, at most: their tables are allocated at the start."""
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", re.IGNORECASE)
_ADAPTER = re.compile(r"[\w.:/-]+")
QUANTIZATIONS = ("none", "int8", "int8-channel", "fp8", "int4", "int4-g64", "int4-g128", "int4-sym")
"""What becomes of a layer's weights: see weights.quantize."""


def option(default: Any, help: str, *, cli: bool = False, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that users may set. `help` gives meaning and unit in one line."""
    return field(default=default, metadata={"help": help, "cli": cli, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how its weights are read."""

    model: str = option("", "hub id, folder or .gguf file; empty for the embedded default")
    revision: str = option("", "branch, tag or commit on the hub; empty for its default branch", cli=True)
    dtype: str = option("auto", "dtype of weights and activations", cli=True, choices=("auto", *DTYPES))
    quantize: str = option(
        "none",
        "weights that are made smaller while they load (docs/weights.md)",
        cli=True,
        choices=QUANTIZATIONS,
    )
    max_model_len: int | Literal["auto"] = option(
        "auto", "tokens of prompt and output together; auto is what the model and the memory allow", cli=True
    )
    load_format: str = option(
        "auto",
        "auto reads the checkpoint; dummy makes random weights from the config alone",
        cli=True,
        choices=("auto", "dummy"),
    )
    allow_pickle: bool = option(False, "read .bin checkpoints (pickle, weights only)", cli=True)
    trust_remote_code: bool = option(False, "run code that a model's folder brings, with all our rights")
    offline: bool = option(False, "never ask the hub or a package index", cli=True)
    pooling: str = option(
        "auto",
        "auto is what the checkpoint says; mean, cls or last makes embeddings with any model",
        choices=("auto", "mean", "cls", "last"),
    )
    images: bool = option(True, "read images, if the model does; without, its language model is loaded alone")
    tokenizer: str = option("", "folder or hub id of the tokenizer; empty for the model's own")
    skip_tokenizer_init: bool = option(False, "token ids in and out, no tokenizer")
    chat_template: str = option("", "file with a chat template; empty for the model's own", cli=True)
    lora: tuple[str, ...] = option(
        (), "NAME=FOLDER of an adapter that PEFT has saved, which requests may name (docs/lora.md)", cli=True
    )
    max_loras: int = option(0, "places for adapters, of which some may be loaded later; 0: as many as lora names")
    max_lora_rank: int = option(16, "rank that an adapter has at most, where max_loras keeps places for others")

    def __post_init__(self) -> None:
        _check_types(self)
        num_loras = len(lora_pairs(self.lora))
        _check_auto_or_positive("max_lora_rank", self.max_lora_rank)
        if self.max_loras < 0 or 0 < self.max_loras < num_loras:
            raise ConfigError(
                f"max_loras must be 0 or at least {num_loras}, the adapters of lora; got {self.max_loras}"
            )
        _check_choice("dtype", self.dtype, ("auto", *DTYPES))
        _check_choice("quantize", self.quantize, QUANTIZATIONS)
        _check_choice("load_format", self.load_format, ("auto", "dummy"))
        _check_choice("pooling", self.pooling, ("auto", "mean", "cls", "last"))
        _check_auto_or_positive("max_model_len", self.max_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Where the model runs."""

    device: str = option("auto", "auto, or a platform with optional device ids, such as cpu", cli=True)
    threads: int | Literal["auto"] = option("auto", "worker threads of a host platform", cli=True)
    tensor_parallel_size: int | Literal["auto"] = option(
        "auto", "devices over which each layer is cut; auto is as many as device names", cli=True
    )
    op_providers: str = option(
        "", "sources of kernels to insist on, or with - to leave out, separated by commas, such as -triton"
    )

    def __post_init__(self) -> None:
        _check_types(self)
        _check_auto_or_positive("threads", self.threads)
        _check_auto_or_positive("tensor_parallel_size", self.tensor_parallel_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig:
    """The KV cache."""

    kv_memory: str = option(
        "auto", "memory for the KV cache, such as 8GiB; auto is computed from what is free", cli=True
    )
    kv_dtype: str = option(
        "auto",
        "auto keeps the dtype of activations; int8 halves the cache: 8 bits a number, a scale a token and head",
        cli=True,
        choices=("auto", *KV_DTYPES),
    )
    block_size: int = option(16, "tokens in one KV block")
    prefix_caching: bool = option(True, "share the KV blocks of equal prefixes", cli=True)
    hash_seed: int = option(0, "seed of the prefix cache's hashes; processes that share blocks share it")
    image_cache_tokens: int = option(
        16384, "places of prompts for which what an encoder made of images is kept, for requests with equal ones"
    )

    def __post_init__(self) -> None:
        _check_types(self)
        _check_auto_or_positive("image_cache_tokens", self.image_cache_tokens)
        _check_seed("hash_seed", self.hash_seed)
        if self.kv_memory != "auto":
            parse_bytes(self.kv_memory, name="kv_memory")
        _check_choice("kv_dtype", self.kv_dtype, ("auto", *KV_DTYPES))
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}")


def lora_pairs(lora: Sequence[str]) -> dict[str, str]:
    """Folder by name of a `lora` setting. Raises ConfigError."""
    pairs: dict[str, str] = {}
    for text in lora:
        name, _, path = text.partition("=")
        if not _ADAPTER.fullmatch(name) or not path:
            raise ConfigError(
                f"lora must be NAME=FOLDER, the name of letters, digits and . _ - / :, got {text!r}",
                remedies=["--lora mine=FOLDER"],
            )
        if name in pairs:
            raise ConfigError(f"lora names {name!r} twice: {pairs[name]} and {path}")
        pairs[name] = path
    return pairs


def parse_speculative(text: str) -> tuple[str, int]:
    """(name of the drafter, drafts of a row) of a `speculative` setting; ("", 0) for none. Raises ConfigError."""
    name, _, count = text.partition(":")
    if text == "none":
        return "", 0
    if not name or (count and not (count.isdecimal() and 1 <= int(count) <= MOST_DRAFT_TOKENS)):
        raise ConfigError(
            f"speculative must be none, or a drafter with a number of tokens from 1 to {MOST_DRAFT_TOKENS}, "
            f"got {text!r}",
            remedies=["--speculative ngram", f"--speculative ngram:{DRAFT_TOKENS}"],
        )
    return name, int(count or DRAFT_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How requests share the steps."""

    max_num_seqs: int = option(64, "requests that may run at the same time", cli=True)
    max_num_batched_tokens: int | Literal["auto"] = option(
        "auto", "tokens in one step (its budget); auto is what the device fills and no more", cli=True
    )
    speculative: str = option(
        "none",
        "what guesses tokens for a step to verify: ngram, or ngram:8 for so many (docs/speculation.md)",
        cli=True,
    )
    policy: str = option("fcfs", "order of waiting requests", choices=("fcfs", "priority"))
    seed: int = option(0, "seed of requests that bring none", cli=True)

    def __post_init__(self) -> None:
        _check_types(self)
        _check_auto_or_positive("max_num_seqs", self.max_num_seqs)
        if self.max_num_seqs > MOST_SEQS:
            raise ConfigError(f"max_num_seqs must be at most {MOST_SEQS}, got {self.max_num_seqs}")
        _check_auto_or_positive("max_num_batched_tokens", self.max_num_batched_tokens)
        _check_choice("policy", self.policy, ("fcfs", "priority"))
        _check_seed("seed", self.seed)
        parse_speculative(self.speculative)

    @property
    def budget(self) -> int:
        """Tokens in one step. Of settings that the engine has resolved; "auto" is what most devices take."""
        return DEFAULT_STEP_TOKENS if self.max_num_batched_tokens == "auto" else self.max_num_batched_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server; only `headrace serve` reads it."""

    host: str = option("127.0.0.1", "address to listen on", cli=True)
    port: int = option(8000, "port to listen on; 0 takes a free one", cli=True)
    api_key: str = option("", "key that clients must send; empty lets everyone in", cli=True)
    api_key_file: str = option("", "file with one key a line, each with a queue of its own", cli=True)
    served_model_name: str = option(
        "", "names that clients may call the model by, separated by commas; empty for its own", cli=True
    )
    tls_cert: str = option("", "PEM file with the certificate chain; empty serves plain HTTP", cli=True)
    tls_key: str = option("", "PEM file with the certificate's key", cli=True)
    cors_origins: str = option("", "origins whose pages may call the server, separated by commas", cli=True)
    ui: bool = option(True, "the page at / and the events that feed it", cli=True)
    max_queue_requests: int = option(1024, "requests that may wait for their first token")
    max_queue_tokens: int = option(1_000_000, "prompt tokens that may wait for their first token")
    request_timeout_s: int = option(3600, "seconds that one request may take in all")
    drain_timeout_s: int = option(30, "seconds that running requests get after SIGTERM")
    max_body_bytes: int = option(32 * 1024**2, "bytes that the body of a request may have")
    allow_remote_media: bool = option(False, "fetch images at http(s) addresses that requests name")
    allow_private_media: bool = option(
        False, "fetch them from this machine and private networks, too, which whoever sends requests can then look at"
    )
    load_loras: bool = option(
        False, "let requests load adapters from folders of this machine, and unload them (docs/lora.md)"
    )
    max_images: int = option(32, "images that one request may bring")
    max_image_bytes: int = option(20 * 1024**2, "bytes that the file of an image may have")
    max_image_pixels: int = option(64 * 1024**2, "pixels that an image may have")
    max_stored_responses: int = option(1000, "responses that are kept for clients that come back to them")
    max_stored_bytes: int = option(64 * 1024**2, "bytes that these responses may take, counted as JSON")
    otlp_endpoint: str = option("", "URL of a collector that traces are sent to (OTLP over HTTP); empty sends none")
    ping_interval_s: int = option(30, "seconds without a token after which a stream gets a comment")
    stall_timeout_s: int = option(120, "seconds without a step after which a busy engine counts as stalled")
    stall_restart_s: int = option(300, "seconds without a step after which a busy engine's process is replaced")
    send_timeout_s: int = option(60, "seconds after which a client that reads nothing is given up")

    def __post_init__(self) -> None:
        _check_types(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        for name in ("max_queue_requests", "max_queue_tokens", "request_timeout_s", "max_body_bytes"):
            _check_auto_or_positive(name, getattr(self, name))
        for name in ("max_stored_responses", "max_stored_bytes", "max_images", "max_image_bytes", "max_image_pixels"):
            _check_auto_or_positive(name, getattr(self, name))
        for name in ("ping_interval_s", "stall_timeout_s", "stall_restart_s", "send_timeout_s"):
            _check_auto_or_positive(name, getattr(self, name))
        for origin in filter(None, map(str.strip, self.cors_origins.split(","))):
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins must be * or origins such as https://example.org, without a path; got {origin!r}"
                )
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_endpoint must be a URL such as http://127.0.0.1:4318, got {self.otlp_endpoint!r}"
            )
        if self.drain_timeout_s < 0:
            raise ConfigError(f"drain_timeout_s must be 0 or more, got {self.drain_timeout_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is logged, and how."""

    log_level: str = option(
        "info", "least level that is logged", cli=True, choices=("debug", "info", "warning", "error")
    )
    log_format: str = option("text", "text or one JSON object a line", cli=True, choices=("text", "json"))

    def __post_init__(self) -> None:
        _check_types(self)
        _check_choice("log_level", self.log_level, ("debug", "info", "warning", "error"))
        _check_choice("log_format", self.log_format, ("text", "json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All groups together; what `LLM` and every command are built from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Build from flat option names. Unknown names are a ConfigError that names the nearest ones."""
        known = {name: group for name, (group, _) in all_options().items()}
        groups: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            if name not in known:
                raise ConfigError(f"unknown option {name!r}{other_name(name) or did_you_mean(name, known)}")
            groups.setdefault(known[name], {})[name] = as_texts(value) if is_list(name) else value
        types = _group_types()
        return cls(**{name: types[name](**values) for name, values in groups.items()})

    def to_options(self) -> dict[str, Any]:
        """Flat option names with their values, what `from_options` takes."""
        return {name: getattr(getattr(self, group), name) for name, (group, _) in all_options().items()}


def all_options() -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """Every public option: name -> (group, field), in the order of the groups."""
    found: dict[str, tuple[str, dataclasses.Field[Any]]] = {}
    for group, group_type in _group_types().items():
        for f in dataclasses.fields(group_type):
            assert f.name not in found, f"option {f.name} stands in two groups"
            found[f.name] = (group, f)
    return found


def is_list(name: str) -> bool:
    """True for an option of several texts."""
    return all_options()[name][1].type == tuple[str, ...]


def as_texts(value: Any) -> Any:
    """The value of such an option: a tuple of what a list holds, NAME=VALUE for a mapping, what commas part in a
    text; anything else as it is."""
    if isinstance(value, str):
        return tuple(filter(None, map(str.strip, value.split(","))))
    if isinstance(value, Mapping):
        return tuple(f"{name}={each}" for name, each in value.items())
    return tuple(value) if isinstance(value, list) else value


def _group_types() -> dict[str, Any]:
    return {f.name: f.default_factory for f in dataclasses.fields(EngineConfig)}


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}{did_you_mean(value, choices)}")


def _check_types(group: Any) -> None:
    """Raise ConfigError for a value of another type than its field's."""
    for item in dataclasses.fields(group):
        value = getattr(group, item.name)
        if item.type == tuple[str, ...]:
            if type(value) is tuple and all(isinstance(each, str) for each in value):
                continue
            raise ConfigError(f"{item.name} must be a list of texts, got {value!r}")
        types: list[Any] = [*get_args(item.type)] or [item.type]
        has_auto = len(types) > 1
        if type(value) in types or (has_auto and value == "auto"):
            continue
        if has_auto or types[0] is int:
            what = "a positive number or auto" if has_auto else "a whole number"
        else:
            what = "true or false" if types[0] is bool else "text"
        raise ConfigError(f"{item.name} must be {what}, got {value!r}")


def _check_seed(name: str, value: int) -> None:
    if not 0 <= value < 2**64:
        raise ConfigError(f"{name} must be 0 or more and fit in 64 bits, got {value}")


def _check_auto_or_positive(name: str, value: int | str) -> None:
    if value != "auto" and (isinstance(value, str) or value < 1):
        has_auto = "" if isinstance(all_options()[name][1].type, type) else " or auto"
        raise ConfigError(f"{name} must be a positive number{has_auto}, got {value!r}")
