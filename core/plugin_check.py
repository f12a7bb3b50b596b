"""What makes a plugin acceptable: it imports, its hooks exist and take their arguments, its manifests are sound.

The same checks run in the child process that tries a third party's module first and, once more, in this one.
"""

import re
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pluggy

from . import hooks
from .errors import HeadraceError, PluginError
from .platform import PlatformSpec
from .suggest import did_you_mean

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def new_manager() -> pluggy.PluginManager:
    """A plugin manager that knows the hooks."""
    manager = pluggy.PluginManager("headrace")
    manager.add_hookspecs(hooks)
    return manager


def resolve(target: str) -> Any:
    """What "package.module" or "package.module:name" names. Raises whatever the import raises."""
    module, _, path = target.partition(":")
    found: Any = import_module(module)
    for part in filter(None, path.split(".")):
        found = getattr(found, part)
    return found


def register(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    """Register a plugin's hooks. Raises PluginError, and then none of them is registered."""
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        if manager.get_plugin(name) is plugin:
            manager.unregister(name=name)
        raise PluginError(_explain(error), plugin=name) from error
    if not manager.get_hookcallers(plugin):
        manager.unregister(name=name)
        raise PluginError("it implements no hook; functions named headrace_* need @hookimpl", plugin=name)


def read_manifests(value: object) -> tuple[PlatformSpec, ...]:
    """What headrace_platforms returned, checked field by field. Raises PluginError."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise PluginError(f"headrace_platforms returned {_kind(value)}, not a sequence of PlatformSpec")
    for spec in value:
        if not isinstance(spec, PlatformSpec):
            raise PluginError(f"headrace_platforms returned a sequence with {_kind(spec)}, not only PlatformSpec")
        _check_manifest(spec)
    return tuple(value)


def describe_error(error: BaseException) -> str:
    """What was raised, in one line, and where: `"ValueError: no chip (probe.py:12)"`."""
    if isinstance(error, HeadraceError):
        return error.reason
    if isinstance(error, SystemExit):
        text = f"it called sys.exit({error.code!r})"
    else:
        text = f"{type(error).__name__}: {error}".strip().partition("\n")[0].removesuffix(":")
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith("<frozen ") and "/importlib/" not in f.filename]
    if not theirs or theirs[-1].filename == __file__:
        return text
    return f"{text} ({theirs[-1].filename.rpartition('/')[2]}:{theirs[-1].lineno})"


def _check_manifest(spec: PlatformSpec) -> None:
    def need(ok: bool, field: str, rule: str) -> None:
        if not ok:
            raise PluginError(f"PlatformSpec.{field} must be {rule}, got {getattr(spec, field)!r}")

    def strings(value: object) -> bool:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)

    api: object = spec.api
    need(isinstance(spec.name, str) and bool(_NAME.fullmatch(spec.name)), "name", "a name such as my-chip")
    for field in ("impl", "detect"):
        target = getattr(spec, field)
        need(isinstance(target, str) and bool(_TARGET.fullmatch(target)), field, '"package.module:name"')
    numbers = isinstance(api, tuple) and len(api) == 2 and all(type(part) is int for part in api)
    need(numbers, "api", "two numbers")
    need(type(spec.priority) is int, "priority", "a number")
    need(isinstance(spec.fix, str), "fix", "text")
    need(strings(spec.device_nodes), "device_nodes", "a tuple of glob patterns")
    need(isinstance(spec.light_probe, bool), "light_probe", "true or false")


def _kind(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"


def _explain(error: Exception) -> str:
    """pluggy's message in one line, without its prefix that repeats the plugin's name."""
    if unknown := re.search(r"unknown hook '(\w+)'", str(error)):
        known = [name for name in vars(hooks) if name.startswith("headrace_")]
        return f"unknown hook {unknown[1]}{did_you_mean(unknown[1], known, limit=1)}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(line for line in lines if not line.startswith("Plugin '"))[:300] or "it cannot be registered"
