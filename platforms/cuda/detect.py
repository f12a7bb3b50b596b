"""Finds NVIDIA GPUs through the driver's own library, without torch. Runs in a child process."""

import ctypes

from headrace.core.platform import DeviceInfo, Probe, Status

from ..gpu.torch_build import installed_torch, software_gap

FIX = "pip install 'headrace[cuda]'"
_ERRORS = {
    100: "the driver sees no GPU",
    999: "the driver does not work: its kernel module and its library may be of different versions",
    803: "the driver's library does not fit its kernel module",
}
OLDEST = 80
"""Compute capability from which on Triton has matrix products; for older GPUs it compiles some kernels, and badly."""
_NAME_BYTES = 256
_MAJOR, _MINOR = 75, 76  # attributes of the compute capability


def detect() -> Probe:
    """GPUs that the driver sees, if the installed torch can drive them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return Probe(status=Status.NO_DEVICE, reason=f"the driver's library libcuda.so.1 does not load: {error}")
    probe = probe_driver(driver)
    if probe.status != Status.OK:
        return probe
    return software_gap(installed_torch(), "cuda", fix=FIX) or probe


def probe_driver(driver: ctypes.CDLL) -> Probe:
    """What the driver's library says."""
    code = driver.cuInit(0)
    if code:
        reason = _ERRORS.get(code, "the driver does not start")
        return Probe(status=Status.NO_DEVICE, reason=f"{reason} (cuInit gave {code})", fix="nvidia-smi")
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    devices = tuple(_device(driver, index) for index in range(count.value))
    if not devices:
        return Probe(status=Status.NO_DEVICE, reason=_ERRORS[100], fix="unset CUDA_VISIBLE_DEVICES")
    if all(map(is_too_old, (device.arch for device in devices))):
        return Probe(
            status=Status.NO_DEVICE, reason=f"{devices[0].name} is {too_old(devices[0].arch)}", devices=devices
        )
    return Probe(status=Status.OK, devices=devices)


def is_too_old(arch: str) -> bool:
    """True if Triton does not serve such GPUs. arch: sm_ and the compute capability."""
    return int(arch.removeprefix("sm_")) < OLDEST


def too_old(arch: str) -> str:
    """What is said of such a GPU."""
    return f"{arch}, and Triton's kernels are for sm_{OLDEST} (Ampere) and newer"


def _device(driver: ctypes.CDLL, index: int) -> DeviceInfo:
    handle, total = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    numbers = (ctypes.c_int(), ctypes.c_int())
    driver.cuDeviceGet(ctypes.byref(handle), index)
    driver.cuDeviceGetName(name, _NAME_BYTES, handle)
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), handle)
    for number, attribute in zip(numbers, (_MAJOR, _MINOR), strict=True):
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, handle)
    return DeviceInfo(
        id=f"cuda:{index}",
        name=name.value.decode(errors="replace"),
        kind="gpu",
        total_bytes=total.value,
        free_bytes=total.value,  # how much is free takes a context, which would take memory itself
        arch=f"sm_{numbers[0].value}{numbers[1].value}",
    )
