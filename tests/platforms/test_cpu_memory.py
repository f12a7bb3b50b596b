"""What the cpu platform allocates: as `plan` said, in huge pages, refused when there is too little; odd steps."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

from headrace import LLM, SamplingParams
from headrace.core.config import EngineConfig
from headrace.core.devices import open_device
from headrace.core.memory_plan import device_target, plan_model
from headrace.core.stages import ForwardBatch, StepInput
from headrace.platforms.cpu import memory
from headrace.platforms.cpu.native import runner as native_runner
from headrace.platforms.cpu.native.runner import NativeRunner

_ops = pytest.importorskip("headrace.kernels.cpu._ops", reason="the native kernels were not built")
OPTIONS: dict[str, Any] = dict(
    device="cpu", load_format="dummy", skip_tokenizer_init=True, kv_memory="48MiB", max_num_batched_tokens=256
)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A config of 24 million parameters with awkward sizes; weights are made up."""
    LlamaConfig(
        vocab_size=9001,
        hidden_size=608,
        intermediate_size=1504,
        num_hidden_layers=4,
        num_attention_heads=19,
        num_key_value_heads=19,
        head_dim=32,
        max_position_embeddings=512,
        dtype="bfloat16",
    ).save_pretrained(tmp_path)
    return str(tmp_path)


def runner_of(llm: LLM) -> NativeRunner:
    """The runner inside."""
    runner = llm.built.engine.executor._runner.runner  # type: ignore[attr-defined]
    assert isinstance(runner, NativeRunner)
    return runner


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("quantize", ["none", "int8", "int8-channel", "fp8", "int4", "int4-sym"])
def test_what_is_planned_is_what_is_allocated(folder: str, quantize: str, kv_dtype: str) -> None:
    check_plan(folder, quantize, kv_dtype)


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_experts_are_planned_as_they_are_allocated(tmp_path: Path, quantize: str) -> None:
    MixtralConfig(
        vocab_size=3001,
        hidden_size=416,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=13,
        num_key_value_heads=13,
        head_dim=32,
        num_local_experts=9,
        max_position_embeddings=512,
        dtype="bfloat16",
    ).save_pretrained(tmp_path)
    check_plan(str(tmp_path), quantize, "auto")


QUANTIZED: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "group_size": 32, "sym": True},
    "gptq asymmetric": {"bits": 4, "group_size": 32, "sym": False},
    "gptq of 128": {"bits": 4, "group_size": 128, "sym": True},
    "gptq with act-order": {"bits": 4, "group_size": 128, "sym": True, "desc_act": True},
    "awq": {"bits": 4, "group_size": 64, "zero_point": True, "modules_to_not_convert": ["o_proj"]},
    "bitsandbytes": {"load_in_8bit": True},
    "fp8": {},
    "compressed-tensors": {
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*down_proj$"],
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}}
        },
    },
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_checkpoints_that_were_quantized_are_planned_as_they_are_allocated(tmp_path: Path, name: str) -> None:
    method = name.split()[0]
    config = LlamaConfig(
        vocab_size=800,
        hidden_size=384,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=512,
        dtype="bfloat16",
        tie_word_embeddings=False,
    )
    config.quantization_config = {"quant_method": method, **QUANTIZED[name]}
    left_out = "down_proj" if method == "compressed-tensors" else "o_proj" if method == "awq" else "none"
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "quantization_config": None}))
    tensors: dict[str, torch.Tensor] = {}
    for key, value in model.state_dict().items():
        if "_proj" not in key or left_out in key:
            tensors[key] = torch.zeros(value.shape, dtype=torch.bfloat16)
        else:
            tensors.update(packed_zeros(method, key.removesuffix(".weight"), value.shape, QUANTIZED[name]))
    save_file(tensors, tmp_path / "model.safetensors")
    config.architectures = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    check_plan(str(tmp_path), "none", "auto", load_format="auto")


