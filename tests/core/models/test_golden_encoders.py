"""Every encoder against transformers: tiny random checkpoints, read from files, hidden states in float32."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder_cases import CASES, Case, load_theirs, make_checkpoint
from headrace.core.models.config import HFConfig, read_config
from headrace.core.models.declare import declare_params
from headrace.core.models.heads import with_default_pooler, with_head_names
from headrace.core.models.name_tables import checkpoint_names
from headrace.core.models.registry import find_family, read_spec
from headrace.core.stages import Array
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.load import CheckpointParams
from headrace.core.weights.open import open_weights
from headrace.core.weights.source import HostTensor
from paged_encoder import OPS, Encoder, make_inputs, theirs_inputs

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 2e-4
"""Largest difference of hidden states over their standard deviation; float32 noise is below 2e-5."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hidden_states_equal_those_of_transformers(case: Case, tmp_path: Path) -> None:
    folder = make_checkpoint(case, tmp_path, "AutoModel")
    model = load_folder(folder)
    sequences, types = make_inputs(case)
    for attention in ("eager", "sdpa") if case.has_sdpa else ("eager",):
        theirs = load_theirs(folder, "AutoModel", attention)
        inputs = [theirs_inputs(case, ids, t) for ids, t in zip(sequences, types, strict=True)]
        expected = [theirs(**each).last_hidden_state[0] for each in inputs]
        for got, want in zip(model.hidden_states(sequences, types), expected, strict=True):
            assert_close(got, want)
    alone = [model.hidden_states([ids], [t])[0] for ids, t in zip(sequences, types, strict=True)]
    for one, together in zip(alone, model.hidden_states(sequences, types), strict=True):
        torch.testing.assert_close(one, together, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case.classifies], ids=lambda case: case.name)
def test_logits_of_labels_equal_those_of_transformers(case: Case, tmp_path: Path) -> None:
    auto = "AutoModelForSequenceClassification"
    model = load_folder(make_checkpoint(case, tmp_path, auto))
    sequences, types = make_inputs(case)
    theirs = load_theirs(tmp_path, auto, "eager")
    inputs = [theirs_inputs(case, ids, t) for ids, t in zip(sequences, types, strict=True)]
    expected = torch.cat([theirs(**each).logits for each in inputs])
    assert model.spec.pooler is not None and len(model.spec.pooler.labels) == 3
    assert_close(model.pooled(sequences, types), expected)


def test_a_changed_weight_changes_the_hidden_states(tmp_path: Path) -> None:
    """The comparison can fail: any parameter whose values are off by a few percent is seen."""
    for name in ("bert", "modernbert_biases_mean", "nomic_bert"):
        case = next(case for case in CASES if case.name == name)
        model = load_folder(make_checkpoint(case, tmp_path / name, "AutoModelForSequenceClassification"))
        sequences, types = make_inputs(case)
        before = model.pooled(sequences, types)
        generator = torch.Generator().manual_seed(11)
        for param, value in model.params.items():
            original = value.clone()
            value.mul_(1 + 0.05 * torch.randn(value.shape, generator=generator))
            after = model.pooled(sequences, types)
            value.copy_(original)
            assert ((after - before).abs().max() / before.std()).item() > TOLERANCE, param


def test_old_names_of_norms_are_read(tmp_path: Path) -> None:
    """Files from TensorFlow have gamma and beta, and the backbone alone has no prefix."""
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(CASES[0], tmp_path, "AutoModelForMaskedLM")
    model, (sequences, types) = load_folder(folder), make_inputs(CASES[0])
    expected = model.hidden_states(sequences, types)
    tensors = load_file(folder / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    assert "bert.embeddings.LayerNorm.gamma" in old
    save_file(old, folder / "model.safetensors")
    for got, want in zip(load_folder(folder).hidden_states(sequences, types), expected, strict=True):
        assert torch.equal(got, want)


def test_nomic_configs_of_its_own_code_are_read(tmp_path: Path) -> None:
    """Which are GPT-2's; transformers itself writes the tensors as that code names them, in files of the backbone."""
    case = next(case for case in CASES if case.name == "nomic_bert")
    folder = make_checkpoint(case, tmp_path, "AutoModel")
    model, (sequences, types) = load_folder(folder), make_inputs(case)
    expected = model.hidden_states(sequences, types)
    config = {
        "model_type": "nomic_bert", "vocab_size": 131, "n_embd": 64, "n_inner": 88, "n_layer": 3, "n_head": 4,
        "n_positions": 8192, "activation_function": "swiglu", "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "type_vocab_size": 2, "max_trained_positions": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for got, want in zip(load_folder(folder).hidden_states(sequences, types), expected, strict=True):
        assert torch.equal(got, want)


def test_nomic_tensors_as_transformers_names_them_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    case = next(case for case in CASES if case.name == "nomic_bert")
    folder = make_checkpoint(case, tmp_path, "AutoModel")
    model, (sequences, types) = load_folder(folder), make_inputs(case)
    expected = model.hidden_states(sequences, types)
    assert any(name.endswith("attn.Wqkv.weight") for name in load_file(folder / "model.safetensors"))
    theirs = load_theirs(folder, "AutoModel", "eager")
    tensors = {f"nomic_bert.{name}": value.clone() for name, value in theirs.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    assert any(name.endswith("self_attn.q_proj.weight") for name in tensors)
    for got, want in zip(load_folder(folder).hidden_states(sequences, types), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("model_type", ["roberta", "camembert", "xlm-roberta"])
def test_a_vocabulary_that_no_file_states_is_that_of_transformers(model_type: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert read_spec(HFConfig({"model_type": model_type})).vocab_size == CONFIG_MAPPING[model_type]().vocab_size


# ---- our side -------------------------------------------------------------------------------------------------
def load_folder(folder: Path) -> Encoder:
    """A checkpoint folder through config, family, declaration and name table."""
    config = read_config(folder)
    spec = with_default_pooler(read_spec(config), config)
    table = with_head_names(checkpoint_names(find_family(spec.model_type).weights, spec), spec)
    params: dict[str, Array] = {}
    for loaded in CheckpointParams(declare_params(spec), open_weights(folder), table):
        if loaded.param.kind in ("linear", "embedding"):
            params[loaded.param.name] = OPS.pack_linear(loaded.tensors, dtype="float32", device="cpu")
        else:
            data = np.concatenate([to_float32(tensor) for tensor in loaded.tensors])
            host = HostTensor(name=loaded.param.name, dtype="float32", shape=data.shape, data=data)
            params[loaded.param.name] = OPS.upload(host, dtype="float32", device="cpu")
    return Encoder(spec, params)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within TOLERANCE of the standard deviation."""
    error = ((got - want).abs().max() / want.std()).item()
    assert error < TOLERANCE, error
