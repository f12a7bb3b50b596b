"""The compiled kernels for CPUs. Arrays are numpy's, C-contiguous; uint16 holds the bits of bfloat16.

Outputs come first and are written in place; nothing is allocated for the caller. A wrong shape or value raises
ValueError, a wrong type TypeError. Every result depends on its own row alone, bit for bit: not on the batch, not on
how a prompt was cut, not on the number of threads (it does depend on the tier).
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int32]
Numbers: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.uint16]
Format: TypeAlias = Literal[
    "float32", "bfloat16", "float16", "int8", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "int4"
]
DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]
KVDtypeName: TypeAlias = Literal["float32", "bfloat16", "float16", "int8"]

OWN_ROWS: int
"""In the place of a KV group: see `Program.write_kv`."""
CHUNK_TOKENS: int
"""Tokens that a mixture of experts takes at once: rows of a View "chunk"."""
PANEL_ROWS: int
"""Rows of a panel of a packed weight."""
MAX_DISTANCE: int
"""Keys farther away than so many positions have the last one's bias."""

def compiled_tiers() -> list[str]:
    """Sets of instructions that this build has kernels for, slowest first."""

def supported_tiers() -> list[str]:
    """Those that this CPU and operating system can run."""

def isa() -> str:
    """The tier in use: HEADRACE_CPU_ISA if set, else the fastest supported.

    Raises ValueError if the variable names no tier, RuntimeError if this CPU lacks it.
    """

def set_isa(tier: str) -> None:
    """Use another tier; for tests and benchmarks. Raises as `isa`."""

def num_threads() -> int:
    """Threads that kernels run on; 1 until it is set."""

def set_num_threads(num_threads: int) -> None:
    """From the next kernel on. Raises ValueError outside [1, 1024]."""

def num_regions() -> int:
    """Parallel regions run so far by this process."""

def numa_nodes() -> list[list[int]]:
    """CPUs of each node of memory that this thread may run on; those without any are left out."""

def set_numa_folder(folder: str) -> None:
    """Where nodes are described, instead of /sys/devices/system/node, from the next pool of threads on; for tests."""

def allocated_bytes() -> int:
    """Address space held for packed weights and KV caches."""

def packed_bytes(format: str, rows: int, cols: int, group: int = 0) -> int:
    """What a PackedWeight would take. Raises ValueError for a shape that the format cannot have."""

