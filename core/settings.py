"""Options from all their sources - flags, environment, a TOML file, defaults - become one EngineConfig.

Nothing here knows an option's name: everything is read from the fields of the config dataclasses.
"""

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from .config import EngineConfig, all_options, as_texts, is_list
from .errors import ConfigError
from .other_names import other_name
from .suggest import did_you_mean
from .units import parse_count

PREFIX = "HEADRACE_"
OTHER_VARIABLES: Mapping[str, str] = {
    "HEADRACE_CACHE": "folder of downloaded files and verdicts; default $XDG_CACHE_HOME/headrace",
    "HEADRACE_CONFIG": "path of the configuration file if --config is not given",
    "HEADRACE_CPU_ISA": "instruction set tier that the native kernels must use; for tests",
    "HEADRACE_DEBUG": "1 shows the traceback of an error",
    "HEADRACE_NO_PLUGINS": "1 loads no third-party plugin",
    "HEADRACE_PROBE_TIMEOUT_S": "seconds that a plugin's import or detection may take",
}
"""Variables that are not options: name -> meaning."""

_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_NEAR = 0.72
"""An unknown HEADRACE_ variable this similar to an option is taken for a misspelt option."""


def resolve_options(
    flags: Mapping[str, Any],
    *,
    config_file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> EngineConfig:
    """One EngineConfig out of flags, environment, file and defaults; the earlier wins.

    flags: option name -> text as typed, or a value of the field's type; None is not given. config_file: TOML
    with flat keys; None takes HEADRACE_CONFIG. environ: None is os.environ. Raises ConfigError that names the
    source and the value.
    """
    environ = os.environ if environ is None else environ
    path = config_file if config_file is not None else environ.get("HEADRACE_CONFIG") or None
    chosen: dict[str, Any] = {}
    if path is not None:
        chosen.update(_from_file(Path(path)))
    chosen.update(_from_environment(environ))
    chosen.update(_from_flags(flags))
    return EngineConfig.from_options(chosen)


def option_type(field: dataclasses.Field[Any]) -> str:
    """How a field's value is written: text, number, number or auto, true or false, or its choices."""
    if field.metadata["choices"]:
        return " | ".join(field.metadata["choices"])
    if is_list(field.name):
        return "texts"
    base, has_auto = _base_type(field)
    return {bool: "true or false", int: "number", str: "text"}[base] + (" or auto" if has_auto else "")


def flag_of(name: str) -> str:
    """The command-line spelling of an option: `--max-model-len`."""
    return "--" + name.replace("_", "-")


def text_of(value: Any) -> str:
    """A value as a variable holds it."""
    return ",".join(value) if isinstance(value, tuple) else str(int(value)) if isinstance(value, bool) else str(value)


def variable_of(name: str) -> str:
    """The environment spelling of an option: `HEADRACE_MAX_MODEL_LEN`."""
    return PREFIX + name.upper()


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    options = all_options()
    unknown = [name for name in flags if name not in options]
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}{did_you_mean(unknown[0], options)}")
    return {
        name: _checked(name, value, flag_of(name) if options[name][1].metadata["cli"] else name)
        for name, value in flags.items()
        if value is not None and value != ()
    }


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    options = all_options()
    by_variable = {variable_of(name): name for name in options}
    chosen: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable in by_variable:
            if text:  # an empty variable is one that was cleared
                name = by_variable[variable]
                chosen[name] = _checked(name, text, variable)
            continue
        # Plugins may have variables of their own; only what is nearly an option is a mistake.
        known = [*by_variable, *OTHER_VARIABLES]
        bare = {other.removeprefix(PREFIX): other for other in known}
        near = difflib.get_close_matches(variable.removeprefix(PREFIX), bare, n=3, cutoff=_NEAR)
        if near:
            names = ", ".join(bare[name] for name in near)
            raise ConfigError(
                f"environment variable {variable} is not an option; did you mean {names}?",
                remedies=[f"unset {variable}"],
            )
    return chosen


def _from_file(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    options = all_options()
    chosen: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if isinstance(value, dict) and name not in options:
            raise ConfigError(f"{path}: [{key}] is a table; options are flat keys such as max-model-len = 4096")
        if name not in options:
            known = [option.replace("_", "-") if "-" in key else option for option in options]
            raise ConfigError(f"{path}: unknown option {key!r}{other_name(key) or did_you_mean(key, known)}")
        if name in chosen:
            raise ConfigError(f"{path}: option {name} stands there twice, with dashes and with underscores")
        base, has_auto = _base_type(options[name][1])
        if isinstance(value, str) and base not in (str, tuple) and not (has_auto and value == "auto"):
            raise ConfigError(f"{path}: {key} must be {_described(options[name][1])}, without quotes; got {value!r}")
        chosen[name] = _checked(name, value, f"{path}: {key}")
    return chosen


def _checked(name: str, value: Any, origin: str) -> Any:
    """The value in the field's type, validated on its own so that the error can name where it came from."""
    _, field = all_options()[name]
    base, has_auto = _base_type(field)
    if base is tuple:
        value = as_texts(value)
    elif isinstance(value, str) and base is not str and not (has_auto and value == "auto"):
        value = _parse(value, field, origin)
    if type(value) is not base and not (has_auto and value == "auto"):
        raise ConfigError(f"{origin} must be {_described(field)}, got {value!r}")
    try:
        EngineConfig.from_options({name: value})
    except ConfigError as error:
        raise ConfigError(f"{origin} {error.reason.removeprefix(name).lstrip()}", remedies=error.remedies) from None
    return value


def _parse(text: str, field: dataclasses.Field[Any], origin: str) -> bool | int:
    if _base_type(field)[0] is bool:
        if text.lower() not in _BOOLEANS:
            raise ConfigError(f"{origin} must be one of {', '.join(_BOOLEANS)}; got {text!r}")
        return _BOOLEANS[text.lower()]
    try:
        return parse_count(text)
    except ValueError:
        raise ConfigError(f"{origin} must be {_described(field)}, got {text!r}") from None


def _described(field: dataclasses.Field[Any]) -> str:
    return option_type(field).replace("number", "a number")


def _base_type(field: dataclasses.Field[Any]) -> tuple[type, bool]:
    """(bool, int, str or tuple; whether the word auto is allowed beside it)."""
    if is_list(field.name):
        return tuple, False
    if isinstance(field.type, type):
        return field.type, False
    return next(part for part in get_args(field.type) if isinstance(part, type)), True
