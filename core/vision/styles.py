"""How each family's prompts mark an image, and how its image processor is asked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Layout = tuple[int, int]
"""Rows and columns: of an image's tiles that are parts of it, or, of one tile, those of its rows."""
Write = Callable[[Sequence[str], Layout], str]
"""From the text of each tile's rows, the whole image's last, to what takes the placeholder's place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStyle:
    """placeholder: what users and chat templates write, "" for the token that rows stand in the place of.

    write: what takes its place. options: of the image processor. bos_behind: all images come first, then the begin of
    sequence, and the prompt ends a line (PaliGemma). by_prompt: the processor cuts an image that is alone into tiles,
    and several not, so that it gets those of a prompt together. bos_before_text: images at the begin of a prompt come
    before the begin of sequence (Llama 3.2).
    """

    placeholder: str = ""
    write: Write = lambda rows, layout: "".join(rows)
    options: Mapping[str, Any] = field(default_factory=dict)
    bos_behind: bool = False
    by_prompt: bool = False
    bos_before_text: bool = False


def style_of(model_type: str, encoder_type: str) -> PromptStyle:
    """The style of a model, or of those with its encoder of images."""
    return STYLES.get(model_type) or STYLES.get(encoder_type) or PromptStyle()


def _between(before: str, after: str, each: str = "") -> Write:
    return lambda rows, layout: f"{before}{''.join(row + each for row in rows)}{after}"


def _idefics(rows: Sequence[str], layout: Layout) -> str:
    around, (num_rows, num_columns) = "<fake_token_around_image>", layout
    text = ""
    for row in range(num_rows):
        for column in range(num_columns):
            text += f"{around}<row_{row + 1}_col_{column + 1}>{rows[row * num_columns + column]}"
        text += "\n"
    return text + ("\n" if num_rows else "") + f"{around}<global-img>{rows[-1]}{around}"


def _pixtral(rows: Sequence[str], layout: Layout) -> str:
    """Lines of rows, each of which ends."""
    num_lines, size = layout[0], len(rows[0]) // layout[0]
    lines = [rows[0][n * size : (n + 1) * size] for n in range(num_lines)]
    return "[IMG_BREAK]".join(lines) + "[IMG_END]"


def _gemma3(rows: Sequence[str], layout: Layout) -> str:
    """The whole image, and its crops where the image processor makes some (`do_pan_and_scan`)."""
    whole, *crops = (f"\n\n<start_of_image>{row}<end_of_image>\n\n" for row in rows)
    if not crops:
        return whole
    return f"Here is the original image {whole} and here are some crops to help you see better {' '.join(crops)}"


def _aya(rows: Sequence[str], layout: Layout) -> str:
    tiles = "".join(f"TILE_{n + 1}{row}" for n, row in enumerate(rows[:-1]))
    return f"<|START_OF_IMG|>{tiles}TILE_GLOBAL{rows[-1]}<|END_OF_IMG|>"


def _llama4(rows: Sequence[str], layout: Layout) -> str:
    num_rows, num_columns = layout
    lines = [
        "<|tile_x_separator|>".join(rows[row * num_columns : (row + 1) * num_columns]) + "<|tile_y_separator|>"
        for row in range(num_rows if len(rows) > 1 else 0)
    ]
    return f"<|image_start|>{''.join(lines)}<|image|>{rows[-1]}<|image_end|>"


_IDEFICS = PromptStyle(write=_idefics, options={"return_row_col_info": True})
_COHERE = ("<|START_OF_IMG|>", "<|END_OF_IMG|>")
STYLES: Mapping[str, PromptStyle] = {
    "aya_vision": PromptStyle(placeholder="<image>", write=_aya, options={"crop_to_patches": True}),
    "cohere2_vision": PromptStyle(write=_between(*_COHERE, each="<|IMG_LINE_BREAK|>")),
    "gemma3": PromptStyle(placeholder="<start_of_image>", write=_gemma3),
    "idefics3": _IDEFICS,
    "internvl": PromptStyle(write=_between("<img>", "</img>"), options={"crop_to_patches": True}),
    "llama4": PromptStyle(placeholder="<|image|>", write=_llama4),
    "llava_onevision": PromptStyle(by_prompt=True),
    "mllama": PromptStyle(bos_before_text=True),
    "paligemma": PromptStyle(bos_behind=True),
    "pixtral": PromptStyle(write=_pixtral),
    "smolvlm": _IDEFICS,
}
"""By model_type, or by that of the encoder; others write the token of rows alone."""