def kv_bytes(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """What a KVCache would take."""

def quantize(
    codes: npt.NDArray[np.int8] | npt.NDArray[np.uint8],
    scales: Floats,
    offsets: Floats | None,
    x: Floats,
    is_symmetric: bool = False,
    bits: int = 4,
) -> None:
    """x [rows, cols] as integers, as core.weights.quantize.quantize_rows: int8 codes and scales [rows, num_groups]
    without offsets; else codes in [0, 2^bits), scales and offsets [rows, num_groups]. Scales are NaN where x is not
    finite."""

class PackedWeight:
    """A weight [rows, cols] in the layout of the kernels, for `linear` and `embedding`. Zero until written."""

    def __init__(self, format: str, rows: int, cols: int, group: int = 0) -> None:
        """group: columns that share a scale, a multiple of 32; for int4 only."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def huge_page_bytes(self) -> int:
        """How much of it lies in huge pages now; -1 if the system does not say."""

    def write_dense(self, start: int, rows: Numbers, any_value: bool = False) -> None:
        """Rows [n, cols] from row `start` on, rounded to the format (int8: to the nearest of 255 levels a row).
        Raises ValueError that names a row with a NaN or an infinity, unless any_value."""

    def write_blocks(self, start: int, rows: npt.NDArray[np.uint8]) -> None:
        """Rows of GGUF blocks as they stand in the file, [n, bytes of a row]."""

    def write_int8(self, start: int, rows: npt.NDArray[np.int8], scales: Floats) -> None:
        """weight = rows * scales[:, None]; rows [n, cols] in [-127, 127], scales [n]."""

    def write_int4(self, start: int, rows: npt.NDArray[np.uint8], scales: Floats, offsets: Floats) -> None:
        """weight = rows * scale + offset; rows [n, cols] in [0, 15], scales and offsets [n, ceil(cols / group)]."""

class KVCache:
    """The KV cache of one layer, zeroed."""

    def __init__(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str) -> None:
        """block_size must be a power of two; dtype: a KVDtypeName, int8 as core.ops.attention defines it."""

    @property
    def num_bytes(self) -> int: ...
    def extent(self, num_blocks: int) -> int:
        """Bytes of memory that the first so many blocks take, of all layers that share this cache's memory."""

    def read_block(self, block: int, out: Numbers | npt.NDArray[np.uint8]) -> None:
        """Copy a block to [2, block_size, num_kv_heads, head_dim], keys then values, of the cache's dtype; of an int8
        cache to bytes [.., head_dim + 4], integers and then their scale."""

    def write_block(self, block: int, array: Numbers | npt.NDArray[np.uint8]) -> None:
        """The reverse of `read_block`."""

def kv_caches(num_blocks: int, block_size: int, layers: Sequence[tuple[int, int]], dtype: str) -> list[KVCache]:
    """The caches of several layers, each (num_kv_heads, head_dim), in one piece of memory: blocks of the same numbers
    lie near each other, so that the first of them take few pages."""

class Prefault:
    """A thread that takes pages of caches from the system before a step writes to them, while nobody computes.

    It runs when no other thread wants to, and sleeps when what is wanted is there.
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        """caches: one of each piece of memory, which is a region."""

    def want(self, region: int, num_bytes: int) -> None:
        """The first bytes of a region shall be there. Raises IndexError."""

    def hold(self) -> None:
        """Somebody computes: do nothing until 20 ms after `rest`."""

    def rest(self) -> None:
        """Nobody computes."""

    def done(self, region: int) -> int:
        """Bytes of a region, from its start on, that are there by now."""

def linear(
    out: Numbers, x: Numbers, weight: PackedWeight, bias: Floats | None = None, quantize_x: bool = False
) -> None:
    """out [num_tokens, rows] = x [num_tokens, cols] @ weight.T + bias [rows].

    Sums in float32. With an int8 weight each row of x is rounded to 255 levels first. quantize_x, for GGUF blocks
    and int4: each 32 columns of x are rounded to 255 levels, which lets integers do the work; faster, less exact.
    """

def embedding(out: Numbers, token_ids: Ints, weight: PackedWeight) -> None:
    """out [num_tokens, cols] = rows of the weight."""

def rms_norm(out: Numbers, x: Numbers, weight: Floats | None, eps: float) -> None:
    """As core.ops.norm.rms_norm; over the last axis."""

def add_rms_norm(
    out: Numbers, total: Numbers, x: Numbers, residual: Numbers, weight: Floats | None, eps: float
) -> None:
    """total = x + residual, out = rms_norm(total). total may be x or residual."""

def layer_norm(out: Numbers, x: Numbers, weight: Floats | None, bias: Floats | None, eps: float) -> None:
    """As core.ops.norm.layer_norm; over the last axis."""

def rope(out: Numbers, x: Numbers, cos: Floats, sin: Floats, interleaved: bool = False) -> None:
    """As core.ops.rope.rope. x [num_tokens, num_heads, head_dim] may be a slice of a wider array; out may be x."""

def act(out: Numbers, x: Numbers, activation: str) -> None:
    """out = an activation of x, by its name in core/models/spec.py."""

def act_mul(out: Numbers, x: Numbers, activation: str) -> None:
    """out [..., n] = act(gate) * up, where x [..., 2 * n] holds gate then up."""

def gather(out: npt.NDArray[Any], x: npt.NDArray[Any], indices: Ints) -> None:
    """out = x[indices]."""

def write_kv(kv_cache: KVCache, key: Numbers, value: Numbers, slot_mapping: Ints) -> None:
    """key, value [num_tokens, num_kv_heads, head_dim], maybe slices of a wider array; a slot of -1 is skipped."""

def paged_attention(
    out: Numbers,
    query: Numbers,
    kv_cache: KVCache,
    query_start_loc: Ints,
    seq_lens: Ints,
    block_table: Ints,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Floats | None = None,
    alibi_slopes: Floats | None = None,
) -> None:
    """As core.ops.attention.paged_attention, with a causal mask and no relative bias."""

def sample(
    out: Ints,
    logits: Floats,
    seeds: Ints,
    positions: Ints,
    temperature: Floats | None = None,
    top_k: Ints | None = None,
    top_p: Floats | None = None,
    min_p: Floats | None = None,
) -> None:
    """As core.ops.sampling.sample; out [num_rows]."""

def gumbel_noise(seed: int, position: int, token: int) -> float:
    """As core.ops.sampling.gumbel_noise, of one token."""

class View:
    """[rows, cols] numbers in a program's arena: the first at byte `offset`, `stride` elements between rows."""

    def __init__(
        self, offset: int, cols: int, stride: int, dtype: str, rows: Literal["tokens", "logits", "chunk"] = "tokens"
    ) -> None: ...

class Stack:
    """num_matrices of `rows` rows each in one packed weight, every one beginning a panel."""

    def __init__(self, weight: PackedWeight, num_matrices: int, rows: int, quantize_x: bool = False) -> None: ...

class Program:
    """A step as a list of kernels over one arena, walked by all threads inside one parallel region.

    Each method but `run` and `read` adds a record, whose meaning is the op of that name in core/ops. Kernels are
    those of the tier that is in use when a record is added. Float parameters are copied, an empty list stands for
    none; weights and caches are kept alive.
    """

    def __init__(self, arena_bytes: int, max_tokens: int, max_logits: int) -> None: ...
    @property
    def num_records(self) -> int: ...
    @property
    def arena(self) -> npt.NDArray[np.uint8]:
        """The arena itself, not a copy. The next step overwrites it."""

    def embedding(self, out: View, weight: PackedWeight, of: str = "input_ids") -> None:
        """Rows of the weight by input_ids, positions or token_types."""

    def linear(
        self, out: View, x: View, weight: PackedWeight, bias: Sequence[float] = ..., quantize_x: bool = False
    ) -> None: ...
    def rms_norm(self, out: View, x: View, n: int, weight: Sequence[float], eps: float) -> None:
        """Over each n columns: the hidden size, or head_dim for a norm of each head."""

    def add_rms_norm(
        self, out: View, total: View, x: View, residual: View, weight: Sequence[float], eps: float
    ) -> None: ...
    def layer_norm(
        self, out: View, x: View, n: int, weight: Sequence[float], bias: Sequence[float], eps: float
    ) -> None:
        """As `rms_norm`."""

    def magnitude(self, out: View, x: View, is_centred: bool) -> None:
        """out: one column of float32."""

    def rotary_angles(
        self,
        cos: View,
        sin: View,
        inv_freq: Sequence[float],
        attention_factors: Sequence[float],
        axes: Sequence[int] = ...,
    ) -> None:
        """inv_freq: [variants, cols], flat; with several variants the step's rope_rows picks one for each token.

        axes: by which of the step's rope_positions each column turns, instead of by positions.
        """

    def rope(
        self, out: View, x: View, cos: View, sin: View, head_dim: int, head_stride: int, interleaved: bool = False
    ) -> None:
        """head_stride: columns of x from one head to the next."""

    def act(self, out: View, x: View, activation: str) -> None: ...
    def act_mul(self, out: View, x: View, activation: str) -> None: ...
    def add(self, out: View, x: View, y: View) -> None: ...
    def scale(self, out: View, x: View, factor: float) -> None: ...
    def softcap(self, out: View, x: View, cap: float) -> None: ...
    def cast(self, out: View, x: View) -> None: ...
    def clamp(self, out: View, x: View, limit: float) -> None: ...
    def xielu(self, out: View, x: View, alpha_p: float, alpha_n: float) -> None: ...
    def modulate(self, out: View, x: View, y: View | Sequence[float], is_gate: bool) -> None:
        """x * y, or x * sigmoid(y). y: a view, each column for as many of x, or a number for each."""

    def log_growth(self, out: View, factor: float, length: int, shift: int) -> None: ...
    def features(self, out: View) -> None:
        """The step's features."""

    def stack_rows(self, out: View, x: View, number: int, width: int) -> None:
        """Rows of x side by side, by the step's windows of this number."""

    def copy_heads(self, out: View, x: View, num_heads: int, head_dim: int, x_step: int, out_step: int) -> None:
        """Columns x_step * head of x, head_dim of them, to columns out_step * head of out."""

    def causal_conv(
        self,
        out: View,
        x: View,
        states: Numbers,
        group: int,
        weight: Sequence[float],
        bias: Sequence[float],
        width: int,
        is_silu: bool,
    ) -> None:
        """group: whose block table's first column is where states come from, and whose slot mapping where they go."""

    def selective_scan(
        self,
        out: View,
        inputs: Sequence[View],
        states: Floats,
        group: int,
        num_heads: int,
        num_groups: int,
        rates: Sequence[float],
        d: Sequence[float],
        dt_bias: Sequence[float],
        dt_min: float,
        dt_max: float,
    ) -> None:
        """inputs: x, dt, b, c. rates: exp(a_log), of each head, or of each head and value of its states."""

    def gated_delta(
        self,
        out: View,
        inputs: Sequence[View],
        states: Floats,
        group: int,
        num_heads: int,
        num_key_heads: int,
        rates: Sequence[float],
        dt_bias: Sequence[float],
        beta_scale: float,
    ) -> None:
        """inputs: query, key, value, dt, beta. rates: exp(a_log)."""

    def wkv(
        self,
        out: View,
        inputs: Sequence[View],
        states: Floats,
        group: int,
        rates: Sequence[float],
        bonus: Sequence[float],
    ) -> None:
        """inputs: key, value. rates: exp(a_log)."""

    def linear_heads(self, out: View, x: View, stack: Stack, x_step: int, out_step: int) -> None:
        """For each matrix i: columns out_step * i of out = columns x_step * i of x @ matrix i."""

    def lru_inputs(
        self,
        taken: View,
        dt: View,
        one: View,
        x: View,
        input_gates: View,
        decay_gates: View,
        input_bias: Sequence[float],
        decay_bias: Sequence[float],
        log_rate: Sequence[float],
    ) -> None:
        """taken, dt and one: what core.ops.state.lru_inputs returns, [num_tokens, n] and, of one, [num_tokens, 1]."""

    def part_identities(
        self,
        weights: View,
        experts: View,
        share_of: View,
        from_weights: View,
        from_experts: View,
        num_experts: int,
    ) -> None:
        """weights, experts and share_of [rows, 1]: what core.ops.moe.part_identities makes of the other two."""

    def route_experts(
        self,
        weights: View,
        experts: View,
        logits: View,
        correction: Sequence[float] = ...,
        score: str = "softmax",
        renormalize: bool = True,
        weight_scale: float = 1.0,
        num_groups: int = 1,
        num_open_groups: int = 1,
        scores_top2: bool = True,
    ) -> None:
        """experts: int32 in the place of float32."""

    def grouped_experts(
        self,
        out: View,
        x: View,
        weights: View,
        experts: View,
        buffers: Sequence[View],
        up: Stack,
        down: Stack,
        up_bias: Sequence[float] = ...,
        down_bias: Sequence[float] = ...,
        activation: str = "silu",
        is_gated: bool = True,
        clamp: float = 0.0,
        alpha: float = 1.702,
    ) -> None:
        """buffers: what up gives, its activation, what down gives, and, where weights scale the input, that input:
        for each token its experts side by side, rows "chunk"."""

    def gather(self, out: View, x: View) -> None:
        """Rows of tokens by logits_indices."""

    def place_rows(self, out: View, x: View, rows: npt.NDArray[Any], column: int, is_sum: bool) -> None:
        """x with rows of images in the place of its own, or added, by the step's image_rows. rows: [n, cols], of
        which columns from `column` on are read in each step."""

    def mean_rows(self, out: View, x: View) -> None:
        """Means of the step's ranges of rows."""

    def write_kv(self, kv_cache: KVCache, key: View, value: View, group: int = 0) -> None:
        """group: OWN_ROWS for a cache of this step's own rows alone, each request in blocks of its own."""

    def paged_attention(
        self,
        out: View,
        query: View,
        kv_cache: KVCache,
        group: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Sequence[float] = ...,
        alibi_slopes: Sequence[float] = ...,
        relative_bias: Sequence[float] = ...,
        sees: Literal["past", "ahead", "all", "encoder"] = "past",
        chunk: int = 0,
    ) -> None:
        """group: as in `write_kv`. relative_bias: [num_heads, 2 * MAX_DISTANCE + 1], flat, by key - query. sees: keys
        up to a token's own, those before the step's reach too, all of its request (within a window on both sides), or
        encoder_lens of it. chunk: and none before the last multiple of it."""

    def call(self, function: Callable[[], None]) -> None:
        """Behind all records so far, in the caller's thread: for what has no kernel. An exception ends the step."""

    def run(
        self,
        input_ids: Ints,
        positions: Ints,
        query_start_loc: Ints,
        seq_lens: Ints,
        block_tables: Sequence[Ints],
        slot_mappings: Sequence[Ints],
        logits_indices: Ints,
        rope_rows: Ints | None = None,
        token_types: Ints | None = None,
        encoder_lens: Ints | None = None,
        ranges: tuple[Ints, Ints] | None = None,
        features: Floats | None = None,
        windows: Sequence[Ints] = ...,
        reach: Ints | None = None,
        image_rows: Ints | None = None,
        rope_positions: Ints | None = None,
    ) -> None:
        """One step; rope_rows if a rope has variants, ranges (starts, ends) if the program makes means of rows: then
        their number is that of the rows of logits. features: [frames, n], then that number is that of frames;
        windows: [rows, width] for each `stack_rows`.

        Raises ValueError for an index out of range, before anything runs.
        """

    def read(self, out: Numbers, view: View) -> None:
        """Copy the first len(out) rows of a value."""
