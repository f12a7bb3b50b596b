"""The kernels for aarch64: cross-compiled as CMakeLists.txt says, run under qemu, compared in float64.

Needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user).
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

gguf = pytest.importorskip("gguf")
COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not COMPILER or not EMULATOR, reason="no cross compiler or no emulator for aarch64"),
]
ROOT = Path(__file__).parents[2]
TIERS = ("scalar", "neon_dot", "neon_bf16", "sve256")
SHARED = ("attention_plan", "isa", "memory", "numa", "pack", "pack_blocks", "thread_pool")
FORMATS: tuple[str, ...] = tuple("float32 bfloat16 float16 int8 q8_0 q4_0 q4_1 q5_0 q5_1 q4_k q5_k q6_k int4".split())
"""In the order of kernels.h."""
DTYPES = ("float32", "bfloat16", "float16")

Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cross_driver.cpp with the kernels of all tiers, for aarch64."""
    folder = tmp_path_factory.mktemp("aarch64")
    build = (ROOT / "CMakeLists.txt").read_text()
    listed = re.search(r"set\(HEADRACE_KERNELS\s+([^)]*)\)", build)
    assert listed is not None
    common = ["-O1", "-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
    common += [f"-I{ROOT / 'kernels/cpu'}", "-c"]
    commands: list[list[str]] = []
    for tier in TIERS:
        found = re.search(rf"set\(HEADRACE_TIER_{tier} ([^)]*)\)", build)
        assert found is not None, tier
        lanes, *options = found[1].split()
        defines = [f"-DHEADRACE_TIER={tier}", f"-DHEADRACE_LANES={lanes}"]
        for source in listed[1].split():
            target = folder / f"{tier}_{Path(source).stem}.o"
            commands.append([*common, *defines, *options, str(ROOT / source), "-o", str(target)])
    tiers = [f"-DHEADRACE_TIER_{tier}" for tier in TIERS]
    for path in (*(ROOT / f"kernels/cpu/{name}.cpp" for name in SHARED), ROOT / "tests/kernels/cross_driver.cpp"):
        commands.append([*common, *tiers, str(path), "-o", str(folder / f"{path.stem}.o")])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, commands))
    program = folder / "driver"
    compile_one(["-static", "-pthread", *map(str, folder.glob("*.o")), "-o", str(program)])
    return program


def compile_one(arguments: Sequence[str]) -> None:
    done = subprocess.run([str(COMPILER), *arguments], capture_output=True, text=True)
    assert not done.returncode, done.stderr


def run(
    driver: Path, data: bytes = b"", *, cpu: str = "max,sve-default-vector-length=32", tier: str = ""
) -> "subprocess.CompletedProcess[bytes]":
    environment = {**os.environ, "HEADRACE_CPU_ISA": tier}
    return subprocess.run(
        [str(EMULATOR), "-cpu", cpu, str(driver)], input=data, capture_output=True, env=environment, check=False
    )


def carrier(dtype: str) -> Any:
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def header(*numbers: int) -> bytes:
    return np.array(numbers, np.int64).tobytes()


