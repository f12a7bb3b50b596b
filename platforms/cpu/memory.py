"""Memory of this machine as this process may use it: what the kernel has, within the limits of its cgroups."""

from pathlib import Path

from headrace.core.platform import Memory

from .cgroup import cgroup_folders, read_number

HUGE_PAGE_BYTES = 2 << 20


def host_memory(root: Path = Path("/")) -> Memory:
    """Total and free bytes within the machine's memory, every cgroup limit and this process's own (`ulimit -v` and
    `-d`, as batch systems set them), and this process's resident bytes.

    Page cache counts as free, as in the kernel's MemAvailable. Above memory.high a group is throttled and its memory
    taken back, so that it is a limit, too.
    """
    machine = _table(root / "proc/meminfo", unit=1024)
    total = machine.get("MemTotal", 0)
    free = machine.get("MemAvailable", machine.get("MemFree", 0))
    for folder in cgroup_folders("memory", root):
        limit = _limit(folder)
        used = _first(folder, "memory.current", "memory.usage_in_bytes")
        if limit is None or used is None:
            continue
        stat = _table(folder / "memory.stat", unit=1)
        reclaimable = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))
        total = min(total, limit)
        free = min(free, max(0, limit - used + reclaimable))
    status = _table(root / "proc/self/status", unit=1024)
    for limit, name in _process_limits(root):
        total = min(total, limit)
        free = min(free, max(0, limit - status.get(name, 0)))
    return Memory(total_bytes=total, free_bytes=free, used_bytes=status.get("VmRSS", 0))


def huge_page_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of this process's memory in huge pages, None if the system does not say."""
    return _table(root / "proc/self/smaps_rollup", unit=1024).get("AnonHugePages")


def memory_limit(root: Path = Path("/")) -> int | None:
    """The smallest limit of a cgroup or of this process below the machine's memory, in bytes, or None."""
    limits = [limit for folder in cgroup_folders("memory", root) if (limit := _limit(folder)) is not None]
    limits += [limit for limit, _ in _process_limits(root)]
    total = _table(root / "proc/meminfo", unit=1024).get("MemTotal", 0)
    smallest = min(limits, default=total)
    return smallest if smallest < total else None


def _limit(folder: Path) -> int | None:
    found = [read_number(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    return min((limit for limit in found if limit is not None), default=None)


def _process_limits(root: Path) -> list[tuple[int, str]]:
    """Soft limits on this process's memory in bytes, each with what /proc/self/status calls what is used of it."""
    try:
        lines = (root / "proc/self/limits").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        for title, name in (("Max address space", "VmSize"), ("Max data size", "VmData")):
            if line.startswith(title) and (words := line.removeprefix(title).split()) and words[0].isdigit():
                found.append((int(words[0]), name))
    return found


def _first(folder: Path, *names: str) -> int | None:
    return next((value for name in names if (value := read_number(folder / name)) is not None), None)


def _table(file: Path, *, unit: int) -> dict[str, int]:
    """Lines "name: number ..." as name -> number * unit."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    table = {}
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[1].isdigit():
            table[words[0].rstrip(":")] = int(words[1]) * unit
    return table
