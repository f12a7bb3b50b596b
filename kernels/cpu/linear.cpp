// x @ weight.T + bias over packed weights, for few tokens (a stream of the weights) and for many (tiles).
//
// Each output is the sum of four chains: chain c adds the words (columns, or pairs or quads of columns) c, c + 4,
// c + 8, ... in ascending order, and the end is (0 + 1) + (2 + 3). Both paths below keep to that, whatever the number
// of tokens and of threads, so a row of the result depends on its own row of x only, bit for bit.
#include "simd.h"

namespace headrace::HEADRACE_TIER {
namespace {

constexpr int kVecs = kPanel / kLanes;  // vectors that hold a number for each row of a panel
constexpr int kChains = 4;
constexpr int64_t kFewTokens = 5;    // at most so many take a panel one after another
constexpr int64_t kPrefetch = 4096;  // bytes ahead in the stream of weights

// Tile of the path for many tokens: kTileRows tokens by kTilePanels panels of accumulators in registers.
constexpr int kTilePanels = kLanes == 16 ? 2 : 1;
constexpr int kTileVecs = kTilePanels * kVecs;
constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 2;
constexpr int64_t kBlockRows = kLanes == 4 ? 64 : 120;  // tokens that share one pass over the weights
constexpr int64_t kBlockWords = 512;                    // words of a panel in L1 and L2 at a time

// ---- readers: a packed panel as words, four (one for each chain) at a time --------------------------------------
// Each has: Word (V or I), Acc, kColumns (columns in a word), kIsCheap (reading costs less than a tile's detour),
// next(Word[kChains][kVecs]), mac(acc, w, x word).

struct FloatProducts {
    using Word = V;
    using Acc = V;
    static constexpr int kColumns = 1;
    static constexpr bool kIsCheap = true;
    static INLINE Acc mac(Acc acc, Word w, uint32_t x) { return fma(w, splat(bits_as<float>(x)), acc); }
};

struct ReadF32 : FloatProducts {
    const char *data;
    ReadF32(const Weight &, const char *panel) : data(panel) {}
    INLINE void next(V (&w)[kChains][kVecs]) {
        for (int c = 0; c < kChains; ++c) {
            __builtin_prefetch(data + c * 64 + kPrefetch);
            for (int v = 0; v < kVecs; ++v) w[c][v] = load<V>(data + (c * kPanel + v * kLanes) * 4);
        }
        data += kChains * kPanel * 4;
    }
};

struct ReadF16 : FloatProducts {
    const char *data;
    ReadF16(const Weight &, const char *panel) : data(panel) {}
    INLINE void next(V (&w)[kChains][kVecs]) {
        for (int c = 0; c < kChains; c += 2) __builtin_prefetch(data + c * 32 + kPrefetch);
        for (int c = 0; c < kChains; ++c)
            for (int v = 0; v < kVecs; ++v)
                w[c][v] = load_as_float(reinterpret_cast<const f16 *>(data) + c * kPanel + v * kLanes);
        data += kChains * kPanel * 2;
    }
};

struct ReadBF16 : FloatProducts {
    const char *data;
    ReadBF16(const Weight &, const char *panel) : data(panel) {}
    INLINE void next(V (&w)[kChains][kVecs]) {
        const I high = splat_word(0xFFFF0000);
        for (int pair = 0; pair < kChains / 2; ++pair) {
            __builtin_prefetch(data + pair * 64 + kPrefetch);
            for (int v = 0; v < kVecs; ++v) {
                const I both = load<I>(data + (pair * kPanel + v * kLanes) * 4);
                w[2 * pair][v] = bits_as<V>(both << 16);
                w[2 * pair + 1][v] = bits_as<V>(both & high);
            }
        }
        data += kChains / 2 * kPanel * 4;
    }
};

// Groups of 32 columns of blocks with scales of 16 bits, or of w4.
template <Format format>
struct ReadBlocks : FloatProducts {
    static constexpr bool kIsCheap = false;
    static constexpr bool kIsW4 = format == Format::w4;
    static constexpr bool kHasOffset = kIsW4 || format == Format::q4_1;
    const char *data;     // quads of the current 32 columns
    const char *head;     // next head
    int64_t group_quads;  // quads of columns that share a head
    int64_t quad = 0;     // since the head
    V scale[kVecs], offset[kVecs];

