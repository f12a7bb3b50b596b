// Linear products of quantized x with weights in blocks: GGUF's and w4.
//
// Each 32 columns of a row of x are rounded to 255 levels with a scale of their own. An output is the sum, over groups
// of 32 columns in ascending order, of (integer dot product) * (scale of the weight * scale of x) (for q6_k: of each
// half of the group), and, for formats with an offset, of offset * (sum of the rounded x). So its bits depend on its row of x only.
#include "read_blocks.h"

namespace headrace::HEADRACE_TIER {
namespace {

constexpr int kVecs = kPanel / kLanes;
constexpr int64_t kGroup = kPieceColumns;
constexpr int kQuads = 8;  // quads of columns in a group
#ifdef HEADRACE_HAS_DOT
constexpr int kWordsPerQuad = 1;  // four int8
#else
constexpr int kWordsPerQuad = 2;  // two int16: columns 0 and 2 of the quad, then 1 and 3
#endif
constexpr int kTileRows = kLanes == 16 ? 8 : kLanes == 8 ? 3 : 1;
constexpr int64_t kBlockRows = 120;  // tokens that share one pass over the weights
constexpr int64_t kPrefetch = 4096;

// 32 columns of a row of x.
struct Group {
    uint32_t words[kQuads * kWordsPerQuad];
    int32_t sums[2];  // of the first and the last 16 levels
    float scale;
    float total;  // scale * sum of all levels
};

template <class T>
INLINE void quantize(const T *x, int64_t count, Group *group) {
    T row[kGroup] = {};
    memcpy(row, x, static_cast<size_t>(count) * sizeof(T));
    V top = {};
    for (int64_t k = 0; k < kGroup; k += kLanes) top = max(abs(load_as_float(row + k)), top);
    const float high = highest(top);
    // To nearest even, by the sum with 1.5 * 2^23.
    const V inverse = splat(high > 0 ? 127 / high : 0), shift = splat(0x1.8p23f);
    int32_t levels[kGroup];
    for (int64_t k = 0; k < kGroup; k += kLanes)
        store(levels + k, bits_as<I>(load_as_float(row + k) * inverse + shift) - bits_as<I>(shift));
    for (int half = 0; half < 2; ++half) {
        int32_t sum = 0;
        for (int64_t k = 0; k < kGroup / 2; ++k) sum += levels[half * kGroup / 2 + k];
        group->sums[half] = sum;
    }
    for (int u = 0; u < kQuads; ++u) {
        const auto level = [&](int k) { return static_cast<uint32_t>(levels[4 * u + k]); };
#ifdef HEADRACE_HAS_DOT
        group->words[u] = (level(0) & 255) | (level(1) & 255) << 8 | (level(2) & 255) << 16 | level(3) << 24;
#else
        group->words[2 * u] = (level(0) & 0xFFFF) | level(2) << 16;
        group->words[2 * u + 1] = (level(1) & 0xFFFF) | level(3) << 16;
#endif
    }
    group->scale = high / 127;
    group->total = group->scale * static_cast<float>(group->sums[0] + group->sums[1]);
}

// What the words of `read_quad` have too much.
template <Format format>
constexpr int32_t zero_of() {
#ifdef HEADRACE_HAS_DOT
    if (format == Format::q8_0) return 128;  // they are made unsigned for the dot product
#endif
    return BlockShape::of(format).zero;
}

// A quad of columns, kLanes rows of it, as words for `mac`.
template <Format format>
INLINE void read_quad(const BlockReader<format> &blocks, int u, int v, I *words) {
    const I word = blocks.quad(u, v);
#ifdef HEADRACE_HAS_DOT
    words[0] = format == Format::q8_0 ? word ^ splat_word(0x80808080) : word;
#else
    if constexpr (format == Format::q8_0) {
        words[0] = bits_as<I>((bits_as<S>(word) << 8) >> 8);
        words[1] = bits_as<I>(bits_as<S>(word) >> 8);
    } else {
        words[0] = word & splat_word(0x00FF00FF);
        words[1] = (word >> 8) & splat_word(0x00FF00FF);
    }
#endif
}

INLINE I mac(I acc, I w, uint32_t x) {
#ifdef HEADRACE_HAS_DOT
    return dot_u8_i8(acc, w, splat_word(x));
#else
    return dot_i16(acc, w, splat_word(x));
#endif
}

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

// One panel with kRows rows of x.
template <Format format, class T, int kRows>
INLINE void tile(const LinearArgs &args, const Group *x, int64_t num_groups, int64_t panel, int64_t token) {
    constexpr BlockShape kShape = BlockShape::of(format);
    constexpr int kSums = kShape.num_scales, kQuadsPerSum = kQuads / kSums;
    const Weight &weight = args.weight;
    BlockReader<format> blocks(weight, weight.data + panel * weight.panel_bytes);
    V acc[kRows][kVecs] = {};
    for (int64_t g = 0; g < num_groups; ++g) {
        blocks.next_piece();
        I sums[kRows][kSums][kVecs];
        for (int r = 0; r < kRows; ++r)
            for (int s = 0; s < kSums; ++s) {
                const int32_t *x_sums = x[r * num_groups + g].sums;
                const int32_t x_sum = kSums == 2 ? x_sums[s] : x_sums[0] + x_sums[1];
                for (int v = 0; v < kVecs; ++v) sums[r][s][v] = I{} - zero_of<format>() * x_sum;
            }
        for (int u = 0; u < kQuads; ++u) {
            if (kRows == 1) __builtin_prefetch(blocks.data + u * kPanel * 4 + kPrefetch);
            for (int v = 0; v < kVecs; ++v) {
                I words[kWordsPerQuad];
                read_quad<format>(blocks, u, v, words);
                for (int r = 0; r < kRows; ++r)
                    for (int i = 0; i < kWordsPerQuad; ++i) {
                        I &sum = sums[r][u / kQuadsPerSum][v];
                        sum = mac(sum, words[i], x[r * num_groups + g].words[u * kWordsPerQuad + i]);
                    }
            }
        }
        for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < kVecs; ++v) {
                const Group &group = x[r * num_groups + g];
                for (int s = 0; s < kSums; ++s)
                    acc[r][v] = fma(to_float(sums[r][s][v]), blocks.scale[s][v] * splat(group.scale), acc[r][v]);
                if constexpr (kShape.has_offset) acc[r][v] = fma(blocks.offset[v], splat(group.total), acc[r][v]);
            }
        blocks.end_piece();
    }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVecs; ++v) put<T>(args, token + r, panel * kPanel + v * kLanes, acc[r][v]);
}

