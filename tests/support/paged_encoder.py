"""Tiny encoders for golden tests, run by definitions of the ops, and inputs of both sides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from encoder_cases import Case
from headrace.core.models.encoder import encoder
from headrace.core.models.pooler import pool
from headrace.core.models.spec import ModelSpec
from headrace.core.ops import OpTable
from headrace.core.stages import Array, ForwardBatch, PoolingBatch

OPS = OpTable()
LENGTHS = (23, 1, 9)


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
