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

// body(Int<count>) for a count of at least kLeast; if it is more than kMost, of kMost.
template <int kLeast, int kMost, class Body>
INLINE void with_count(int64_t count, const Body &body) {
    if constexpr (kMost > kLeast)
        if (count < kMost) return with_count<kLeast, kMost - 1>(count, body);
    body(Int<kMost>{});
}

// Rows that are a stride apart, walked side by side. An address can be a pointer and once or twice a stride, so a pointer
// serves three rows; GCC, left alone, keeps one for each, more than there are registers for.
template <int kRows>
class RowPointers {
  public:
    INLINE RowPointers(const void *first, int64_t stride) : stride_(stride) {
        for (int i = 0; i < kNum; ++i) at_[i] = static_cast<const char *>(first) + 3 * i * stride;
    }
    INLINE const char *operator[](int row) const { return at_[row / 3] + row % 3 * stride_; }
    INLINE void advance(int64_t bytes) {
        for (int i = 0; i < kNum; ++i) {
            at_[i] += bytes;
            asm("" : "+r"(at_[i]));  // hides where it came from
        }
    }

  private:
    static constexpr int kNum = (kRows + 2) / 3;
    const char *at_[kNum];
    int64_t stride_;
};

}  // namespace
}  // namespace headrace::HEADRACE_TIER
