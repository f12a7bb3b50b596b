"""Tiny encoder-decoder models for golden tests: made by transformers, run over paged caches by definitions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.core.models.decoder import compute_logits, decoder
from headrace.core.models.encoder_decoder import encode
from headrace.core.runner.encoder import encoder_batch
from headrace.core.stages import EncoderBatch, EncoderInput, ForwardBatch, KVCaches
from paged_model import OPS, SIZES, PagedModel, assert_close, load_folder, on_device, randomise

LENGTHS = ((23, 17), (1, 1), (9, 30))
"""Tokens of the encoder's and of the decoder's input, of each request."""
NUM_FRAMES = 48
_SIZES: Mapping[str, Any] = {
    **SIZES, "d_ff": 88, "d_kv": 24, "num_layers": 2, "num_decoder_layers": 3,
    "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 88, "decoder_ffn_dim": 72, "max_position_embeddings": 256, "num_mel_bins": 12,
    "max_source_positions": NUM_FRAMES // 2, "max_target_positions": 256, "decoder_start_token_id": 2,
    "forced_eos_token_id": None, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip


@dataclass(frozen=True)
class Seq2SeqCase:
    """One tiny checkpoint. config: what differs from the sizes of all."""

    name: str
    model_type: str
    config: Mapping[str, Any]
    has_sdpa: bool = True


SEQ2SEQ_CASES = (
    Seq2SeqCase("t5", "t5", {}),
    Seq2SeqCase("t5_v1_1", "t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    Seq2SeqCase("t5_gated_silu", "t5", {"feed_forward_proj": "gated-silu", "num_decoder_layers": None}),
    Seq2SeqCase("mt5", "mt5", {}),
    Seq2SeqCase("umt5", "umt5", {}),
    Seq2SeqCase("bart", "bart", {}),
    Seq2SeqCase("bart_scaled", "bart", {"scale_embedding": True, "activation_function": "relu"}),
    Seq2SeqCase("plbart", "plbart", {}),
    Seq2SeqCase("mbart", "mbart", {"scale_embedding": True}),
    Seq2SeqCase("marian", "marian", {"scale_embedding": True, "activation_function": "swish"}),
    Seq2SeqCase(
        "marian_two_vocabularies",
        "marian",
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 97, "tie_word_embeddings": False},
    ),
    Seq2SeqCase("pegasus", "pegasus", {"scale_embedding": True, "activation_function": "relu"}),
    Seq2SeqCase("m2m_100", "m2m_100", {"pad_token_id": 1, "bos_token_id": 0}),
    Seq2SeqCase("blenderbot", "blenderbot", {}),
    Seq2SeqCase("blenderbot_small", "blenderbot-small", {"scale_embedding": True}),
    Seq2SeqCase("mvp", "mvp", {"scale_embedding": True}, has_sdpa=False),
    Seq2SeqCase("fsmt", "fsmt", {"src_vocab_size": 97, "tgt_vocab_size": 131}, has_sdpa=False),
    Seq2SeqCase(
        "fsmt_tied",
        "fsmt",
        {"src_vocab_size": 131, "tgt_vocab_size": 131, "tie_word_embeddings": True},
        has_sdpa=False,
    ),
    Seq2SeqCase("t5_near", "t5", {"relative_attention_max_distance": 20}),
    Seq2SeqCase("t5_few_buckets", "t5", {"relative_attention_max_distance": 70, "relative_attention_num_buckets": 9}),
    Seq2SeqCase("umt5_near", "umt5", {"relative_attention_max_distance": 40}),
    *(
        Seq2SeqCase(f"{name}_untied", name, {"tie_word_embeddings": False})
        for name in ("bart", "plbart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot")
    ),
    Seq2SeqCase("umt5_stated", "umt5", {"dense_act_fn": "relu", "is_gated_act": False}),
    Seq2SeqCase("whisper", "whisper", {}),
    Seq2SeqCase("whisper_scaled", "whisper", {"scale_embedding": True}),
)


def make_seq2seq(case: Seq2SeqCase, folder: Path) -> Path:
    """A tiny random model of transformers, saved as people save them."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[case.model_type]
    default, renamed = kind(), getattr(kind, "attribute_map", {})
    known = {key: size for key, size in _SIZES.items() if hasattr(default, key) and key not in renamed}
    config = AutoConfig.for_model(case.model_type, **{**known, **case.config})
    auto: Any = AutoModelForSpeechSeq2Seq if case.model_type == "whisper" else AutoModelForSeq2SeqLM
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomise(model)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


def load_oracle(folder: Path, attention: str = "eager") -> Any:
    """transformers' model, from the same files."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    is_speech = AutoConfig.from_pretrained(folder).model_type == "whisper"
    auto: Any = AutoModelForSpeechSeq2Seq if is_speech else AutoModelForSeq2SeqLM
    return auto.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32).eval()


def make_inputs(is_speech: bool, vocab_size: int = 97) -> tuple[list[Any], list[list[int]]]:
    """Random inputs of the encoder (token ids or frames) and of the decoder."""
    random = np.random.default_rng(3)
    sources: list[Any] = [
        random.standard_normal((NUM_FRAMES, 12)).astype(np.float32)
        if is_speech
        else random.integers(3, vocab_size, length).tolist()
        for length, _ in LENGTHS
    ]
    return sources, [random.integers(3, vocab_size, length).tolist() for _, length in LENGTHS]


def oracle_logits(model: Any, source: Any, target: Sequence[int]) -> torch.Tensor:
    """transformers' logits [num_target_tokens, vocab_size]."""
    # With a cache, FSMT masks nothing.
    inputs: dict[str, Any] = {"decoder_input_ids": torch.tensor([list(target)]), "use_cache": False}
    if isinstance(source, np.ndarray):
        inputs["input_features"] = torch.from_numpy(source.T.copy())[None]
    else:
        inputs["input_ids"] = torch.tensor([source])
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.inference_mode():
        logits: torch.Tensor = model(**inputs).logits[0]
    return logits


