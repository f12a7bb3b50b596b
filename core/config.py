"""Every setting of the engine, grouped by the stage that reads it.

A field made with `option()` is a public option: `--its-name` on the command line if `cli` is true, a TOML key
and HEADRACE_ITS_NAME always, and a keyword of `LLM`. Names are unique over all groups.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from .errors import ConfigError
from .suggest import did_you_mean
from .units import parse_bytes

DTYPES = ("float32", "bfloat16", "float16")


def option(default: Any, help: str, *, cli: bool = False, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that users may set. `help` gives meaning and unit in one line."""
    return field(default=default, metadata={"help": help, "cli": cli, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how its weights are read."""

    model: str = option("", "hub id, folder or .gguf file; empty for the embedded default")
    revision: str = option("", "branch, tag or commit on the hub; empty for its default branch", cli=True)
    dtype: str = option("auto", "dtype of weights and activations", cli=True, choices=("auto", *DTYPES))
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
    offline: bool = option(False, "never ask the hub or a package index", cli=True)
    tokenizer: str = option("", "folder or hub id of the tokenizer; empty for the model's own")
    skip_tokenizer_init: bool = option(False, "token ids in and out, no tokenizer")
    chat_template: str = option("", "file with a chat template; empty for the model's own", cli=True)

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, ("auto", *DTYPES))
        _check_choice("load_format", self.load_format, ("auto", "dummy"))
        _check_auto_or_positive("max_model_len", self.max_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Where the model runs."""

    device: str = option("auto", "auto, or a platform with optional device ids, such as cpu", cli=True)
    threads: int | Literal["auto"] = option("auto", "worker threads of a host platform", cli=True)

    def __post_init__(self) -> None:
        _check_auto_or_positive("threads", self.threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig:
    """The KV cache."""

    kv_memory: str = option(
        "auto", "memory for the KV cache, such as 8GiB; auto is computed from what is free", cli=True
    )
    block_size: int = option(16, "tokens in one KV block")
    prefix_caching: bool = option(True, "share the KV blocks of equal prefixes", cli=True)
    hash_seed: int = option(0, "seed of the prefix cache's hashes; processes that share blocks share it")

    def __post_init__(self) -> None:
        if self.kv_memory != "auto":
            parse_bytes(self.kv_memory, name="kv_memory")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How requests share the steps."""

    max_num_seqs: int = option(64, "requests that may run at the same time", cli=True)
    max_num_batched_tokens: int = option(2048, "tokens in one step (its budget)", cli=True)
    policy: str = option("fcfs", "order of waiting requests", cli=True, choices=("fcfs", "priority"))
    seed: int = option(0, "seed of requests that bring none", cli=True)

    def __post_init__(self) -> None:
        _check_auto_or_positive("max_num_seqs", self.max_num_seqs)
        _check_auto_or_positive("max_num_batched_tokens", self.max_num_batched_tokens)
        _check_choice("policy", self.policy, ("fcfs", "priority"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is logged, and how."""

    log_level: str = option(
        "info", "least level that is logged", cli=True, choices=("debug", "info", "warning", "error")
    )
    log_format: str = option("text", "text or one JSON object a line", cli=True, choices=("text", "json"))

    def __post_init__(self) -> None:
        _check_choice("log_level", self.log_level, ("debug", "info", "warning", "error"))
        _check_choice("log_format", self.log_format, ("text", "json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All groups together; what `LLM` and every command are built from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Build from flat option names. Unknown names are a ConfigError that names the nearest ones."""
        known = {name: group for name, (group, _) in all_options().items()}
        groups: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            if name not in known:
                raise ConfigError(f"unknown option {name!r}{did_you_mean(name, known)}")
            groups.setdefault(known[name], {})[name] = value
        types = _group_types()
        return cls(**{name: types[name](**values) for name, values in groups.items()})


def all_options() -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """Every public option: name -> (group, field), in the order of the groups."""
    found: dict[str, tuple[str, dataclasses.Field[Any]]] = {}
    for group, group_type in _group_types().items():
        for f in dataclasses.fields(group_type):
            assert f.name not in found, f"option {f.name} stands in two groups"
            found[f.name] = (group, f)
    return found


def _group_types() -> dict[str, Any]:
    return {f.name: f.default_factory for f in dataclasses.fields(EngineConfig)}


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}{did_you_mean(value, choices)}")


def _check_auto_or_positive(name: str, value: object) -> None:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{name} must be a positive number, got {value!r}")
