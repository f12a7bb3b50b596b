"""GGUF files of every architecture against transformers' logits: names, rearranged numbers, metadata."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import encoder_cases
from gguf_cases import GGUF_CASES
from gguf_files import METADATA, write_gguf
from headrace import LLM
from headrace.core.errors import ModelError
from headrace.core.models.config import HFConfig
from headrace.core.models.declare import declare_params
from headrace.core.models.gguf_archs import ARCHS
from headrace.core.models.gguf_config import config_from_gguf, with_gguf_pooler
from headrace.core.models.gguf_names import gguf_names
from headrace.core.models.heads import with_default_pooler, with_head_names
from headrace.core.models.registry import read_spec
from headrace.core.models.spec import ModelSpec
from headrace.core.stages import Array
from headrace.core.weights.gguf import GGUFSource
from headrace.core.weights.load import CheckpointParams
from headrace.core.weights.unstacked import UnstackedSource
from paged_encoder import Encoder, theirs_inputs
from paged_encoder import make_inputs as encoder_inputs
from paged_model import PagedModel, assert_close, hf_logits, make_checkpoint, make_sequences, place
from paged_seq2seq import (
    SEQ2SEQ_CASES,
    Seq2SeqCase,
    load_oracle,
    make_inputs,
    make_seq2seq,
    oracle_logits,
    seq2seq_logits,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ENCODERS = {f"e_{case.name}": case for case in encoder_cases.CASES}
_GEMMA = ENCODERS["e_gemma3_text"]
ENCODERS["e_gemma_embedding"] = replace(_GEMMA, config={**_GEMMA.config, "query_pre_attn_scalar": 24})
"""Files do not say what divides scores; llama.cpp takes the size of a head."""
SEQ2SEQ = {f"s_{case.name}": case for case in SEQ2SEQ_CASES}


def load_gguf(file: Path) -> tuple[ModelSpec, dict[str, Array]]:
    """A file as the engine reads it."""
    source = GGUFSource(file)
    config = config_from_gguf(source.metadata, source.names(), source.read)
    spec = with_default_pooler(read_spec(config), config)
    names = gguf_names(str(source.metadata["general.architecture"]), spec, source.names())
    params = place(CheckpointParams(declare_params(spec), UnstackedSource(source), with_head_names(names, spec)))
    source.close()
    return spec, params


@pytest.mark.parametrize("name", [name for name in METADATA if name in GGUF_CASES])
def test_logits_of_a_decoder(name: str, tmp_path: Path) -> None:
    case = GGUF_CASES[name]
    folder, sequences = make_checkpoint(case, tmp_path), make_sequences(case)
    write_gguf(name, folder, tmp_path / "model.gguf")
    model = PagedModel(*load_gguf(tmp_path / "model.gguf"))
    expected = hf_logits(folder, "eager", sequences)
    for got, want in zip(model.logits(sequences, block_size=4, chunk=7), expected, strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("name", [name for name in METADATA if name in ENCODERS])
def test_hidden_states_of_an_encoder(name: str, tmp_path: Path) -> None:
    case = ENCODERS[name]
    folder = encoder_cases.make_checkpoint(case, tmp_path, "AutoModel")
    write_gguf(name, folder, tmp_path / "model.gguf")
    model, (sequences, types) = Encoder(*load_gguf(tmp_path / "model.gguf")), encoder_inputs(case)
    theirs = encoder_cases.load_theirs(folder, "AutoModel", "eager")
    expected = [
        theirs(**theirs_inputs(case, *each)).last_hidden_state[0] for each in zip(sequences, types, strict=True)
    ]
    for got, want in zip(model.hidden_states(sequences, types), expected, strict=True):
        assert_close(got, want)


@pytest.mark.parametrize(
    ("pooling_type", "name"), [(1, "e_bert"), (2, "e_bert"), (3, "e_bert"), (1, "e_gemma_embedding")]
)
def test_embeddings_are_pooled_as_the_file_says(pooling_type: int, name: str, tmp_path: Path) -> None:
    case = ENCODERS[name]
    folder = encoder_cases.make_checkpoint(case, tmp_path, "AutoModel")
    write_gguf(name, folder, tmp_path / "model.gguf", {"pooling_type": pooling_type})
    theirs, texts = encoder_cases.load_theirs(folder, "AutoModel", "eager"), [[5, 80, 33, 7, 9], [40]]
    with LLM(str(tmp_path / "model.gguf"), device="reference", dtype="float32", skip_tokenizer_init=True) as llm:
        outputs = llm.embed([{"prompt_token_ids": ids} for ids in texts])
    for ids, output in zip(texts, outputs, strict=True):
        hidden = theirs(input_ids=torch.tensor([ids])).last_hidden_state[0]
        pooled = {1: hidden.mean(0), 2: hidden[0], 3: hidden[-1]}[pooling_type]
        torch.testing.assert_close(torch.tensor(output.embedding), pooled / pooled.norm(), atol=2e-5, rtol=0)


def test_a_classifier_is_refused_and_no_pooling_type_changes_nothing() -> None:
    spec = read_spec(
        HFConfig(
            {
                "model_type": "bert",
                "hidden_size": 32,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "intermediate_size": 32,
                "vocab_size": 9,
            }
        )
    )
    metadata = {"general.architecture": "bert"}
    assert with_gguf_pooler(spec, metadata) == with_gguf_pooler(spec, {**metadata, "bert.pooling_type": 0}) == spec
    with pytest.raises(ModelError, match=r"is a classifier \(pooling_type 4\)"):
        with_gguf_pooler(spec, {**metadata, "bert.pooling_type": 4})


@pytest.mark.parametrize("name", [name for name in METADATA if name in SEQ2SEQ])
def test_logits_of_an_encoder_decoder(name: str, tmp_path: Path) -> None:
    case = SEQ2SEQ[name]
    more = {"num_decoder_layers": 2, "decoder_start_token_id": 2}  # the converter knows no other number
    folder = make_seq2seq(Seq2SeqCase(name, case.model_type, {**case.config, **more}), tmp_path)
    write_gguf(name, folder, tmp_path / "model.gguf")
    model, theirs = PagedModel(*load_gguf(tmp_path / "model.gguf")), load_oracle(folder)
    sources, targets = make_inputs(False)
    got = seq2seq_logits(model, sources, targets, block_size=4, chunk=7)
    for logits, source, target in zip(got, sources, targets, strict=True):
        assert_close(logits, oracle_logits(theirs, source, target))


def test_every_architecture_has_a_file() -> None:
    assert {keys["general.architecture"] for keys in METADATA.values()} | {"baichuan"} == set(ARCHS)
    assert METADATA.keys() <= {*GGUF_CASES, *ENCODERS, *SEQ2SEQ}
