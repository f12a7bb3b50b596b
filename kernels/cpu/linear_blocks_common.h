// What the two paths of linear products with blocks have in common: rounding x, the words of a weight.
//
// Each 32 columns of a row of x are rounded to 255 levels with a scale of their own. An output is the sum, over groups
// of 32 columns in ascending order, of (integer dot product) * (scale of the weight * scale of x) (for q6_k: of each
// half of the group), and, for formats with an offset, of offset * (sum of the rounded x). Both paths (linear_blocks.cpp,
// linear_blocks_many.cpp) keep to that, so the bits of a row depend on its row of x only.
#pragma once

#include "linear_target.h"
#include "read_blocks.h"

namespace headrace::HEADRACE_TIER {
namespace {

constexpr int kVecs = kPanel / kLanes;
constexpr int64_t kGroup = kPieceColumns;
constexpr int kQuads = 8;  // quads of columns in a group

// How integers are multiplied. Each has: kWordsPerQuad (of columns), Part (of an integer sum, as it begins, grows by the
// products of a word, and ends), quads_of_part (quads that a part may take).

struct ByWords {  // of four int8 with a dot product, else two of two int16: columns 0 and 2 of the quad, then 1 and 3
#ifdef HEADRACE_HAS_DOT_I8
    static constexpr int kWordsPerQuad = 1;
#else
    static constexpr int kWordsPerQuad = 2;
#endif
    using Part = I;
    static constexpr int quads_of_part(BlockShape shape) { return kQuads / shape.num_scales; }
    static INLINE Part begin(I sum) { return sum; }
    template <int bits>
    static INLINE Part mac(Part part, I w, uint32_t x) {
#ifdef HEADRACE_HAS_DOT_I8
        return dot_u8_i8(part, w, splat_word(x));
#else
        return dot_i16(part, w, splat_word(x));
#endif
    }
    static INLINE I end(I, Part part) { return part; }
};

#ifdef HEADRACE_HAS_256
struct ByPairs {  // of four int8; a part is made of sums of two columns in int16
    static constexpr int kWordsPerQuad = 1;
    using Part = S;
    // A pair of products is at most 2 * 127 * (2^bits - 1), or 2 * 127 * 128 for signed integers.
    static constexpr int quads_of_part(BlockShape shape) {
        const int all = kQuads / shape.num_scales;
        const int fit = shape.bits == 8 ? 1 : (1 << 15) / (254 * ((1 << shape.bits) - 1));
        return fit < all ? fit : all;
    }
    static INLINE Part begin(I) { return Part{}; }
    template <int bits>
    static INLINE Part mac(Part part, I w, uint32_t x) {
        // Products of unsigned w: the sign of a signed one goes to x.
        const __m256i integers = bits_as<__m256i>(w), levels = _mm256_set1_epi32(static_cast<int32_t>(x));
        if constexpr (bits == 8)
            return part + bits_as<S>(_mm256_maddubs_epi16(_mm256_abs_epi8(integers), _mm256_sign_epi8(levels, integers)));
        else
            return part + bits_as<S>(_mm256_maddubs_epi16(integers, levels));
    }
    static INLINE I end(I sum, Part part) { return dot_i16(sum, bits_as<I>(part), splat_word(0x00010001)); }
};
#else
using ByPairs = ByWords;
#endif

// 32 columns of a row of x.
template <class Multiply>
struct Group {
    uint32_t words[kQuads * Multiply::kWordsPerQuad];
    int32_t start[2];  // of the integer sum; with two scales, of the sums of the first and the last 16 columns
    float scale;
    float total;  // scale * sum of all levels
};

// What the words of `read_quad` have too much.
template <Format format>
constexpr int32_t zero_of() {
#ifdef HEADRACE_HAS_DOT_I8
    if (format == Format::q8_0) return 128;  // they are made unsigned for the dot product
#endif
    return BlockShape::of(format).zero;
}

template <Format format, class Multiply, class T>
INLINE void quantize(const T *x, int64_t count, Group<Multiply> *group) {
    constexpr int kWordsPerQuad = Multiply::kWordsPerQuad;
    T row[kGroup] = {};
    if (count < kGroup) {
        memcpy(row, x, static_cast<size_t>(count) * sizeof(T));
        x = row;
    }
    V top = {};
    for (int64_t k = 0; k < kGroup; k += kLanes) top = max(abs(load_as_float(x + k)), top);
    const float high = highest(top);
    // To nearest even, by the sum with 1.5 * 2^23, whose low bits are the level.
    const V inverse = splat(high > 0 ? 127 / high : 0), shift = splat(0x1.8p23f);
    [[maybe_unused]] int32_t levels[kGroup];
    int32_t sums[2] = {};
    for (int64_t k = 0; k < kGroup; k += kLanes) {
        const I shifted = bits_as<I>(load_as_float(x + k) * inverse + shift);
        int32_t &sum_of_half = sums[k / (kGroup / 2)];
        if constexpr (kWordsPerQuad == 1) {
            const B bytes = low_bytes(bits_as<U>(shifted));
            store(reinterpret_cast<char *>(group->words) + k, bytes);
            sum_of_half += sum_signed(bytes);
        } else {
            const I level = shifted - bits_as<I>(shift);
            store(levels + k, level);
            sum_of_half += sum(level);
        }
    }
    if constexpr (kWordsPerQuad == 2)
        for (int u = 0; u < kQuads; ++u) {
            const auto level = [&](int k) { return static_cast<uint32_t>(levels[4 * u + k]); };
            group->words[2 * u] = (level(0) & 0xFFFF) | level(2) << 16;
            group->words[2 * u + 1] = (level(1) & 0xFFFF) | level(3) << 16;
        }
    const bool is_split = BlockShape::of(format).num_scales == 2;
    group->start[0] = -zero_of<format>() * (is_split ? sums[0] : sums[0] + sums[1]);
    group->start[1] = -zero_of<format>() * sums[1];
    group->scale = high / 127;
    group->total = group->scale * static_cast<float>(sums[0] + sums[1]);
}

// Rows of x, [rows][groups].
template <Format format, class T, class Multiply>
void quantize_rows(const LinearArgs &args, int64_t first, int64_t rows, Group<Multiply> *x) {
    const int64_t cols = args.weight.cols, num_groups = args.weight.padded_cols / kGroup;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t g = 0; g < num_groups; ++g) {
            const int64_t left = cols - g * kGroup;
            const T *row = row_of_x<T>(args, first + r);
            quantize<format>(row + g * kGroup, left < 0 ? 0 : left < kGroup ? left : kGroup, x + r * num_groups + g);
        }
}

// A quad of columns, kLanes rows of it, as words.
template <Format format, class Multiply>
INLINE void read_quad(const BlockReader<format> &blocks, int u, int v, I *words) {
    const I word = blocks.quad(u, v);
    if constexpr (Multiply::kWordsPerQuad == 1) {
#ifdef HEADRACE_HAS_DOT_I8
        words[0] = format == Format::q8_0 ? word ^ splat_word(0x80808080) : word;
#else
        words[0] = word;
#endif
    } else if constexpr (format == Format::q8_0) {
        words[0] = bits_as<I>((bits_as<S>(word) << 8) >> 8);
        words[1] = bits_as<I>(bits_as<S>(word) >> 8);
    } else {
        words[0] = word & splat_word(0x00FF00FF);
        words[1] = (word >> 8) & splat_word(0x00FF00FF);
    }
}

// Call Path::run<format, T>(args, context) for the format of the weight and the dtype of x.
template <class Path, class T>
void run_format(const LinearArgs &args, const Context &context) {
    switch (args.weight.format) {
        case Format::q8_0: return Path::template run<Format::q8_0, T>(args, context);
        case Format::q4_0: return Path::template run<Format::q4_0, T>(args, context);
        case Format::q4_1: return Path::template run<Format::q4_1, T>(args, context);
        case Format::q5_0: return Path::template run<Format::q5_0, T>(args, context);
        case Format::q5_1: return Path::template run<Format::q5_1, T>(args, context);
        case Format::q4_k: return Path::template run<Format::q4_k, T>(args, context);
        case Format::q5_k: return Path::template run<Format::q5_k, T>(args, context);
        case Format::q6_k: return Path::template run<Format::q6_k, T>(args, context);
        case Format::w4: return Path::template run<Format::w4, T>(args, context);
        default: return;  // the border lets no other format through
    }
}

template <class Path>
void run_path(const LinearArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return run_format<Path, float>(args, context);
        case Dtype::bf16: return run_format<Path, bf16>(args, context);
        case Dtype::f16: return run_format<Path, f16>(args, context);
    }
}

}  // namespace
}  // namespace headrace::HEADRACE_TIER