    ReadBlocks(const Weight &weight, const char *panel)
        : data(panel), head(panel), group_quads(kIsW4 ? weight.group / 4 : 8) {}

    INLINE void next(V (&w)[kChains][kVecs]) {
        if (quad == 0) read_head();
        const int64_t u = quad % 8;
        __builtin_prefetch(data + u * 64 + kPrefetch);
        for (int v = 0; v < kVecs; ++v) {
            I word;
            if constexpr (format == Format::q8_0)
                word = load<I>(data + (u * kPanel + v * kLanes) * 4);
            else
                word = load<I>(data + (u % 4 * kPanel + v * kLanes) * 4) >> static_cast<int>(u / 4 * 4);
            for (int c = 0; c < kChains; ++c) {
                if constexpr (format == Format::q8_0)
                    w[c][v] = to_float((word << (24 - 8 * c)) >> 24) * scale[v];
                else if constexpr (format == Format::q4_0)
                    w[c][v] = to_float(((word >> (8 * c)) & 15) - 8) * scale[v];
                else
                    w[c][v] = to_float((word >> (8 * c)) & 15) * scale[v] + offset[v];
            }
        }
        ++quad;
        if (quad % 8 == 0) data += format == Format::q8_0 ? 512 : 256;
        if (quad == group_quads) {
            quad = 0;
            head = data;
        }
    }

