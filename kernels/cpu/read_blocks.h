// Reads weights in blocks (block_shape.h), a piece of 32 columns and a vector of rows at a time.
#pragma once

#include "block_shape.h"
#include "simd.h"

namespace headrace::HEADRACE_TIER {
namespace {

template <Format format>
struct BlockReader {
    static constexpr BlockShape kShape = BlockShape::of(format);
    static constexpr int kVecs = kPanel / kLanes;  // vectors that hold a number for each row of a panel

    const char *data;      // what comes next: a head; behind next_piece the integers of the piece
    int64_t group_pieces;  // pieces that share a group's head
    int64_t piece = 0;     // of the group
    V scale[kShape.num_scales][kVecs] = {}, offset[kVecs] = {};
    V group_scale[kVecs] = {}, group_offset[kVecs] = {};

    BlockReader(const Weight &weight, const char *panel)
        : data(panel), group_pieces((kShape.group_columns ? kShape.group_columns : weight.group) / kPieceColumns) {}

    // Read the heads of the next piece.
    INLINE void next_piece() {
        if (kShape.group_head_bytes && piece == 0) {
            for (int v = 0; v < kVecs; ++v) read_group_head(v);
            data += kShape.group_head_bytes;
        }
        for (int v = 0; v < kVecs; ++v) read_piece_head(v);
        data += kShape.piece_head_bytes;
        if (kShape.group_head_bytes) piece = piece + 1 == group_pieces ? 0 : piece + 1;
    }

    // Leave the integers behind.
    INLINE void end_piece() { data += kShape.piece_bytes - kShape.piece_head_bytes; }

    // The integers of columns 4 u to 4 u + 3 for a vector of rows, a byte each: int8 for q8_0, else unsigned.
    INLINE I quad(int u, int v) const {
        const char *rows = data + v * kLanes * 4;
        if constexpr (kShape.bits == 8) {
            return load<I>(rows + u * kPanel * 4);
        } else {
            I word = (load<I>(rows + u % 4 * kPanel * 4) >> (u / 4 * 4)) & splat_word(0x0F0F0F0F);
            const char *high = rows + 4 * kPanel * 4;
            if constexpr (kShape.bits == 5) word |= ((load<I>(high) >> u) & splat_word(0x01010101)) << 4;
            if constexpr (kShape.bits == 6)
                word |= ((load<I>(high + u / 4 * kPanel * 4) >> (u % 4 * 2)) & splat_word(0x03030303)) << 4;
            return word;
        }
    }

  private:
    INLINE void read_group_head(int v) {
        if constexpr (format == Format::w4) {
            scale[0][v] = load<V>(data + v * kLanes * 4);
            offset[v] = load<V>(data + (kPanel + v * kLanes) * 4);
        } else {
            const auto *halves = reinterpret_cast<const f16 *>(data) + v * kLanes;
            group_scale[v] = load_as_float(halves);
            if constexpr (kShape.has_offset) group_offset[v] = load_as_float(halves + kPanel);
        }
    }

    INLINE void read_piece_head(int v) {
        if constexpr (format == Format::w4) {
            return;
        } else if constexpr (kShape.group_head_bytes) {
            const char *bytes = data + v * kLanes;
            if constexpr (kShape.has_offset) {
                scale[0][v] = group_scale[v] * load_bytes<uint8_t>(bytes);
                offset[v] = -(group_offset[v] * load_bytes<uint8_t>(bytes + kPanel));
            } else {
                scale[0][v] = group_scale[v] * load_bytes<int8_t>(bytes);
                scale[1][v] = group_scale[v] * load_bytes<int8_t>(bytes + kPanel);
            }
        } else {
            const auto *halves = reinterpret_cast<const f16 *>(data) + v * kLanes;
            scale[0][v] = load_as_float(halves);
            if constexpr (kShape.has_offset) offset[v] = load_as_float(halves + kPanel);
        }
    }

    template <class T>
    static INLINE V load_bytes(const char *bytes) {
        const I numbers = bits_as<I>(widen(load<B>(bytes)));
        return to_float(T(-1) < 0 ? (numbers << 24) >> 24 : numbers);
    }
};

}  // namespace
}  // namespace headrace::HEADRACE_TIER
