"""The one table of GGUF block types: ids, sizes, and what each block's bytes mean as float32.

A block is a fixed number of consecutive values of a row, packed with their scales. Layouts are those that
llama.cpp writes; every function takes uint8 [num_blocks, num_bytes] and returns float32 [num_blocks, num_values]
with the products and sums rounded in llama.cpp's order, so that results agree to the last bit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """One block type.

    name: lower case, the `dtype` of a HostTensor. ggml_type: its number in a GGUF file. num_values and
    num_bytes: of one block. dequantize: None if the layout is known but not its code book.
    """

    name: str
    ggml_type: int
    num_values: int
    num_bytes: int
    dequantize: Callable[[Bytes], Floats] | None


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block: [num_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _fields(packed: Bytes, bits: int, span: int) -> Bytes:
    """Split bytes into fields of `bits`: each run of `span` bytes holds span values in its lowest bits, then
    the next span values in the bits above, and so on. [n, k] -> [n, k * 8 / bits].
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = (packed.reshape(len(packed), -1, 1, span) >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(len(packed), -1)


def _scaled(scales: Floats, codes: npt.NDArray[np.int8] | Bytes) -> Floats:
    """Each row's codes in len(scales[0]) equal groups, times the group's scale."""
    values = codes.astype(np.float32).reshape(len(codes), scales.shape[1], -1)
    values *= scales[:, :, None]
    return values.reshape(len(codes), -1)


def _minus(codes: Bytes, offset: int) -> npt.NDArray[np.int8]:
    return codes.view(np.int8) - np.int8(offset)


def _q4_0(blocks: Bytes) -> Floats:
    return _scaled(_half(blocks, 0), _minus(_fields(blocks[:, 2:], 4, 16), 8))


def _q4_1(blocks: Bytes) -> Floats:
    values = _scaled(_half(blocks, 0), _fields(blocks[:, 4:], 4, 16))
    values += _half(blocks, 2)
    return values


def _with_fifth_bit(low: Bytes, high: Bytes) -> Bytes:
    """Codes of 5 bits from nibbles [n, 16] and one bit a value [n, 4], value 0 in the lowest bit."""
    return _fields(low, 4, 16) | (np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4))


def _q5_0(blocks: Bytes) -> Floats:
    return _scaled(_half(blocks, 0), _minus(_with_fifth_bit(blocks[:, 6:], blocks[:, 2:6]), 16))


def _q5_1(blocks: Bytes) -> Floats:
    values = _scaled(_half(blocks, 0), _with_fifth_bit(blocks[:, 8:], blocks[:, 4:8]))
    values += _half(blocks, 2)
    return values


def _q8_0(blocks: Bytes) -> Floats:
    return _scaled(_half(blocks, 0), blocks[:, 2:].view(np.int8))


def _scaled_minus_min(scales: Floats, codes: Bytes, minimums: Floats) -> Floats:
    values = _scaled(scales, codes).reshape(len(codes), scales.shape[1], -1)
    values -= minimums[:, :, None]
    return values.reshape(len(codes), -1)


def _q2_k(blocks: Bytes) -> Floats:
    scales = _half(blocks, 80) * (blocks[:, :16] & np.uint8(15)).astype(np.float32)
    minimums = _half(blocks, 82) * (blocks[:, :16] >> np.uint8(4)).astype(np.float32)
    return _scaled_minus_min(scales, _fields(blocks[:, 16:80], 2, 32), minimums)


