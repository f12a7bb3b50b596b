"""What reads the images of a prompt as data: an encoder, and what makes its output fit into the decoder."""

from dataclasses import dataclass
from typing import Literal

from .spec import DenseSpec, ModelSpec, NormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorSpec:
    """From what an encoder says of patches to rows as wide as the decoder: squares of patches become one row each."""

    dense: tuple[DenseSpec, ...]
    """behind the merging"""
    patch_norm: NormSpec | None = None
    """of each patch"""
    is_mean: bool = False
    """a row is the mean of its patches; else they stand side by side"""
    norm: NormSpec | None = None
    """of each row"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """What turns images into rows that stand in a prompt in the place of token embeddings.

    An image is one tile or several, of patches of encoder.num_features numbers each.
    """

    encoder: ModelSpec
    """reads patches; its parameters begin with "vision." """
    projector: ProjectorSpec
    image_token_id: int
    """what stands in a prompt where a row goes"""
    patch_size: int
    """pixels along each side"""
    merge: int = 1
    """patches along each side of the square that becomes one row"""
    patch_bias: bool = True
    has_class: bool = False
    """a learned row stands before the patches of a tile; it takes part, and is left out in the end"""
    extra_rows: int = 0
    """1: it is a row of its image, after all; -1: the first patch of a tile is none"""
    class_last: bool = False
    """it has the last one of the learned positions, not the first"""
    first_place: int = 0
    """the row and column, as ropes turn by them, of the first patch; those of the learned row are 0"""
    has_newline: bool = False
    """a learned row stands behind each line of rows where an image is put together from tiles"""
    resolutions: tuple[tuple[int, int], ...] = ()
    """(height, width) in pixels that an image is cut into tiles at, the best one for its shape (LLaVA-NeXT)"""
    max_tiles: int = 0
    """where an image has the rows of more tiles than these, as many as these have are interpolated; 0 has no end"""
    frames: int = 1
    """times that a patch holds an image, as if it were a film"""
    window: int = 0
    """pixels along each side of the windows that in_window layers see"""
    patch_norm: NormSpec | None = None
    """of patches, before positions are added"""
    num_corners: int = 0
    """rows of a learned embedding of a square of positions, of which a patch mixes the four nearest; 0 has none"""
    is_bicubic: bool = False
    """it mixes the sixteen nearest"""
    second: ModelSpec | None = None
    """reads what the encoder gives, and its own position embedding for each tile (Llama 3.2); its parameters begin
    with "second." """
    chosen: tuple[int, ...] = ()
    """layers of the encoder whose outputs stand side by side in the place of the last one's"""
    joined: tuple[int, ...] = ()
    """layers of the encoder whose outputs stand beside the last one's, in the projector's input"""
    tile_shapes: tuple[tuple[int, int], ...] = ()
    """rows and columns of tiles that an image may have. Each image has max_tiles then, the last of which may be
    padding; rows are read by the decoder's cross attention, and a token stands in a prompt where an image goes"""
    taps: tuple[tuple[int, ProjectorSpec], ...] = ()
    """(layer of the encoder, projector): what is added behind the decoder's first layers (Qwen3-VL)"""
    sight: Literal["past", "image", "prompt"] = "past"
    """what a token of an image sees besides those before it: the rest of its image, or of the prompt, all tokens of
    which then do, images or not"""

    @property
    def num_row_parts(self) -> int:
        """Rows as wide as the decoder that are kept for each place in a prompt."""
        return 1 + len(self.taps)

    @property
    def is_crossed(self) -> bool:
        """Images are read by cross attention, instead of in the places of tokens."""
        return bool(self.tile_shapes)
