"""Finds and loads plugins one by one, so that a broken one is a line in a table and never a broken command."""

import logging
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata, resources
from pathlib import Path
from typing import Any

import pluggy

from .errors import PluginError
from .hooks import GROUP
from .platform import API, PlatformSpec, Status
from .plugin_check import describe_error, new_manager, read_manifests, register, resolve
from .probe_cache import fingerprint, read_verdict, write_verdict
from .probe_process import Outcome, Task, probe_timeout_s, run_children

OWN = __name__.partition(".")[0]
"""Our own distribution and import package."""
DISABLE = "HEADRACE_NO_PLUGINS"
"""Environment variable: 1 loads no plugin of third parties."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One entry point: its name, where it points, and the distribution that brings it."""

    name: str
    target: str
    distribution: str
    version: str

    @property
    def is_own(self) -> bool:
        """True if headrace's own distribution brings it."""
        return self.distribution == OWN

    def __str__(self) -> str:
        return f"{self.distribution}:{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A plugin, or one of its platforms, that cannot be used: why, and what would help."""

    plugin: Plugin
    status: Status
    reason: str
    fix: str
    platform: str = ""
    """the platform's name if only that is refused"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A platform that may be chosen, and the plugin that brings it."""

    spec: PlatformSpec
    plugin: Plugin


class Plugins:
    """The plugins of this process. Owns the hook relay; a name in `manifests` is unique.

    manifests: usable platforms' manifests. problems: all that went wrong, in the order it happened.
    """

    def __init__(self) -> None:
        self.manager = new_manager()
        self.loaded: list[Plugin] = []
        self.manifests: list[Manifest] = []
        self.problems: list[Problem] = []

    @property
    def hooks(self) -> pluggy.HookRelay:
        """pluggy's hook relay. A call through it raises what the first failing plugin raises; see `ask`."""
        return self.manager.hook

    def ask(self, hook: str, **arguments: Any) -> list[tuple[Plugin, Any]]:
        """Call one hook plugin by plugin, ours first: each answer that is not None, with its plugin.

        A plugin that raises becomes a problem and the others are asked all the same.
        """
        found: list[tuple[Plugin, Any]] = []
        modules = {str(plugin): self.manager.get_plugin(str(plugin)) for plugin in self.loaded}
        for plugin in self.loaded:
            others = [module for name, module in modules.items() if name != str(plugin)]
            call = self.manager.subset_hook_caller(hook, others)
            if not call.get_hookimpls():
                continue
            try:
                answers = call(**arguments)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a plugin raises is its problem
                self.refuse(plugin, Status.BROKEN, f"{hook} failed: {describe_error(error)}")
                continue
            takes_first = call.spec is not None and call.spec.opts["firstresult"]
            several = [answers] if takes_first else answers
            found += [(plugin, answer) for answer in several if answer is not None]
        return found

    def factories(self, hook: str) -> dict[str, tuple[Plugin, Callable[..., Any]]]:
        """The answers of a hook that gives factories by name, each with its plugin; of equal names the last one's.

        A plugin that answers with anything else becomes a problem.
        """
        found: dict[str, tuple[Plugin, Callable[..., Any]]] = {}
        for plugin, offer in self.ask(hook):
            if isinstance(offer, Mapping) and all(callable(factory) for factory in offer.values()):
                found.update({name: (plugin, factory) for name, factory in offer.items()})
            else:
                self.refuse(plugin, Status.BROKEN, f"{hook} must return names with factories")
        return found

    def refuse(self, plugin: Plugin, status: Status, reason: str, *, platform: str = "") -> None:
        """Note a problem."""
        fix = _fix(plugin, status)
        self.problems.append(Problem(plugin=plugin, status=status, reason=reason, fix=fix, platform=platform))

    def log_problems(self) -> None:
        """Warn of each problem; for commands that do not show them as a table."""
        for problem in self.problems:
            fields = {"reason": problem.reason, "fix": problem.fix}
            _log.warning("plugin %s: %s", problem.plugin, problem.status, extra={"fields": fields})


def load_plugins(*, recheck: bool = False) -> Plugins:
    """Load every plugin of the entry-point group `headrace.plugins`.

    Our own modules are imported directly. A third party's module is imported in a child process first, and
    what came of it is remembered; recheck tries all of them again. Nothing that a plugin does raises here.
    """
    plugins = Plugins()
    own, others = _discover()
    for plugin in own:
        _load(plugins, plugin)
    checked = _check_others(others, recheck)
    for plugin, outcome in checked:
        if outcome.status != Status.OK:
            plugins.refuse(plugin, outcome.status, outcome.reason)
        else:
            _load(plugins, plugin)
    _read_manifests(plugins)
    return plugins


@cache
def reserved_names() -> frozenset[str]:
    """Platform names that only headrace's own distribution may use."""
    text = (resources.files(f"{OWN}.platforms") / "reserved.txt").read_text()
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return frozenset({"auto", *filter(None, lines)})


