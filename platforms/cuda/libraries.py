"""NVIDIA's and others' libraries as op providers beside Triton's kernels, whose layouts they share."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from headrace.core.platform import OpContext, OpProvider
from headrace.kernels.triton.tuning import tuning_for

if TYPE_CHECKING:
    from headrace.kernels.triton.ops import TritonOps

FLASHINFER_DTYPES = ("float16", "bfloat16")
FLASHINFER_HEAD_DIMS = (64, 128, 256)


def library_providers(triton: OpProvider, kernels: "TritonOps", arch: str) -> Sequence[OpProvider]:
    """cuBLASLt for products in 8 bits; flashinfer for attention over pages, if it is installed."""
    from .cublaslt import CublasLt

    float8 = tuning_for(arch).float8 == "e4m3fn"
    linear = CublasLt(kernels, triton.ops["linear"], has_float8=float8)
    packed: dict[str, Callable[..., Any]] = {**_of(triton, "pack_linear", "embedding"), "linear": linear}
    found = [OpProvider(name="cublaslt", priority=55, ops=packed)]
    if find_spec("flashinfer") is not None:
        from .flashinfer import FlashInfer

        attention = FlashInfer(triton.ops["paged_attention"])
        paged: dict[str, Callable[..., Any]] = {
            **_of(triton, "new_kv_cache", "write_kv"),
            "paged_attention": attention,
        }
        found.append(OpProvider(name="flashinfer", priority=60, ops=paged, declines=_flashinfer_declines))
    return found


def _of(provider: OpProvider, *names: str) -> Mapping[str, Callable[..., Any]]:
    return {name: provider.ops[name] for name in names}


def _flashinfer_declines(op: str, context: OpContext) -> str:
    if context.dtype not in FLASHINFER_DTYPES:
        return f"its kernels are for {' and '.join(FLASHINFER_DTYPES)}, not {context.dtype}"
    for attn in (layer.attn for layer in context.spec.layers if layer.has_attention):
        if attn.head_dim not in FLASHINFER_HEAD_DIMS:
            sizes = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
            return f"its kernels are for heads of {sizes} values, not {attn.head_dim}"
    return ""
