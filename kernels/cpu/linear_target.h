// Where rows of x of a linear product come from, and where the sums of a tile go.
#pragma once

#include "simd.h"

namespace headrace::HEADRACE_TIER {
namespace {

template <class T>
INLINE const T *row_of_x(const LinearArgs &args, int64_t token) {
    return static_cast<const T *>(args.x) + (args.x_rows ? args.x_rows[token] : token) * args.x_stride;
}

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
