"""Finds out about the processor with the standard library alone: name, instruction set, threads, memory."""

import os
import platform
from importlib.util import find_spec
from pathlib import Path

from headrace.core.platform import DeviceInfo, Probe, Status

from .cgroup import cgroup_folders, read_number
from .memory import host_memory

_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
# Best first: the first tier whose flags are all there is the processor's.
_TIERS: tuple[tuple[str, set[str]], ...] = (
    ("amx", _AVX512 | {"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni"}),
    ("avx512-bf16+vnni", _AVX512 | {"avx512_bf16", "avx512_vnni"}),
    ("avx512-vnni", _AVX512 | {"avx512_vnni"}),
    ("avx512", _AVX512),
    ("avx2", _AVX2),
    ("neon-bf16", {"asimd", "bf16"}),
    ("neon", {"asimd"}),
)
SCALAR = "scalar"
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}


def detect() -> Probe:
    """The processor, usable if our kernels were built or torch is installed (which the definitions run on)."""
    info = cpu_info()
    if not has_native_kernels() and find_spec("torch") is None:
        return Probe(
            status=Status.MISSING,
            reason="the native kernels were not built, and the package torch is not installed",
            fix="pip install 'headrace[torch]'",
            devices=(info,),
        )
    return Probe(status=Status.OK, devices=(info,))


def has_native_kernels() -> bool:
    """True if the compiled module is there."""
    return find_spec("headrace.kernels.cpu._ops") is not None


def cpu_info(root: Path = Path("/"), *, id: str = "cpu") -> DeviceInfo:
    """This processor: name, instruction set tier (`arch`), and memory within the cgroup's limit."""
    name, flags = _cpuinfo(root)
    memory = host_memory(root)
    return DeviceInfo(
        id=id,
        name=name or platform.machine() or "cpu",
        kind="cpu",
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        arch=isa_tier(flags),
        extra={"threads": str(usable_threads(root))},
    )


def isa_tier(flags: set[str]) -> str:
    """The best instruction set tier that these processor flags allow."""
    return next((tier for tier, needed in _TIERS if needed <= flags), SCALAR)


def has_native_bfloat16(root: Path = Path("/")) -> bool:
    """True if the processor multiplies bfloat16 itself."""
    return bool(_cpuinfo(root)[1] & _BF16)


def usable_threads(root: Path = Path("/")) -> int:
    """Threads that can run at full speed: physical cores of the affinity mask, within the cgroup's quota."""
    allowed = os.sched_getaffinity(0)
    cores = {_core_of(root, cpu) for cpu in allowed}
    return max(1, min([len(cores), *_quotas(root)]))


def _quotas(root: Path) -> list[int]:
    """Whole processors that each cgroup allows."""
    found = []
    for folder in cgroup_folders("cpu", root):
        try:
            quota_text, period_text = (folder / "cpu.max").read_text().split()
            quota, period = (None if quota_text == "max" else int(quota_text)), int(period_text)
        except (OSError, ValueError):
            quota = read_number(folder / "cpu.cfs_quota_us")
            period = read_number(folder / "cpu.cfs_period_us") or 0
        if quota is not None and quota > 0 and period > 0:
            found.append(max(1, quota // period))
    return found


def _core_of(root: Path, cpu: int) -> tuple[str, str]:
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    try:
        package = (topology / "physical_package_id").read_text().strip()
        return package, (topology / "core_id").read_text().strip()
    except OSError:
        return "", str(cpu)


def _cpuinfo(root: Path) -> tuple[str, set[str]]:
    """Model name and flags of the first processor; x86 says flags, arm says Features."""
    try:
        first = (root / "proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return "", set()
    table: dict[str, str] = {}
    for line in first.splitlines():
        key, _, value = line.partition(":")
        table.setdefault(key.strip(), value.strip())
    flags = table.get("flags") or table.get("Features") or ""
    return table.get("model name", ""), set(flags.split())
