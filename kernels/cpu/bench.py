"""Measures each kernel by itself: GB/s where memory limits it, GFLOP/s where arithmetic does.

python -m headrace.kernels.cpu.bench [--threads N] [--tier NAME] [--size 2048] [--json]
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _ops

FORMATS = ("float32", "bfloat16", "float16", "int8", "q8_0", "q4_0", "q4_1", "q5_0", "q4_k", "q5_k", "q6_k", "int4")
BLOCKS = {
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
}
"""Columns and bytes of a block in a GGUF file."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The best of several runs of one kernel. gb_per_s counts what must be read and written once."""

    kernel: str
    shape: str
    seconds: float
    gb_per_s: float
    gflop_per_s: float


def measure(*, size: int = 2048, repeats: int = 10) -> Iterator[Measurement]:
    """All kernels at the hidden size `size`, activations in bfloat16, on the threads and tier in use."""
    random = np.random.default_rng(0)
    for format in FORMATS:
        weight = _weight(random, format, 4 * size, size)
        for quantize_x in (False, True) if format in (*BLOCKS, "int4") else (False,):
            for num_tokens in (1, 4, 16, 128):
                x, out = _bf16(random, num_tokens, size), np.zeros((num_tokens, 4 * size), np.uint16)
                yield _time(
                    f"linear {format}{', x in int8' if quantize_x else ''}",
                    f"[{num_tokens}, {size}] x [{4 * size}, {size}]",
                    partial(_ops.linear, out, x, weight, None, quantize_x),
                    repeats,
                    num_bytes=weight.num_bytes + x.nbytes + out.nbytes,
                    flop=2 * num_tokens * size * 4 * size,
                )
    x, out = _bf16(random, 256, size), np.zeros((256, size), np.uint16)
    scale = np.ones(size, np.float32)
    for name, call in {
        "rms_norm": lambda: _ops.rms_norm(out, x, scale, 1e-5),
        "add_rms_norm": lambda: _ops.add_rms_norm(out, x, x, out, scale, 1e-5),
        "layer_norm": lambda: _ops.layer_norm(out, x, scale, scale, 1e-5),
        "act_mul silu": lambda: _ops.act_mul(out[:, : size // 2].copy(), x, "silu"),
    }.items():
        yield _time(name, f"[256, {size}]", call, repeats, num_bytes=2 * x.nbytes, flop=0)
    for num_tokens, seq_len in ((1, 512), (1, 8192), (512, 512)):
        yield _attention(random, num_tokens, seq_len, size, repeats)
    logits = random.standard_normal((4, 150_000)).astype(np.float32)
    ints, token_ids = np.arange(4, dtype=np.int32), np.zeros(4, np.int32)
    warm, cut = np.full(4, 0.8, np.float32), np.full(4, 0.9, np.float32)
    for name, call in {
        "sample greedy": lambda: _ops.sample(token_ids, logits, ints, ints),
        "sample": lambda: _ops.sample(token_ids, logits, ints, ints, warm),
        "sample top_p": lambda: _ops.sample(token_ids, logits, ints, ints, warm, None, cut),
    }.items():
        yield _time(name, "[4, 150000]", call, repeats, num_bytes=logits.nbytes, flop=0)


def main() -> int:
    """Print a table, or JSON lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tier", default="", help="one of: " + ", ".join(_ops.supported_tiers()))
    parser.add_argument("--size", type=int, default=2048, help="hidden size, a multiple of 256")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    _ops.set_num_threads(options.threads)
    if options.tier:
        _ops.set_isa(options.tier)
    for m in measure(size=options.size):
        if options.json:
            line = json.dumps({"tier": _ops.isa(), "threads": options.threads, **asdict(m)})
        else:
            line = f"{m.kernel:24} {m.shape:28} {m.seconds * 1e6:10.1f} us {m.gb_per_s:8.1f} GB/s"
            line += f" {m.gflop_per_s:8.1f} GFLOP/s" if m.gflop_per_s else ""
        sys.stdout.write(line + "\n")
    return 0


def _time(
    kernel: str, shape: str, call: Callable[[], None], repeats: int, *, num_bytes: int, flop: int
) -> Measurement:
    call()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return Measurement(
        kernel=kernel, shape=shape, seconds=best, gb_per_s=num_bytes / best / 1e9, gflop_per_s=flop / best / 1e9
    )


def _attention(random: np.random.Generator, num_tokens: int, seq_len: int, size: int, repeats: int) -> Measurement:
    head_dim, block_size = 64, 16
    num_heads = size // head_dim
    num_kv_heads = max(1, num_heads // 4)
    num_blocks = -(-seq_len // block_size)
    cache = _ops.KVCache(num_blocks + 1, block_size, num_kv_heads, head_dim, "bfloat16")
    kv = _bf16(random, seq_len, num_kv_heads * head_dim).reshape(seq_len, num_kv_heads, head_dim)
    _ops.write_kv(cache, kv, kv, np.arange(block_size, block_size + seq_len, dtype=np.int32))
    query = _bf16(random, num_tokens, size).reshape(num_tokens, num_heads, head_dim)
    out = np.zeros_like(query)
    batch = [np.array(a, np.int32) for a in ([0, num_tokens], [seq_len], [np.arange(1, num_blocks + 1)])]
    return _time(
        "paged_attention",
        f"{num_tokens} of {seq_len}, {num_heads}/{num_kv_heads} heads",
        lambda: _ops.paged_attention(out, query, cache, batch[0], batch[1], batch[2], head_dim**-0.5),
        repeats,
        num_bytes=2 * kv.nbytes,
        flop=4 * size * num_tokens * (seq_len - (num_tokens - 1) // 2),
    )


def _bf16(random: np.random.Generator, rows: int, cols: int) -> npt.NDArray[np.uint16]:
    values = random.standard_normal((rows, cols), np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _weight(random: np.random.Generator, format: str, rows: int, cols: int) -> _ops.PackedWeight:
    weight = _ops.PackedWeight(format, rows, cols, 64 if format == "int4" else 0)
    if format == "int4":
        scales = np.full((rows, -(-cols // 64)), 0.01, np.float32)
        weight.write_int4(0, random.integers(0, 16, (rows, cols), np.uint8), scales, -8 * scales)
    elif format in BLOCKS:
        columns, num_bytes = BLOCKS[format]
        blocks = random.integers(0, 60, (rows, cols // columns, num_bytes), np.uint8)
        blocks[..., :2] = np.array([0.01], np.float16).view(np.uint8)
        weight.write_blocks(0, blocks.reshape(rows, -1))
    else:
        weight.write_dense(0, random.standard_normal((rows, cols), np.float32))
    return weight


if __name__ == "__main__":
    sys.exit(main())
