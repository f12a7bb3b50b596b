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
        devices = jax.devices()
    except RuntimeError as error:
        return Probe(status=Status.NO_DEVICE, reason=f"JAX finds no {what}: {str(error).splitlines()[0]}")
    return Probe(status=Status.OK, devices=tuple(jax_info(device, platform) for device in devices))


def jax_info(device: object, name: str) -> DeviceInfo:
    """One of JAX's devices as `name:index`."""
    stats = getattr(device, "memory_stats", lambda: None)() or {}
    total = stats.get("bytes_limit", 0)
    kind = str(getattr(device, "device_kind", "accelerator"))
    return DeviceInfo(
        id=f"{name}:{getattr(device, 'local_hardware_id', None) or getattr(device, 'id', 0)}",
        name=kind,
        kind="accelerator",
        total_bytes=total,
        free_bytes=total - stats.get("bytes_in_use", 0),
    )
