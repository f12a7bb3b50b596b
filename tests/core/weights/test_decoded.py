"""Quantized checkpoints, each format packed here bit by bit as its paper or its writer's documentation says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from headrace.core.errors import ModelError, WeightError
from headrace.core.weights.decoded import DecodedSource, check_quantization, format_names
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.safetensors import SafetensorsSource

ROWS, COLS, GROUP = 48, 128, 32
Tensors = dict[str, torch.Tensor]
Made = tuple[dict[str, Any], Tensors, npt.NDArray[Any], bool]
"""quantization_config, stored tensors, the weight that they stand for, and whether it may stay in integers."""
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def pack(codes: npt.NDArray[Any], bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Codes of each row into words of 32 bits, one by one: the first in the lowest bits, or as `order` says."""
    per_word = 32 // bits
    words = np.zeros((len(codes), -(-codes.shape[1] // per_word)), np.uint32)
    for r, row in enumerate(codes):
        for c in range(len(row)):
            word, place = divmod(c, per_word)
            shift = bits * (order.index(place) if order else place)
            words[r, word] |= np.uint32(int(row[c]) << shift)
    return torch.from_numpy(words.view(np.int32).copy())


def random_codes(bits: int, group: int = GROUP) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """codes [rows, cols], zeros and float16 scales [rows, groups]."""
    random = np.random.default_rng(bits)
    shape = ROWS, COLS // group
    codes = random.integers(0, 1 << bits, (ROWS, COLS))
    scales = random.uniform(0.01, 0.1, shape).astype(np.float16)
    return codes, random.integers(1, 1 << bits, shape), scales


def value_of(codes: Any, zeros: Any, scales: Any, groups: Any = None) -> npt.NDArray[Any]:
    """(code - zero) * scale of the group of each column, in float64."""
    groups = np.arange(COLS) // (COLS // np.shape(scales)[1]) if groups is None else groups
    return np.asarray((codes - np.asarray(zeros)[:, groups]) * np.asarray(scales, np.float64)[:, groups])


def gptq(bits: int, act_order: bool = False, v2: bool = False) -> Made:
    codes, zeros, scales = random_codes(bits)
    groups = np.arange(COLS) // GROUP
    if act_order:
        np.random.default_rng(0).shuffle(groups)
    stored_zeros = zeros if v2 else zeros - 1
    tensors = {
        "x.qweight": pack(codes, bits).T.contiguous(),
        "x.qzeros": pack(stored_zeros.T, bits),
        "x.scales": torch.from_numpy(scales.T.copy()),
        "x.g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order}
    if v2:
        config["checkpoint_format"] = "gptq_v2"
    return config, tensors, value_of(codes, zeros, scales, groups), bits == 4 and not act_order


def awq() -> Made:
    codes, zeros, scales = random_codes(4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "x.qweight": pack(codes.T, 4, order),
        "x.qzeros": pack(zeros.T, 4, order),
        "x.scales": torch.from_numpy(scales.T.copy()),
    }
    return {"quant_method": "awq", "bits": 4, "version": "gemm"}, tensors, value_of(codes, zeros, scales), True


def float8(scales: npt.NDArray[Any], name: str, method: str = "fp8", **config: Any) -> Made:
    random = np.random.default_rng(2)
    weight = torch.from_numpy(random.standard_normal((ROWS, COLS))).to(torch.float8_e4m3fn)
    wide = np.broadcast_to(scales, scales.shape) if scales.size == 1 else scales
    if scales.ndim == 2 and scales.shape != (ROWS, 1):
        wide = np.repeat(np.repeat(scales, 32, 0), 32, 1)[:ROWS, :COLS]
    tensors = {"x.weight": weight, name: torch.from_numpy(scales), "x.input_scale": torch.ones(1)}
    return {"quant_method": method, **config}, tensors, weight.double().numpy() * wide, True


def ct_packed(bits: int, asymmetric: bool) -> Made:
    codes, zeros, scales = random_codes(bits)
    middle = np.full_like(zeros, 1 << (bits - 1))
    tensors = {
        "x.weight_packed": pack(codes, bits),
        "x.weight_scale": torch.from_numpy(scales),
        "x.weight_shape": torch.tensor([ROWS, COLS]),
    }
    if asymmetric:
        tensors["x.weight_zero_point"] = pack(zeros.T, bits).T.contiguous()
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    kept = bits == 4 or not asymmetric
    return config, tensors, value_of(codes, zeros if asymmetric else middle, scales), kept


def ct_int8(by_row: bool) -> Made:
    random = np.random.default_rng(4)
    codes = random.integers(-128, 128, (ROWS, COLS)).astype(np.int8)
    scales = random.uniform(0.01, 0.1, (ROWS, 1) if by_row else (1,)).astype(np.float32)
    tensors = {"x.weight": torch.from_numpy(codes), "x.weight_scale": torch.from_numpy(scales)}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    return config, tensors, codes.astype(np.float64) * scales, by_row


def nvfp4(method: str) -> Made:
    random = np.random.default_rng(5)
    codes = random.integers(0, 16, (ROWS, COLS))
    scales = torch.from_numpy(random.uniform(1, 100, (ROWS, COLS // 16))).to(torch.float8_e4m3fn)
    whole = np.float32(37.5)
    packed = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
    wide = np.repeat(scales.double().numpy(), 16, 1)
    values = np.array(FP4)[codes] * wide
    if method == "modelopt":
        tensors = {"x.weight": packed, "x.weight_scale": scales, "x.weight_scale_2": torch.tensor(whole)}
        return {"quant_method": "modelopt", "quant_algo": "NVFP4"}, tensors, values * whole, False
    tensors = {
        "x.weight_packed": packed,
        "x.weight_scale": scales,
        "x.weight_global_scale": torch.tensor([whole]),
    }
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    return config, tensors, values / whole, False


def bnb_int8() -> Made:
    random = np.random.default_rng(6)
    codes = random.integers(-127, 128, (ROWS, COLS)).astype(np.int8)
    largest = random.uniform(0.5, 2, ROWS).astype(np.float32)
    tensors = {
        "x.weight": torch.from_numpy(codes),
        "x.SCB": torch.from_numpy(largest),
        "x.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    values = codes.astype(np.float64) * largest[:, None].astype(np.float64) / 127
    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors, values, True


def bnb_nf4(nested: bool) -> Made:
    random = np.random.default_rng(7)
    codes = random.integers(0, 16, ROWS * COLS)
    table = np.sort(random.uniform(-1, 1, 16)).astype(np.float32)
    num_blocks = ROWS * COLS // 64
    packed = (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [ROWS, COLS]}
    tensors = {"x.weight": torch.from_numpy(packed), "x.weight.quant_map": torch.from_numpy(table)}
    if nested:
        levels = np.sort(random.uniform(-1, 1, 256)).astype(np.float32)
        outer = random.uniform(0.1, 1, -(-num_blocks // 32)).astype(np.float32)
        inner = random.integers(0, 256, num_blocks).astype(np.uint8)
        state |= {"nested_blocksize": 32, "nested_dtype": "float32", "nested_offset": 0.75}
        absmax = np.array([np.float64(levels[inner[i]]) * outer[i // 32] + 0.75 for i in range(num_blocks)])
        tensors |= {
            "x.weight.absmax": torch.from_numpy(inner),
            "x.weight.nested_absmax": torch.from_numpy(outer),
            "x.weight.nested_quant_map": torch.from_numpy(levels),
        }
    else:
        absmax = random.uniform(0.5, 2, num_blocks).astype(np.float32)
        tensors["x.weight.absmax"] = torch.from_numpy(absmax)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    tensors["x.weight.quant_state.bitsandbytes__nf4"] = torch.from_numpy(text)
    values = np.array([np.float64(table[code]) * absmax[i // 64] for i, code in enumerate(codes)])
    return {"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors, values.reshape(ROWS, COLS), False


UNIFORM = np.random.default_rng(8).uniform(0.5, 2, ROWS * COLS).astype(np.float32)
CASES: dict[str, Callable[[], Made]] = {
    "gptq-4": lambda: gptq(4),
    "gptq-4-v2": lambda: gptq(4, v2=True),
    "gptq-8": lambda: gptq(8),
    "gptq-2": lambda: gptq(2),
    "gptq-4-act-order": lambda: gptq(4, act_order=True),
    "awq": awq,
    "fp8-blocks": lambda: float8(UNIFORM[:8].reshape(2, 4), "x.weight_scale_inv", weight_block_size=[32, 32]),
    "fp8-one": lambda: float8(UNIFORM[:1], "x.weight_scale"),
    "fbgemm": lambda: float8(UNIFORM[:ROWS].reshape(ROWS, 1), "x.weight_scale", "fbgemm_fp8"),
    "modelopt-fp8": lambda: float8(UNIFORM[:1].reshape(()), "x.weight_scale", "modelopt", quant_algo="FP8"),
    "compressed-fp8-rows": lambda: float8(
        UNIFORM[:ROWS].reshape(ROWS, 1), "x.weight_scale", "compressed-tensors", format="float-quantized"
    ),
    "compressed-fp8-blocks": lambda: float8(
        UNIFORM[:8].reshape(2, 4),
        "x.weight_scale",
        "compressed-tensors",
        format="float-quantized",
        config_groups={"group_0": {"weights": {"num_bits": 8, "type": "float", "block_structure": [32, 32]}}},
    ),
    "compressed-w4": lambda: ct_packed(4, False),
    "compressed-w4-zeros": lambda: ct_packed(4, True),
    "compressed-w8": lambda: ct_packed(8, False),
    "compressed-w8-zeros": lambda: ct_packed(8, True),
    "compressed-int8-rows": lambda: ct_int8(True),
    "compressed-int8-one": lambda: ct_int8(False),
    "compressed-nvfp4": lambda: nvfp4("compressed-tensors"),
    "modelopt-nvfp4": lambda: nvfp4("modelopt"),
    "bnb-int8": bnb_int8,
    "bnb-nf4": lambda: bnb_nf4(False),
    "bnb-nf4-nested": lambda: bnb_nf4(True),
}


def open_source(folder: Path, made: Made, *, keep_codes: bool = True) -> DecodedSource:
    """A checkpoint of the tensors and one that is not quantized."""
    config, tensors, *_ = made
    check_quantization(config, "config.json")
    save_file({**tensors, "norm.weight": torch.ones(3)}, folder / "model.safetensors")
    return DecodedSource(SafetensorsSource(folder / "model.safetensors"), config, keep_codes=keep_codes)


@pytest.mark.parametrize("keep_codes", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_format(name: str, keep_codes: bool, tmp_path: Path) -> None:
    made = CASES[name]()
    source = open_source(tmp_path, made, keep_codes=keep_codes)
    assert sorted(source.names()) == ["norm.weight", "x.weight"]
    assert source.info("x.weight").shape == (ROWS, COLS)
    tensor = source.read("x.weight")
    assert (tensor.scales is not None) == (keep_codes and made[3])
    np.testing.assert_allclose(to_float32(tensor), made[2], rtol=1e-5, atol=1e-6)
    assert source.read("norm.weight").data.tolist() == [1, 1, 1]


def test_mxfp4_equals_transformers(tmp_path: Path) -> None:
    random = np.random.default_rng(9)
    blocks = torch.from_numpy(random.integers(0, 256, (3, 24, 2, 16)).astype(np.uint8))
    scales = torch.from_numpy(random.integers(110, 140, (3, 24, 2)).astype(np.uint8))
    made: Made = ({"quant_method": "mxfp4"}, {"e.up_blocks": blocks, "e.up_scales": scales}, np.empty(0), False)
    tensor = open_source(tmp_path, made).read("e.up")
    want = _convert_moe_packed_tensors(blocks, scales)
    assert tensor.dtype == "bfloat16" and tensor.shape == tuple(want.shape)
    assert np.array_equal(tensor.data, want.contiguous().view(torch.uint16).numpy())


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    config, tensors, values, kept = awq()
    del tensors["x.scales"]
    with pytest.raises(WeightError, match=r"x\.weight lacks x\.scales"):
        open_source(tmp_path, (config, tensors, values, kept))


def test_parts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    config, tensors, values, kept = awq()
    tensors["x.scales"] = tensors["x.scales"][:3].contiguous()
    with pytest.raises(WeightError, match=r"x\.qzeros is \[4, 6\], but x\.weight takes \[3, 6\]"):
        open_source(tmp_path, (config, tensors, values, kept))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "aqlm"}, "read are awq, bitsandbytes, compressed_tensors"),
        ({"quant_method": "awk"}, "did you mean awq"),
        ({"quant_method": "gptq", "bits": 3}, "bits must be 2, 4 or 8, got 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format must be"),
        ({"quant_method": "awq", "version": "gemv"}, "version must be gemm"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format must be one of"),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized", "sparsity_config": {"format": "s"}},
            "spar",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo must be FP8 or NVFP4"),
    ],
)
def test_what_is_not_read_is_refused_with_the_reason(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match="which cannot be read here") as caught:
        check_quantization(config, "config.json")
    assert reason in str(caught.value)


def test_every_format_is_tested() -> None:
    made = {str(make()[0]["quant_method"]).replace("-", "_") for make in CASES.values()}
    assert made | {"mxfp4"} == set(format_names())


def quantized_llama(folder: Path) -> Path:
    """A tiny Llama with linear layers as GPTQ stores them, `folder`/int4, and what they stand for, `folder`/dense."""
    from safetensors.torch import load_file

    from tiny_checkpoints import save_tiny

    whole, packed = folder / "dense", folder / "int4"
    save_tiny(whole, "llama", num_hidden_layers=2)
    packed.mkdir()
    stored: Tensors = {}
    tensors = load_file(whole / "model.safetensors")
    for name, tensor in tensors.items():
        if "_proj" not in name:
            stored[name] = tensor
            continue
        groups, values = tensor.shape[1] // GROUP, tensor.numpy()
        parts = values.reshape(len(values), groups, GROUP)
        scales = (np.abs(parts).max(2) / 7).astype(np.float16)
        codes = np.clip(np.rint(parts / scales[..., None]) + 8, 0, 15).astype(np.int64)
        tensors[name] = torch.from_numpy(((codes - 8) * scales[..., None].astype(np.float32)).reshape(values.shape))
        base = name.removesuffix(".weight")
        stored[f"{base}.qweight"] = pack(codes.reshape(values.shape), 4).T.contiguous()
        stored[f"{base}.qzeros"] = pack(np.full((groups, len(values)), 7), 4)
        stored[f"{base}.scales"] = torch.from_numpy(scales.T.copy())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, whole / "model.safetensors")
    save_file(stored, packed / "model.safetensors")
    config = json.loads((whole / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}
    (packed / "config.json").write_text(json.dumps(config))
    return folder


def test_a_quantized_checkpoint_generates_what_its_values_do(tmp_path: Path) -> None:
    from headrace import LLM, SamplingParams

    folder = quantized_llama(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "kv_memory": "8MiB", "threads": 1}

    def run(name: str, **changes: Any) -> tuple[list[int], list[float]]:
        with LLM(str(folder / name), **{**options, **changes}) as llm:
            output = llm.generate({"prompt_token_ids": list(range(5, 40))}, params)[0].outputs[0]
        assert output.logprobs is not None
        chosen = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
        return output.token_ids, chosen

    for device in ("reference", "cpu"):
        want, got = run("dense", device=device, dtype="float32"), run("int4", device=device, dtype="float32")
        assert got[0] == want[0] and got[1] == pytest.approx(want[1], abs=1e-5)
    kept = run("int4", device="cpu")  # in 4 bits, with rounded activations
    assert kept[1][0] == pytest.approx(run("dense", device="cpu", dtype="float32")[1][0], abs=0.1)
    with pytest.raises(WeightError, match="is quantized already"):
        run("int4", device="cpu", quantize="int8")
