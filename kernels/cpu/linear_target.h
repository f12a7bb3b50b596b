// Where rows of x of a linear product come from, how they are cut into blocks, and where the sums of a tile go.
#pragma once

#include "items.h"
#include "simd.h"

namespace headrace::HEADRACE_TIER {
namespace {

template <class T>
INLINE const T *row_of_x(const LinearArgs &args, int64_t token) {
    return static_cast<const T *>(args.x) + (args.x_rows ? args.x_rows[token] : token) * args.x_stride;
}

// Tokens as nearly even blocks of whole tiles, the last tile excepted, at most most_rows each (a multiple of tile_rows).
struct Blocks {
    int64_t num_tokens, tile_rows, num_tiles, count;

    Blocks(int64_t tokens, int64_t tile, int64_t most_rows)
        : num_tokens(tokens), tile_rows(tile), num_tiles((tokens + tile - 1) / tile),
          count((tokens + most_rows - 1) / most_rows) {}

    int64_t first_of(int64_t block) const {
        const int64_t token = num_tiles * block / count * tile_rows;
        return token < num_tokens ? token : num_tokens;
    }
    int64_t most_rows() const { return (num_tiles + count - 1) / count * tile_rows; }
};

template <class T>
struct Target {
    T *out;                // of the tile's first row and output
    int64_t stride, left;  // from one row to the next; outputs that are left from here on
    const float *bias;     // of the tile's first output, or null

    // kLanes outputs of row r.
    INLINE void put(int64_t r, int v, V value) const {
        const int64_t here = left - v * kLanes;
        T *to = out + r * stride + v * kLanes;
        if (here >= kLanes) {
            if (bias) value = value + load<V>(bias + v * kLanes);
            store_from_float(to, value);
        } else if (here > 0) {
            if (bias) value = value + load_tail(bias + v * kLanes, here);
            store_tail(to, value, here);
        }
    }
};

// The target of rows of out from `token` and of outputs from `row` on.
template <class T>
INLINE Target<T> target_of(const LinearArgs &args, int64_t token, int64_t row) {
    const int64_t rows = args.weight.rows;
    return {static_cast<T *>(args.out) + token * args.out_stride + row, args.out_stride, rows - row,
            args.bias ? args.bias + row : nullptr};
}

}  // namespace
}  // namespace headrace::HEADRACE_TIER
