"""What runs in the child process that tries a third party's module or a detection function first.

Its answer goes, as JSON, to a file descriptor of its own, so that whatever the plugin prints is harmless.
"""

import dataclasses
import json
import os
from typing import Any

from .platform import Probe
from .plugin_check import describe_error, new_manager, read_manifests, register, resolve

LAUNCH = (
    "import json, sys; request = json.load(sys.stdin); sys.path[:] = request['sys_path']; "
    "from headrace.core.probe_child import main; main(request)"
)
"""The program text of the child; it takes the parent's import path before it imports anything of ours."""


def main(request: dict[str, Any]) -> None:
    """Answer one request: {"action": "check" or "detect", "target", "result_fd"}. Does not return."""
    fd: int = request["result_fd"]
    try:
        answer = {"check": _check, "detect": _detect}[request["action"]](request["target"])
    except BaseException as error:  # noqa: BLE001 - whatever a plugin raises is the answer
        answer = {"error": describe_error(error)}
    with os.fdopen(fd, "w", closefd=False) as file:
        json.dump(answer, file)
    # Exit handlers of vendor libraries may hang or crash; the answer is complete.
    os._exit(0)


def _check(target: str) -> dict[str, Any]:
    manager = new_manager()
    module = target.partition(":")[0]
    try:
        plugin = resolve(target)
    except ModuleNotFoundError as error:
        if error.name and (module + ".").startswith(error.name + "."):
            return {"error": f"its entry point names module {module!r}, which does not exist"}
        raise
    register(manager, plugin, target)
    for manifests in manager.hook.headrace_platforms():
        read_manifests(manifests)
    return {}


def _detect(target: str) -> dict[str, Any]:
    probe = resolve(target)()
    if not isinstance(probe, Probe):
        return {"error": f"{target} returned {type(probe).__name__}, not a Probe"}
    plain = dataclasses.asdict(probe)
    json.dumps(plain)
    return {"probe": plain}
