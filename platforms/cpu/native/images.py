"""The encoder of images beside a native program: in torch, over weights of its own.

What it makes of images lies in rows that the program reads. Imported only where a model has one, because torch is.
"""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.models.declare import image_params
from headrace.core.models.spec import ModelSpec
from headrace.core.models.vision import encode_images, rows_of_images
from headrace.core.ops import OpTable
from headrace.core.runner.caches import image_row_size
from headrace.core.runner.params import put_param
from headrace.core.stages import Array, EncoderBatch, KVCaches
from headrace.core.weights.source import LoadedParam
from headrace.kernels.torch import fused

from .segments import tensor_of
from .weights import STORED_DTYPES


class ImageEncoder:
    """Owns the weights of what reads images, and the rows that are kept of them."""

    def __init__(self, spec: ModelSpec, dtype: str) -> None:
        assert spec.vision is not None, "only models that read images have an encoder of them"
        self._spec = spec
        self._dtype = dtype
        self._ops = OpTable({"encoder_attention": _attention})
        self._names = {param.name for param in image_params(spec.vision)}
        self._params: dict[str, Array] = {}
        self.rows: npt.NDArray[Any] = np.empty((0, 0), STORED_DTYPES[dtype])

    def owns(self, name: str) -> bool:
        """True for a parameter that is this encoder's alone."""
        return name in self._names

    def load(self, loaded: LoadedParam) -> None:
        """Take one of its parameters."""
        with torch.inference_mode():
            self._params[loaded.param.name] = put_param(self._ops, loaded, dtype=self._dtype, device="cpu")

    def make_room(self, num_rows: int) -> None:
        """Allocate the rows that are kept."""
        self.rows = np.zeros((num_rows, image_row_size(self._spec)), STORED_DTYPES[self._dtype])

    def rows_of(self, batch: EncoderBatch) -> npt.NDArray[np.float32]:
        """Run over whole images: what cross attention reads of them, [num_rows, hidden_size]."""
        assert self._spec.vision is not None
        with torch.inference_mode():
            rows: Array = rows_of_images(self._ops, self._spec.vision, self._params, _to_torch(batch))
            found: npt.NDArray[np.float32] = rows.float().numpy()
            return found

    def encode(self, batch: EncoderBatch) -> None:
        """Run over whole images, and keep what comes of them."""
        with torch.inference_mode():
            kept = KVCaches(layers=(), group_of_layer=(), images=tensor_of(self.rows, self._dtype, 0))
            encode_images(self._ops, self._spec, self._params, kept, _to_torch(batch))


def _to_torch(batch: EncoderBatch) -> EncoderBatch:
    def moved(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [moved(part) for part in value]
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    return EncoderBatch(**{field.name: moved(getattr(batch, field.name)) for field in dataclasses.fields(batch)})


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    relative_bias: torch.Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    max_query_len: int = 0,
) -> torch.Tensor:
    """As the definition, by torch's kernel, which never holds all scores: images have many patches."""
    if relative_bias is not None or window or softcap:
        out: torch.Tensor = OpTable.encoder_attention(
            query, key, value, query_start_loc, relative_bias, scale=scale, window=window, softcap=softcap
        )
        return out
    return fused.encoder_attention(query, key, value, query_start_loc, scale=scale)