def weight_bytes(random: np.random.Generator, format: str, rows: int, cols: int) -> tuple[bytes, Array | None]:
    """A random weight as the driver reads it, and what it means if gguf or arithmetic say so."""
    if format == "int4":
        codes = random.integers(0, 16, (rows, cols)).astype(np.uint8)
        scales = random.uniform(0.01, 0.1, (rows, cols // 64)).astype(np.float32)
        offsets = (scales * random.uniform(-8, -7, scales.shape)).astype(np.float32)
        wide = [np.repeat(a.astype(np.float64), 64, 1) for a in (scales, offsets)]
        return codes.tobytes() + scales.tobytes() + offsets.tobytes(), codes * wide[0] + wide[1]
    if not format.startswith("q"):
        return random.standard_normal((rows, cols)).astype(np.float32).tobytes(), None
    kind = gguf.GGMLQuantizationType[format.upper()]
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    raw = random.integers(0, 256, (rows, cols // columns, size)).astype(np.uint8)
    for n, at in enumerate(
        {"q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}.get(format, (0,))
    ):
        halves = random.uniform(0.01, 0.1 if n == 0 else 1, raw.shape[:2]).astype(np.float16)
        raw[..., at : at + 2] = halves[..., None].view(np.uint8)
    raw = raw.reshape(rows, -1)
    return raw.tobytes(), gguf.quants.dequantize(raw, kind).astype(np.float64)


def test_tiers_follow_the_cpu(driver: Path) -> None:
    # Of SVE the length counts: 256 bits, no more and no less.
    for cpu, expected in (
        ("cortex-a53", TIERS[:1]),
        ("neoverse-n1", TIERS[:2]),
        ("max,sve=off", TIERS[:3]),
        ("max,sve-default-vector-length=16", TIERS[:3]),
        ("max,sve-default-vector-length=64", TIERS[:3]),
        ("max,sve-default-vector-length=32", TIERS),
    ):
        assert run(driver, cpu=cpu).stdout.decode().split() == list(expected)
    refused = run(driver, header(0, 0, 1, 1, 0, 0, 1, 0, 0) + bytes(8), cpu="neoverse-n1", tier="neon_bf16")
    assert b"this CPU (or its operating system) lacks the instructions" in refused.stderr


@pytest.mark.parametrize("tier", TIERS)
def test_products(kit: Any, driver: Path, tier: str) -> None:
    """Every format with every dtype of activations, few and many tokens, rounded activations where they may be."""
    random = np.random.default_rng(0)
    rows, cols = 37, 256
    cases = [
        (format, dtype, num_tokens, rounds)
        for format in FORMATS
        for dtype in DTYPES
        for num_tokens in (1, 3, 13)
        for rounds in ((False, True) if format.startswith("q") or format == "int4" else (False,))
    ]
    data, expected = b"", []
    for format, dtype, num_tokens, rounds in cases:
        weight, meaning = weight_bytes(random, format, rows, cols)
        x = kit.to_dtype(random.standard_normal((num_tokens, cols)), dtype)
        numbers = FORMATS.index(format), rows, cols, 64 * (format == "int4"), DTYPES.index(dtype)
        data += header(0, *numbers, num_tokens, rounds, len(weight)) + weight + x.tobytes()
        expected.append((meaning, kit.to_float64(x)))
    done = run(driver, data, tier=tier)
    assert not done.returncode, done.stderr.decode()
    result = memoryview(done.stdout)
    for (format, dtype, num_tokens, rounds), (meaning, x) in zip(cases, expected, strict=True):
        packed = np.frombuffer(result[: rows * cols * 4], np.float32).reshape(rows, cols).astype(np.float64)
        result = result[rows * cols * 4 :]
        if meaning is not None:
            np.testing.assert_allclose(packed, meaning, rtol=1e-6, atol=1e-6)
        size = num_tokens * rows * carrier(dtype).itemsize
        out = np.frombuffer(result[:size], carrier(dtype)).reshape(num_tokens, rows)
        result = result[size:]
        rounding = 1e-4 if rounds or format == "int8" else 0.0
        limit = kit.limits[dtype] + rounding
        assert kit.nmse(out, x @ packed.T) < limit, (format, dtype, num_tokens, rounds)
    assert not len(result)


@pytest.mark.parametrize("tier", TIERS)
def test_attention(kit: Any, driver: Path, tier: str) -> None:
    """A causal prompt over a cache of each dtype, in blocks that lie backwards."""
    random = np.random.default_rng(1)
    num_heads, num_kv_heads, head_dim, block_size, num_tokens = 6, 2, 40, 16, 300
    kv_dtypes = (*DTYPES, "int8")
    cases = [(dtype, kv_dtype) for dtype in DTYPES for kv_dtype in (dtype, "int8")]
    data, expected = b"", []
    for dtype, kv_dtype in cases:
        key, value, query = (
            kit.to_dtype(random.standard_normal((num_tokens, heads, head_dim)), dtype)
            for heads in (num_kv_heads, num_kv_heads, num_heads)
        )
        data += header(1, DTYPES.index(dtype), kv_dtypes.index(kv_dtype), num_heads, num_kv_heads, head_dim)
        data += header(block_size, num_tokens) + key.tobytes() + value.tobytes() + query.tobytes()
        expected.append(causal_attention(*map(kit.to_float64, (query, key, value))))
    done = run(driver, data, tier=tier)
    assert not done.returncode, done.stderr.decode()
    result = memoryview(done.stdout)
    for (dtype, kv_dtype), wanted in zip(cases, expected, strict=True):
        size = wanted.size * carrier(dtype).itemsize
        out = np.frombuffer(result[:size], carrier(dtype)).reshape(wanted.shape)
        result = result[size:]
        assert kit.nmse(out, wanted) < kit.limits[dtype] + (2e-4 if kv_dtype == "int8" else 0), (dtype, kv_dtype)
    assert not len(result)


def causal_attention(query: Array, key: Array, value: Array) -> Array:
    """In float64, scores times 1 / 8."""
    group = query.shape[1] // key.shape[1]
    scores = np.einsum("qhd,khd->hqk", query, np.repeat(key, group, 1), optimize=True) / 8
    scores = np.where(np.tri(len(query), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.asarray(np.einsum("hqk,khd->qhd", weights, np.repeat(value, group, 1), optimize=True))
