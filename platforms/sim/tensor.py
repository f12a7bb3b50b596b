"""The tensor of the simulated device: a wrapper around host memory that counts, and refuses what hardware would.

Importing this module gives torch's private-use device the name `sim`, once in a process.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

NAME = "sim"
aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class MixedDevices(RuntimeError):
    """An operation was given tensors of the simulated device and of the host."""


@dataclass(slots=True)
class Counts:
    """What happened on the device since `reset`.

    host_syncs: reads that make the host wait and that nobody asked for, such as `.item()`, `.tolist()` or a
    result whose shape depends on values. copies_in, copies_out: transfers between host and device.
    """

    ops: int = 0
    copies_in: int = 0
    copies_out: int = 0
    host_syncs: int = 0

    def reset(self) -> None:
        """Begin at 0 again."""
        for field in fields(self):
            setattr(self, field.name, 0)


COUNTS = Counts()
_READS_VALUES = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
}


class SimTensor(torch.Tensor):
    """A tensor on the simulated device. Owns `host`, the tensor in host memory that has its values."""

    host: torch.Tensor
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "SimTensor":
        """Wrap a host tensor; strides and offset are its own."""
        tensor: SimTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
        )
        tensor.host = host
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        """Shape and dtype; the values stay on the device."""
        return f"SimTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation: a transfer, or on the device."""
        return _dispatch(func, args, dict(kwargs or {}))


def _dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func is aten._to_copy.default and kwargs.get("device") is not None:
        return _to_copy(args[0], kwargs)
    if func is aten.copy_.default:
        return _copy(args[0], args[1])
    # In inference mode operations arrive whole; taken apart, transfers are seen whatever they are called by.
    if func.has_kernel_for_dispatch_key(_COMPOSITE):
        return func.decompose(*args, **kwargs)
    COUNTS.ops += 1
    COUNTS.host_syncs += func in _READS_VALUES
    wrapped: dict[int, SimTensor] = {}

    def enter(value: Any) -> Any:
        if isinstance(value, SimTensor):
            wrapped[id(value.host)] = value
            return value.host
        if isinstance(value, torch.Tensor) and value.dim():
            raise MixedDevices(f"{func}: one tensor is on {NAME}, another {tuple(value.shape)} on {value.device}")
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        return value

    def leave(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # An operation in place gives back the very tensor that it was given.
        return wrapped[id(value)] if id(value) in wrapped else SimTensor(value)

    return tree_map(leave, func(*tree_map(enter, args), **tree_map(enter, kwargs)))


def _to_copy(source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    host = source.host if isinstance(source, SimTensor) else source
    enters = torch.device(kwargs["device"]).type == NAME
    kwargs.pop("pin_memory", None)
    result: torch.Tensor = aten._to_copy.default(host, **{**kwargs, "device": torch.device("cpu")})
    if not enters:
        COUNTS.copies_out += 1
        return result
    COUNTS.copies_in += not isinstance(source, SimTensor)
    return SimTensor(result)


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    to_sim, from_sim = isinstance(target, SimTensor), isinstance(source, SimTensor)
    COUNTS.copies_in += to_sim and not from_sim
    COUNTS.copies_out += from_sim and not to_sim
    COUNTS.ops += to_sim and from_sim
    inner = target.host if isinstance(target, SimTensor) else target
    inner.copy_(source.host if isinstance(source, SimTensor) else source)
    return target


def _empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **ignored: Any) -> SimTensor:
    return SimTensor(torch.empty(size, dtype=dtype))


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **ignored: Any
) -> SimTensor:
    return SimTensor(torch.empty_strided(size, stride, dtype=dtype))


def _arange(*bounds: Any, dtype: torch.dtype | None = None, **ignored: Any) -> SimTensor:
    return SimTensor(torch.arange(*bounds, dtype=dtype))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _copy(target, source)


class _Module(backend_registration._DummyBackendModule):
    """What torch calls `torch.sim`."""

    def synchronize(self, device: Any = None) -> None:
        """Wait for the device: a read that nobody asked for."""
        COUNTS.host_syncs += 1


def _register() -> Any:
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    for name in ("arange", "arange.start", "arange.start_step"):
        library.impl(name, _arange, "PrivateUse1")
    return library


_LIBRARY = _register()
"""Kept for as long as the process: the registrations end with it."""