def packed_zeros(method: str, base: str, whole: torch.Size, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A weight of zeros, as a format stores it."""
    rows, cols = whole
    group = config.get("group_size", 64)
    shape, half = (cols // group, rows), torch.float16
    match method:
        case "gptq":
            groups = torch.arange(cols, dtype=torch.int32) // group
            return {
                f"{base}.qweight": torch.full((cols // 8, rows), -0x77777778, dtype=torch.int32),
                # Stored less one: 8 everywhere, or 8 for odd rows and 5 for even ones.
                f"{base}.qzeros": torch.full(
                    (shape[0], rows // 8), 0x77777777 if config["sym"] else 0x74747474, dtype=torch.int32
                ),
                f"{base}.scales": torch.ones(shape, dtype=half),
                f"{base}.g_idx": groups.flip(0) if config.get("desc_act") else groups,
            }
        case "awq":
            zeros = torch.full((shape[0], rows // 8), 0x12345678, dtype=torch.int32)
            return {
                f"{base}.qweight": torch.zeros((cols, rows // 8), dtype=torch.int32),
                f"{base}.qzeros": zeros,
                f"{base}.scales": torch.ones(shape, dtype=half),
            }
        case "bitsandbytes":
            return {
                f"{base}.weight": torch.zeros((rows, cols), dtype=torch.int8),
                f"{base}.SCB": torch.ones(rows),
            }
        case "fp8":
            return {
                f"{base}.weight": torch.zeros((rows, cols)).to(torch.float8_e4m3fn),
                f"{base}.weight_scale_inv": torch.ones(1),
            }
        case _:
            return {
                f"{base}.weight_packed": torch.full((rows, cols // 8), -0x77777778, dtype=torch.int32),
                f"{base}.weight_scale": torch.ones((rows, cols // 64), dtype=half),
                f"{base}.weight_shape": torch.tensor([rows, cols]),
            }


def check_plan(folder: str, quantize: str, kv_dtype: str, **changes: Any) -> None:
    """Weights, caches and activations against the plan."""
    options = {**OPTIONS, "quantize": quantize, "kv_dtype": kv_dtype, **changes}
    config = EngineConfig.from_options({**options, "model": folder})
    plan = plan_model(config, device_target(open_device(config)), lambda line: None)
    with LLM(folder, **options) as llm:
        runner = runner_of(llm)
        weights = sum(weight.num_bytes for weight in runner._weights.values())
        weights += sum(vector.nbytes for vector in runner._vectors.values())
        [program] = runner._programs
        caches = sum(cache.num_bytes for cache in program._caches.values())
        assert abs(plan.weights_bytes - weights) <= 0.02 * weights
        assert abs(plan.kv_bytes - caches) <= 0.02 * caches
        assert plan.step_bytes == program.arena_bytes > 1 << 20
        held = _ops.allocated_bytes()
    total = plan.weights_bytes + plan.kv_bytes + plan.step_bytes
    # Address space comes in chunks of 64 MiB; what is not touched in the last ones takes no memory.
    assert 0.98 * total <= held <= total + (192 << 20)


def test_memory_grows_by_what_is_planned(folder: str) -> None:
    """In a process of its own, by the system's count of its private pages."""
    program = f"""
import ctypes, gc, re
from headrace import LLM
from headrace.core.weights.dummy import DummyParams
def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
options = {OPTIONS!r}
LLM({folder!r}, **options).close()  # what is allocated once: libraries, threads, the pool of dummy values
gc.collect()
ctypes.CDLL(None).malloc_trim(0)  # and what malloc keeps for the next who asks
before = resident()
llm = LLM({folder!r}, **options)
print(resident() - before, llm.built.choices)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    grown = int(done.stdout.split()[0])
    config = EngineConfig.from_options({**OPTIONS, "model": folder})
    plan = plan_model(config, device_target(open_device(config)), lambda line: None)
    # Of the KV cache only pages that were used are there, but those are huge ones; so is each thread's scratch.
    assert 0.98 * plan.weights_bytes - (2 << 20) <= grown
    assert grown <= 1.02 * (plan.weights_bytes + plan.step_bytes) + (36 << 20)


def test_weights_lie_in_huge_pages(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system gives no huge pages")
    caplog.set_level(logging.INFO)
    with LLM(folder, **OPTIONS) as llm:
        weights = runner_of(llm)._weights.values()
        assert sum(w.huge_page_bytes for w in weights) > 0.8 * sum(w.num_bytes for w in weights)
    assert "huge pages given=" in caplog.text and "small pages" not in caplog.text


def test_small_pages_are_said_aloud(
    folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native_runner, "huge_page_bytes", lambda: 4096)
    with LLM(folder, **OPTIONS):
        pass
    assert "weights lie in small pages" in caplog.text and "transparent_hugepage" in caplog.text
    (tmp_path / "proc/self").mkdir(parents=True)
    assert memory.huge_page_bytes(tmp_path) is None
    (tmp_path / "proc/self/smaps_rollup").write_text("Rss: 80 kB\nAnonHugePages:   6144 kB\n")
    assert memory.huge_page_bytes(tmp_path) == 6 << 20


def test_too_little_memory_is_an_error_with_numbers(folder: str) -> None:
    """An address-space limit that nobody looks at stands for memory that others took since free memory was read."""
    program = f"""
import resource
from headrace import LLM
from headrace.core.errors import OutOfMemory
options = {{**{OPTIONS!r}, "kv_memory": "700MiB", "max_num_seqs": 512}}
import headrace.kernels.cpu._ops, headrace.core.engine.build, headrace.platforms.cpu.native.runner
headrace.platforms.cpu.memory._process_limits = lambda root: []
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), used + (400 << 20)))
try:
    LLM({folder!r}, **options)
except OutOfMemory as error:
    print("refused:", error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "refused: this machine has no memory left for a KV cache of 6" in done.stdout, done.stderr[-2000:]
    assert "try: a smaller --kv-memory" in done.stdout


def test_more_threads_than_cores(folder: str) -> None:
    prompt: Any = {"prompt_token_ids": list(range(5, 60))}
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0, ignore_eos=True)
    found = []
    for threads in (1, 2, 13):
        with LLM(folder, threads=threads, **OPTIONS) as llm:
            [output] = llm.generate([prompt], params)
            found.append(
                [
                    (t, step[t].logprob)
                    for t, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or (), strict=True)
                ]
            )
    assert found[0] == found[1] == found[2]


def test_a_step_of_nothing_but_padding(folder: str) -> None:
    """Tokens of no request, slots and tables of -1: nothing is written that a real step behind it could see."""
    prompt: Any = {"prompt_token_ids": list(range(5, 25))}
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    with LLM(folder, prefix_caching=False, **OPTIONS) as llm:
        [before] = llm.generate([prompt], params)
        zeros, none = np.zeros(8, np.int32), np.full(8, -1, np.int32)
        padding = ForwardBatch(
            input_ids=zeros,
            positions=zeros,
            query_start_loc=np.zeros(9, np.int32),
            seq_lens=zeros,
            block_tables=[np.full((8, 3), -1, np.int32)],
            slot_mappings=[none],
            logits_indices=np.empty(0, np.int32),
        )
        output = runner_of(llm).step(StepInput(forward=padding)).result()
        assert len(output.token_ids) == 0
        [after] = llm.generate([prompt], params)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
