"""NVIDIA's and others' libraries as op providers beside Triton's kernels, whose layouts they share."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from headrace.core.models.spec import AttentionSpec
from headrace.core.platform import OpContext, OpProvider
from headrace.core.self_test import TOLERANCE
from headrace.kernels.triton.tuning import tuning_for

if TYPE_CHECKING:
    from headrace.kernels.torch.beside import Beside
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
        from headrace.kernels.torch.flashinfer import FlashInfer

        attention = FlashInfer(triton.ops["paged_attention"])
        trial = Trial(attention, triton.ops["new_kv_cache"])
        paged: dict[str, Callable[..., Any]] = {
            **_of(triton, "new_kv_cache", "write_kv"),
            "paged_attention": attention,
        }
        found.append(OpProvider(name="flashinfer", priority=60, ops=paged, declines=trial.declines))
    return found


class Trial:
    """Whether flashinfer serves a model: what its kernels are for, and whether they give what Triton's give, tried
    when a model is opened, once for each kind of layer. Many installations find out only then that they cannot
    compile."""

    def __init__(self, attend: "Beside", new_kv_cache: Callable[..., Any], *, device: str = "cuda") -> None:
        self._attend = attend
        self._new_kv_cache = new_kv_cache
        self._device = device
        self._results: dict[tuple[Any, ...], str] = {}

    def declines(self, op: str, context: OpContext) -> str:
        """Why it does not; "" if it does."""
        if reason := _flashinfer_lacks(context):
            return reason
        kinds = {layer.attn for layer in context.spec.layers if layer.has_attention}
        return next((reason for attn in kinds if (reason := self._tried(attn, context))), "")

    def _tried(self, attn: AttentionSpec, context: OpContext) -> str:
        key = (attn, context.block_size, context.dtype)
        if key not in self._results:
            try:
                from headrace.kernels.torch.beside import Asked

                error = self._attend.error(
                    self._new_kv_cache,
                    num_heads=attn.num_heads,
                    kind=Asked(scale=attn.scale, window=attn.window, softcap=attn.softcap),
                    dtype=context.dtype,
                    block_size=context.block_size,
                    num_kv_heads=attn.num_kv_heads,
                    head_dim=attn.head_dim,
                    device=self._device,
                )
            except Exception as failure:  # noqa: BLE001 - a compiler that is missing, a GPU that it does not know
                self._results[key] = f"it does not work here: {type(failure).__name__}: {str(failure)[:200]}"
            else:
                differs = f"it differs from Triton's kernel here: an error of {error:.1e}"
                self._results[key] = "" if error < 10 * TOLERANCE[context.dtype] else differs
        return self._results[key]


def _of(provider: OpProvider, *names: str) -> Mapping[str, Callable[..., Any]]:
    return {name: provider.ops[name] for name in names}


def _flashinfer_lacks(context: OpContext) -> str:
    if context.dtype not in FLASHINFER_DTYPES:
        return f"its kernels are for {' and '.join(FLASHINFER_DTYPES)}, not {context.dtype}"
    for attn in (layer.attn for layer in context.spec.layers if layer.has_attention):
        if attn.head_dim not in FLASHINFER_HEAD_DIMS:
            sizes = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
            return f"its kernels are for heads of {sizes} values, not {attn.head_dim}"
    return ""
