// x @ weight.T + bias over packed weights: few tokens, which are a stream of the weights. linear_many.cpp does many.
#include "linear_common.h"
#include "unroll.h"

namespace headrace::HEADRACE_TIER {

size_t linear_many_scratch(const LinearArgs &);
void linear_many(const LinearArgs &, const Context &);

namespace {

// Scratch: words of x.

// Tokens that share a pass over a panel: each has kChains vectors of sums in registers. Where those are few, tokens take
// turns, and all but the first read the panel from the cache.
constexpr int kShared = kLanes == 16 ? kFewTokens : 1;

// One panel with kRows tokens, from `first` on.
template <class Reader, class T, int kRows>
INLINE void tile(const LinearArgs &args, const uint32_t *words, int64_t num_words, const float *scales, int64_t panel,
                 int64_t first) {
    using Acc = typename Reader::Acc;
    const Weight &weight = args.weight;
    Reader reader(weight, weight.data + panel * weight.panel_bytes);
    Acc acc[kRows][kChains][kVecs] = {};
    RowPointers<kRows> x(words + first * num_words, num_words * 4);
    for (int64_t j = 0; j < num_words; j += kChains) {
        typename Reader::Word w[kChains][kVecs];
        reader.next(w);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
            for (int c = 0; c < kChains; ++c)
                for (int v = 0; v < kVecs; ++v) acc[r][c][v] = Reader::mac(acc[r][c][v], w[c][v], load<uint32_t>(x[r] + c * 4));
        x.advance(kChains * 4);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVecs; ++v) {
            const int64_t row = panel * kPanel + v * kLanes;
            if (row >= weight.rows) continue;
            const Acc total = (acc[r][0][v] + acc[r][1][v]) + (acc[r][2][v] + acc[r][3][v]);
            put<T>(args, first + r, row, finish(weight, total, row, scales[first + r]));
        }
}

template <class Reader, class T>
void few_tokens(const LinearArgs &args, const Context &context) {
    const Weight &weight = args.weight;
    const int64_t num_words = weight.padded_cols / Reader::kColumns;
    auto *words = reinterpret_cast<uint32_t *>(context.scratch);
    Items items((weight.rows + kPanel - 1) / kPanel, context);
    int64_t panel;
    if (!items.next(&panel)) return;
    float scales[kFewTokens];
    for (int64_t token = 0; token < args.num_tokens; ++token)
        read_x<Reader>(row_of_x<T>(args, token), weight.cols, num_words, words + token * num_words, scales + token);
    with_count<1, Reader::kIsCheap ? kShared : 1>(args.num_tokens, [&](auto count) {
        constexpr int kRows = decltype(count)::value;
        do {
            for (int64_t token = 0; token < args.num_tokens; token += kRows)
                tile<Reader, T, kRows>(args, words, num_words, scales, panel, token);
        } while (items.next(&panel));
    });
}

struct Path {
    template <class Reader, class T>
    static void run(const LinearArgs &args, const Context &context) {
        if (args.num_tokens <= (Reader::kIsCheap ? kFewTokens : 1))
            few_tokens<Reader, T>(args, context);
        else
            linear_many(args, context);
    }
};

}  // namespace

size_t linear_scratch(const LinearArgs &args) {
    const size_t few = static_cast<size_t>(kFewTokens * args.weight.padded_cols) * 4, many = linear_many_scratch(args);
    return few > many ? few : many;
}

void linear(const LinearArgs &args, const Context &context) { run_path<Path>(args, context); }

}  // namespace headrace::HEADRACE_TIER
