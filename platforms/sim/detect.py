"""Says whether the simulated device can be opened: it needs a torch that lets Python define a device."""

from importlib.metadata import PackageNotFoundError, version

from headrace.core.platform import DeviceInfo, Probe, Status

from ..cpu.memory import host_memory

OLDEST_TORCH = (2, 10)
"""The first release whose private-use device can be written in Python alone."""


def sim_info() -> DeviceInfo:
    """The one simulated device; its memory is the machine's."""
    memory = host_memory()
    return DeviceInfo(
        id="sim",
        name="strict simulated accelerator",
        kind="accelerator",
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
    )


def detect() -> Probe:
    """Usable if the installed torch is new enough."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return Probe(
            status=Status.MISSING, reason="the package torch is not installed", fix="pip install 'headrace[torch]'"
        )
    if tuple(int(part) for part in installed.split("+")[0].split(".")[:2]) < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        return Probe(
            status=Status.MISSING,
            reason=f"torch {installed} cannot define a device in Python; {wanted} or newer can",
            fix=f"pip install 'torch>={wanted}'",
        )
    return Probe(status=Status.OK, devices=(sim_info(),))
