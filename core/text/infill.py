"""Prompts that ask a model for the text between two others, for tokenizers that have the tokens for it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coders, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek coders
)
"""What stands before the text in front, before the text behind, and before what is to be made."""


def infill_marks(tokenizer: "Tokenizer") -> Sequence[int] | None:
    """The three ids; None for a model that was not taught to fill in."""
    for marks in _MARKS:
        ids = [tokenizer.token_id(mark) for mark in marks]
        if all(id is not None for id in ids):
            return [id for id in ids if id is not None]
    return None


def infill_prompt(marks: Sequence[int], before: Sequence[int], after: Sequence[int], num_first: int) -> list[int]:
    """The prompt. before: tokens of the text in front, of which the first `num_first` begin every prompt (BOS)."""
    return [*before[:num_first], marks[0], *before[num_first:], marks[1], *after, marks[2]]
