// What a thread takes of the items of one record: its share, piece by piece, then pieces of the others' shares that nobody
// has begun. So a thread whose CPU is slowed down by others keeps nobody waiting; which thread does an item changes no bit.
#pragma once

#include "simd.h"

namespace headrace::HEADRACE_TIER {
namespace {

class Items {
  public:
    Items(int64_t num_items, const Context &context) : context_(context), num_items_(num_items) {}

    // The next item; false if there is none left.
    INLINE bool next(int64_t *item) {
        if (at_ == end_ && !next_piece()) return false;
        *item = at_++;
        return true;
    }

  private:
    static constexpr int64_t kPieces = 8;  // of a share

    bool next_piece() {
        if (!context_.begun || context_.num_threads == 1) {
            share(num_items_, context_, &at_, &end_);
            if (turn_++ > 0) at_ = end_;
            return at_ < end_;
        }
        for (; turn_ < context_.num_threads; ++turn_) {
            const int owner = (context_.thread + turn_) % context_.num_threads;
            int64_t first, last;
            share(num_items_, context_, &first, &last, owner);
            if (first == last) continue;
            const int64_t size = (last - first + kPieces - 1) / kPieces;
            const int64_t piece = begin_piece(&context_.begun[owner].count, (last - first + size - 1) / size);
            if (piece < 0) continue;
            at_ = first + piece * size;
            end_ = at_ + size < last ? at_ + size : last;
            return true;
        }
        return false;
    }

    // The number of the next piece of so many, or -1.
    int64_t begin_piece(uint64_t *count, int64_t num_pieces) const {
        const uint64_t step = static_cast<uint64_t>(context_.step) << 32;
        uint64_t seen = __atomic_load_n(count, __ATOMIC_RELAXED);
        for (;;) {
            const uint64_t piece = (seen & ~0xFFFFFFFFull) == step ? seen & 0xFFFFFFFFull : 0;
            if (piece >= static_cast<uint64_t>(num_pieces)) return -1;
            if (__atomic_compare_exchange_n(count, &seen, step | (piece + 1), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
                return static_cast<int64_t>(piece);
        }
    }

    const Context &context_;
    int64_t num_items_, at_ = 0, end_ = 0;
    int turn_ = 0;
};

}  // namespace
}  // namespace headrace::HEADRACE_TIER
