"""Prompts of encoder-decoder models: text goes to the encoder, and the decoder starts from tokens of the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from ..models.config import HFConfig
from ..stages import EncoderInput, ImageInput
from .inputs import token_ids
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """A prompt as the engine takes it. text: what it was made from, if that was text."""

    token_ids: list[int]
    text: str | None = None
    encoder: EncoderInput | None = None
    encoder_text: str | None = None
    images: Sequence[ImageInput] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStart:
    """What the decoder's prompt begins with, -1: nothing. forced_token_id: follows where a user says nothing else."""

    token_id: int
    forced_token_id: int = -1

    def token_ids(self) -> list[int]:
        """The decoder's prompt where a user gives none. Raises RequestError if the model has no start token."""
        if self.token_id < 0:
            raise RequestError(
                "the checkpoint does not say how the decoder begins (decoder_start_token_id)",
                remedies=['{"encoder_prompt": ..., "decoder_prompt": ...}'],
            )
        return [self.token_id, self.forced_token_id] if self.forced_token_id >= 0 else [self.token_id]


def read_decoder_start(config: HFConfig, generation: Mapping[str, Any]) -> DecoderStart:
    """As transformers' generate reads config.json and generation_config.json."""

    def find(*names: str) -> int:
        for name in names:
            for value in (generation.get(name), config.get(name)):
                value = value[0] if isinstance(value, list) and value else value
                if isinstance(value, int) and value >= 0:
                    return value
        return -1

    return DecoderStart(
        token_id=find("decoder_start_token_id", "bos_token_id"), forced_token_id=find("forced_bos_token_id")
    )


def prepare_seq2seq(prompt: Any, start: DecoderStart, tokenizer: Tokenizer | None) -> PreparedPrompt:
    """A text, {"prompt_token_ids"} or {"encoder_prompt", "decoder_prompt"} whose parts are one of the former.

    A decoder prompt of the user's stands behind the start token, unless it begins with it. Raises RequestError.
    """
    encoder, decoder = prompt, None
    if isinstance(prompt, Mapping) and "encoder_prompt" in prompt:
        unknown = ", ".join(sorted(map(str, set(prompt) - {"encoder_prompt", "decoder_prompt"})))
        if unknown:
            raise RequestError(f"a prompt has encoder_prompt and decoder_prompt, got also {unknown}")
        encoder, decoder = prompt["encoder_prompt"], prompt.get("decoder_prompt")
    begin = [start.token_id] if start.token_id >= 0 else []
    text, encoder_ids = _tokens(encoder, tokenizer, add_special_tokens=True)
    if decoder is None:
        decoder_text, ids = text, start.token_ids()
    else:
        decoder_text, ids = _tokens(decoder, tokenizer, add_special_tokens=False)
        ids = ids if begin and ids[:1] == begin else [*begin, *ids]
    return PreparedPrompt(
        token_ids=ids, text=decoder_text, encoder=EncoderInput(token_ids=encoder_ids), encoder_text=text
    )


def _tokens(prompt: Any, tokenizer: Tokenizer | None, *, add_special_tokens: bool) -> tuple[str | None, list[int]]:
    if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
        return None, token_ids(prompt["prompt_token_ids"])
    if not isinstance(prompt, str):
        raise RequestError(f"a prompt is text or has prompt_token_ids, got {type(prompt).__name__}")
    if tokenizer is None:
        raise RequestError("a text needs a tokenizer, and skip_tokenizer_init is set", code="no_tokenizer")
    return prompt, tokenizer.encode(prompt, add_special_tokens)
