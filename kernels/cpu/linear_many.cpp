// x @ weight.T + bias over packed weights: many tokens, in tiles that are held in registers.
#include "linear_common.h"

namespace headrace::HEADRACE_TIER {
namespace {

// A tile is kTileRows tokens by kTilePanels panels of accumulators in registers.
constexpr int kTilePanels = kLanes == 16 ? 2 : 1;
constexpr int kTileVecs = kTilePanels * kVecs;
constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 2;
constexpr int64_t kBlockRows = kLanes == 4 ? 64 : 120;  // tokens that share one pass over the weights
constexpr int64_t kBlockWords = 512;                    // words of a panel in L1 and L2 at a time

// Scratch: words of x [rows][chain][words / 4], a piece of a tile of panels [chain][words / 4][tile vectors], sums
// [rows][chain][tile vectors], scales of x [rows].

struct Layout {
    size_t panels, sums, scales, end;
};

Layout layout_of(int64_t num_rows, int64_t num_words) {
    const int64_t tile_bytes = kTilePanels * kPanel * 4;
    Layout layout;
    layout.panels = (static_cast<size_t>(num_rows * num_words) * 4 + 63) / 64 * 64;
    layout.sums = layout.panels + static_cast<size_t>(kBlockWords * tile_bytes);
    layout.scales = layout.sums + static_cast<size_t>(num_rows * kChains * tile_bytes);
    layout.end = layout.scales + static_cast<size_t>(num_rows) * 4;
    return layout;
}

// sums[r] += the products of `count` words of rows r = 0 .. kRows - 1 with a tile of panels, for one chain.
template <class Reader, int kRows>
INLINE void tile(const uint32_t *x, int64_t x_stride, const char *w, int64_t count, char *sums, int64_t sum_stride) {
    using Acc = typename Reader::Acc;
    Acc acc[kRows][kTileVecs];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kTileVecs; ++v) acc[r][v] = load<Acc>(sums + r * sum_stride + v * kLanes * 4);
    for (int64_t j = 0; j < count; ++j, w += kTileVecs * kLanes * 4) {
        typename Reader::Word word[kTileVecs];
        for (int v = 0; v < kTileVecs; ++v) word[v] = load<typename Reader::Word>(w + v * kLanes * 4);
        for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < kTileVecs; ++v) acc[r][v] = Reader::mac(acc[r][v], word[v], x[r * x_stride + j]);
    }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kTileVecs; ++v) store(sums + r * sum_stride + v * kLanes * 4, acc[r][v]);
}

template <class Reader, class T>
void many_tokens(const LinearArgs &args, const Context &context) {
    using Acc = typename Reader::Acc;
    const Weight &weight = args.weight;
    const int64_t num_words = weight.padded_cols / Reader::kColumns, chain_words = num_words / kChains;
    const int64_t block_rows = args.num_tokens < kBlockRows ? args.num_tokens : kBlockRows;
    const Layout layout = layout_of(block_rows, num_words);
    auto *words = reinterpret_cast<uint32_t *>(context.scratch);
    char *panels = context.scratch + layout.panels, *sums = context.scratch + layout.sums;
    auto *scales = reinterpret_cast<float *>(context.scratch + layout.scales);
    constexpr int64_t kTileBytes = kTileVecs * kLanes * 4, kSumStride = kChains * kTileBytes;

    const int64_t num_panels = (weight.rows + kPanel - 1) / kPanel;
    int64_t begin, end;
    share((num_panels + kTilePanels - 1) / kTilePanels, context, &begin, &end);
    if (begin == end) return;
    for (int64_t first = 0; first < args.num_tokens; first += block_rows) {
        const int64_t rows = args.num_tokens - first < block_rows ? args.num_tokens - first : block_rows;
        for (int64_t r = 0; r < rows; ++r)
            read_x<Reader>(static_cast<const T *>(args.x) + (first + r) * weight.cols, weight.cols, num_words,
                           words + r * num_words, scales + r,
                           [=](int64_t j) { return j % kChains * chain_words + j / kChains; });
        for (int64_t t = begin; t < end; ++t) {
            // A tile that sticks out repeats its last panel; `put` drops what it computes.
            const int64_t panel = t * kTilePanels;
            Reader readers[2] = {
                Reader(weight, weight.data + panel * weight.panel_bytes),
                Reader(weight, weight.data + (panel + 1 < num_panels ? panel + 1 : panel) * weight.panel_bytes)};
            memset(sums, 0, static_cast<size_t>(rows * kSumStride));
            for (int64_t j = 0; j < num_words; j += kBlockWords) {
                const int64_t count = (num_words - j < kBlockWords ? num_words - j : kBlockWords) / kChains;
                for (int p = 0; p < kTilePanels; ++p)
                    for (int64_t i = 0; i < count; ++i) {
                        typename Reader::Word w[kChains][kVecs];
                        readers[p].next(w);
                        for (int c = 0; c < kChains; ++c)
                            for (int v = 0; v < kVecs; ++v)
                                store(panels + (c * count + i) * kTileBytes + (p * kVecs + v) * kLanes * 4, w[c][v]);
                    }
                for (int64_t r = 0; r < rows;) {
                    const int64_t left = rows - r;
                    for (int c = 0; c < kChains; ++c) {
                        const uint32_t *x = words + r * num_words + c * chain_words + j / kChains;
                        const char *w = panels + c * count * kTileBytes;
                        char *sum = sums + r * kSumStride + c * kTileBytes;
                        if (left >= kTileRows)
                            tile<Reader, kTileRows>(x, num_words, w, count, sum, kSumStride);
                        else if (left >= 4 && kTileRows > 4)
                            tile<Reader, 4>(x, num_words, w, count, sum, kSumStride);
                        else if (left >= 2)
                            tile<Reader, 2>(x, num_words, w, count, sum, kSumStride);
                        else
                            tile<Reader, 1>(x, num_words, w, count, sum, kSumStride);
                    }
                    r += left >= kTileRows ? kTileRows : left >= 4 && kTileRows > 4 ? 4 : left >= 2 ? 2 : 1;
                }
            }
            for (int64_t r = 0; r < rows; ++r)
                for (int v = 0; v < kTileVecs; ++v) {
                    Acc acc[kChains];
                    for (int c = 0; c < kChains; ++c)
                        acc[c] = load<Acc>(sums + r * kSumStride + c * kTileBytes + v * kLanes * 4);
                    const int64_t row = panel * kPanel + v * kLanes;
                    if (row >= weight.rows) continue;
                    const Acc total = (acc[0] + acc[1]) + (acc[2] + acc[3]);
                    put<T>(args, first + r, row, finish(weight, total, row, scales[r]));
                }
        }
    }
}

struct Path {
    template <class Reader, class T>
    static void run(const LinearArgs &args, const Context &context) {
        many_tokens<Reader, T>(args, context);
    }
};

}  // namespace

size_t linear_many_scratch(const LinearArgs &args) {
    const int64_t rows = args.num_tokens < kBlockRows ? args.num_tokens : kBlockRows;
    return layout_of(rows, args.weight.padded_cols).end;
}

void linear_many(const LinearArgs &args, const Context &context) { run_path<Path>(args, context); }

}  // namespace headrace::HEADRACE_TIER
