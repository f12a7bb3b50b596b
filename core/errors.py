"""Every error that headrace raises on purpose.

HeadraceError
|- ConfigError            an option or setting is wrong                      exit code 2
|- RequestError           one request is wrong; others go on                 exit code 2
|- ModelError             a model cannot be found, read or understood        exit code 3
|  |- ModelNotFound       no such folder, file, hub id, or access denied
|  |- WeightError         a tensor is missing, damaged, extra or mis-shaped
|- CapacityError          it does not fit in memory                          exit code 4
|- PlatformError          a device or what drives it                         exit code 5
|  |- DeviceUnavailable   no such device here
|  |- Unsupported         the device cannot do what the model needs
|  |- OutOfMemory         an allocation failed on the device                 exit code 4
|  |- DeviceLost          the device stopped working; requests are requeued  exit code 1
|- PluginError            a plugin misbehaved                                exit code 5
|- MissingPackage         a package that a feature needs is not installed    exit code 5
|- PortBusy               the server's port is taken                         exit code 6
"""

from collections.abc import Sequence
from typing import ClassVar

FREES_MEMORY = (
    "a smaller --kv-memory or --max-model-len",
    "weights of fewer bits: --quantize int8 or int4",
    "headrace plan MODEL, which says what takes how much",
)


class HeadraceError(Exception):
    """What happened, with the values that matter, and up to three commands or settings that would work.

    reason: one or more sentences. remedies: what the user can type or set instead.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, reason: str, *, remedies: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedies = tuple(remedies)

    def __str__(self) -> str:
        if not self.remedies:
            return self.reason
        return f"{self.reason}\n  try: {'  |  '.join(self.remedies)}"


class ConfigError(HeadraceError):
    """An option, a configuration file or an environment variable is wrong."""

    exit_code = 2


class RequestError(HeadraceError):
    """One request is wrong. `code` is the machine-readable name that the server's error body carries."""

    exit_code = 2

    def __init__(self, reason: str, *, code: str = "invalid_request", remedies: Sequence[str] = ()) -> None:
        super().__init__(reason, remedies=remedies)
        self.code = code


class ModelError(HeadraceError):
    """A model cannot be found, read or understood."""

    exit_code = 3


class ModelNotFound(ModelError):
    """No such folder, file or hub id, or the hub denies access."""


class WeightError(ModelError):
    """A tensor or the file that holds it is wrong. `file` and `tensor` name the place ("" if unknown)."""

    def __init__(self, reason: str, *, file: str = "", tensor: str = "", remedies: Sequence[str] = ()) -> None:
        super().__init__(reason, remedies=remedies)
        self.file = file
        self.tensor = tensor


class CapacityError(HeadraceError):
    """Weights, KV cache or workspace do not fit in the memory there is."""

    exit_code = 4


class PlatformError(HeadraceError):
    """A device, or the software that drives it, cannot do its part."""

    exit_code = 5


class DeviceUnavailable(PlatformError):
    """The device that was asked for cannot be used here."""


class Unsupported(PlatformError):
    """The device cannot serve a need of the model; raised before weights are read."""


class OutOfMemory(PlatformError):
    """An allocation failed on the device; the engine may try again with less. Without remedies of its own it has
    those that free memory wherever it was asked for."""

    exit_code = 4

    def __init__(self, reason: str, *, remedies: Sequence[str] = FREES_MEMORY) -> None:
        super().__init__(reason, remedies=remedies)


class DeviceLost(PlatformError):
    """The device stopped working; its worker must be restarted and its requests run again."""

    exit_code = 1


class PluginError(HeadraceError):
    """A plugin raised something of its own. `plugin` names the distribution."""

    exit_code = 5

    def __init__(self, reason: str, *, plugin: str = "", remedies: Sequence[str] = ()) -> None:
        super().__init__(reason, remedies=remedies)
        self.plugin = plugin


class MissingPackage(HeadraceError):
    """A package that a feature needs is not installed, or cannot be imported; see extras.py."""

    exit_code = 5


class PortBusy(HeadraceError):
    """The address that the server is to listen on is in use."""

    exit_code = 6