template <Format format, class T>
void run(const LinearArgs &args, const Context &context) {
    const Weight &weight = args.weight;
    const int64_t num_groups = weight.padded_cols / kGroup;
    auto *x = reinterpret_cast<Group *>(context.scratch);
    int64_t begin, end;
    share((weight.rows + kPanel - 1) / kPanel, context, &begin, &end);
    if (begin == end) return;
    for (int64_t first = 0; first < args.num_tokens; first += kBlockRows) {
        const int64_t rows = args.num_tokens - first < kBlockRows ? args.num_tokens - first : kBlockRows;
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t g = 0; g < num_groups; ++g) {
                const int64_t left = weight.cols - g * kGroup;
                const T *row = static_cast<const T *>(args.x) + (first + r) * weight.cols;
                quantize(row + g * kGroup, left < 0 ? 0 : left < kGroup ? left : kGroup, x + r * num_groups + g);
            }
        for (int64_t panel = begin; panel < end; ++panel) {
            int64_t r = 0;
            for (; r + kTileRows <= rows; r += kTileRows)
                tile<format, T, kTileRows>(args, x + r * num_groups, num_groups, panel, first + r);
            if constexpr (kTileRows > 2)
                for (; r + 2 <= rows; r += 2)
                    tile<format, T, 2>(args, x + r * num_groups, num_groups, panel, first + r);
            for (; r < rows; ++r) tile<format, T, 1>(args, x + r * num_groups, num_groups, panel, first + r);
        }
    }
}

template <class T>
void run_format(const LinearArgs &args, const Context &context) {
    switch (args.weight.format) {
        case Format::q8_0: return run<Format::q8_0, T>(args, context);
        case Format::q4_0: return run<Format::q4_0, T>(args, context);
        case Format::q4_1: return run<Format::q4_1, T>(args, context);
        case Format::q5_0: return run<Format::q5_0, T>(args, context);
        case Format::q5_1: return run<Format::q5_1, T>(args, context);
        case Format::q4_k: return run<Format::q4_k, T>(args, context);
        case Format::q5_k: return run<Format::q5_k, T>(args, context);
        case Format::q6_k: return run<Format::q6_k, T>(args, context);
        case Format::w4: return run<Format::w4, T>(args, context);
        default: return;  // the border lets no other format through
    }
}

}  // namespace

size_t linear_blocks_scratch(const LinearArgs &args) {
    const int64_t rows = args.num_tokens < kBlockRows ? args.num_tokens : kBlockRows;
    return static_cast<size_t>(rows * (args.weight.padded_cols / kGroup)) * sizeof(Group);
}

void linear_blocks(const LinearArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return run_format<float>(args, context);
        case Dtype::bf16: return run_format<bf16>(args, context);
        case Dtype::f16: return run_format<f16>(args, context);
    }
}

}  // namespace headrace::HEADRACE_TIER
