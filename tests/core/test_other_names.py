"""What users of other engines type is answered with headrace's own name for it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from headrace import LLM, SamplingParams
from headrace.core.beam_search import BeamSearchParams
from headrace.core.config import all_options
from headrace.core.errors import ConfigError, RequestError
from headrace.core.other_names import _NONE, _OURS
from headrace.core.pooling.params import PoolingParams
from headrace.core.settings import resolve_options
from tiny_server_model import tiny_server_model


def test_the_table_names_what_there_is() -> None:
    ours = {*all_options(), *(field.name for field in dataclasses.fields(SamplingParams))}
    assert set(_OURS.values()) <= ours
    assert not set(_OURS) & set(_NONE)
    assert not (set(_OURS) | set(_NONE)) & set(all_options()) - {"model"}


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("serve --gpu-memory-utilization=0.9", "'--gpu-memory-utilization'; headrace calls it --kv-memory"),
        ("serve --enforce-eager", "'--enforce-eager'; it is chosen by the device's platform"),
        ("serve -ngl 99", "'-ngl'; headrace calls it --device"),
        ("serve -c4096", "'-c4096'; headrace calls it --max-model-len"),
        ("serve -tp 2", "'-tp'; headrace calls it --tensor-parallel-size"),
        ("serve --task embed", "'--task'; headrace calls it HEADRACE_POOLING"),
        ("serve --temp 0", "'--temp'; headrace calls it temperature of a request"),
        ("complete --max_new_tokens 5 x", "'--max_new_tokens'; headrace calls it --max-tokens"),
        ("complete -n 5 x", "'-n'; headrace calls it --max-tokens"),
    ],
)
def test_options_of_other_engines(typed: str, hint: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *typed.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith(f"error: no such option {hint}\n"), done.stderr


def test_keywords_of_other_engines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'gpu_memory_utilization'; headrace calls it kv_memory"):
        LLM(gpu_memory_utilization=0.9)
    (tmp_path / "c.toml").write_text("ctx-size = 5")
    with pytest.raises(ConfigError, match="unknown option 'ctx-size'; headrace calls it max_model_len"):
        resolve_options({}, config_file=tmp_path / "c.toml", environ={})
    wrong: list[tuple[Any, str, str]] = [
        (SamplingParams, "max_new_tokens", "headrace calls it max_tokens"),
        (SamplingParams, "temprature", "did you mean temperature"),
        (SamplingParams, "num_beams", "it is LLM.beam_search"),
        (BeamSearchParams, "max_new_tokens", "headrace calls it max_tokens"),
        (PoolingParams, "dimension", "did you mean dimensions"),
    ]
    for cls, name, hint in wrong:
        with pytest.raises(RequestError, match=f"{cls.__name__} has no {name}; {hint}"):
            cls(**{name: 1})


@pytest.mark.parametrize(("text", "count"), [("8k", 8000), ("8K", 8192), ("25.6k", 25600), ("1M", 1 << 20), ("7", 7)])
def test_counts_as_vllm_reads_them(text: str, count: int) -> None:
    config = resolve_options({"max_model_len": text}, environ={})
    assert config.model.max_model_len == count


@pytest.mark.parametrize("text", ["8kk", "1.5K", "k", "-1k", "0.0001k", "8 k", ""])
def test_counts_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-model-len must be"):
        resolve_options({"max_model_len": text}, environ={})


def test_the_tokenizer_renders_as_transformers_does(tmp_path: Path) -> None:
    folder = tiny_server_model(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "TokenizersBackend"}))
    oracle: Any = AutoTokenizer.from_pretrained(folder)
    messages: list[dict[str, str]] = [{"role": "user", "content": "Say hello."}]
    with LLM(str(folder), device="null", load_format="dummy", max_model_len=64) as llm:
        tokenizer = llm.get_tokenizer()
        for begin in (False, True):
            theirs = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=begin)
            assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begin) == theirs
        ids = oracle.apply_chat_template(messages, return_dict=False)
        assert tokenizer.apply_chat_template(messages) == ids
        assert len(llm.generate(["a", "b"], use_tqdm=False)) == 2
