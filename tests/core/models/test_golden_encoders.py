"""Every encoder against transformers: tiny random checkpoints, read from files, hidden states in float32."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encoder_cases import CASES, Case, load_theirs, make_checkpoint
from headrace.core.models.config import read_config
from headrace.core.models.declare import declare_params
from headrace.core.models.encoder import encoder
from headrace.core.models.heads import with_default_pooler, with_head_names
from headrace.core.models.pooler import pool
from headrace.core.models.registry import find_family, read_spec
from headrace.core.models.spec import ModelSpec
from headrace.core.ops import OpTable
from headrace.core.stages import Array, ForwardBatch, PoolingBatch
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.load import CheckpointParams
from headrace.core.weights.open import open_weights
from headrace.core.weights.source import HostTensor

TOLERANCE = 2e-4
"""Largest difference of hidden states over their standard deviation; float32 noise is below 2e-5."""
OPS = OpTable()
LENGTHS = (23, 1, 9)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on a shared machine made a forward pass a hundred times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


# ---- our side -------------------------------------------------------------------------------------------------
@dataclass
class Encoder:
    """A spec with its parameters on torch, run through the definitions of the ops."""

    spec: ModelSpec
    params: Mapping[str, Array]

    def hidden_states(
        self, sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]]
    ) -> Sequence[torch.Tensor]:
        """All sequences in one batch; the hidden states of each."""
        return list(torch.split(self._run(sequences, types), [len(ids) for ids in sequences]))

    def pooled(self, sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> torch.Tensor:
        """All sequences in one batch; the vector of each."""
        assert self.spec.pooler is not None
        ends = np.cumsum([len(ids) for ids in sequences])
        starts = ends - [len(ids) for ids in sequences]
        match self.spec.pooler.kind:
            case "cls":
                ends = starts + 1
            case "last":
                starts = ends - 1
        batch = PoolingBatch(starts=on_device(starts), ends=on_device(ends))
        with torch.inference_mode():
            result: torch.Tensor = pool(OPS, self.spec, self.params, self._run(sequences, types), batch)
        return result

    def _run(self, sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> Array:
        batch = ForwardBatch(
            input_ids=on_device(np.concatenate(sequences)),
            positions=on_device(np.concatenate([np.arange(len(ids)) for ids in sequences])),
            query_start_loc=on_device(np.cumsum([0, *map(len, sequences)])),
            seq_lens=on_device([len(ids) for ids in sequences]),
            block_tables=(),
            slot_mappings=(),
            logits_indices=on_device([]),
            token_types=on_device(np.concatenate(types)),
        )
        with torch.inference_mode():
            return encoder(OPS, self.spec, self.params, batch)


def on_device(values: Any) -> Array:
    """int32 through ops.to_device."""
    return OPS.to_device(np.asarray(values, dtype=np.int32), device="cpu")


def load_folder(folder: Path) -> Encoder:
    """A checkpoint folder through config, family, declaration and name table."""
    config = read_config(folder)
    spec = with_default_pooler(read_spec(config), config)
    table = with_head_names(find_family(spec.model_type).weights, spec)
    params: dict[str, Array] = {}
    for loaded in CheckpointParams(declare_params(spec), open_weights(folder), table):
        if loaded.param.kind in ("linear", "embedding"):
            params[loaded.param.name] = OPS.pack_linear(loaded.tensors, dtype="float32", device="cpu")
        else:
            data = np.concatenate([to_float32(tensor) for tensor in loaded.tensors])
            host = HostTensor(name=loaded.param.name, dtype="float32", shape=data.shape, data=data)
            params[loaded.param.name] = OPS.upload(host, dtype="float32", device="cpu")
    return Encoder(spec, params)


# ---- their side -----------------------------------------------------------------------------------------------
def make_inputs(case: Case) -> tuple[list[list[int]], list[list[int]]]:
    """Random token ids, and for each token its type."""
    random = np.random.default_rng(3)
    # Beyond the 128 tokens at which distances are all one to MPNet.
    lengths = (*LENGTHS, 200) if case.model_type == "mpnet" else LENGTHS
    sequences = [random.integers(3, 131, length).tolist() for length in lengths]
    types = [[int(case.has_types and i > len(ids) // 2) for i in range(len(ids))] for ids in sequences]
    return sequences, types


def theirs_inputs(case: Case, ids: Sequence[int], types: Sequence[int]) -> dict[str, torch.Tensor]:
    """Arguments of a forward pass in transformers."""
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    return {**inputs, "token_type_ids": torch.tensor([types])} if case.has_types else inputs


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within TOLERANCE of the standard deviation."""
    error = ((got - want).abs().max() / want.std()).item()
    assert error < TOLERANCE, error
