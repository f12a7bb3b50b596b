"""Finds Gaudi accelerators in what the kernel tells of its devices. Runs in a child process."""

import os
from importlib.util import find_spec
from pathlib import Path

from headrace.core.platform import DeviceInfo, Probe, Status

FIX = "install Intel's Gaudi software (habana-torch-plugin and its torch) from Intel's own package index"
BRIDGE = "habana_frameworks"
HABANA = "0x1da3"
_GENERATIONS = {"0x1000": "Gaudi", "0x1010": "Gaudi", "0x1020": "Gaudi2", "0x1060": "Gaudi3"}
"""PCI device id -> what it is."""


def detect(root: Path = Path("/")) -> Probe:
    """The accelerators of this host, if this user may use them and the software is there."""
    nodes = accelerators(root)
    if not nodes:
        return Probe(status=Status.NO_DEVICE, reason="no accelerator of this machine is Habana's")
    devices = tuple(
        DeviceInfo(id=f"gaudi:{i}", name=name, kind="accelerator", total_bytes=0, free_bytes=0, arch=name.lower())
        for i, (_, name) in enumerate(nodes)
    )
    closed = next((node for node, _ in nodes if not os.access(node, os.R_OK | os.W_OK)), None)
    if closed is not None:
        return Probe(
            status=Status.NO_DEVICE,
            reason=f"this user may not open {closed}",
            fix="sudo usermod -aG render $USER, then log in again",
            devices=devices,
        )
    for package in ("torch", BRIDGE):
        if find_spec(package) is None:
            reason = f"the package {package} is not installed"
            return Probe(status=Status.MISSING, reason=reason, fix=FIX, devices=devices)
    return Probe(status=Status.OK, devices=devices)


def accelerators(root: Path = Path("/")) -> list[tuple[Path, str]]:
    """(device file, generation) of each, in the driver's order."""
    found: list[tuple[Path, str]] = []
    for kind, stem in (("accel", "accel"), ("habanalabs", "hl")):
        folders = (root / "sys/class" / kind).glob(f"{stem}[0-9]*")
        for folder in sorted(folders, key=lambda folder: (len(folder.name), folder.name)):
            try:
                vendor = (folder / "device/vendor").read_text().strip()
                device_id = (folder / "device/device").read_text().strip()
            except OSError:
                continue
            if vendor == HABANA:
                node = root / "dev" / ("accel" if kind == "accel" else "") / folder.name
                found.append((node, _GENERATIONS.get(device_id, f"Gaudi ({device_id})")))
    return found
