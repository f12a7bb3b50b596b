"""A whole step in one parallel region against the same kernels called one by one."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

ops = pytest.importorskip("headrace.kernels.cpu._ops", reason="the kernels are not built: pip install -e .")

Array = npt.NDArray[Any]
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MIDDLE, VOCAB, LAYERS, BLOCK = 4, 2, 8, 24, 40, 50, 3, 16
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
MAX_TOKENS, MAX_LOGITS = 64, 8
SCALE = HEAD_DIM**-0.5


class Model:
    """A small decoder with random weights: qk-norm in layer 1, a window in layer 2."""

    def __init__(self, kit: Any, dtype: str) -> None:
        self.kit, self.dtype = kit, dtype
        self.random = np.random.default_rng(0)
        self.embed = self._weight(VOCAB, HIDDEN)
        self.layers = [
            {
                "qkv": self._weight(QKV, HIDDEN),
                "o": self._weight(HIDDEN, HEADS * HEAD_DIM),
                "gate_up": self._weight(2 * MIDDLE, HIDDEN),
                "down": self._weight(HIDDEN, MIDDLE),
                "bias": self._floats(QKV),
                "norms": [self._floats(HIDDEN) for _ in range(2)],
                "q_norm": self._floats(HEAD_DIM),
            }
            for _ in range(LAYERS)
        ]
        self.inv_freq = (100.0 ** -np.arange(0, 1, 2 / HEAD_DIM)).astype(np.float32)

    def _floats(self, n: int) -> Array:
        return self.random.standard_normal(n).astype(np.float32)

    def _weight(self, rows: int, cols: int) -> Any:
        weight = ops.PackedWeight("bfloat16", rows, cols)
        weight.write_dense(0, self.kit.to_dtype(self.random.standard_normal((rows, cols)) * cols**-0.5, "bfloat16"))
        return weight

    def caches(self) -> list[Any]:
        return [ops.KVCache(12, BLOCK, KV_HEADS, HEAD_DIM, self.dtype) for _ in range(LAYERS)]

    @staticmethod
    def window(layer: int) -> int:
        return 5 if layer == 2 else 0

    def program(self, caches: list[Any]) -> tuple[Any, Any, list[Any]]:
        """The native program, the views of its logits and of its angles; every value has a place of its own."""
        size = 4 if self.dtype == "float32" else 2
        offset = 0

        def value(cols: int, rows: str = "tokens", dtype: str = self.dtype) -> Any:
            nonlocal offset
            view = ops.View(offset, cols, cols, dtype, rows)
            offset += MAX_TOKENS * cols * 4
            places.append((view, offset - MAX_TOKENS * cols * 4, cols))
            return view

        def part(view: Any, column: int, cols: int) -> Any:
            start, stride = next((s, c) for v, s, c in places if v is view)
            return ops.View(start + column * size, cols, stride, self.dtype, "tokens")

        places: list[tuple[Any, int, int]] = []
        p = ops.Program(1 << 20, MAX_TOKENS, MAX_LOGITS)
        residual = value(HIDDEN)
        p.embedding(residual, self.embed)
        cos, sin = (value(HEAD_DIM // 2, dtype="float32") for _ in range(2))
        p.rotary_angles(cos, sin, self.inv_freq.tolist(), [1.0])
        block: Any = None
        for i, layer in enumerate(self.layers):
            x, total = value(HIDDEN), value(HIDDEN)
            if block is None:
                p.rms_norm(x, residual, HIDDEN, layer["norms"][0].tolist(), 1e-5)
            else:
                p.add_rms_norm(x, total, block, residual, layer["norms"][0].tolist(), 1e-5)
                residual = total
            qkv = value(QKV)
            p.linear(qkv, x, layer["qkv"], layer["bias"].tolist())
            query = part(qkv, 0, HEADS * HEAD_DIM)
            key = part(qkv, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
            if i == 1:
                normed = value(HEADS * HEAD_DIM)
                p.rms_norm(normed, query, HEAD_DIM, layer["q_norm"].tolist(), 1e-5)
                query = normed
            turned_q, turned_k = value(HEADS * HEAD_DIM), value(KV_HEADS * HEAD_DIM)
            p.rope(turned_q, query, cos, sin, HEAD_DIM, HEAD_DIM)
            p.rope(turned_k, key, cos, sin, HEAD_DIM, HEAD_DIM)
            p.write_kv(caches[i], turned_k, part(qkv, (HEADS + KV_HEADS) * HEAD_DIM, KV_HEADS * HEAD_DIM))
            attended = value(HEADS * HEAD_DIM)
            p.paged_attention(attended, turned_q, caches[i], 0, SCALE, self.window(i))
            out, x, total = value(HIDDEN), value(HIDDEN), value(HIDDEN)
            p.linear(out, attended, layer["o"])
            p.add_rms_norm(x, total, out, residual, layer["norms"][1].tolist(), 1e-5)
            residual = total
            gate_up, middle, block = value(2 * MIDDLE), value(MIDDLE), value(HIDDEN)
            p.linear(gate_up, x, layer["gate_up"])
            p.act_mul(middle, gate_up, "silu")
            p.linear(block, middle, layer["down"])
        hidden, last = value(HIDDEN), value(HIDDEN, "logits")
        p.add(hidden, block, residual)
        p.gather(last, hidden)
        logits, wide = value(VOCAB, "logits"), value(VOCAB, "logits", "float32")
        p.linear(logits, last, self.embed)
        p.cast(wide, logits)
        return p, wide, [cos, sin]

    def by_hand(self, caches: list[Any], step: dict[str, Any], cos: Array, sin: Array) -> Array:
        """The same with one call a kernel."""
        kind = np.uint16 if self.dtype == "bfloat16" else np.dtype(self.dtype)
        n = len(step["input_ids"])

        def new(*shape: int) -> Array:
            return np.zeros(shape, kind)

        residual = new(n, HIDDEN)
        ops.embedding(residual, step["input_ids"], self.embed)
        block: Array | None = None
        for i, layer in enumerate(self.layers):
            x, total = new(n, HIDDEN), new(n, HIDDEN)
            if block is None:
                ops.rms_norm(x, residual, layer["norms"][0], 1e-5)
            else:
                ops.add_rms_norm(x, total, block, residual, layer["norms"][0], 1e-5)
                residual = total
            qkv = new(n, QKV)
            ops.linear(qkv, x, layer["qkv"], layer["bias"])
            heads = qkv.reshape(n, -1, HEAD_DIM)
            query, key, value = heads[:, :HEADS], heads[:, HEADS : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS :]
            if i == 1:
                normed = new(n, HEADS, HEAD_DIM)
                ops.rms_norm(normed, np.ascontiguousarray(query), layer["q_norm"], 1e-5)
                query = normed
            turned_q, turned_k = new(n, HEADS, HEAD_DIM), new(n, KV_HEADS, HEAD_DIM)
            ops.rope(turned_q, query, cos, sin)
            ops.rope(turned_k, key, cos, sin)
            ops.write_kv(caches[i], turned_k, value, step["slot_mappings"][0])
            attended = new(n, HEADS, HEAD_DIM)
            batch = step["query_start_loc"], step["seq_lens"], step["block_tables"][0]
            ops.paged_attention(attended, turned_q, caches[i], *batch, SCALE, self.window(i))
            out, x, total = new(n, HIDDEN), new(n, HIDDEN), new(n, HIDDEN)
            ops.linear(out, attended.reshape(n, -1), layer["o"])
            ops.add_rms_norm(x, total, out, residual, layer["norms"][1], 1e-5)
            residual = total
            gate_up, middle, block = new(n, 2 * MIDDLE), new(n, MIDDLE), new(n, HIDDEN)
            ops.linear(gate_up, x, layer["gate_up"])
            ops.act_mul(middle, gate_up, "silu")
            ops.linear(block, middle, layer["down"])
        assert block is not None
        hidden = self.kit.to_dtype(self.kit.to_float64(block) + self.kit.to_float64(residual), self.dtype)
        last = np.ascontiguousarray(hidden[step["logits_indices"]])
        logits = new(len(last), VOCAB)
        ops.linear(logits, last, self.embed)
        result: Array = self.kit.to_float64(logits)
        return result


def make_step(chunks: list[tuple[int, int, int]]) -> dict[str, Any]:
    """A ragged batch of (sequence, begin, end); sequence s owns blocks 1 + 3 s and on."""
    table = np.full((len(chunks), 4), -1, np.int32)
    for row, (s, _, end) in enumerate(chunks):
        used = -(-end // BLOCK)
        table[row, :used] = 1 + 3 * s + np.arange(used)
    positions = np.concatenate([np.arange(begin, end) for _, begin, end in chunks]).astype(np.int32)
    owner = np.concatenate([np.full(end - begin, s) for s, begin, end in chunks])
    starts = np.cumsum([0, *(end - begin for _, begin, end in chunks)]).astype(np.int32)
    return {
        "input_ids": ((positions * 7 + owner * 13) % VOCAB).astype(np.int32),
        "positions": positions,
        "query_start_loc": starts,
        "seq_lens": np.array([end for _, _, end in chunks], np.int32),
        "block_tables": [table],
        "slot_mappings": [((1 + 3 * owner + positions // BLOCK) * BLOCK + positions % BLOCK).astype(np.int32)],
        "logits_indices": (starts[1:] - 1).astype(np.int32),
    }


STEPS = [
    [(0, 0, 20), (1, 0, 7)],
    [(0, 20, 21), (1, 7, 40), (2, 0, 1)],
    [(0, 21, 22), (1, 40, 41), (2, 1, 2)],
    [(2, 2, 30)],
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_program_gives_the_bits_of_its_kernels(kit: Any, tier: str, dtype: str) -> None:
    model = Model(kit, dtype)
    for num_threads in (1, 3):
        ops.set_num_threads(num_threads)
        native, plain = model.caches(), model.caches()
        program, logits, angles = model.program(native)
        for chunks in STEPS:
            step = make_step(chunks)
            before = ops.num_regions()
            program.run(**step)
            assert ops.num_regions() == before + 1, "a step is one parallel region"
            out = kit.Guarded((len(chunks), VOCAB), "float32")
            program.read(out.array, logits)
            turns = [np.zeros((len(step["positions"]), HEAD_DIM // 2), np.float32) for _ in range(2)]
            for turn, view, function in zip(turns, angles, (np.cos, np.sin), strict=True):
                program.read(turn, view)
                exact = function(step["positions"].astype(np.float64)[:, None] * model.inv_freq)
                np.testing.assert_allclose(turn, exact, atol=5e-6)
            assert np.array_equal(out.check(), model.by_hand(plain, step, *turns).astype(np.float32))


def test_logits_do_not_depend_on_batch_or_threads(kit: Any, tier: str) -> None:
    model = Model(kit, "bfloat16")
    seen: list[Array] = []
    for num_threads in (1, 2, 4):
        ops.set_num_threads(num_threads)
        for steps in ([[(0, 0, 30)]], [[(1, 0, 9), (0, 0, 11)], [(0, 11, 29), (2, 0, 3)], [(1, 9, 10), (0, 29, 30)]]):
            program, logits, _ = model.program(model.caches())
            for chunks in steps:
                program.run(**make_step(chunks))
            out = np.zeros((len(steps[-1]), VOCAB), np.float32)
            program.read(out, logits)
            seen.append(out[-1])
    assert all(np.array_equal(row, seen[0]) for row in seen)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_program_runs_with_other_threads_than_it_was_built_with(kit: Any, tier: str, dtype: str) -> None:
    """Whoever takes a piece of another's share, and however often a record ran before: the bits are the same."""
    model = Model(kit, dtype)
    ops.set_num_threads(2)
    program, logits, _ = model.program(model.caches())
    seen: list[Array] = []
    for num_threads in (2, 1, 3, 2, 5, 2):
        ops.set_num_threads(num_threads)
        for chunks in ([(0, 0, 20)], [(0, 20, 30), (1, 0, 9)], [(0, 29, 30)]):
            program.run(**make_step(chunks))
        out = np.zeros((1, VOCAB), np.float32)
        program.read(out, logits)
        seen.append(out[0])
    assert all(np.array_equal(row, seen[0]) for row in seen)


