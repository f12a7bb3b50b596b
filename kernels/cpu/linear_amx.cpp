// x @ weight.T + bias over packed weights, in AMX's tiles: bf16 times bf16, and int8 for many tokens. All other kernels
// are those of the tier below, HEADRACE_BASE_TIER.
//
// A step multiplies up to 32 tokens, 16 words of columns (pairs or quads) and two panels. Each output adds its steps in
// ascending order, and bf16 takes this way for a single token too: a row of the result depends on its own row of x
// only, bit for bit. (Sums of integers are the same in any order: few tokens of int8 take the tier's own way.)
#include "amx.h"
#include "linear_common.h"

namespace headrace::HEADRACE_BASE_TIER {
const Kernels *table();
}

namespace headrace::HEADRACE_TIER {
namespace {

constexpr int kTilePanels = 2;
constexpr int64_t kStepWords = kTileBytes / 4;               // of columns
constexpr int64_t kStepBytes = kStepWords * kPanel * 4;      // of a panel
constexpr int64_t kSumBytes = kTilePanels * kPanel * 4;      // of one row
constexpr int64_t kBlockRows = 128;                          // tokens that share one pass over the weights
constexpr int64_t kPieceSteps = 64;                          // at a time: a block's rows of so many stay in L2
static_assert(kLanes == kPanel && kVecs == 1);

// Scratch: words of x [block rows][padded words + kPad], the last step of two panels if it is not whole, sums
// [block rows][2 panels], scales of x [block rows].
struct Layout {
    size_t rests, sums, scales, end;
};

int64_t padded_words(int64_t num_words) { return (num_words + kStepWords - 1) / kStepWords * kStepWords; }

Layout layout_of(int64_t num_tokens, int64_t num_words) {
    const int64_t rows = num_tokens < kBlockRows ? num_tokens : kBlockRows;
    Layout layout;
    layout.rests = (static_cast<size_t>(rows * (padded_words(num_words) + kPad)) * 4 + 63) / 64 * 64;
    layout.sums = layout.rests + kTilePanels * kStepBytes;
    layout.scales = layout.sums + static_cast<size_t>(rows * kSumBytes);
    layout.end = layout.scales + static_cast<size_t>(rows) * 4;
    return layout;
}

// Registers: sums 0 to 3, two tiles of rows 4 and 5, two of panels 6 and 7. `rows` are up to 32.
void set_rows(int64_t rows) {
    TileShapes shapes;
    const auto first = static_cast<uint8_t>(rows < kTileRows ? rows : kTileRows);
    const auto second = static_cast<uint8_t>(rows > kTileRows ? rows - kTileRows : kTileRows);
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = first;
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = second;
    set_tiles(shapes);
}

// Add the steps of a piece to the sums of up to 32 rows. `rests`: what stands for the last step, or null.
template <class Acc, bool kIsTall>
INLINE void add_piece(const char *x, int64_t x_bytes, const char *const *panels, const char *rests, int64_t num_steps,
                      bool is_first, bool fetches, char *sums) {
    const int64_t half = kTileRows * kSumBytes;
    if (is_first) {
        zero_tile<0>(), zero_tile<1>();
        if (kIsTall) zero_tile<2>(), zero_tile<3>();
    } else {
        load_tile<0>(sums, kSumBytes), load_tile<1>(sums + kPanel * 4, kSumBytes);
        if (kIsTall) load_tile<2>(sums + half, kSumBytes), load_tile<3>(sums + half + kPanel * 4, kSumBytes);
    }
    for (int64_t step = 0; step < num_steps; ++step) {
        const bool is_rest = rests != nullptr && step == num_steps - 1;
        const char *left = is_rest ? rests : panels[0] + step * kStepBytes;
        const char *right = is_rest ? rests + kStepBytes : panels[1] + step * kStepBytes;
        if (fetches)
            for (int64_t line = 0; line < kStepBytes; line += 64) {
                __builtin_prefetch(left + kPrefetch + line);
                __builtin_prefetch(right + kPrefetch + line);
            }
        load_tile<6>(left, kTileBytes), load_tile<7>(right, kTileBytes);
        load_tile<4>(x + step * kTileBytes, x_bytes);
        add_products<0, 4, 6>(Acc{}), add_products<1, 4, 7>(Acc{});
        if (kIsTall) {
            load_tile<5>(x + kTileRows * x_bytes + step * kTileBytes, x_bytes);
            add_products<2, 5, 6>(Acc{}), add_products<3, 5, 7>(Acc{});
        }
    }
    store_tile<0>(sums, kSumBytes), store_tile<1>(sums + kPanel * 4, kSumBytes);
    if (kIsTall) store_tile<2>(sums + half, kSumBytes), store_tile<3>(sums + half + kPanel * 4, kSumBytes);
}

template <class Reader, class T>
void multiply(const LinearArgs &args, const Context &context) {
    using Acc = typename Reader::Acc;
    const Weight &weight = args.weight;
    const int64_t num_words = weight.padded_cols / Reader::kColumns, padded = padded_words(num_words);
    const int64_t num_steps = padded / kStepWords;
    const int64_t num_blocks = (args.num_tokens + kBlockRows - 1) / kBlockRows;
    const int64_t num_panels = (weight.rows + kPanel - 1) / kPanel;
    const int64_t num_pairs = (num_panels + kTilePanels - 1) / kTilePanels;
    const Layout layout = layout_of(args.num_tokens, num_words);
    char *rests = context.scratch + layout.rests, *sums = context.scratch + layout.sums;
    auto *copy = reinterpret_cast<uint32_t *>(context.scratch);
    auto *scales = reinterpret_cast<float *>(context.scratch + layout.scales);
    memset(rests, 0, kTilePanels * kStepBytes);

    int64_t block = -1, rows = 0, shaped = 0;
    Items items(num_blocks * num_pairs, context);
    const bool is_copied = __is_same(Acc, I) || args.x_rows || weight.cols != padded * Reader::kColumns ||
                           (args.num_tokens > kFewTokens && args.x_stride / Reader::kColumns % kBadStride == 0);
    const int64_t x_bytes = is_copied ? (padded + kPad) * 4 : args.x_stride * static_cast<int64_t>(sizeof(T));
    const char *x = context.scratch;
    for (int64_t item; items.next(&item);) {
        const int64_t first = item / num_pairs * kBlockRows, panel = item % num_pairs * kTilePanels;
        if (item / num_pairs != block) {
            block = item / num_pairs;
            rows = args.num_tokens - first < kBlockRows ? args.num_tokens - first : kBlockRows;
            if (!is_copied) x = reinterpret_cast<const char *>(row_of_x<T>(args, first));
            for (int64_t r = 0; is_copied && r < rows; ++r)
                read_x<Reader>(row_of_x<T>(args, first + r), weight.cols, padded, copy + r * (padded + kPad), scales + r);
        }
        // A pair that sticks out repeats its last panel; `put` drops what it computes.
        const char *panels[kTilePanels];
        for (int p = 0; p < kTilePanels; ++p) {
            panels[p] = weight.data + (panel + p < num_panels ? panel + p : panel) * weight.panel_bytes;
            if (padded != num_words)
                memcpy(rests + p * kStepBytes, panels[p] + (num_steps - 1) * kStepBytes,
                       static_cast<size_t>(num_words - (padded - kStepWords)) * kPanel * 4);
        }
        for (int64_t step = 0; step < num_steps; step += kPieceSteps) {
            const bool is_last = step + kPieceSteps >= num_steps;
            const int64_t count = is_last ? num_steps - step : kPieceSteps;
            const char *here[kTilePanels] = {panels[0] + step * kStepBytes, panels[1] + step * kStepBytes};
            for (int64_t r = 0; r < rows; r += 2 * kTileRows) {
                const int64_t left = rows - r < 2 * kTileRows ? rows - r : 2 * kTileRows;
                if (left != shaped) set_rows(shaped = left);
                const auto add = left > kTileRows ? add_piece<Acc, true> : add_piece<Acc, false>;
                add(x + r * x_bytes + step * kTileBytes, x_bytes, here, is_last && padded != num_words ? rests : nullptr,
                    count, step == 0, r == 0, sums + r * kSumBytes);
            }
        }
        const int64_t row = panel * kPanel;
        const ScaledTarget<T> target{target_of<T>(args, first, row), scales,
                                     weight.scales ? weight.scales + row : nullptr,
                                     weight.sums ? weight.sums + row : nullptr};
        for (int64_t r = 0; r < rows; ++r)
            for (int p = 0; p < kTilePanels; ++p) target.put(r, p, load<Acc>(sums + r * kSumBytes + p * kPanel * 4));
    }
    release_tiles();
}

bool takes_tiles(const LinearArgs &args) {
    if (args.weight.format == Format::i8) return args.num_tokens > kFewTokens;
    return args.weight.format == Format::bf16 && args.dtype == Dtype::bf16;
}

void linear(const LinearArgs &args, const Context &context) {
    if (!takes_tiles(args)) return HEADRACE_BASE_TIER::table()->linear(args, context);
    if (args.weight.format == Format::bf16) return multiply<ReadDotBF16, bf16>(args, context);
    switch (args.dtype) {
        case Dtype::f32: return multiply<ReadInt8, float>(args, context);
        case Dtype::bf16: return multiply<ReadInt8, bf16>(args, context);
        case Dtype::f16: return multiply<ReadInt8, f16>(args, context);
    }
}

size_t linear_scratch(const LinearArgs &args) {
    // Of int8, fewer tokens than these take the tier's own way.
    const size_t below = HEADRACE_BASE_TIER::table()->linear_scratch(args);
    const int columns = args.weight.format == Format::i8 ? ReadInt8::kColumns : ReadDotBF16::kColumns;
    const size_t own = takes_tiles(args) ? layout_of(args.num_tokens, args.weight.padded_cols / columns).end : 0;
    return own > below ? own : below;
}

}  // namespace

const Kernels *table() {
    static const Kernels kernels = [] {
        Kernels changed = *HEADRACE_BASE_TIER::table();
        changed.linear = linear;
        changed.linear_scratch = linear_scratch;
        return changed;
    }();
    return &kernels;
}

}  // namespace headrace::HEADRACE_TIER
