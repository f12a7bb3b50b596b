"""`headrace devices`: platforms and their devices, and for each that cannot be used why, and what would help."""

from typing import TYPE_CHECKING, Any

import click

from .options import json_option
from .output import print_json, print_table

if TYPE_CHECKING:
    from ..devices import Found
    from ..plugin_loader import Problem


@click.command()
@json_option
@click.option("--recheck", is_flag=True, help="Try plugins of third parties again, whatever came of them before.")
def command(as_json: bool, recheck: bool) -> None:
    """List platforms and devices, and why some cannot be used.

    `--device auto` takes the platform marked with a star. One whose priority is below 0 is taken only by name.
    """
    from ..devices import find_platforms
    from ..plugin_loader import load_plugins

    plugins = load_plugins(recheck=recheck)
    found = find_platforms(plugins)
    automatic = next((item.spec.name for item in found if item.is_usable and item.spec.priority >= 0), "")
    if as_json:
        print_json(
            {
                "auto": automatic or None,
                "platforms": [_platform(item) for item in found],
                "problems": [_problem(problem) for problem in plugins.problems],
            }
        )
        return
    rows = [row for item in found for row in _rows(item, automatic)]
    rows += [
        [
            f"  {problem.platform or problem.plugin.name}",
            str(problem.status),
            "",
            "",
            f"{problem.reason} ({problem.plugin.distribution} {problem.plugin.version})",
            problem.fix,
        ]
        for problem in plugins.problems
    ]
    print_table(("device", "status", "name", "free / total", "why", "fix"), rows)


def _rows(item: "Found", automatic: str) -> list[list[str]]:
    from ..units import format_bytes

    mark = "*" if item.spec.name == automatic else " "
    if not item.is_usable:
        return [[f"{mark} {item.spec.name}", str(item.probe.status), "", "", item.probe.reason, item.probe.fix]]
    return [
        [
            f"{mark} {device.id}",
            str(item.probe.status),
            " ".join(filter(None, (device.name, device.arch))),
            f"{format_bytes(device.free_bytes)} / {format_bytes(device.total_bytes)}",
            "" if item.spec.priority >= 0 else f"only by name: --device {item.spec.name}",
            "",
        ]
        for device in item.probe.devices
    ]


def _platform(item: "Found") -> dict[str, Any]:
    import dataclasses

    return {
        "name": item.spec.name,
        "usable": item.is_usable,
        "status": str(item.probe.status),
        "priority": item.spec.priority,
        "reason": item.probe.reason,
        "fix": item.probe.fix,
        "plugin": item.plugin.name,
        "distribution": item.plugin.distribution,
        "version": item.plugin.version,
        "devices": [dataclasses.asdict(device) for device in item.probe.devices],
    }


def _problem(problem: "Problem") -> dict[str, Any]:
    return {
        "plugin": problem.plugin.name,
        "platform": problem.platform or None,
        "distribution": problem.plugin.distribution,
        "version": problem.plugin.version,
        "status": str(problem.status),
        "reason": problem.reason,
        "fix": problem.fix,
    }