def test_errors(kit: Any) -> None:
    model = Model(kit, "float32")
    program, _, _ = model.program(model.caches())
    step = make_step([(0, 0, 3)])
    for name, value, message in [
        ("input_ids", VOCAB, rf"input_ids\[1\] is {VOCAB}, not in \[0, {VOCAB}\)"),
        ("logits_indices", 3, r"logits_indices\[0\] is 3"),
    ]:
        wrong = {**step, name: step[name].copy()}
        wrong[name][len(wrong[name]) // 2] = value
        with pytest.raises(ValueError, match=message):
            program.run(**wrong)
    with pytest.raises(ValueError, match="slot_mapping"):
        program.run(**{**step, "slot_mappings": [np.full(3, 12 * BLOCK, np.int32)]})
    with pytest.raises(ValueError, match="uses 1 KV groups"):
        program.run(**{**step, "slot_mappings": []})
    with pytest.raises(ValueError, match="exceeds the program's 64 and 8"):
        program.run(**make_step([(0, 0, 40), (1, 0, 40)]))
    with pytest.raises(ValueError, match="does not lie in an arena"):
        program.embedding(ops.View((1 << 20) - 64, HIDDEN, HIDDEN, "float32"), model.embed)
    with pytest.raises(ValueError, match="has 5 columns where 24 are needed"):
        program.embedding(ops.View(0, 5, 5, "float32"), model.embed)
    with pytest.raises(ValueError, match="rows must be one of 'tokens', 'logits'"):
        ops.View(0, 5, 5, "float32", "requests")


def test_rope_rows_pick_the_variant_of_a_token() -> None:
    inv_freq = np.array([[1.0, 0.1, 0.01], [0.5, 0.05, 0.005]], np.float32)
    factors = np.array([1.0, 1.19], np.float32)
    cos, sin = (ops.View(offset, 3, 3, "float32") for offset in (0, 4096))
    program = ops.Program(8192, MAX_TOKENS, MAX_LOGITS)
    with pytest.raises(ValueError, match="inv_freq must have 9 values, got 6"):
        program.rotary_angles(cos, sin, inv_freq.ravel().tolist(), [1.0, 1.0, 1.0])
    program.rotary_angles(cos, sin, inv_freq.ravel().tolist(), factors.tolist())
    step = make_step([(0, 0, 5)])
    rows = np.array([1, 0, 1, 1, 0], np.int32)
    program.run(**step, rope_rows=rows)
    angles = step["positions"][:, None] * inv_freq.astype(np.float64)[rows]
    for view, function in ((cos, np.cos), (sin, np.sin)):
        found = np.empty((5, 3), np.float32)
        program.read(found, view)
        np.testing.assert_allclose(found, function(angles) * factors[rows][:, None], atol=1e-6)
    with pytest.raises(ValueError, match="a rope has variants, and the step brings no rope_rows"):
        program.run(**step)
    with pytest.raises(ValueError, match=r"rope_rows\[2\] is 2, not in \[0, 2\)"):
        program.run(**step, rope_rows=np.array([1, 0, 2, 0, 0], np.int32))


def test_columns_of_angles_turn_by_their_own_axis() -> None:
    inv_freq, axes = np.array([1.0, 0.1, 0.01, 0.5], np.float32), [0, 2, 1, 2]
    cos, sin = (ops.View(offset, 4, 4, "float32") for offset in (0, 4096))
    program = ops.Program(8192, MAX_TOKENS, MAX_LOGITS)
    with pytest.raises(ValueError, match="an axis for each of 4 columns"):
        program.rotary_angles(cos, sin, inv_freq.tolist(), [1.5], axes[:3])
    program.rotary_angles(cos, sin, inv_freq.tolist(), [1.5], axes)
    step = make_step([(0, 0, 5)])
    places = np.random.default_rng(0).integers(0, 50, (5, 3)).astype(np.int32)
    program.run(**step, rope_positions=places)
    angles = places[:, axes] * inv_freq.astype(np.float64)
    for view, function in ((cos, np.cos), (sin, np.sin)):
        found = np.empty((5, 4), np.float32)
        program.read(found, view)
        np.testing.assert_allclose(found, function(angles) * 1.5, atol=1e-5)
    with pytest.raises(ValueError, match="a rope turns by 3 axes, and the step brings fewer"):
        program.run(**step, rope_positions=places[:, :2].copy())
