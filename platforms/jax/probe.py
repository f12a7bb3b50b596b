"""Asks JAX for the devices of one of its platforms, without opening them for use."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from importlib.util import find_spec

from headrace.core.platform import DeviceInfo, Probe, Status


def probe_jax(platform: str, driver: str, *, what: str, fix: str) -> Probe:
    """The devices of one of JAX's platforms, which the package `driver` drives. `what`: one of them, in words."""
    for package in ("jax", driver):
        if find_spec(package) is None:
            return Probe(status=Status.MISSING, reason=f"the package {package} is not installed", fix=fix)
    import jax

    jax.config.update("jax_platforms", platform)
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        return Probe(status=Status.NO_DEVICE, reason=f"JAX finds no {what}: {str(error).splitlines()[0]}")
    return Probe(status=Status.OK, devices=tuple(jax_info(device, platform, i) for i, device in enumerate(devices)))


def jax_info(device: object, name: str, index: int) -> DeviceInfo:
    """One of JAX's devices as `name:index`, counted on this host: JAX's own ids count all hosts."""
    stats = getattr(device, "memory_stats", lambda: None)() or {}
    total = stats.get("bytes_limit", 0)
    kind = str(getattr(device, "device_kind", "accelerator"))
    return DeviceInfo(
        id=f"{name}:{index}",
        name=kind,
        kind="accelerator",
        total_bytes=total,
        free_bytes=total - stats.get("bytes_in_use", 0),
    )
