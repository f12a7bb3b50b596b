#include "pack_blocks.h"

#include <cstring>

#include "convert.h"

namespace headrace {
namespace {

constexpr std::int64_t kNibbles = kPanel * kPieceColumns / 2;

struct Scales {
    std::uint8_t scale[8], minimum[8];
};

// 8 scales and 8 minimums of 6 bits from 12 bytes: a, b and c, four bytes each. The first four lie in the low 6 bits of
// a and b; of the last four, the low nibbles lie in c and the top two bits above those of a and b.
Scales k_scales(const std::uint8_t *packed) {
    Scales result;
    for (int j = 0; j < 4; ++j) {
        const int a = packed[j], b = packed[4 + j], c = packed[8 + j];
        result.scale[j] = static_cast<std::uint8_t>(a & 63);
        result.minimum[j] = static_cast<std::uint8_t>(b & 63);
        result.scale[4 + j] = static_cast<std::uint8_t>((c & 15) | (a >> 6 << 4));
        result.minimum[4 + j] = static_cast<std::uint8_t>((c >> 4) | (b >> 6 << 4));
    }
    return result;
}

// The 256 integers of a block of q4_k, q5_k or q6_k.
void unpack_k(Format format, const std::uint8_t *block, std::uint8_t *values) {
    if (format == Format::q6_k) {
        const std::uint8_t *low = block, *high = block + 128;
        for (int part = 0; part < 2; ++part, low += 64, high += 32, values += 128)
            for (int i = 0; i < 32; ++i) {
                values[i] = static_cast<std::uint8_t>((low[i] & 15) | (high[i] & 3) << 4);
                values[32 + i] = static_cast<std::uint8_t>((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4);
                values[64 + i] = static_cast<std::uint8_t>((low[i] >> 4) | (high[i] >> 4 & 3) << 4);
                values[96 + i] = static_cast<std::uint8_t>((low[32 + i] >> 4) | (high[i] >> 6 & 3) << 4);
            }
        return;
    }
    const bool has_fifth = format == Format::q5_k;
    const std::uint8_t *fifth = block + 16, *low = block + (has_fifth ? 48 : 16);
    for (int part = 0; part < 4; ++part, low += 32, values += 64)
        for (int i = 0; i < 32; ++i) {
            values[i] = static_cast<std::uint8_t>(low[i] & 15);
            values[32 + i] = static_cast<std::uint8_t>(low[i] >> 4);
            if (has_fifth) {
                values[i] = static_cast<std::uint8_t>(values[i] | (fifth[i] >> (2 * part) & 1) << 4);
                values[32 + i] = static_cast<std::uint8_t>(values[32 + i] | (fifth[i] >> (2 * part + 1) & 1) << 4);
            }
        }
}

void write_k_block(Format format, const std::uint8_t *block, char *group, std::int64_t lane) {
    const BlockShape shape = BlockShape::of(format);
    std::uint8_t values[256];
    unpack_k(format, block, values);
    const bool is_q6 = format == Format::q6_k;
    std::memcpy(group + lane * 2, block + (is_q6 ? 208 : 0), 2);
    if (!is_q6) std::memcpy(group + (kPanel + lane) * 2, block + 2, 2);
    const Scales scales = is_q6 ? Scales{} : k_scales(block + 4);
    char *piece = group + shape.group_head_bytes;
    for (int g = 0; g < 8; ++g, piece += shape.piece_bytes) {
        piece[lane] = static_cast<char>(is_q6 ? block[192 + 2 * g] : scales.scale[g]);
        piece[kPanel + lane] = static_cast<char>(is_q6 ? block[193 + 2 * g] : scales.minimum[g]);
        write_integers(shape.bits, values + g * kPieceColumns, piece + shape.piece_head_bytes, lane);
    }
}

int read_integer(const BlockShape &shape, const char *integers, std::int64_t lane, std::int64_t k) {
    const auto *bytes = reinterpret_cast<const std::uint8_t *>(integers);
    const std::int64_t u = k / 4, b = k % 4;
    if (shape.bits == 8) return static_cast<std::int8_t>(bytes[(u * kPanel + lane) * 4 + b]);
    int value = bytes[(u % 4 * kPanel + lane) * 4 + b] >> (u / 4 * 4) & 15;
    const std::uint8_t *high = bytes + kNibbles + lane * 4 + b;
    if (shape.bits == 5) value |= (*high >> u & 1) << 4;
    if (shape.bits == 6) value |= (high[u / 4 * kPanel * 4] >> (u % 4 * 2) & 3) << 4;
    return value - shape.zero;
}

}  // namespace

void write_integers(int bits, const std::uint8_t *values, char *integers, std::int64_t lane) {
    for (int u = 0; u < 4; ++u) {
        std::uint8_t word[4];
        for (int b = 0; b < 4; ++b)
            word[b] = static_cast<std::uint8_t>((values[4 * u + b] & 15) | (values[16 + 4 * u + b] & 15) << 4);
        std::memcpy(integers + (u * kPanel + lane) * 4, word, 4);
    }
    char *high = integers + kNibbles + lane * 4;
    if (bits == 5) {
        std::uint8_t word[4] = {};
        for (int k = 0; k < kPieceColumns; ++k)
            word[k % 4] = static_cast<std::uint8_t>(word[k % 4] | (values[k] >> 4 & 1) << (k / 4));
        std::memcpy(high, word, 4);
    }
    if (bits == 6)
        for (int half = 0; half < 2; ++half) {
            std::uint8_t word[4] = {};
            for (int k = 0; k < 16; ++k)
                word[k % 4] = static_cast<std::uint8_t>(word[k % 4] | (values[16 * half + k] >> 4 & 3) << (k / 4 * 2));
            std::memcpy(high + half * kPanel * 4, word, 4);
        }
}

void write_block(Format format, const std::uint8_t *block, char *group, std::int64_t lane) {
    const BlockShape shape = BlockShape::of(format);
    if (shape.group_columns == 256) return write_k_block(format, block, group, lane);
    // In the file: scale and offset, q5's fifth bits (column k in bit k), then bytes as they lie in a piece.
    const std::int64_t num_heads = shape.has_offset ? 2 : 1;
    for (std::int64_t h = 0; h < num_heads; ++h) std::memcpy(group + (h * kPanel + lane) * 2, block + h * 2, 2);
    block += num_heads * 2;
    char *integers = group + shape.piece_head_bytes;
    if (shape.bits == 5) {
        std::uint8_t values[kPieceColumns];
        for (int k = 0; k < kPieceColumns; ++k)
            values[k] = static_cast<std::uint8_t>((block[4 + k % 16] >> (k / 16 * 4) & 15) |
                                                  (block[k / 8] >> (k % 8) & 1) << 4);
        return write_integers(5, values, integers, lane);
    }
    for (std::int64_t u = 0; u < shape.bits; ++u) std::memcpy(integers + (u * kPanel + lane) * 4, block + u * 4, 4);
}

void read_block_row(const Weight &weight, const char *panel, std::int64_t lane, float *out) {
    const BlockShape shape = BlockShape::of(weight.format);
    for (std::int64_t k = 0; k < weight.cols; ++k) {
        const char *group = panel + k / weight.group * shape.group_bytes(weight.group);
        const char *piece = group + shape.group_head_bytes + k % weight.group / kPieceColumns * shape.piece_bytes;
        float scale, offset = 0;
        if (weight.format == Format::w4) {
            scale = number(group, Dtype::f32, lane);
            offset = number(group, Dtype::f32, kPanel + lane);
        } else if (shape.num_scales == 2) {
            const char s = piece[k % kPieceColumns / 16 * kPanel + lane];
            scale = number(group, Dtype::f16, lane) * static_cast<float>(static_cast<std::int8_t>(s));
        } else if (shape.group_head_bytes) {
            const auto *bytes = reinterpret_cast<const std::uint8_t *>(piece);
            scale = number(group, Dtype::f16, lane) * static_cast<float>(bytes[lane]);
            offset = -(number(group, Dtype::f16, kPanel + lane) * static_cast<float>(bytes[kPanel + lane]));
        } else {
            scale = number(piece, Dtype::f16, lane);
            if (shape.has_offset) offset = number(piece, Dtype::f16, kPanel + lane);
        }
        const int integer = read_integer(shape, piece + shape.piece_head_bytes, lane, k % kPieceColumns);
        out[k] = static_cast<float>(integer) * scale;
        if (shape.has_offset) out[k] += offset;
    }
}

}  // namespace headrace
