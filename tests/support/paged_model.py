"""Tiny models for golden tests: made by transformers, read from files, run over a paged cache by definitions."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.core.kv.groups import KVGroup, kv_groups
from headrace.core.models.config import read_config
from headrace.core.models.declare import declare_params
from headrace.core.models.decoder import compute_logits, decoder
from headrace.core.models.name_tables import checkpoint_names
from headrace.core.models.registry import family_of, read_spec
from headrace.core.models.rope import RopeRows, rope_rows
from headrace.core.models.spec import ModelSpec
from headrace.core.ops import OpTable
from headrace.core.runner.caches import new_caches
from headrace.core.stages import Array, ForwardBatch
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.load import CheckpointParams
from headrace.core.weights.open import open_weights
from headrace.core.weights.source import HostTensor, ParamSource

TOLERANCE = 2e-4
"""Largest difference of logits over their standard deviation; float32 noise is 1e-6 to 7e-5, real errors 0.1."""
OPS = OpTable()

SIZES: Mapping[str, Any] = {
    # Every key of a size in transformers' configs, applied where a class has it.
    "vocab_size": 131, "hidden_size": 64, "d_model": 64, "n_embd": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 88, "ffn_dim": 88, "ffn_hidden_size": 88, "intermediate_size_mlp": 88,
    "num_hidden_layers": 4, "n_layer": 3, "n_layers": 4, "num_layers": 4,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2,
    "max_position_embeddings": 256, "n_positions": 256, "max_seq_len": 256,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40,
    "shared_intermediate_size": 40, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "moe_num_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_start_index": 1,
    "moe_layer_interval": 1, "num_dense_layers": 1,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One tiny checkpoint. config: what differs from SIZES; None takes a key of SIZES out."""

    name: str
    model_type: str
    config: Mapping[str, Any]
    has_sdpa: bool = True
    has_eager: bool = True
    """False where transformers' eager attention is known to be wrong"""
    lengths: tuple[int, ...] = (23, 9)
    """tokens of each sequence; beyond the window of 6"""
    twin: str = ""
    """the model_type that transformers has, for a family that it has not"""
    respell: Callable[[Path], None] | None = None
    """rewrites the twin's folder as the family publishes its checkpoints"""


@dataclass
class PagedModel:
    """A spec with its parameters on torch, run through the definitions of the ops."""

    spec: ModelSpec
    params: Mapping[str, Array]

    def logits(
        self, sequences: Sequence[Sequence[int]], *, block_size: int, chunk: int = 0, seed: int | None = None
    ) -> list[torch.Tensor]:
        """Logits of every token of every sequence: all run together, `chunk` tokens a step (0: all at once).

        With a seed, blocks are handed out in random order and entries that left a window point anywhere.
        """
        groups = kv_groups(self.spec, max_model_len=max(map(len, sequences)))
        cache = PagedCache(self.spec, groups, block_size, sequences, seed)
        done, out = [0] * len(sequences), [list[torch.Tensor]() for _ in sequences]
        while any(n < len(ids) for n, ids in zip(done, sequences, strict=True)):
            ends = [min(len(ids), n + (chunk or len(ids))) for n, ids in zip(done, sequences, strict=True)]
            batch = cache.batch(sequences, done, ends, rope_rows(self.spec))
            with torch.inference_mode():
                hidden_states, cache.kv = decoder(OPS, self.spec, self.params, cache.kv, batch)
                logits = compute_logits(OPS, self.spec, self.params, OPS.gather(hidden_states, batch.logits_indices))
            counts = [end - start for start, end in zip(done, ends, strict=True)]
            for r, part in enumerate(logits.split(counts)):
                out[r].append(part)
            done = ends
        return [torch.cat(parts) for parts in out]


