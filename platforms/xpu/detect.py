"""Finds Intel GPUs in what the kernel tells of the graphics devices. Runs in a child process."""

import ctypes
import os
from pathlib import Path

from headrace.core.platform import DeviceInfo, Probe, Status

from ..gpu.torch_build import installed_torch, software_gap

FIX = "install torch for XPU from PyTorch's XPU wheel index"
INTEL = "0x8086"
LEVEL_ZERO = "libze_loader.so.1"


def detect(root: Path = Path("/")) -> Probe:
    """GPUs of Intel's drivers i915 and xe, if this user may use them and the software is there."""
    nodes = render_nodes(root)
    if not nodes:
        return Probe(status=Status.NO_DEVICE, reason="no graphics device of this machine is Intel's")
    devices = tuple(
        DeviceInfo(id=f"xpu:{i}", name=f"Intel GPU {device_id}", kind="gpu", total_bytes=0, free_bytes=0, arch="xe")
        for i, (_, device_id) in enumerate(nodes)
    )
    closed = next((node for node, _ in nodes if not os.access(node, os.R_OK | os.W_OK)), None)
    if closed is not None:
        return Probe(
            status=Status.NO_DEVICE,
            reason=f"this user may not open {closed}",
            fix="sudo usermod -aG render $USER, then log in again",
            devices=devices,
        )
    gap = software_gap(installed_torch(), "xpu", fix=FIX)
    if gap is not None:
        return gap
    try:
        ctypes.CDLL(LEVEL_ZERO)
    except OSError as error:
        fix = "install Intel's compute runtime (Level Zero)"
        return Probe(status=Status.MISSING, reason=f"{LEVEL_ZERO} does not load: {error}", fix=fix, devices=devices)
    return Probe(status=Status.OK, devices=devices)


def render_nodes(root: Path = Path("/")) -> list[tuple[Path, str]]:
    """(device file, PCI device id) of each of Intel's graphics devices."""
    found: list[tuple[Path, str]] = []
    for folder in sorted((root / "sys/class/drm").glob("renderD*")):
        try:
            vendor = (folder / "device/vendor").read_text().strip()
            device_id = (folder / "device/device").read_text().strip()
        except OSError:
            continue
        if vendor == INTEL:
            found.append((root / "dev/dri" / folder.name, device_id))
    return found