def _load(plugins: Plugins, plugin: Plugin) -> None:
    try:
        register(plugins.manager, resolve(plugin.target), str(plugin))
    except PluginError as error:
        plugins.refuse(plugin, Status.BROKEN, error.reason)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a plugin raises is its problem
        plugins.refuse(plugin, Status.BROKEN, f"loading it failed: {describe_error(error)}")
    else:
        plugins.loaded.append(plugin)


def _read_manifests(plugins: Plugins) -> None:
    taken: dict[str, Plugin] = {}
    for plugin, value in plugins.ask("headrace_platforms"):
        try:
            specs = read_manifests(value)
        except PluginError as error:
            plugins.refuse(plugin, Status.BROKEN, error.reason)
            continue
        for spec in specs:
            conflict = _conflict(spec, plugin, taken)
            if conflict:
                plugins.refuse(plugin, Status.CONFLICT, conflict, platform=spec.name)
            elif spec.api[0] != API[0] or spec.api[1] > API[1]:
                theirs, ours = (".".join(map(str, api)) for api in (spec.api, API))
                reason = f"platform {spec.name} needs plugin interface {theirs}; this headrace has {ours}"
                plugins.refuse(plugin, Status.INCOMPATIBLE, reason, platform=spec.name)
            else:
                taken[spec.name] = plugin
                plugins.manifests.append(Manifest(spec=spec, plugin=plugin))


def _conflict(spec: PlatformSpec, plugin: Plugin, taken: dict[str, Plugin]) -> str:
    if not plugin.is_own and spec.name in reserved_names():
        return f"the platform name {spec.name} is reserved for headrace's own"
    if spec.name in taken:
        return f"the platform name {spec.name} is taken by {taken[spec.name]}"
    return ""


def _check_others(
    plugins: Sequence[tuple[Plugin, metadata.Distribution]], recheck: bool
) -> list[tuple[Plugin, Outcome]]:
    """The verdict on each third-party plugin: remembered, or from a child process."""
    keys = [fingerprint(distribution, plugin.target) for plugin, distribution in plugins]
    verdicts: list[Outcome | None] = [
        None if recheck else read_verdict(plugin.distribution, plugin.name, key)
        for (plugin, _), key in zip(plugins, keys, strict=True)
    ]
    missing = [i for i, verdict in enumerate(verdicts) if verdict is None]
    if missing:
        tasks = [Task(action="check", target=plugins[i][0].target) for i in missing]
        for i, outcome in zip(missing, run_children(tasks, probe_timeout_s()), strict=True):
            verdicts[i] = outcome
            write_verdict(plugins[i][0].distribution, plugins[i][0].name, keys[i], outcome)
    return [(plugin, verdict) for (plugin, _), verdict in zip(plugins, verdicts, strict=True) if verdict]


def _discover() -> tuple[list[Plugin], list[tuple[Plugin, metadata.Distribution]]]:
    """Our own entry points, and those of others, each sorted by distribution and name."""
    own: list[Plugin] = []
    others: list[tuple[Plugin, metadata.Distribution]] = []
    named: dict[metadata.Distribution, tuple[str, str]] = {}  # each look at a name or a version parses a file
    for entry in metadata.entry_points(group=GROUP):
        distribution = entry.dist
        assert distribution is not None, entry
        if distribution not in named:
            named[distribution] = _normalize(distribution.name), distribution.version
        name, version = named[distribution]
        plugin = Plugin(name=entry.name, target=entry.value, distribution=name, version=version)
        if plugin.is_own:
            own.append(plugin)
        elif not _is_disabled():
            others.append((plugin, distribution))
    others.sort(key=lambda pair: str(pair[0]))
    return own or _checkout_plugins(), others


def _checkout_plugins() -> list[Plugin]:
    """Our own entry points when headrace runs from a checkout that was never installed: out of pyproject.toml."""
    origin = import_module(OWN).__file__
    assert origin is not None
    project = Path(origin).parents[2] / "pyproject.toml"
    try:
        data = tomllib.loads(project.read_text())["project"]
        entries: dict[str, str] = data["entry-points"][GROUP]
        version: str = data["version"]
    except (OSError, KeyError, ValueError):
        _log.warning("no plugins of our own: headrace is not installed and has no project file=%s", project)
        return []
    return [Plugin(name=name, target=target, distribution=OWN, version=version) for name, target in entries.items()]


def _is_disabled() -> bool:
    return os.environ.get(DISABLE, "").strip().lower() not in ("", "0", "false", "no")


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _fix(plugin: Plugin, status: Status) -> str:
    if plugin.is_own:
        return f"pip install --force-reinstall {OWN}"
    if status == Status.INCOMPATIBLE:
        return f"pip install -U {plugin.distribution} {OWN}"
    if status == Status.CONFLICT:
        return f"pip uninstall {plugin.distribution}"
    return f"pip install -U {plugin.distribution}, or pip uninstall {plugin.distribution}, or {DISABLE}=1"
