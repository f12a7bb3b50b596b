"""Defaults that a checkpoint brings for generation: generation_config.json, or what a GGUF says."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ModelError, RequestError
from ..model_file import read_json
from ..models.config import HFConfig
from ..sampling.params import SamplingParams
from ..text.seq2seq import DecoderStart, read_decoder_start

PROCESSORS = {"no_repeat_ngram_size": "no_repeat_ngram", "forced_eos_token_id": "forced_eos"}
"""Keys of generation_config.json -> the logits processors that do what they ask for."""
_UNLIMITED = ("no_repeat_ngram_size", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling parameters that apply where a user gives none, and the tokens that end a text."""

    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]
    decoder_start: DecoderStart | None = None
    """how the decoder of an encoder-decoder model begins"""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """generation_config.json, and what older config.json say of it"""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """what no text of an encoder-decoder model may hold (Marian's padding), whatever a user asks for"""


def generation_defaults(
    folder: Path | None, config: HFConfig, end_token_ids: Sequence[int], *, has_encoder: bool = False
) -> GenerationDefaults:
    """Read generation_config.json beside the weights. Without one, generation is greedy.

    The end-of-sequence ids of generation config, config and tokenizer are taken together: chat models end a turn
    with another token than a document.
    """
    data = read_generation_config(folder)
    ids: list[int] = []
    for file, value in (
        ("generation_config.json", data.get("eos_token_id")),
        ("config.json", config.get("eos_token_id", None)),
        ("", list(end_token_ids)),
    ):
        for token in value if isinstance(value, list) else [value]:
            if token is not None and (not isinstance(token, int) or isinstance(token, bool)):
                raise ModelError(
                    f"eos_token_id in {folder}/{file} must be a token id or a list of them, got {value!r:.100}",
                    remedies=["correct the file", "download it again"],
                )
            if token is not None and token >= 0 and token not in ids:
                ids.append(token)
    start = read_decoder_start(config, data) if has_encoder else None
    if not data.get("do_sample", False):
        params = SamplingParams(temperature=0.0)
    else:
        try:
            params = SamplingParams(
                temperature=_number(data, "temperature", 1.0),
                top_p=_number(data, "top_p", 1.0),
                top_k=int(_number(data, "top_k", 0)),
                min_p=_number(data, "min_p", 0.0),
                repetition_penalty=_number(data, "repetition_penalty", 1.0),
            )
        except (RequestError, TypeError, ValueError, OverflowError) as error:
            raise ModelError(
                f"{folder}/generation_config.json has a value that no request can take: {error}",
                remedies=["correct or delete the file"],
            ) from error
    return GenerationDefaults(
        sampling_params=params,
        eos_token_ids=tuple(ids),
        decoder_start=start,
        generation=_beams(data, config),
        bad_word_ids=_bad_words(data, config) if start is not None else (),
    )


def with_processors(defaults: GenerationDefaults, available: Collection[str]) -> GenerationDefaults:
    """The defaults of an encoder-decoder model with the processors that its generation_config.json asks for, as far
    as plugins have them."""
    args = {
        key: value
        for key, name in PROCESSORS.items()
        if name in available and (value := defaults.generation.get(key)) is not None and (key, value) != _UNLIMITED
    }
    if defaults.decoder_start is None or not args:
        return defaults
    names = [PROCESSORS[key] for key in args]
    params = dataclasses.replace(defaults.sampling_params, logits_processors=names, extra_args=args)
    return dataclasses.replace(defaults, sampling_params=params)


def _beams(data: Mapping[str, Any], config: HFConfig) -> Mapping[str, Any]:
    """What a search of beams goes by, from generation_config.json before config.json."""
    names = (
        "num_beams", "max_new_tokens", "max_length", "length_penalty", "early_stopping", "no_repeat_ngram_size",
        "forced_eos_token_id",
    )  # fmt: skip
    found = {name: data[name] if name in data else config.get(name) for name in names}
    end = found["forced_eos_token_id"]
    return {**found, "forced_eos_token_id": end[0] if isinstance(end, list) and end else end}


def _bad_words(data: Mapping[str, Any], config: HFConfig) -> tuple[tuple[int, ...], ...]:
    words = data.get("bad_words_ids") or config.get("bad_words_ids") or []
    return tuple(tuple(word) for word in words if isinstance(word, list) and word)


def read_generation_config(folder: Path | None) -> Mapping[str, Any]:
    """generation_config.json of a folder; empty if there is none. Raises ModelError if it is damaged."""
    return {} if folder is None else read_json(folder / "generation_config.json")


def _number(data: Mapping[str, Any], name: str, default: float) -> float:
    value = data.get(name)
    return default if value is None else float(value)
