"""Which platforms can be used here, and the opening of the one that --device asks for."""

import dataclasses
import glob
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .config import EngineConfig
from .errors import ConfigError, DeviceUnavailable, HeadraceError, PluginError, Unsupported
from .platform import Device, DeviceInfo, OpProvider, Platform, PlatformSpec, Probe, Status
from .plugin_check import describe_error, resolve
from .plugin_loader import Manifest, Plugin, Plugins, load_plugins
from .probe_process import Outcome, Task, probe_timeout_s, run_children
from .suggest import did_you_mean

AUTO: Final = "auto"
EMULATED = "emulated"
"""Device id of a platform's real code path on this machine's processor; needs no device."""
EMULATED_KV_BYTES = 64 << 20
"""KV cache of an emulated device by default: enough to try a model out, and little enough to be walked over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A platform and what its detection said."""

    spec: PlatformSpec
    plugin: Plugin
    probe: Probe

    @property
    def is_usable(self) -> bool:
        """True if a device was found."""
        return self.probe.status == Status.OK


def find_platforms(
    plugins: Plugins, *, manifests: Sequence[Manifest] | None = None, timeout_s: float | None = None
) -> list[Found]:
    """Probe platforms (all of them by default), best first.

    A platform whose device files are missing is not probed. A third party's detection, and one that touches
    vendor libraries, runs in a child process, all at the same time; it may raise, hang or crash.
    """
    wanted = plugins.manifests if manifests is None else manifests
    probes: dict[str, Probe] = {}
    children: list[Manifest] = []
    for manifest in wanted:
        spec = manifest.spec
        if spec.device_nodes and not any(glob.glob(pattern) for pattern in spec.device_nodes):
            reason = f"no device file {' or '.join(spec.device_nodes)}"
            probes[spec.name] = Probe(status=Status.NO_DEVICE, reason=reason, fix=spec.fix)
        elif spec.light_probe and manifest.plugin.is_own:
            probes[spec.name] = _probe_here(spec)
        else:
            children.append(manifest)
    tasks = [Task(action="detect", target=manifest.spec.detect) for manifest in children]
    limit_s = probe_timeout_s() if timeout_s is None else timeout_s
    for manifest, outcome in zip(children, run_children(tasks, limit_s) if tasks else (), strict=True):
        probes[manifest.spec.name] = _probe_of(manifest.spec, outcome)
    ranked = sorted(wanted, key=lambda manifest: (-manifest.spec.priority, manifest.spec.name))
    return [
        Found(spec=manifest.spec, plugin=manifest.plugin, probe=probes[manifest.spec.name]) for manifest in ranked
    ]


def open_device(config: EngineConfig, plugins: Plugins | None = None) -> Device:
    """Open the device that `--device` names: `auto`, `name` or `name:ids`.

    auto takes the usable platform with the highest priority; a named device never falls back to another one.
    Raises DeviceUnavailable with the reason and the fix, ConfigError, PluginError.
    """
    plugins = load_plugins() if plugins is None else plugins
    name, ids = parse_device(config.device.device)
    manifest = _choose(plugins) if name == AUTO else _named(plugins, name, ids)
    device = _open(manifest, ids, config)
    device.extra_providers = collect_providers(plugins, manifest, device.info)
    plugins.log_problems()
    wanted = config.device.tensor_parallel_size
    if wanted not in (AUTO, device.tp_size):
        device.close()
        raise Unsupported(
            f"{device.info.id} cuts a model over {device.tp_size} ranks, not {wanted}",
            remedies=["without --tensor-parallel-size"],
        )
    return device


def rank_devices(name: str, ids: Sequence[str], config: EngineConfig) -> tuple[str, ...]:
    """--device of each rank, for a platform whose ids name one device each; empty for a model that is not cut.

    Raises ConfigError if there are not as many ids as ranks.
    """
    wanted = config.device.tensor_parallel_size
    size = max(1, len(ids)) if wanted == AUTO else wanted
    if size == 1 and len(ids) <= 1:
        return ()
    if list(ids) == [EMULATED]:
        return (f"{name}:{EMULATED}",) * size
    ids = ids or [str(index) for index in range(size)]
    if len(ids) != size:
        raise ConfigError(
            f"--device {name}:{','.join(ids)} names {len(ids)} devices, --tensor-parallel-size {size} asks for "
            f"{size}",
            remedies=[f"--tensor-parallel-size {len(ids)}", f"--device {name}"],
        )
    return tuple(f"{name}:{index}" for index in ids)


def parse_device(text: str) -> tuple[str, list[str]]:
    """`"name:0,1"` as ("name", ["0", "1"]). Raises ConfigError."""
    name, colon, rest = text.strip().partition(":")
    ids = [part.strip() for part in rest.split(",")] if colon else []
    if not name or not all(ids) or (name == AUTO and colon):
        raise ConfigError(
            f"device must be auto, a platform, or a platform with ids such as name:0,1; got {text!r}",
            remedies=["headrace devices"],
        )
    if len(set(ids)) != len(ids):
        raise ConfigError(f"device {text!r} names an id twice")
    return name, ids


