// Packed weights: one layout that serves a single token (a stream of whole cache lines) and large batches.
//
// Rows (outputs) come in panels of 16; a panel is one contiguous stream. Inside, for ascending column k:
//   f32    [k][16] float
//   bf16   [k / 2][16][2], pairs of columns, as a bf16 dot product reads them
//   f16    [k][16]
//   i8     [k / 4][16][4] int8, four columns in the order 0, 2, 1, 3: the even bytes are the first pair
//   GGUF's blocks and w4: see block_shape.h
// i8 has a float scale and the sum of its integers for each row in arrays of their own. Padding is zero.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "memory.h"

namespace headrace {

// Bytes that a packed weight takes, all its arrays. Throws std::invalid_argument for a shape that it cannot have.
std::int64_t packed_bytes(Format format, std::int64_t rows, std::int64_t cols, std::int64_t group);

// Owns a packed weight. Rows are written once, in any order, by whole rows.
class PackedWeight {
  public:
    PackedWeight(Format format, std::int64_t rows, std::int64_t cols, std::int64_t group);

    // Round (or, for i8, quantize to the nearest of 255 levels) dense rows [num_rows, cols].
    // Throws std::invalid_argument for a format of 4-bit or GGUF blocks, and for a NaN or an infinity unless
    // any_value.
    void write_dense(std::int64_t start, std::int64_t num_rows, const void *data, Dtype dtype, bool any_value);

    // GGUF blocks as they stand in the file, [num_rows, cols / 32] blocks.
    void write_blocks(std::int64_t start, std::int64_t num_rows, const std::uint8_t *blocks);

    // i8: weight = values * scales[row]; values [num_rows, cols] in [-127, 127].
    void write_int8(std::int64_t start, std::int64_t num_rows, const std::int8_t *values, const float *scales);

    // w4: weight = scale * value + offset; values [num_rows, cols] in [0, 15]; scales, offsets
    // [num_rows, ceil(cols / group)].
    void write_int4(std::int64_t start, std::int64_t num_rows, const std::uint8_t *values, const float *scales,
                    const float *offsets);

    // One row as floats [cols].
    void read_row(std::int64_t row, float *out) const;

    const Weight &weight() const { return weight_; }
    std::int64_t num_bytes() const { return static_cast<std::int64_t>(memory_.num_bytes); }
    const void *data() const { return memory_.data; }

  private:
    void check_rows(std::int64_t start, std::int64_t num_rows) const;
    char *panel(std::int64_t row) const { return memory_.data + row / kPanel * weight_.panel_bytes; }
    void write_int8_row(std::int64_t row, const std::int8_t *values, float scale);

    Allocation memory_;
    Weight weight_;
};

}  // namespace headrace
