"""Models cut over two processes: tokens of transformers, shares that make up the whole, and ranks that die."""

import dataclasses
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.core.config import DeviceConfig, EngineConfig
from headrace.core.devices import open_device, rank_devices
from headrace.core.errors import ConfigError, DeviceLost, Unsupported
from headrace.core.models.declare import declare_params
from headrace.core.models.spec import MlpSpec, ModelSpec
from headrace.core.platform import Caps, RunnerConfig
from headrace.core.runner.ranked import RankedRunner
from headrace.core.runner.sharding import make_share, rank_params
from headrace.core.self_test import Driver, load_runner, tiny_config, tiny_spec
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.dummy import DummyParams
from headrace.core.weights.quantize import QuantizedParams
from headrace.core.weights.source import HostTensor
from tiny_checkpoints import greedy_tokens, save_golden_case

OPTIONS: dict[str, Any] = dict(
    dtype="float32",
    skip_tokenizer_init=True,
    threads=1,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=96,
    kv_memory="8MiB",
)
PROMPTS = [[3, 1, 4, 1, 5], [(7 * i + 3) % 200 + 3 for i in range(40)]]
CASES = ("gpt_bigcode cohere2 mixtral qwen2_moe gpt_oss deepseek_v3 llama4_text bloom mpt phi jamba").split()
TRITON = (
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # of masked lanes in the interpreter
)


def cut_runner(spec: ModelSpec, device: str = "reference", tp_size: int = 2) -> tuple[RankedRunner, RunnerConfig]:
    engine = EngineConfig(device=DeviceConfig(device=device, tensor_parallel_size=tp_size, threads=1))
    config = dataclasses.replace(tiny_config(spec), engine=engine)
    runner = load_runner(open_device(engine), config)
    assert isinstance(runner, RankedRunner)
    return runner, config


@pytest.mark.parametrize(
    ("device", "name"),
    [
        *(pytest.param("reference", name, marks=[] if name == "qwen2_moe" else [pytest.mark.slow]) for name in CASES),
        *(pytest.param("gaudi:emulated", name, marks=[pytest.mark.slow]) for name in ("gpt_oss", "deepseek_v3")),
        pytest.param("sim", "deepseek_v3", marks=[pytest.mark.slow]),
        *(
            pytest.param("cuda:emulated", name, marks=[pytest.mark.slow, *TRITON])
            for name in ("gpt_oss", "gpt_bigcode")
        ),
    ],
)
def test_two_ranks_give_the_tokens_of_transformers(device: str, name: str, tmp_path: Path) -> None:
    model = save_golden_case(tmp_path, name)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path), device=device, tensor_parallel_size=2, **OPTIONS) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    assert [output.outputs[0].token_ids for output in outputs] == [greedy_tokens(model, p, 8) for p in PROMPTS]


@pytest.mark.slow
def test_a_cache_of_integers_is_cut_by_heads() -> None:
    found = []
    for tp_size in (1, 2):
        engine = EngineConfig(device=DeviceConfig(device="reference", tensor_parallel_size=tp_size, threads=1))
        config = dataclasses.replace(tiny_config(tiny_spec()), engine=engine, kv_dtype="int8")
        driver = Driver(load_runner(open_device(engine), config), config)
        found.append(driver.generate(PROMPTS[1], 12))
        driver.runner.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("quantization", ["none", "int8", "int8-channel"])
def test_shares_make_up_the_whole(quantization: str) -> None:
    spec = tiny_spec()
    layers = tuple(dataclasses.replace(x, mlp=MlpSpec(intermediate_size=128)) for x in spec.layers)
    spec = dataclasses.replace(spec, vocab_size=212, layers=layers)
    params = declare_params(spec)
    source = QuantizedParams(DummyParams(params, seed=0, dtype="float32"), quantization, Caps())
    whole = {loaded.param.name: loaded for loaded in source}
    shares = [make_share(spec, tp_rank, 2) for tp_rank in range(2)]

    def values(tensors: tuple[HostTensor, ...]) -> Any:
        return np.concatenate([to_float32(tensor) for tensor in tensors])

    for name, (declared, own) in rank_params(spec, 2).items():
        parts = [values(share.take(whole[name]).tensors) for share in shares]
        assert all(part.shape == own.shape for part in parts), name
        expected = values(whole[name].tensors)
        if declared.shard == "row":
            assert np.array_equal(np.concatenate(parts, 1), expected), name
        elif not shares[0].is_cut(name):
            assert all(np.array_equal(part, expected) for part in parts), name
        else:
            ends = np.cumsum([0, *(part.rows for part in declared.parts or [])])
            pieces = [expected[a:b] for a, b in zip(ends, ends[1:], strict=False)] or [expected]
            for rank, part in enumerate(parts):
                assert np.array_equal(part, np.concatenate([np.split(piece, 2)[rank] for piece in pieces])), name