def seq2seq_logits(
    model: PagedModel,
    sources: Sequence[Any],
    targets: Sequence[Sequence[int]],
    *,
    block_size: int,
    chunk: int = 0,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Logits of every token of every decoder input, all together, `chunk` tokens a step, over shuffled blocks."""
    spec, random = model.spec, np.random.default_rng(seed)
    assert spec.encoder is not None
    inputs = [EncoderInput(features=s) if isinstance(s, np.ndarray) else EncoderInput(token_ids=s) for s in sources]
    encoder_lens = [entry.num_tokens(spec.encoder) for entry in inputs]
    tables = []
    for lengths in ([len(ids) for ids in targets], encoder_lens):
        counts = [-(-length // block_size) for length in lengths]
        ids = random.permutation(np.arange(1, 1 + sum(counts), dtype=np.int32))
        table = np.full((len(counts), max(counts) + 1), -1, np.int32)
        for row, part in enumerate(np.split(ids, np.cumsum(counts)[:-1])):
            table[row, : len(part)] = part
        tables.append(table)
    own, cross = tables
    num_blocks = 1 + int(max(table.max() for table in tables))
    size: dict[str, Any] = dict(num_blocks=num_blocks, block_size=block_size, dtype="float32", device="cpu")
    kv = KVCaches(
        layers=[
            OPS.new_kv_cache(num_kv_heads=layer.attn.num_kv_heads, head_dim=layer.attn.head_dim, **size)
            for layer in spec.layers
        ],
        group_of_layer=[0] * spec.num_layers,
        cross=[
            OPS.new_kv_cache(num_kv_heads=layer.cross.num_heads, head_dim=layer.cross.head_dim, **size)
            for layer in spec.layers
            if layer.cross is not None
        ],
        cross_group=1,
    )
    batch = encoder_batch(spec.encoder, inputs, cross, block_size=block_size, dtype="float32")
    moved = {name: on_device(getattr(batch, name)) for name in ("positions", "query_start_loc", "slot_mapping")}
    batch = EncoderBatch(
        **moved,
        input_ids=None if batch.input_ids is None else on_device(batch.input_ids),
        features=None if batch.features is None else torch.from_numpy(batch.features),
        windows=[on_device(window) for window in batch.windows],
    )
    with torch.inference_mode():
        kv = encode(OPS, spec, model.params, kv, batch)
    done, out = [0] * len(targets), [list[torch.Tensor]() for _ in targets]
    while any(n < len(ids) for n, ids in zip(done, targets, strict=True)):
        ends = [min(len(ids), n + (chunk or len(ids))) for n, ids in zip(done, targets, strict=True)]
        counts = [end - start for start, end in zip(done, ends, strict=True)]
        rows = np.repeat(np.arange(len(targets)), counts)
        positions = np.concatenate([np.arange(start, end) for start, end in zip(done, ends, strict=True)])
        forward = ForwardBatch(
            input_ids=on_device([targets[int(r)][int(p)] for r, p in zip(rows, positions, strict=True)]),
            positions=on_device(positions),
            query_start_loc=on_device(np.cumsum([0, *counts])),
            seq_lens=on_device(ends),
            encoder_lens=on_device(encoder_lens),
            block_tables=[on_device(own), on_device(cross)],
            slot_mappings=[on_device(own[rows, positions // block_size] * block_size + positions % block_size)] * 2,
            logits_indices=on_device(np.arange(len(rows))),
        )
        with torch.inference_mode():
            hidden_states, kv = decoder(OPS, spec, model.params, kv, forward)
            logits = compute_logits(OPS, spec, model.params, hidden_states)
        for r, part in enumerate(logits.split(counts)):
            out[r].append(part)
        done = ends
    return [torch.cat(parts) for parts in out]


def check_seq2seq(case: Seq2SeqCase, folder: Path) -> float:
    """Compare a case's logits with transformers': the largest error. Raises AssertionError."""
    make_seq2seq(case, folder)
    model, oracle = load_folder(folder), load_oracle(folder)
    sources, targets = make_inputs(case.model_type == "whisper")
    expected = [oracle_logits(oracle, s, t) for s, t in zip(sources, targets, strict=True)]
    sdpa = load_oracle(folder, "sdpa" if case.has_sdpa else "eager")
    errors = [
        assert_close(oracle_logits(sdpa, s, t), want) for s, t, want in zip(sources, targets, expected, strict=True)
    ]
    for chunk, block_size in ((0, 4), (1, 16), (5, 4)):
        got = seq2seq_logits(model, sources, targets, block_size=block_size, chunk=chunk, seed=chunk)
        errors += [assert_close(logits, want) for logits, want in zip(got, expected, strict=True)]
    return max(errors)
