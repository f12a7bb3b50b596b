// Loops over a tile. On AVX2 the index is a constant in each turn: GCC keeps an array in registers only if nothing else
// indexes it, and there a tile's sums would go to the stack and back with each piece of the columns.
#pragma once

#include "simd.h"

namespace headrace::HEADRACE_TIER {
namespace {

template <int n>
struct Int {
    static constexpr int value = n;
    constexpr operator int() const { return n; }
};

// body(i) for i in 0 .. n - 1.
template <int n, class Body>
INLINE void unroll(const Body &body) {
    if constexpr (kLanes != 8) {
        for (int i = 0; i < n; ++i) body(i);
    } else if constexpr (n > 0) {
        unroll<n - 1>(body);
        body(Int<n - 1>{});
    }
}

// body(row, vector) for each of a tile.
template <int rows, int vecs, class Body>
INLINE void unroll_tile(const Body &body) {
    if constexpr (kLanes != 8)
        for (int r = 0; r < rows; ++r)
            for (int v = 0; v < vecs; ++v) body(r, v);
    else
        unroll<rows * vecs>([&](auto i) INLINE_LAMBDA {
            body(Int<decltype(i)::value / vecs>{}, Int<decltype(i)::value % vecs>{});
        });
}

}  // namespace
}  // namespace headrace::HEADRACE_TIER