def test_a_kv_head_is_held_by_every_rank_that_needs_it() -> None:
    spec = tiny_spec()  # 4 heads, 2 KV heads of 16 values, over 4 ranks
    [loaded] = [
        loaded
        for loaded in DummyParams(declare_params(spec), seed=0, dtype="float32")
        if loaded.param.name == "layers.0.attn.qkv_proj.weight"
    ]
    rows = loaded.tensors[0].data
    for rank in range(4):
        share = make_share(spec, rank, 4)
        got = np.concatenate([tensor.data for tensor in share.take(loaded).tensors])
        head = rank // 2
        want = [rows[16 * rank :][:16], rows[64 + 16 * head :][:16], rows[96 + 16 * head :][:16]]
        assert np.array_equal(got, np.concatenate(want))


@pytest.mark.parametrize(
    ("changes", "tp_size", "reason"),
    [
        (dict(kind="encoder_decoder"), 2, "only decoders are cut"),
        (dict(), 3, "4 attention heads cannot be cut over 3 ranks"),
        (dict(num_relative_buckets=8), 2, "a learned bias by distance"),
    ],
)
def test_a_model_that_cannot_be_cut_says_why(changes: dict[str, Any], tp_size: int, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        make_share(dataclasses.replace(tiny_spec(), **changes), 0, tp_size)


def test_devices_and_ranks_must_agree() -> None:
    config = EngineConfig(device=DeviceConfig(device="null", tensor_parallel_size=2))
    with pytest.raises(Unsupported, match="null cuts a model over 1 ranks, not 2"):
        open_device(config)
    config = EngineConfig(device=DeviceConfig(tensor_parallel_size=3))
    with pytest.raises(ConfigError, match="names 2 devices, --tensor-parallel-size 3 asks for 3"):
        rank_devices("name", ["0", "1"], config)
    assert rank_devices("name", [], config) == ("name:0", "name:1", "name:2")
    assert rank_devices("name", ["4", "7"], EngineConfig()) == ("name:4", "name:7")
    assert rank_devices("name", ["4"], EngineConfig()) == ()


def test_seeds_masks_and_a_rank_that_dies() -> None:
    spec = tiny_spec()  # 211 tokens: a vocabulary that is whole on every rank
    alone = open_device(EngineConfig(device=DeviceConfig(device="reference", threads=1)))
    whole = Driver(load_runner(alone, tiny_config(spec)), tiny_config(spec))
    runner, config = cut_runner(spec)
    driver = Driver(runner, config)

    def sampled(tried: Driver) -> list[list[int]]:
        rows = [tried.add(PROMPTS[0], temperature=1.0, seed=seed, allowed=range(seed, 200)) for seed in (1, 7)]
        tried.step({row: 5 for row in rows})
        for _ in range(6):
            tried.step({row: 1 for row in rows})
        return [tried.requests[row].token_ids for row in rows]

    assert sampled(driver) == sampled(whole)
    os.kill(runner._ranks._processes[0].pid, signal.SIGKILL)
    started_s = time.monotonic()
    for _ in range(2):
        with pytest.raises(DeviceLost, match=r"rank 1 of 2 \(reference\) died: signal SIGKILL"):
            driver.step({0: 1})
    assert time.monotonic() - started_s < 10
    runner.close()


@pytest.mark.slow
def test_a_rank_that_fails_says_what_it_said() -> None:
    runner, config = cut_runner(tiny_spec())
    Driver(runner, config)
    runner._ranks.tell(("no_such_method",))
    with pytest.raises(DeviceLost, match="rank 1 of 2 .* failed: .*no_such_method"):
        runner._ranks.answers()
    runner.close()
