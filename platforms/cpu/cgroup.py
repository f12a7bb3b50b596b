"""Finds the control groups of this process, version 1 and 2, from its own group up to the root."""

import re
from pathlib import Path

_ESCAPED = re.compile(r"\\([0-7]{3})")
"""How mountinfo writes blanks in paths."""


def cgroup_folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """Folders of the groups that limit `controller` ("memory" or "cpu"), innermost first; [] without cgroups.

    root: where proc and sys are (tests bring their own). Inside a container the path in /proc/self/cgroup may
    be the host's and not exist here; then the mount point itself is the group.
    """
    paths = _own_paths(root)
    for kind, mount_root, mount_point, options in _mounts(root):
        if kind == "cgroup2":
            path = paths.get("")
        elif controller in options:
            path = paths.get(controller)
        else:
            continue
        base = root / mount_point.lstrip("/")
        if path is None or not base.is_dir() or (kind == "cgroup2" and controller in paths):
            continue
        top = mount_root.rstrip("/")
        inside = path.removeprefix(top).strip("/") if f"{path}/".startswith(f"{top}/") else path.strip("/")
        leaf = base / inside
        if not leaf.is_dir():
            return [base]
        return [leaf, *(parent for parent in leaf.parents if parent == base or base in parent.parents)]
    return []


def read_number(file: Path) -> int | None:
    """The number in a file, or None: no such file, "max", or a value that stands for no limit."""
    try:
        value = int(file.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return value if 0 <= value < 1 << 60 else None


def _own_paths(root: Path) -> dict[str, str]:
    """Controller -> path of this process's group; "" stands for version 2."""
    paths: dict[str, str] = {}
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return paths
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _mounts(root: Path) -> list[tuple[str, str, str, list[str]]]:
    """(file system, root inside it, mount point, options) of each cgroup mount."""
    found = []
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) > 4 and len(right) > 2 and right[0] in ("cgroup", "cgroup2"):
            mount_root, mount_point = (_ESCAPED.sub(lambda code: chr(int(code[1], 8)), text) for text in left[3:5])
            found.append((right[0], mount_root, mount_point, right[2].split(",")))
    return found
