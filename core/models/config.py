"""config.json as data: its keys with clear errors, old and new spellings made one. No transformers here."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

from ..errors import ModelError, ModelNotFound
from ..json_text import parse_json
from ..suggest import did_you_mean

CONFIG_FILE = "config.json"
_REQUIRED: Final = object()
NOTHING: Mapping[str, Any] = MappingProxyType({})
_MAX_LAYERS = 10_000
_MAX_NUMBER = sys.float_info.max


class HFConfig:
    """The keys of one config.json; never changed. `file` is the place that errors name.

    A key that is null reads as `null` where a caller gives one (Mistral's `sliding_window: null` switches the
    window off, although an absent key means 4096), else as if it were absent.
    """

    __slots__ = ("_spelled", "_values", "file")

    def __init__(
        self, values: Mapping[str, Any], *, file: str = CONFIG_FILE, spelled: Mapping[str, str] = NOTHING
    ) -> None:
        """spelled: names of keys -> those that the file has, for errors."""
        self._values = dict(values)
        self._spelled = spelled
        self.file = file

    def __repr__(self) -> str:
        return f"HFConfig(model_type={self._values.get('model_type')!r}, file={self.file!r})"

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        """The value of a key that must be there. Raises ModelError that names key and file."""
        value = self._values.get(name)
        if value is None:
            theirs = self.spelled(name)
            hint = ": it is null" if name in self._values else did_you_mean(theirs, self._values)
            raise ModelError(f"{self.file} lacks the key {theirs!r}{hint}")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it stands, or `default` if the key is absent."""
        return self._values.get(name, default)

    def with_defaults(self, **values: Any) -> "HFConfig":
        """This config, with `values` where keys are absent: the defaults of a family's config class. Rotary
        parameters that are null are absent, too."""
        ours = self._values
        if "rope_parameters" in values and ours.get("rope_parameters") is None:
            ours = {name: value for name, value in ours.items() if name != "rope_parameters"}
        return HFConfig({**values, **ours}, file=self.file, spelled=self._spelled)

    def replace(self, **values: Any) -> "HFConfig":
        """This config with other values."""
        return HFConfig({**self._values, **values}, file=self.file, spelled=self._spelled)

    def alias(self, **names: str) -> "HFConfig":
        """This config, with the value of each old key (right) under its Llama name (left) too, where it is there."""
        found = {ours: self._values[theirs] for ours, theirs in names.items() if theirs in self._values}
        spelled = {ours: theirs for ours, theirs in names.items() if ours in found or ours not in self._values}
        return HFConfig({**self._values, **found}, file=self.file, spelled={**self._spelled, **spelled})

    @property
    def values(self) -> Mapping[str, Any]:
        """All keys as they stand."""
        return MappingProxyType(self._values)

    @property
    def model_type(self) -> str:
        """The family, as transformers names it."""
        return self.text("model_type")

    @property
    def dtype(self) -> str:
        """dtype of the checkpoint; `dtype`, or `torch_dtype` as older files call it. float32 if not stated."""
        value = self.get("dtype") or self.get("torch_dtype") or "float32"
        return str(value).removeprefix("torch.")

    def quantization(self) -> Mapping[str, Any]:
        """How the checkpoint's weights were quantized; empty if they were not. Raises ModelError."""
        return self.mapping("quantization_config") or self.mapping("compression_config")

    def integer(self, name: str, default: Any = _REQUIRED, *, null: Any = _REQUIRED) -> int:
        """An integer of at least 0. Raises ModelError."""
        value = self._value(name, default, null)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(name, value, "an integer of at least 0")
        return value

    def size(self, name: str, default: Any = _REQUIRED) -> int:
        """An integer of at least 1. Raises ModelError."""
        value = self.integer(name, default)
        if value < 1:
            raise self._wrong(name, value, "an integer of at least 1")
        return value

    def num_layers(self, name: str = "num_hidden_layers") -> int:
        """A number of layers; a damaged one must not become a list of so many. Raises ModelError."""
        value = self.size(name)
        if value > _MAX_LAYERS:
            raise self._wrong(name, value, f"at most {_MAX_LAYERS}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, null: Any = _REQUIRED) -> float:
        """A finite number. Raises ModelError."""
        value = self._value(name, default, null)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_NUMBER:
            raise self._wrong(name, value, "a finite number")
        return float(value)

    def positive(self, name: str, default: Any = _REQUIRED) -> float:
        """A number above 0. Raises ModelError."""
        value = self.number(name, default)
        if value <= 0:
            raise self._wrong(name, value, "a number above 0")
        return value

    def boolean(self, name: str, default: Any = _REQUIRED) -> bool:
        """True or false. Raises ModelError."""
        value = self._value(name, default, _REQUIRED)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        """A string. Raises ModelError."""
        value = self._value(name, default, _REQUIRED)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object; empty if the key is absent or null. Raises ModelError."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return value or {}

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty if the key is absent or null. Raises ModelError."""
        return self._items(name, "a list of strings", lambda item: isinstance(item, str), is_required=False)

    def flags(self, name: str) -> tuple[bool, ...]:
        """A list of true or false, or of 1 or 0; empty if the key is absent or null. Raises ModelError."""
        wanted = "a list of true or false"
        return tuple(map(bool, self._items(name, wanted, lambda item: isinstance(item, int), is_required=False)))

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` finite numbers. Raises ModelError."""
        wanted = f"a list of {count} finite numbers"
        found = self._items(name, wanted, lambda item: type(item) in (int, float) and abs(item) <= _MAX_NUMBER)
        if len(found) != count:
            raise self._wrong(name, self[name], wanted)
        return tuple(map(float, found))

    def indices(self, name: str) -> tuple[int, ...]:
        """A list of indices from 0. Raises ModelError."""
        return self._items(name, "a list of integers from 0", lambda item: type(item) is int and item >= 0)

    def rope_parameters(self, layer_type: str = "") -> "HFConfig":
        """Rotary parameters in today's spelling: `rope_type`, `rope_theta`, `partial_rotary_factor` and what the
        type needs, `original_max_position_embeddings` included.

        Older files have `rope_scaling` (its `type` is today's `rope_type`) beside a top-level `rope_theta`;
        newer ones `rope_parameters`, flat or one object per layer type. Raises ModelError.
        """
        stated = self.mapping("rope_scaling") or self.mapping("rope_parameters")
        nested = any(isinstance(value, Mapping) for value in stated.values())
        where = f"rope parameters of {self.file}"
        if nested:
            where = f"rope parameters of {layer_type} in {self.file}"
            if layer_type not in stated:
                raise ModelError(
                    f"{self.file} has rope parameters for {', '.join(stated)}, but not for {layer_type!r}"
                )
            # transformers reads `truncate` beside the types, not of them.
            outer, stated = stated, HFConfig(stated, file=where).mapping(layer_type)
            stated = {**stated, "truncate": outer.get("truncate", True)}
        values = dict(stated)
        values.setdefault("rope_type", values.get("type", "default"))
        for name, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)):
            values.setdefault(name, default if self.get(name) is None else self.get(name))
        # The length that training saw: the top level wins, because Phi-3 keeps it there.
        length = None if nested else self.get("original_max_position_embeddings")
        if length is not None:
            values["original_max_position_embeddings"] = length
        values.setdefault("original_max_position_embeddings", self.get("max_position_embeddings"))
        return HFConfig(values, file=where)

    def _items(
        self, name: str, wanted: str, is_right: Callable[[Any], bool], *, is_required: bool = True
    ) -> tuple[Any, ...]:
        value = self[name] if is_required else self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(map(is_right, value)):
            raise self._wrong(name, value, wanted)
        return tuple(value)

    def _value(self, name: str, default: Any, null: Any) -> Any:
        if name in self._values:
            value = self._values[name]
            if value is not None:
                return value
            if null is not _REQUIRED:
                return null
        return self[name] if default is _REQUIRED else default

    def spelled(self, name: str) -> str:
        """A key as the file calls it."""
        return self._spelled.get(name, name)

    def _wrong(self, name: str, value: object, wanted: str) -> ModelError:
        return ModelError(f"{self.spelled(name)} in {self.file} must be {wanted}, got {value!r}")


