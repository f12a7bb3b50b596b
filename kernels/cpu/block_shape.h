// How weights of 4 to 8 bits with scales for small groups of columns are packed: GGUF's blocks and w4.
//
// A panel (16 rows) is a run of groups; a group is a head, if the format has one for it, and pieces of 32 columns:
//   piece   its own head, then integers: [8][16][4] int8 for q8_0, else [4][16][4] bytes, of which byte (u, row, b)
//           holds the low four bits of column 4 u + b in its low and of column 4 u + b + 16 in its high half
//   q5_*    behind them the fifth bits, [16] words: column 4 u + b in bit 8 b + u
//   q6_k    behind them bits five and six, [2][16] words: column 16 h + 4 u + b in bits 8 b + 2 u of word h
// Heads, each a row of 16 numbers (one a row of the panel) for
//   q8_0, q4_0, q5_0   piece: scale f16
//   q4_1, q5_1         piece: scale f16, offset f16
//   w4                 group: scale f32, offset f32
//   q4_k, q5_k         group of 256 columns: d f16, m f16; piece: s uint8, t uint8; scale = d s, offset = -(m t)
//   q6_k               group of 256 columns: d f16; piece: s int8 for its first 16 and s int8 for its last 16 columns
// A weight is scale * (integer - zero) + offset.
#pragma once

#include "kernels.h"

namespace headrace {

constexpr int64_t kPieceColumns = 32;

struct BlockShape {
    int bits, zero;
    bool has_offset;
    int num_scales;          // of a piece's 32 columns
    int64_t group_columns;   // 0: Weight::group
    int64_t group_head_bytes, piece_head_bytes, piece_bytes;
    int64_t file_bytes;      // of a block of as many columns in a GGUF file

    static constexpr BlockShape of(Format format) {
        constexpr int64_t kF16 = 2 * kPanel, kByte = kPanel, kF32 = 4 * kPanel;
        switch (format) {
            case Format::q8_0: return make(8, 0, false, 1, 32, 0, kF16, 34);
            case Format::q4_0: return make(4, 8, false, 1, 32, 0, kF16, 18);
            case Format::q4_1: return make(4, 0, true, 1, 32, 0, 2 * kF16, 20);
            case Format::q5_0: return make(5, 16, false, 1, 32, 0, kF16, 22);
            case Format::q5_1: return make(5, 0, true, 1, 32, 0, 2 * kF16, 24);
            case Format::q4_k: return make(4, 0, true, 1, 256, 2 * kF16, 2 * kByte, 144);
            case Format::q5_k: return make(5, 0, true, 1, 256, 2 * kF16, 2 * kByte, 176);
            case Format::q6_k: return make(6, 32, false, 2, 256, kF16, 2 * kByte, 210);
            default: return make(4, 0, true, 1, 0, 2 * kF32, 0, 0);  // w4
        }
    }

    constexpr int64_t group_bytes(int64_t columns) const {
        return group_head_bytes + columns / kPieceColumns * piece_bytes;
    }

  private:
    static constexpr BlockShape make(int bits, int zero, bool has_offset, int num_scales, int64_t columns,
                                     int64_t group_head, int64_t piece_head, int64_t file) {
        const int64_t integers = kPanel * kPieceColumns * bits / 8;
        return {bits, zero, has_offset, num_scales, columns, group_head, piece_head, piece_head + integers, file};
    }
};

// Formats that are packed so, and those of them that a GGUF file may hold.
static constexpr bool has_blocks(Format format) { return format >= Format::q8_0; }
static constexpr bool is_gguf(Format format) { return has_blocks(format) && format != Format::w4; }

}  // namespace headrace
