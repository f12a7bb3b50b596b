"""In the place of the vendor's library: a torch device of its own, whose tensors wrap host memory."""

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class Beads(torch.Tensor):
    """A tensor on the device; `host` has its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host):
        layout = dict(strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype)
        tensor = torch.Tensor._make_wrapper_subclass(cls, host.size(), device="abacus:0", **layout)
        tensor.host = host
        return tensor

    def tolist(self):
        return self.host.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._to_copy.default and kwargs.get("device") is not None:
            leaves = torch.device(kwargs["device"]).type == "cpu"
            copy = func(_host(args[0]), **{**kwargs, "device": "cpu"})
            return copy if leaves else Beads(copy)
        if func is aten.copy_.default:
            _host(args[0]).copy_(_host(args[1]))
            return args[0]
        if func.has_kernel_for_dispatch_key(_COMPOSITE):
            return func.decompose(*args, **kwargs)
        inputs = {id(x.host): x for x in args if isinstance(x, Beads)}  # what an operation in place gives back
        result = func(*tree_map(_host, args), **tree_map(_host, kwargs))
        return tree_map(lambda x: inputs[id(x)] if id(x) in inputs else _wrap(x), result)


def rms_norm(x, weight, *, eps):
    """The vendor's kernel, with the signature of the op's declaration."""
    wide = x.host.to(torch.promote_types(x.dtype, torch.float32))
    y = torch.nn.functional.rms_norm(wide, x.shape[-1:], eps=eps)
    return Beads((y if weight is None else y * weight.host).to(x.dtype))


def used_bytes():
    """Memory in use: this device has the process's own."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def _host(x):
    if isinstance(x, torch.device) and x.type == "abacus":
        return torch.device("cpu")
    return x.host if isinstance(x, Beads) else x


def _wrap(x):
    return Beads(x) if isinstance(x, torch.Tensor) else x


backend_registration._setup_privateuseone_for_python_backend("abacus")
_library = torch.library.Library("aten", "IMPL")  # the registrations end with it
_library.impl("_copy_from", lambda source, target, _=False: aten.copy_.default(target, source), "PrivateUse1")
_names = ("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step")
for _name, _make in zip(_names, (torch.empty, torch.empty_strided, *[torch.arange] * 3), strict=True):
    _library.impl(_name, lambda *a, dtype=None, _make=_make, **_: Beads(_make(*a, dtype=dtype)), "PrivateUse1")