    INLINE void read_head() {
        for (int v = 0; v < kVecs; ++v) {
            if constexpr (kIsW4) {
                scale[v] = load<V>(head + v * kLanes * 4);
                offset[v] = load<V>(head + (kPanel + v * kLanes) * 4);
            } else {
                scale[v] = load_as_float(reinterpret_cast<const f16 *>(head) + v * kLanes);
                if constexpr (kHasOffset)
                    offset[v] = load_as_float(reinterpret_cast<const f16 *>(head) + kPanel + v * kLanes);
            }
        }
        data = head + kPanel * (kIsW4 ? 8 : kHasOffset ? 4 : 2);
    }
};

#ifdef HEADRACE_HAS_DOT
struct ReadDotBF16 {
    using Word = I;
    using Acc = V;
    static constexpr int kColumns = 2;
    static constexpr bool kIsCheap = true;
    const char *data;
    ReadDotBF16(const Weight &, const char *panel) : data(panel) {}
    static INLINE Acc mac(Acc acc, Word w, uint32_t x) { return dot_bf16(acc, w, splat_word(x)); }
    INLINE void next(I (&w)[kChains][kVecs]) {
        for (int c = 0; c < kChains; ++c) {
            __builtin_prefetch(data + c * 64 + kPrefetch);
            for (int v = 0; v < kVecs; ++v) w[c][v] = load<I>(data + (c * kPanel + v * kLanes) * 4);
        }
        data += kChains * kPanel * 4;
    }
};

struct ReadInt8 {
    using Word = I;
    using Acc = I;
    static constexpr int kColumns = 4;
    static constexpr bool kIsCheap = true;
    const char *data;
    ReadInt8(const Weight &, const char *panel) : data(panel) {}
    static INLINE Acc mac(Acc acc, Word w, uint32_t x) { return dot_u8_i8(acc, splat_word(x), w); }
    INLINE void next(I (&w)[kChains][kVecs]) {
        for (int c = 0; c < kChains; ++c) {
            __builtin_prefetch(data + c * 64 + kPrefetch);
            for (int v = 0; v < kVecs; ++v) w[c][v] = load<I>(data + (c * kPanel + v * kLanes) * 4);
        }
        data += kChains * kPanel * 4;
    }
};
#else
struct ReadInt8 {
    using Word = I;
    using Acc = I;
    static constexpr int kColumns = 2;
    static constexpr bool kIsCheap = true;
    const char *data;
    ReadInt8(const Weight &, const char *panel) : data(panel) {}
    static INLINE Acc mac(Acc acc, Word w, uint32_t x) { return dot_i16(acc, w, splat_word(x)); }
    INLINE void next(I (&w)[kChains][kVecs]) {
        for (int half = 0; half < 2; ++half) {
            __builtin_prefetch(data + half * 64 + kPrefetch);
            for (int v = 0; v < kVecs; ++v) {
                const S bytes = load<S>(data + (half * kPanel + v * kLanes) * 4);
                w[2 * half][v] = bits_as<I>((bytes << 8) >> 8);
                w[2 * half + 1][v] = bits_as<I>(bytes >> 8);
            }
        }
        data += 2 * kPanel * 4;
    }
};
#endif

// ---- rows of x as words ------------------------------------------------------------------------------------------
// Word j of the row goes to words[at(j)]; columns behind the end are zero.

template <class Reader, class T, class At>
INLINE void row_to_words(const T *x, int64_t cols, int64_t num_words, uint32_t *words, float *scale, At at) {
    (void)scale;
    if constexpr (Reader::kColumns == 1) {
        for (int64_t j = 0; j < cols; ++j) words[at(j)] = bits_as<uint32_t>(to_float(x[j]));
        for (int64_t j = cols; j < num_words; ++j) words[at(j)] = 0;
    } else {  // pairs of bf16
        for (int64_t j = 0; j < cols / 2; ++j) words[at(j)] = load<uint32_t>(x + 2 * j);
        for (int64_t j = cols / 2; j < num_words; ++j)
            words[at(j)] = 2 * j < cols ? load<uint16_t>(x + 2 * j) : 0;
    }
}

// One row quantized to 255 levels: words of two int16, or of four uint8 with 128 added, in the order of the columns
// in a packed word. The rounding is to nearest even, by the sum with 1.5 * 2^23.
template <class T, class At>
INLINE void row_to_int8(const T *x, int64_t cols, int64_t num_words, uint32_t *words, float *scale, At at) {
    V top = {};
    float high = 0;
    int64_t k = 0;
    for (; k + kLanes <= cols; k += kLanes) top = max(abs(load_as_float(x + k)), top);
    if (k < cols) top = max(abs(load_tail(x + k, cols - k)), top);
    high = highest(top);
    *scale = high / 127;
    const float inverse = high > 0 ? 127 / high : 0;
    const auto level = [&](int64_t column) -> int32_t {
        if (column >= cols) return 0;
        const float shifted = to_float(x[column]) * inverse + 0x1.8p23f;
        return static_cast<int32_t>(bits_as<uint32_t>(shifted) & 0xFFFF) << 16 >> 16;
    };
    for (int64_t j = 0; j < num_words; ++j) {
        uint32_t word = 0;
        if constexpr (ReadInt8::kColumns == 2) {
            word = (static_cast<uint32_t>(level(2 * j)) & 0xFFFF) | static_cast<uint32_t>(level(2 * j + 1)) << 16;
        } else {
            const int order[4] = {0, 2, 1, 3};
            for (int b = 0; b < 4; ++b)
                word |= (static_cast<uint32_t>(level(4 * j + order[b]) + 128) & 255) << (8 * b);
        }
        words[at(j)] = word;
    }
}

template <class Reader, class T, class At>
INLINE void read_x(const T *x, int64_t cols, int64_t num_words, uint32_t *words, float *scale, At at) {
    if constexpr (__is_same(typename Reader::Acc, I))
        row_to_int8(x, cols, num_words, words, scale, at);
    else
        row_to_words<Reader>(x, cols, num_words, words, scale, at);
}

// ---- the end of a sum --------------------------------------------------------------------------------------------

INLINE V finish(const Weight &, V total, int64_t, float) { return total; }
INLINE V finish(const Weight &weight, I total, int64_t row, float x_scale) {
#ifdef HEADRACE_HAS_DOT
    total = total - load<I>(weight.sums + row) * 128;
#endif
    return to_float(total) * (load<V>(weight.scales + row) * splat(x_scale));
}

// Store kLanes results of one token from output `row` on.
template <class T>
INLINE void put(const LinearArgs &args, int64_t token, int64_t row, V value) {
    const int64_t rows = args.weight.rows, left = rows - row;
    if (left <= 0) return;
    T *out = static_cast<T *>(args.out) + token * rows + row;
    if (left >= kLanes) {
        if (args.bias) value = value + load<V>(args.bias + row);
        store_from_float(out, value);
    } else {
        if (args.bias) value = value + load_tail(args.bias + row, left);
        store_tail(out, value, left);
    }
}

// ---- few tokens ----------------------------------------------------------------------------------------------------
// Each panel is read from memory for the first token and from the cache for the others. Scratch: words of x.

template <class Reader, class T>
void few_tokens(const LinearArgs &args, const Context &context) {
    const Weight &weight = args.weight;
    const int64_t num_words = weight.padded_cols / Reader::kColumns;
    auto *words = reinterpret_cast<uint32_t *>(context.scratch);
    int64_t begin, end;
    share((weight.rows + kPanel - 1) / kPanel, context, &begin, &end);
    if (begin == end) return;
    float scales[kFewTokens];
    for (int64_t token = 0; token < args.num_tokens; ++token)
        read_x<Reader>(static_cast<const T *>(args.x) + token * weight.cols, weight.cols, num_words,
                       words + token * num_words, scales + token, [](int64_t j) { return j; });
    for (int64_t panel = begin; panel < end; ++panel)
        for (int64_t token = 0; token < args.num_tokens; ++token) {
            Reader reader(weight, weight.data + panel * weight.panel_bytes);
            const uint32_t *x = words + token * num_words;
            typename Reader::Acc acc[kChains][kVecs] = {};
            for (int64_t j = 0; j < num_words; j += kChains) {
                typename Reader::Word w[kChains][kVecs];
                reader.next(w);
                for (int c = 0; c < kChains; ++c)
                    for (int v = 0; v < kVecs; ++v) acc[c][v] = Reader::mac(acc[c][v], w[c][v], x[j + c]);
            }
            for (int v = 0; v < kVecs; ++v) {
                const int64_t row = panel * kPanel + v * kLanes;
                if (row >= weight.rows) continue;
                const typename Reader::Acc total = (acc[0][v] + acc[1][v]) + (acc[2][v] + acc[3][v]);
                put<T>(args, token, row, finish(weight, total, row, scales[token]));
            }
        }
}

// ---- many tokens -------------------------------------------------------------------------------------------------
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

template <class Reader, class T>
void run(const LinearArgs &args, const Context &context) {
    if (args.num_tokens <= (Reader::kIsCheap ? kFewTokens : 1))
        few_tokens<Reader, T>(args, context);
    else
        many_tokens<Reader, T>(args, context);
}

template <class T>
void run_format(const LinearArgs &args, const Context &context) {
    switch (args.weight.format) {
        case Format::f32: return run<ReadF32, T>(args, context);
        case Format::bf16:
#ifdef HEADRACE_HAS_DOT
            if constexpr (__is_same(T, bf16)) return run<ReadDotBF16, T>(args, context);
#endif
            return run<ReadBF16, T>(args, context);
        case Format::f16: return run<ReadF16, T>(args, context);
        case Format::i8: return run<ReadInt8, T>(args, context);
        case Format::q8_0: return run<ReadBlocks<Format::q8_0>, T>(args, context);
        case Format::q4_0: return run<ReadBlocks<Format::q4_0>, T>(args, context);
        case Format::q4_1: return run<ReadBlocks<Format::q4_1>, T>(args, context);
        case Format::w4: return run<ReadBlocks<Format::w4>, T>(args, context);
    }
}

}  // namespace

size_t linear_scratch(const LinearArgs &args) {
    const int64_t rows = args.num_tokens < kBlockRows ? args.num_tokens : kBlockRows;
    return layout_of(rows, args.weight.padded_cols).end;
}

void linear(const LinearArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return run_format<float>(args, context);
        case Dtype::bf16: return run_format<bf16>(args, context);
        case Dtype::f16: return run_format<f16>(args, context);
    }
}

}  // namespace headrace::HEADRACE_TIER