_T = TypeVar("_T")
Read: TypeAlias = _T | Callable[[HFConfig], _T]
"""A value, or what a function makes of the config."""


def flag(name: str, default: bool = False) -> Callable[[HFConfig], bool]:
    """Reads true or false under a key."""
    return lambda config: config.boolean(name, default)


def number(name: str, default: float, *, null: Any = _REQUIRED) -> Callable[[HFConfig], float]:
    """Reads a number under a key."""
    return lambda config: config.number(name, default, null=null)


def read(value: Any, config: HFConfig) -> Any:
    """A value, or what a function makes of the config."""
    return value(config) if callable(value) else value


def read_all(values: Mapping[str, Any], config: HFConfig) -> dict[str, Any]:
    """The same for each value."""
    return {name: read(value, config) for name, value in values.items()}


def read_config(folder: Path) -> HFConfig:
    """The config.json of a model folder. Raises ModelNotFound if there is none, ModelError if it is damaged."""
    path = folder / CONFIG_FILE
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _not_found(folder) from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    try:
        values = parse_json(data)
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object, but it holds a {type(values).__name__}")
    return HFConfig(values, file=str(path))


def _not_found(folder: Path) -> ModelNotFound:
    if not folder.is_dir():
        return ModelNotFound(f"there is no folder {folder}")
    names = sorted(entry.name for entry in folder.iterdir())
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    reason = f"{folder} has no {CONFIG_FILE}; " + (f"it holds {listed}" if names else "it is empty")
    remedies = [f"give the file itself: {folder / name}" for name in names if name.endswith(".gguf")][:2]
    remedies += [
        f"give the folder {entry.parent}" for entry in sorted(folder.glob(f"*/{CONFIG_FILE}"))[:1] if not remedies
    ]
    return ModelNotFound(reason, remedies=remedies or ["give a folder with config.json, or a .gguf file"])
