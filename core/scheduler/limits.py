"""What bounds a step besides its token budget and the KV blocks."""

from typing import Protocol

from ..kv.cross import CrossPool
from ..kv.images import ImagePool
from .policy import RequestQueue
from .request import Request


class Limit(Protocol):
    """Says whether a waiting request may join the running ones. Must admit any request if none runs."""

    def admits(self, request: Request, running: RequestQueue) -> bool:
        """False: it and all behind it wait for a later step."""
        ...


class MaxNumSeqs:
    """At most this many requests run: the device keeps state in as many slots."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs

    def admits(self, request: Request, running: RequestQueue) -> bool:
        return len(running) < self._max_num_seqs


class Quarantine:
    """Suspects of a failed step come back in halves, so that one that makes steps fail ends up alone.

    Request.max_company is the number of requests, itself included, that may run beside a suspect; 0 for others.
    """

    def admits(self, request: Request, running: RequestQueue) -> bool:
        count = len(running) + 1
        if 0 < request.max_company < count:
            return False
        return not any(0 < other.max_company < count for other in running)


class EncoderBudget:
    """The encoder reads at most this many tokens in a step, or one input, if that is longer: inputs are not cut."""

    def __init__(self, max_tokens: int, stored: CrossPool) -> None:
        """stored: where outputs of the encoder are, which then need not be computed."""
        self._max_tokens = max_tokens
        self._stored = stored

    def admits(self, request: Request, running: RequestQueue) -> bool:
        cross = request.blocks.cross
        if cross is None or self._stored.is_stored(cross):
            return True
        in_step = sum(other.source.num_encoder_tokens for other in running if other.is_encoding)
        return not in_step or in_step + cross.num_tokens <= self._max_tokens


class ImageBudget:
    """The encoder reads images of at most this many patches in a step, or one request's images, if those are more."""

    def __init__(self, max_patches: int, kept: ImagePool) -> None:
        """kept: where rows of images are, which then need not be computed."""
        self._max_patches = max_patches
        self._kept = kept

    def admits(self, request: Request, running: RequestQueue) -> bool:
        table, images = request.blocks.images, request.source.images
        if table is None:
            return True
        wanted = sum(len(images[i].patches) for i in self._kept.missing(table))
        in_step = sum(other.num_patches_to_encode for other in running if other.is_encoding)
        return not wanted or not in_step or in_step + wanted <= self._max_patches
