"""Finds AMD GPUs in what the kernel's driver tells of them. Runs in a child process."""

import os
from pathlib import Path

from headrace.core.platform import DeviceInfo, Probe, Status

from ..gpu.torch_build import installed_torch, software_gap

FIX = "install torch for ROCm from PyTorch's ROCm wheel index"


def detect(root: Path = Path("/")) -> Probe:
    """GPUs of the driver's topology, if this user may use them and the installed torch can drive them."""
    devices = topology(root)
    if not devices:
        return Probe(status=Status.NO_DEVICE, reason="the driver (kfd) knows no GPU")
    node = root / "dev/kfd"
    if not os.access(node, os.R_OK | os.W_OK):
        return Probe(
            status=Status.NO_DEVICE,
            reason=f"this user may not open {node}",
            fix="sudo usermod -aG render,video $USER, then log in again",
            devices=devices,
        )
    return software_gap(installed_torch(), "hip", fix=FIX) or Probe(status=Status.OK, devices=devices)


def topology(root: Path = Path("/")) -> tuple[DeviceInfo, ...]:
    """The GPUs under /sys/class/kfd, in the driver's order; a node without SIMD units is a processor."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    found: list[DeviceInfo] = []
    try:
        folders = sorted(nodes.iterdir(), key=lambda folder: int(folder.name))
    except (OSError, ValueError):
        return ()
    for folder in folders:
        properties = _properties(folder / "properties")
        if not properties.get("simd_count"):
            continue
        banks = folder.glob("mem_banks/*/properties")
        total = sum(_properties(bank).get("size_in_bytes", 0) for bank in banks)
        arch = _architecture(properties.get("gfx_target_version", 0))
        info = DeviceInfo(
            id=f"rocm:{len(found)}",
            name=f"AMD GPU {arch}",
            kind="gpu",
            total_bytes=total,
            free_bytes=total,
            arch=arch,
        )
        found.append(info)
    return tuple(found)


def _architecture(version: int) -> str:
    """90402 is gfx942, 90010 is gfx90a, 110000 is gfx1100: major, minor and step, the step in hexadecimal."""
    return f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}"


def _properties(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        key, _, value = line.partition(" ")
        if value.strip().isdecimal():
            found[key] = int(value)
    return found
