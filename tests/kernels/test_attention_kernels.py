"""Paged attention and write_kv against a dense oracle in float64, and their bits across batches and chunks."""

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

ops = pytest.importorskip("headrace.kernels.cpu._ops", reason="the kernels are not built: pip install -e .")

Array = npt.NDArray[Any]


@dataclass(slots=True, kw_only=True)
class Case:
    """Sequences with random keys and values in a cache whose other slots hold NaN."""

    kit: Any
    seq_lens: list[int]
    dtype: str = "float32"
    cache_dtype: str = "float32"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    prefixes: list[tuple[int, int]] = field(default_factory=list)
    """For each sequence, the one before it whose first so many positions it shares: (sequence, positions)."""
    cache: Any = None
    tables: list[list[int]] = field(default_factory=list)
    queries: list[Array] = field(default_factory=list)
    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)

    def build(self) -> "Case":
        random = np.random.default_rng((len(self.seq_lens), self.head_dim, self.block_size))
        needed = [-(-n // self.block_size) for n in self.seq_lens]
        num_blocks = sum(needed) + 3
        self.cache = ops.KVCache(num_blocks, self.block_size, self.num_kv_heads, self.head_dim, self.cache_dtype)
        shape = (2, self.block_size, self.num_kv_heads, self.head_dim)
        for block in range(num_blocks):
            self.cache.write_block(block, nan_block(self.kit, shape, self.cache_dtype))
        free = list(random.permutation(np.arange(1, num_blocks)))
        for s, (n, blocks) in enumerate(zip(self.seq_lens, needed, strict=True)):
            other, shared = self.prefixes[s] if self.prefixes else (0, 0)
            table = self.tables[other][: shared // self.block_size] if shared else []
            self.tables.append(table + [int(free.pop()) for _ in range(blocks - len(table))])
            self.queries.append(self._random(random, (n, self.num_heads, self.head_dim)))
            # One wider array, as a fused projection gives it.
            kv = self._random(random, (n, 2 * self.num_kv_heads + 1, self.head_dim))
            if shared:
                kv[:shared, : self.num_kv_heads] = self.keys[other][:shared]
                kv[:shared, self.num_kv_heads : 2 * self.num_kv_heads] = self.values[other][:shared]
            self.keys.append(kv[:, : self.num_kv_heads])
            self.values.append(kv[:, self.num_kv_heads : 2 * self.num_kv_heads])
            slots = [self.tables[-1][p // self.block_size] * self.block_size + p % self.block_size for p in range(n)]
            ops.write_kv(self.cache, self.keys[-1], self.values[-1], np.array(slots, np.int32))
        return self

    def _random(self, random: np.random.Generator, shape: tuple[int, ...]) -> Array:
        result: Array = self.kit.to_dtype(random.standard_normal(shape), self.dtype)
        return result

    def run(self, chunks: list[tuple[int, int, int]]) -> list[Array]:
        """One call for chunks (sequence, begin, end) of positions; a result for each."""
        tokens = [self.queries[s][begin:end] for s, begin, end in chunks]
        width = max(len(table) for table in self.tables)
        table = np.full((len(chunks), width), -1, np.int32)
        for row, (s, begin, end) in enumerate(chunks):
            blocks = self.tables[s][: -(-end // self.block_size)]
            table[row, : len(blocks)] = blocks
            window = self.options.get("window", 0)
            if window:  # entries before the window may be stale
                table[row, : max(0, begin - window + 1) // self.block_size] = 10**6
        starts = np.cumsum([0, *(len(t) for t in tokens)]).astype(np.int32)
        query = np.ascontiguousarray(np.concatenate(tokens))
        out = self.kit.Guarded(query.shape, self.dtype)
        lens = np.array([end for _, _, end in chunks], np.int32)
        scale = self.head_dim**-0.5
        ops.paged_attention(out.array, query, self.cache, starts, lens, table, scale, **self.options)
        result = out.check()
        return [result[a:b] for a, b in zip(starts[:-1], starts[1:], strict=True)]

    def oracle(self, s: int) -> Array:
        """All positions of a sequence, in float64."""
        wide = self.kit.to_float64
        group = self.num_heads // self.num_kv_heads
        stored = [as_stored(self.kit, wide(a), self.cache_dtype) for a in (self.keys[s], self.values[s])]
        k, v = (np.repeat(a, group, 1) for a in stored)
        n = self.seq_lens[s]
        scores = np.einsum("qhd,khd->hqk", wide(self.queries[s]), k, optimize=True) * self.head_dim**-0.5
        cap = self.options.get("softcap", 0)
        if cap:
            scores = cap * np.tanh(scores / cap)
        distance = np.arange(n)[None, :] - np.arange(n)[:, None]
        slopes = self.options.get("alibi_slopes")
        if slopes is not None:
            scores = scores + slopes.astype(np.float64)[:, None, None] * distance
        window = self.options.get("window", 0) or n
        scores = np.where((distance > 0) | (distance <= -window), -np.inf, scores)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        sinks = self.options.get("sinks")
        if sinks is not None:
            total = total + np.exp(sinks.astype(np.float64)[:, None, None] - top)
        result: Array = np.einsum("hqk,khd->qhd", weights / total, v, optimize=True)
        return result


def nan_block(kit: Any, shape: tuple[int, ...], dtype: str) -> Array:
    """A block in the host's layout whose every key and value is NaN."""
    if dtype != "int8":
        nans: Array = kit.to_dtype(np.full(shape, np.nan), dtype)
        return nans
    block = np.ones((*shape[:-1], shape[-1] + 4), np.uint8)
    block[..., -4:] = np.full((*shape[:-1], 1), np.nan, np.float32).view(np.uint8)
    return block


def as_stored(kit: Any, values: Array, dtype: str) -> Array:
    """Keys or values [.., head_dim] as a cache gives them back, in float64: for int8, whole multiples of a 127th of
    the largest."""
    if dtype != "int8":
        stored: Array = kit.to_float64(kit.to_dtype(values, dtype))
        return stored
    narrow = values.astype(np.float32)  # so that what lies between two integers is rounded as it is defined
    top = np.abs(narrow).max(-1, keepdims=True)
    codes = np.rint(narrow * (np.float32(127) / np.where(top > 0, top, 1)))
    read: Array = codes.astype(np.float64) * (top / np.float32(127))
    return read


def check(case: Case) -> None:
    """Whole prompts in one batch, then decodes of the last position, against the oracle."""
    case.build()
    limit = max(case.kit.limits[case.dtype], case.kit.limits.get(case.cache_dtype, 0))
    whole = case.run([(s, 0, n) for s, n in enumerate(case.seq_lens)])
    last = case.run([(s, n - 1, n) for s, n in enumerate(case.seq_lens)])
    for s in range(len(case.seq_lens)):
        assert case.kit.nmse(whole[s], case.oracle(s)) < limit
        assert np.array_equal(last[s][0], whole[s][-1])


DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")]
DTYPES += [("float32", "int8"), ("bfloat16", "int8")]


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(1, 1, 1), (4, 4, 7), (6, 2, 64), (9, 3, 80), (71, 1, 48), (2, 1, 256)],
)
def test_against_the_oracle(
    kit: Any, tier: str, dtype: str, cache_dtype: str, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    check(
        Case(
            kit=kit,
            seq_lens=[1, 17, 300],
            dtype=dtype,
            cache_dtype=cache_dtype,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
    )


@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16, 64, 512])
def test_block_sizes(kit: Any, tier: str, block_size: int, cache_dtype: str) -> None:
    case = Case(kit=kit, seq_lens=[40, 515], block_size=block_size, options={"window": 70})
    check(replace(case, dtype="float32" if cache_dtype == "int8" else cache_dtype, cache_dtype=cache_dtype))


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 33},
    "window of one": {"window": 1},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": np.array([-1, 0, 1.5, 3], np.float32)},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.1, 0.01], np.float32)},
    "all": {
        "window": 300,
        "softcap": 2.0,
        "sinks": np.zeros(4, np.float32),
        "alibi_slopes": np.full(4, 0.02, np.float32),
    },
}


@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_options(kit: Any, tier: str, name: str, cache_dtype: str) -> None:
    dtype = "float32" if cache_dtype == "int8" else cache_dtype
    check(Case(kit=kit, seq_lens=[50, 601], options=OPTIONS[name], dtype=dtype, cache_dtype=cache_dtype))


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": 200, "sinks": np.ones(4, np.float32)}], ids=["full", "window"])
def test_bits_do_not_depend_on_batch_chunks_or_threads(
    kit: Any, tier: str, dtype: str, cache_dtype: str, options: dict[str, Any]
) -> None:
    case = Case(kit=kit, seq_lens=[900, 30], dtype=dtype, cache_dtype=cache_dtype, options=options).build()
    ops.set_num_threads(1)
    whole = case.run([(0, 0, 900)])[0]
    for num_threads in (1, 2, 5):
        ops.set_num_threads(num_threads)
        for cuts in ([0, 900], [0, 255, 256, 257, 600, 601, 899, 900], [0, 13, 590, 900]):
            for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
                part = case.run([(1, 29, 30), (0, begin, end), (1, 0, 30)])[1]
                assert np.array_equal(part, whole[begin:end])


def a_third(*lists: Iterable[str]) -> list[Any]:
    """All combinations; the quick run takes a third of them, which has every pair of entries of different lists."""
    slow = pytest.mark.slow
    return [
        pytest.param(*(value for _, value in items), marks=[slow] if sum(i for i, _ in items) % 3 else [])
        for items in itertools.product(*(list(enumerate(values)) for values in lists))
    ]


SHARED = {
    "one": ([600, 513, 700, 520, 900], [(0, 0), (0, 512), (0, 512), (0, 512), (0, 512)]),
    "a tree": ([800, 600, 790, 1100, 300, 257], [(0, 0), (0, 256), (0, 768), (3, 0), (1, 256), (0, 256)]),
    "less than a segment": ([300, 290, 280], [(0, 0), (0, 240), (0, 240)]),
    "two families": ([530, 540, 550, 560], [(0, 0), (1, 0), (0, 512), (1, 512)]),
    "many": ([270 + i for i in range(60)], [(0, 256 if i else 0) for i in range(60)]),
}
OF_SHARED: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi, softcap, sinks": {
        "softcap": 20.0,
        "sinks": np.linspace(-2, 2, 4, dtype=np.float32),
        "alibi_slopes": 2.0 ** -np.arange(1, 5, dtype=np.float32),
    },
    "window": {"window": 555},
}


@pytest.mark.parametrize(
    ("shape", "dtypes", "options"),
    a_third(SHARED, ["float32 float32", "bfloat16 bfloat16", "float32 int8", "bfloat16 int8"], OF_SHARED),
)
def test_bits_do_not_depend_on_who_shares_a_prefix(
    kit: Any, tier: str, shape: str, dtypes: str, options: str
) -> None:
    """Requests whose tables begin with the same blocks read them together."""
    dtype, cache_dtype = dtypes.split()
    seq_lens, prefixes = SHARED[shape]
    case = Case(
        kit=kit,
        seq_lens=seq_lens,
        dtype=dtype,
        cache_dtype=cache_dtype,
        options=OF_SHARED[options],
        prefixes=prefixes,
    )
    check(case)
    last = [(s, n - 1, n) for s, n in enumerate(seq_lens)]
    alone = [case.run([chunk])[0] for chunk in last]
    # With longer pieces of prompts between them, and another order.
    mixed = [(s, max(0, n - 40 * (s % 2) - 1), n) for s, n in enumerate(seq_lens)][::-1]
    for threads in (1, 2, 5):
        ops.set_num_threads(threads)
        for single, shared in zip(alone, case.run(last), strict=True):
            assert np.array_equal(single, shared)
        for single, piece in zip(alone, case.run(mixed)[::-1], strict=True):
            assert np.array_equal(single[-1], piece[-1])


@pytest.mark.parametrize(
    ("dtypes", "options", "shape"),
    a_third(
        ["float32 float32", "bfloat16 bfloat16", "float16 float16", "float32 int8"],
        OF_SHARED,
        ["4 4 7 16", "12 4 64 4", "4 4 256 512"],
    ),
)
def test_heads_of_a_token_taken_together_have_the_bits_of_heads_alone(
    kit: Any, tier: str, dtypes: str, options: str, shape: str
) -> None:
    """With many requests that decode, a task takes several heads, segment by segment."""
    num_heads, num_kv_heads, head_dim, block_size = map(int, shape.split())
    dtype, cache_dtype = dtypes.split()
    few = OF_SHARED[options]
    wide = {
        name: np.resize(value, num_heads) if isinstance(value, np.ndarray) else value for name, value in few.items()
    }
    case = Case(
        kit=kit,
        seq_lens=[1, 255, 256, 257, 600, 40, 769, 300, 16, 90, 511, 512],
        dtype=dtype,
        cache_dtype=cache_dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        options=wide,
    )
    check(case)
    last = [(s, n - 1, n) for s, n in enumerate(case.seq_lens)]
    alone = [case.run([chunk])[0] for chunk in last]
    for threads in (1, 2, 3):
        ops.set_num_threads(threads)
        for number in (3, 7, len(last)):
            for single, together in zip(alone, case.run(last[:number]), strict=False):
                assert np.array_equal(single, together)
        mixed = [(s, max(0, n - 1 - 20 * (s % 3 == 2)), n) for s, n in enumerate(case.seq_lens)]
        for single, piece in zip(alone, case.run(mixed), strict=True):
            assert np.array_equal(single[-1], piece[-1])


def test_a_request_without_tokens(kit: Any, tier: str) -> None:
    case = Case(kit=kit, seq_lens=[5, 9]).build()
    alone = case.run([(0, 0, 5)])[0]
    results = case.run([(1, 4, 4), (0, 0, 5), (1, 0, 0)])
    assert [len(r) for r in results] == [0, 5, 0]
    assert np.array_equal(results[1], alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("block_size", [2, 32])
def test_blocks_in_the_host_layout(kit: Any, dtype: str, block_size: int) -> None:
    cache = ops.KVCache(4, block_size, 3, 5, dtype)
    random = np.random.default_rng(0)
    key, value = (kit.to_dtype(random.standard_normal((block_size, 3, 5)), dtype) for _ in range(2))
    slots = np.arange(2 * block_size, 3 * block_size, dtype=np.int32)
    slots[-1] = -1
    ops.write_kv(cache, key, value, slots)
    out = kit.Guarded((2, block_size, 3, 5), dtype)
    cache.read_block(2, out.array)
    expected = np.stack([key, value])
    expected[:, -1] = 0
    assert np.array_equal(out.check(), expected)
    cache.write_block(0, out.array)
    again = kit.Guarded((2, block_size, 3, 5), dtype).array
    cache.read_block(0, again)
    assert np.array_equal(again, expected)
    assert cache.num_bytes == ops.kv_bytes(4, block_size, 3, 5, dtype)


@pytest.mark.parametrize("block_size", [2, 32])
def test_blocks_of_integers_are_those_of_the_definition(kit: Any, tier: str, block_size: int) -> None:
    """Every code and scale, to the bit; a vector that holds a NaN or an infinity reads back as NaN."""
    torch = pytest.importorskip("torch")
    from headrace.core.ops import attention

    cache = ops.KVCache(4, block_size, 3, 37, "int8")
    definition = attention.new_kv_cache(
        num_blocks=4, block_size=block_size, num_kv_heads=3, head_dim=37, dtype="int8", device="cpu"
    )
    random = np.random.default_rng(0)
    key, value = (random.standard_normal((block_size, 3, 37)).astype(np.float32) for _ in range(2))
    key[0, 0], key[0, 1, 3], key[0, 2, 36], value[1, 1, 0] = 0, np.nan, np.inf, -np.inf
    value[1, 2] = [63.5, *range(18), *range(-18, 0)]  # halves, by a scale of a half
    slots = np.arange(2 * block_size, 3 * block_size, dtype=np.int32)
    ops.write_kv(cache, key, value, slots)
    attention.write_kv(definition, *map(torch.from_numpy, (key, value, slots)))
    out = kit.Guarded((2, block_size, 3, 41), "uint8")
    cache.read_block(2, out.array)
    found = out.check()
    codes, scales = found[..., :37].view(np.int8), found[..., 37:].copy().view(np.float32)[..., 0]
    for mine, place in (([codes[0], scales[0]], 0), ([codes[1], scales[1]], 1)):
        expected_codes, expected_scales = definition[place].codes[2], definition[place].scales[2]
        assert np.array_equal(mine[1], expected_scales.numpy(), equal_nan=True)
        is_number = ~np.isnan(mine[1])
        assert np.array_equal(mine[0][is_number], expected_codes.numpy()[is_number])
    assert np.isnan(scales).sum() == 3
    cache.write_block(0, found)
    again = kit.Guarded((2, block_size, 3, 41), "uint8").array
    cache.read_block(0, again)
    assert np.array_equal(again, found)
    assert cache.num_bytes == ops.kv_bytes(4, block_size, 3, 37, "int8")


def test_layers_in_one_memory_keep_apart(kit: Any) -> None:
    layers = [(3, 5), (1, 16), (2, 64)]
    caches, random = ops.kv_caches(19, 4, layers, "bfloat16"), np.random.default_rng(0)
    written = {}
    for layer, (heads, head_dim) in enumerate(layers):
        for block in range(19):
            values = kit.to_dtype(random.standard_normal((2, 4, heads, head_dim)), "bfloat16")
            caches[layer].write_block(block, values)
            written[layer, block] = values
    for (layer, block), values in written.items():
        found = np.zeros_like(values)
        caches[layer].read_block(block, found)
        assert np.array_equal(found, values), (layer, block)
    sizes = [ops.kv_bytes(19, 4, heads, head_dim, "bfloat16") for heads, head_dim in layers]
    assert [cache.num_bytes for cache in caches] == sizes


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say what is resident")
def test_the_first_blocks_of_all_layers_take_few_pages() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    caches = ops.kv_caches(4096, 16, [(3, 64)] * 30, "float32")
    token = np.ones((1, 3, 64), np.float32)
    for cache in caches:
        ops.write_kv(cache, token, token, np.zeros(1, np.int32))
    assert resident_bytes() - before < 16 << 20  # two huge pages a layer would be 120 MiB


def test_errors(kit: Any) -> None:
    cache = ops.KVCache(4, 16, 2, 8, "float32")
    query = np.zeros((2, 4, 8), np.float32)
    ints = [np.array(a, np.int32) for a in ([0, 2], [2], [[1]])]
    with pytest.raises(ValueError, match=r"block table entry \[0, 0\] is 4, the cache has 4 blocks"):
        ops.paged_attention(query, query, cache, ints[0], ints[1], np.array([[4]], np.int32), 1.0)
    with pytest.raises(ValueError, match="has 2 tokens, a sequence length of 17 and a block table for 16"):
        ops.paged_attention(query, query, cache, ints[0], np.array([17], np.int32), ints[2], 1.0)
    with pytest.raises(ValueError, match="query_start_loc must rise"):
        ops.paged_attention(query, query, cache, np.array([0, 3], np.int32), ints[1], ints[2], 1.0)
    with pytest.raises(ValueError, match="num_heads 3 is no multiple of num_kv_heads 2"):
        three = np.zeros((2, 3, 8), np.float32)
        ops.paged_attention(three, three, cache, *ints, 1.0)
    with pytest.raises(ValueError, match=r"slot 64 of token 1 is not in \[-1, 64\)"):
        kv = np.zeros((2, 2, 8), np.float32)
        ops.write_kv(cache, kv, kv, np.array([0, 64], np.int32))
    with pytest.raises(ValueError, match="a block size that is a power of two"):
        ops.KVCache(4, 24, 2, 8, "float32")
    with pytest.raises(ValueError, match="unknown dtype 'int4'"):
        ops.KVCache(4, 16, 2, 8, "int4")
    with pytest.raises(ValueError, match="block 4 is not in a cache of 4 blocks"):
        cache.read_block(4, np.zeros((2, 16, 2, 8), np.float32))