def collect_providers(plugins: Plugins, manifest: Manifest, info: DeviceInfo) -> tuple[OpProvider, ...]:
    """Op providers that plugins other than the platform's own bring for an opened device."""
    found: list[OpProvider] = []
    for plugin, value in plugins.ask("headrace_op_providers", platform=manifest.spec.name, device=info):
        if not isinstance(value, Sequence) or not all(isinstance(item, OpProvider) for item in value):
            reason = f"headrace_op_providers returned {type(value).__name__}, not a sequence of OpProvider"
            plugins.refuse(plugin, Status.BROKEN, reason)
            continue
        found += value
    return tuple(found)


def _choose(plugins: Plugins) -> Manifest:
    candidates = [manifest for manifest in plugins.manifests if manifest.spec.priority >= 0]
    found = find_platforms(plugins, manifests=candidates)
    usable = next((item for item in found if item.is_usable), None)
    if usable is not None:
        return next(manifest for manifest in candidates if manifest.spec is usable.spec)
    reasons = [f"{item.spec.name}: {item.probe.reason}" for item in found]
    reasons += [f"{problem.plugin}: {problem.reason}" for problem in plugins.problems]
    fixes = [item.probe.fix for item in found if item.probe.fix][:2]
    raise DeviceUnavailable(
        "no platform can be used here: " + ("; ".join(reasons) or "none is installed"),
        remedies=[*fixes, "headrace devices"],
    )


def _named(plugins: Plugins, name: str, ids: Sequence[str]) -> Manifest:
    manifest = next((manifest for manifest in plugins.manifests if manifest.spec.name == name), None)
    if manifest is None:
        raise _unknown(plugins, name)
    if ids == [EMULATED]:
        return manifest
    [found] = find_platforms(plugins, manifests=[manifest])
    if not found.is_usable:
        probe = found.probe
        reason = probe.reason or str(probe.status)
        fix = probe.fix or manifest.spec.fix
        raise DeviceUnavailable(
            f"device {name} cannot be used ({probe.status}): {reason}",
            remedies=[*([fix] if fix else []), "headrace devices"],
        )
    return manifest


def _unknown(plugins: Plugins, name: str) -> DeviceUnavailable:
    """Why there is no platform of that name: refused, or a slip of the pen."""
    for problem in plugins.problems:
        if name in (problem.platform, problem.plugin.name):
            return DeviceUnavailable(
                f"device {name} cannot be used ({problem.status}): {problem.plugin}: {problem.reason}",
                remedies=[problem.fix, "headrace devices"],
            )
    known = [manifest.spec.name for manifest in plugins.manifests]
    reason = f"no plugin brings a platform {name!r}{did_you_mean(name, known)}"
    return DeviceUnavailable(f"{reason}; there are {', '.join(known) or 'none'}", remedies=["headrace devices"])


def _open(manifest: Manifest, ids: Sequence[str], config: EngineConfig) -> Device:
    spec = manifest.spec
    try:
        platform = resolve(spec.impl)()
        if not isinstance(platform, Platform):
            raise PluginError(f"{spec.impl} is no headrace Platform")
        device = platform.open(ids, config)
        if not isinstance(device, Device):
            raise PluginError(f"{spec.impl}.open returned {type(device).__name__}, not a Device")
    except PluginError as error:
        raise PluginError(f"platform {spec.name}: {error.reason}", plugin=str(manifest.plugin)) from error
    except HeadraceError:
        raise
    except Exception as error:
        raise PluginError(
            f"platform {spec.name} ({manifest.plugin}) failed to open: {describe_error(error)}",
            plugin=str(manifest.plugin),
            remedies=["headrace doctor", "headrace devices"],
        ) from error
    return device


def _probe_here(spec: PlatformSpec) -> Probe:
    try:
        probe = resolve(spec.detect)()
    except Exception as error:  # noqa: BLE001 - a failed detection is a line in the table
        return Probe(status=Status.BROKEN, reason=f"its detection failed: {describe_error(error)}", fix=spec.fix)
    assert isinstance(probe, Probe), f"{spec.detect} returned {type(probe).__name__}"
    return probe


def _probe_of(spec: PlatformSpec, outcome: Outcome) -> Probe:
    """A child's outcome as a Probe."""
    if outcome.status != Status.OK:
        return Probe(status=outcome.status, reason=outcome.reason, fix=spec.fix)
    plain = outcome.answer["probe"]
    try:
        devices = tuple(DeviceInfo(**device) for device in plain.pop("devices"))
        probe = Probe(**{**plain, "status": Status(plain["status"]), "devices": devices})
    except (TypeError, ValueError, KeyError) as error:
        return Probe(status=Status.BROKEN, reason=f"its detection gave a malformed Probe: {error}", fix=spec.fix)
    return probe if probe.fix or probe.status == Status.OK else dataclasses.replace(probe, fix=spec.fix)
