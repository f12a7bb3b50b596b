// Rows that are computed number by number, cut so that a single row is work for all threads too.
#pragma once

#include "simd.h"

namespace headrace::HEADRACE_TIER {
namespace {

// Calls body(row, first column, behind its last) for this thread's pieces of num_rows rows of n numbers.
template <class Body>
INLINE void each_piece(int64_t num_rows, int64_t n, const Context &context, const Body &body) {
    const int64_t pieces = (n + kPiece - 1) / kPiece;
    int64_t begin, end;
    share(num_rows * pieces, context, &begin, &end);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t first = item % pieces * kPiece;
        body(item / pieces, first, first + kPiece < n ? first + kPiece : n);
    }
}

}  // namespace
}  // namespace headrace::HEADRACE_TIER