class PagedCache:
    """Caches of all layers, block tables of all groups, and the batches that use them."""

    def __init__(
        self,
        spec: ModelSpec,
        groups: Sequence[KVGroup],
        block_size: int,
        sequences: Sequence[Sequence[int]],
        seed: int | None,
    ) -> None:
        self.groups, self.block_size = groups, block_size
        self.random = None if seed is None else np.random.default_rng(seed)
        counts = [-(-len(ids) // block_size) for ids in sequences]
        self.num_blocks = 1 + sum(counts)
        self.tables = [self._table(counts) for _ in groups]
        self.kv = new_caches(
            OPS,
            groups,
            [self.num_blocks] * len(groups),
            num_layers=spec.num_layers,
            block_size=block_size,
            dtype="float32",
            device="cpu",
        )

    def _table(self, counts: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
        ids = np.arange(1, self.num_blocks, dtype=np.int32)
        if self.random is not None:
            self.random.shuffle(ids)
        table = np.full((len(counts), max(counts) + 1), -1, np.int32)
        for r, part in enumerate(np.split(ids, np.cumsum(counts)[:-1])):
            table[r, : len(part)] = part
        return table

    def batch(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], ends: Sequence[int], rope: RopeRows
    ) -> ForwardBatch:
        """The step that computes tokens [start, end) of each sequence."""
        spans = list(zip(starts, ends, strict=True))
        rows = np.concatenate([np.full(end - start, r) for r, (start, end) in enumerate(spans)])
        positions = np.concatenate([np.arange(start, end) for start, end in spans])
        slots, tables = [], []
        for group, table in zip(self.groups, self.tables, strict=True):
            if group.kind == "state":  # the state of a request is one block's, in place
                tables.append(np.where(np.array(starts) > 0, table[:, 0], -1)[:, None])
                last = np.array([p == ends[r] - 1 for r, p in zip(rows, positions, strict=True)])
                slots.append(np.where(last, table[rows, 0], -1))
                continue
            slots.append(table[rows, positions // self.block_size] * self.block_size + positions % self.block_size)
            table = table.copy()
            if group.window and self.random is not None:
                for r, start in enumerate(starts):
                    gone = max(0, start - group.window + 1) // self.block_size
                    table[r, :gone] = self.random.integers(0, self.num_blocks, gone)
            tables.append(table)
        rope_row = np.array([rope.row(len(ids)) for ids in sequences])
        return ForwardBatch(
            input_ids=on_device([sequences[r][p] for r, p in zip(rows, positions, strict=True)]),
            positions=on_device(positions),
            query_start_loc=on_device(np.cumsum([0, *(end - start for start, end in spans)])),
            seq_lens=on_device(ends),
            block_tables=[on_device(table) for table in tables],
            slot_mappings=[on_device(slot) for slot in slots],
            logits_indices=on_device(np.arange(len(rows))),
            rope_rows=on_device(rope_row[rows]),
        )


def on_device(values: Any) -> Array:
    """int32 through ops.to_device."""
    return OPS.to_device(np.asarray(values, dtype=np.int32), device="cpu")


def load_folder(folder: Path) -> PagedModel:
    """A checkpoint folder through config, family, declaration and name table; without what reads images."""
    config = read_config(folder)
    spec = read_spec(config, with_images=False)
    source = open_weights(folder)
    table = checkpoint_names(family_of(config, with_images=False).weights, spec)
    return PagedModel(spec, place(CheckpointParams(declare_params(spec), source, table)))


def place(source: ParamSource) -> dict[str, Array]:
    """Each parameter as a runner puts it on a device."""
    placed: dict[str, Array] = {}
    for loaded in source:
        if loaded.param.kind == "stacked":
            placed[loaded.param.name] = OPS.pack_stacked(
                loaded.tensors, num_stacked=loaded.param.num_stacked, dtype="float32", device="cpu"
            )
        elif loaded.param.kind in ("linear", "embedding"):
            placed[loaded.param.name] = OPS.pack_linear(loaded.tensors, dtype="float32", device="cpu")
        else:
            data = np.concatenate([to_float32(tensor) for tensor in loaded.tensors])
            host = HostTensor(name=loaded.param.name, dtype="float32", shape=data.shape, data=data)
            placed[loaded.param.name] = OPS.upload(host, dtype="float32", device="cpu")
    return placed


def check_logits(case: Case, folder: Path, *, thoroughly: bool = True) -> float:
    """Compare a case's logits with transformers': the largest error. Raises AssertionError.

    All sequences run in one batch, cut into chunks, over blocks in random order: prefill, decode and their mixture.
    """
    make_checkpoint(case, folder)
    sequences = make_sequences(case)
    oracles = [name for name, has in (("eager", case.has_eager), ("sdpa", case.has_sdpa)) if has]
    expected = hf_logits(folder, oracles[0], sequences)
    errors = []
    if thoroughly and len(oracles) > 1:
        for sdpa, eager in zip(hf_logits(folder, "sdpa", sequences), expected, strict=True):
            assert_close(sdpa, eager)
    if case.respell is not None:
        case.respell(folder)
    model = load_folder(folder)
    if thoroughly:
        errors += [
            assert_close(model.logits([ids], block_size=64)[0], want)
            for ids, want in zip(sequences, expected, strict=True)
        ]
    for chunk, block_size in ((0, 4), (1, 16), (5, 4), (16, 2)) if thoroughly else ((5, 4),):
        got = model.logits(sequences, chunk=chunk, block_size=block_size, seed=chunk + 1)
        errors += [assert_close(logits, want) for logits, want in zip(got, expected, strict=True)]
    return max(errors)


def make_checkpoint(case: Case, folder: Path) -> Path:
    """A tiny random model of transformers, saved as people save them."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(case.twin or case.model_type, **tiny_sizes(case))
    model = causal_lm().from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomise(model)
    model.save_pretrained(folder)
    return folder


def causal_lm() -> Any:
    """transformers' table of causal models, with those that it only has inside others."""
    from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

    auto: Any = AutoModelForCausalLM
    auto.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    return auto


def tiny_sizes(case: Case) -> dict[str, Any]:
    """Keys of the case's config: SIZES where the class knows them, then what the case says."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[case.twin or case.model_type]
    default, renamed = kind(), getattr(kind, "attribute_map", {})
    known = {key: size for key, size in SIZES.items() if hasattr(default, key) and key not in renamed}
    return {
        **{key: size for key, size in known.items() if case.config.get(key, 0) != ...},
        **{k: v for k, v in case.config.items() if v is not ...},
    }


def randomise(model: torch.nn.Module) -> None:
    """Fresh models have unit norms, zero biases and flat attention, which would hide errors."""
    generator = torch.Generator().manual_seed(7)
    buffers = [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if ("bias" in name or "scalar" in name) and buffer.is_floating_point()
    ]
    for name, parameter in [*model.named_parameters(), *buffers]:
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and name.endswith("weight") or parameter.dim() == 1:
            is_norm_weight = name.endswith(("weight", "scalar"))
            values = 0.2 * values + parameter.data.mean().round() if is_norm_weight else 0.3 * values
        elif "embed" in name or "wte" in name or "wpe" in name:
            values = 0.5 * values
        else:
            is_stored_transposed = "c_" in name and "gpt2" in type(model).__name__.lower()
            fan_in = parameter.shape[0] if is_stored_transposed else parameter.shape[-1]
            values = values * (3.0 if _QUERY_OR_KEY.search(name) else 1.0) / fan_in**0.5
        parameter.data.copy_(values)


_QUERY_OR_KEY = re.compile(r"q_proj|k_proj|qkv|c_attn|query|key|_b_proj|kv_a_proj|router|gate\.weight")
"""Weights that are made larger, so that attention and routers decide something."""


def make_sequences(case: Case) -> list[list[int]]:
    """Random token ids of the case's lengths."""
    random = np.random.default_rng(3)
    num_tokens = case.config.get("vocab_size", SIZES["vocab_size"])
    return [random.integers(3, num_tokens, length).tolist() for length in case.lengths]


def hf_logits(folder: Path, attention: str, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits of each sequence by transformers, loaded from the same files."""
    model: Any = causal_lm().from_pretrained(folder, attn_implementation=attention, dtype=torch.float32)
    with torch.inference_mode():
        return [model.eval()(torch.tensor([list(ids)]), use_cache=False).logits[0] for ids in sequences]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> float:
    """Within TOLERANCE of the standard deviation, and the same most likely tokens; returns the error."""
    error = ((got - want).abs().max() / want.std()).item()
    assert error < TOLERANCE, error
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    return error
