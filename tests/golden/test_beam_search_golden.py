"""Beams through the whole engine, against transformers' generate."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM, BeamSearchParams
from headrace.core.errors import ConfigError
from headrace.core.llm_inputs import Prompt
from paged_seq2seq import SEQ2SEQ_CASES, make_seq2seq
from tiny_checkpoints import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (3, 17)
OPTIONS: dict[str, Any] = dict(device="reference", dtype="float32", skip_tokenizer_init=True, block_size=4)
SEARCHES: tuple[dict[str, Any], ...] = (
    dict(num_beams=4, max_new_tokens=8),
    dict(num_beams=3, max_new_tokens=6, length_penalty=2.0, early_stopping=True),
    dict(num_beams=4, max_new_tokens=8, length_penalty=0.6, early_stopping="never", no_repeat_ngram_size=2),
    dict(num_beams=2, max_new_tokens=4, forced_eos_token_id=2),
)


def translate(options: dict[str, Any]) -> BeamSearchParams:
    names = {"num_beams": "beam_width", "max_new_tokens": "max_tokens"}
    return BeamSearchParams(**{names.get(name, name): value for name, value in options.items()})


def likely_ends(model: Any) -> None:
    """Fresh models never stop; this one does, now and then."""
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[2] += 0.5 * head.std() * torch.randn(head.shape[1], generator=torch.Generator().manual_seed(1))
        head[2] *= 2.5


def texts(outputs: torch.Tensor, num_given: int) -> list[list[int]]:
    """New tokens of each row, up to the end or to the padding behind it."""
    found = []
    for row in outputs[:, num_given:].tolist():
        end = row.index(2) + 1 if 2 in row else len(row)
        found.append(row[:end])
    return found


@pytest.mark.parametrize("name", ["bart", "marian"])
def test_beams_of_encoder_decoder_models_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    case = next(case for case in SEQ2SEQ_CASES if case.name == name)
    folder, auto, random = make_seq2seq(case, tmp_path), AutoModelForSeq2SeqLM, np.random.default_rng(5)
    model: Any = auto.from_pretrained(folder, dtype=torch.float32).eval()
    likely_ends(model)
    model.save_pretrained(folder)
    prompts = [random.integers(3, 97, length).tolist() for length in LENGTHS]
    begin = {"prompt_token_ids": [2]}
    both: list[Any] = [{"encoder_prompt": {"prompt_token_ids": ids}, "decoder_prompt": begin} for ids in prompts]
    with LLM(str(folder), **OPTIONS) as llm:
        found = [llm.beam_search(both, translate(options)) for options in SEARCHES]
        llm.built.engine.scheduler.check_integrity()
    for options, texts_found in zip(SEARCHES, found, strict=True):
        for prompt, beams in zip(prompts, texts_found, strict=True):
            outputs = model.generate(
                torch.tensor([prompt]), **options, num_return_sequences=options["num_beams"], do_sample=False,
                eos_token_id=2, decoder_start_token_id=2,
            )  # fmt: skip
            assert [beam.token_ids for beam in beams] == texts(outputs, 1), options


def test_beams_of_decoders_are_those_of_transformers(tmp_path: Path) -> None:
    model: Any = save_tiny(tmp_path, "llama")
    model.generation_config.eos_token_id = model.config.eos_token_id = 2
    likely_ends(model)
    model.save_pretrained(tmp_path)
    random, searches = np.random.default_rng(5), SEARCHES[:3]
    prompts = [random.integers(3, 97, length).tolist() for length in LENGTHS]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        asked: list[Prompt] = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = [llm.beam_search(asked, translate(options)) for options in searches]
        alone = llm.beam_search({"prompt_token_ids": prompts[1]}, translate(searches[0]))
    assert [beam.token_ids for beam in alone[0]] == [beam.token_ids for beam in found[0][1]]
    for options, texts_found in zip(searches, found, strict=True):
        for prompt, beams in zip(prompts, texts_found, strict=True):
            outputs = model.generate(
                torch.tensor([prompt]), **options, num_return_sequences=options["num_beams"], do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
            assert [beam.token_ids for beam in beams] == texts(outputs, len(prompt)), options


RULES: tuple[dict[str, Any], ...] = (
    {"no_repeat_ngram_size": 2},
    {"forced_bos_token_id": 9, "forced_eos_token_id": 2},
    {"bad_words_ids": "the likeliest"},
    {"no_repeat_ngram_size": 1, "bad_words_ids": "the likeliest", "forced_eos_token_id": 5},
)


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_greedy_texts_go_by_what_a_checkpoint_asks_for(rules: dict[str, Any], tmp_path: Path) -> None:
    """generation_config.json of an encoder-decoder model; a ban of one token and one of two hold for any request."""
    from transformers import AutoModelForSeq2SeqLM, GenerationConfig

    case = next(case for case in SEQ2SEQ_CASES if case.name == "bart")
    folder, auto, random = make_seq2seq(case, tmp_path), AutoModelForSeq2SeqLM, np.random.default_rng(5)
    model: Any = auto.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [random.integers(3, 97, length).tolist() for length in LENGTHS]
    make: Any = GenerationConfig
    plain = make(max_new_tokens=10, eos_token_id=1, pad_token_id=0, decoder_start_token_id=2)

    def theirs(config: Any) -> list[list[int]]:
        return [model.generate(torch.tensor([prompt]), generation_config=config)[0].tolist() for prompt in prompts]

    unruled = theirs(plain)
    if "bad_words_ids" in rules:
        rules = {**rules, "bad_words_ids": [unruled[0][3:4], unruled[1][3:5]]}
    ruled = make(**{**plain.to_dict(), **rules})
    ruled.save_pretrained(folder)
    expected = theirs(ruled)
    assert expected != unruled
    with LLM(str(folder), **OPTIONS) as llm:
        num_given = 2 if "forced_bos_token_id" in rules else 1
        params = dataclasses.replace(llm.default_sampling_params, max_tokens=11 - num_given)
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert [output.outputs[0].token_ids for output in found] == [ids[num_given:] for ids in expected]


def test_impossible_beams_are_refused() -> None:
    with pytest.raises(ConfigError, match="beam_width must be 1 to 10, got 0"):
        BeamSearchParams(beam_width=0)