def _q3_k(blocks: Bytes) -> Floats:
    # 16 scales of 6 bits: 8 bytes of low nibbles, then 4 bytes of high pairs of bits.
    scales = _fields(blocks[:, 96:104], 4, 8) | (_fields(blocks[:, 104:108], 2, 4) << np.uint8(4))
    low = _fields(blocks[:, 32:96], 2, 32)
    # A set mask bit means "no offset": the code is low + 4 * mask - 4.
    codes = _minus(low | (_fields(blocks[:, :32], 1, 32) << np.uint8(2)), 4)
    return _scaled(_half(blocks, 108) * _minus(scales, 32).astype(np.float32), codes)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """8 scales and 8 minimums of 6 bits from 12 bytes: a, b and c, four bytes each. The first four lie in the
    low 6 bits of a and b; of the last four, the low nibbles lie in c and the top two bits above those of a, b.
    """
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    low, top = np.uint8(0x3F), np.uint8(0x30)
    scales = np.concatenate([a & low, (c & np.uint8(15)) | ((a >> np.uint8(2)) & top)], axis=1)
    minimums = np.concatenate([b & low, (c >> np.uint8(4)) | ((b >> np.uint8(2)) & top)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _q4_k(blocks: Bytes) -> Floats:
    scales, minimums = _k_scales(blocks[:, 4:16])
    codes = _fields(blocks[:, 16:], 4, 32)
    return _scaled_minus_min(_half(blocks, 0) * scales, codes, _half(blocks, 2) * minimums)


def _q5_k(blocks: Bytes) -> Floats:
    scales, minimums = _k_scales(blocks[:, 4:16])
    codes = _fields(blocks[:, 48:], 4, 32) | (_fields(blocks[:, 16:48], 1, 32) << np.uint8(4))
    return _scaled_minus_min(_half(blocks, 0) * scales, codes, _half(blocks, 2) * minimums)


def _q6_k(blocks: Bytes) -> Floats:
    codes = _fields(blocks[:, :128], 4, 64) | (_fields(blocks[:, 128:192], 2, 32) << np.uint8(4))
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _scaled(scales, _minus(codes, 32))


_IQ4_CODES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _scaled(_half(blocks, 0), _IQ4_CODES[_fields(blocks[:, 2:], 4, 16)])


def iq4_nl_as_q8_0(rows: Bytes) -> Bytes:
    """Rows of blocks of iq4_nl as those of q8_0, which have the same scale and the codes' values."""
    blocks = rows.reshape(-1, 18)
    values = _IQ4_CODES[_fields(blocks[:, 2:], 4, 16)].reshape(len(blocks), 32)
    return np.concatenate([blocks[:, :2], values.view(np.uint8)], axis=1).reshape(len(rows), -1)


def _iq4_xs(blocks: Bytes) -> Floats:
    # 8 scales of 6 bits: two bytes of high pairs of bits, four bytes of low nibbles, both value by value.
    high = _fields(blocks[:, 2:4], 2, 1)
    scales = _minus(_fields(blocks[:, 4:8], 4, 1) | (high << np.uint8(4)), 32).astype(np.float32)
    return _scaled(_half(blocks, 0) * scales, _IQ4_CODES[_fields(blocks[:, 8:], 4, 16)])


def _ternary(packed: Bytes, count: int, span: int) -> Bytes:
    """`count` base-3 digits a byte, stored as fractions of 256: digit k is the whole part of 3 * frac(3**k * x)."""
    powers = (3 ** np.arange(count)).astype(np.uint8)[:, None]
    fractions = packed.reshape(len(packed), -1, 1, span) * powers  # wraps at 256 on purpose
    return ((fractions.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(len(packed), -1)


def _tq1_0(blocks: Bytes) -> Floats:
    digits = [_ternary(blocks[:, :32], 5, 32), _ternary(blocks[:, 32:48], 5, 16), _ternary(blocks[:, 48:52], 4, 4)]
    return _scaled(_half(blocks, 52), _minus(np.concatenate(digits, axis=1), 1))


def _tq2_0(blocks: Bytes) -> Floats:
    return _scaled(_half(blocks, 64), _minus(_fields(blocks[:, :64], 2, 32), 1))


# e2m1 values, doubled; the scales below are halved in return. Both zeros are positive, as in llama.cpp.
_FP4_CODES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
_E8M0_HALF = np.ldexp(np.float32(0.5), np.arange(-127, 129)).astype(np.float32)


def _ue4m3_half() -> Floats:
    """Half the value of an e4m3 byte without sign; 0x7F (NaN) counts as 0."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    values = np.where(exponent == 0, np.ldexp(mantissa, -10), np.ldexp(8.0 + mantissa, exponent - 11))
    values[0x7F] = 0.0
    return np.asarray(values, dtype=np.float32)


_UE4M3_HALF = _ue4m3_half()


def _mxfp4(blocks: Bytes) -> Floats:
    return _scaled(_E8M0_HALF[blocks[:, :1]], _FP4_CODES[_fields(blocks[:, 1:], 4, 16)])


def _nvfp4(blocks: Bytes) -> Floats:
    return _scaled(_UE4M3_HALF[blocks[:, :4]], _FP4_CODES[_fields(blocks[:, 4:], 4, 8)])


# (name, number in a file, values and bytes of a block, dequantize). q8_1 and q8_k are llama.cpp's activations,
# which no model file should hold; iq1, iq2 and iq3 need code books of thousands of entries; for q1_0 no other
# implementation is there to compare with.
_ROWS: tuple[tuple[str, int, int, int, Callable[[Bytes], Floats] | None], ...] = (
    ("q4_0", 2, 32, 18, _q4_0),
    ("q4_1", 3, 32, 20, _q4_1),
    ("q5_0", 6, 32, 22, _q5_0),
    ("q5_1", 7, 32, 24, _q5_1),
    ("q8_0", 8, 32, 34, _q8_0),
    ("q8_1", 9, 32, 36, None),
    ("q2_k", 10, 256, 84, _q2_k),
    ("q3_k", 11, 256, 110, _q3_k),
    ("q4_k", 12, 256, 144, _q4_k),
    ("q5_k", 13, 256, 176, _q5_k),
    ("q6_k", 14, 256, 210, _q6_k),
    ("q8_k", 15, 256, 292, None),
    ("iq2_xxs", 16, 256, 66, None),
    ("iq2_xs", 17, 256, 74, None),
    ("iq3_xxs", 18, 256, 98, None),
    ("iq1_s", 19, 256, 50, None),
    ("iq4_nl", 20, 32, 18, _iq4_nl),
    ("iq3_s", 21, 256, 110, None),
    ("iq2_s", 22, 256, 82, None),
    ("iq4_xs", 23, 256, 136, _iq4_xs),
    ("iq1_m", 29, 256, 56, None),
    ("tq1_0", 34, 256, 54, _tq1_0),
    ("tq2_0", 35, 256, 66, _tq2_0),
    ("mxfp4", 39, 32, 17, _mxfp4),
    ("nvfp4", 40, 64, 36, _nvfp4),
    ("q1_0", 41, 128, 18, None),
)

BLOCK_TYPES = {
    name: BlockType(name=name, ggml_type=number, num_values=values, num_bytes=size, dequantize=function)
    for name, number, values, size, function in _ROWS
}
"""By name, the `dtype` of a HostTensor."""
