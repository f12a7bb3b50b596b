// What the two paths of x @ weight.T + bias have in common: reading packed weights and rows of x, the end of a sum.
//
// Each output is the sum of four chains: chain c adds the words (columns, or pairs or quads of columns) c, c + 4,
// c + 8, ... in ascending order, and the end is (0 + 1) + (2 + 3). Both paths (linear.cpp, linear_many.cpp) keep to
// that, whatever the number of tokens and of threads, so a row of the result depends on its own row of x only, bit for
// bit.
#pragma once

#include "linear_target.h"
#include "read_blocks.h"

namespace headrace::HEADRACE_TIER {
namespace {

constexpr int kVecs = kPanel / kLanes;  // vectors that hold a number for each row of a panel
constexpr int kChains = 4;
constexpr int64_t kPrefetch = 4096;  // bytes ahead in the stream of weights
constexpr int64_t kFewTokens = kLanes == 16 ? 6 : 5;  // at most so many stream the weights once, untiled

// Words behind a row's copy: rows that are apart by a multiple of 2 KiB would fight for the same few lines of L1.
constexpr int64_t kPad = 16;
constexpr int64_t kBadStride = 512;

// ---- readers: a packed panel as words, four (one for each chain) at a time --------------------------------------
// Each has: Word (V or I), Acc, kColumns (columns in a word), kIsCheap (reading costs less than a tile's detour), kIsRaw
// (a tile takes words from the panel as it lies), next(Word[kChains][kVecs]), mac(acc, w, x word). A raw panel has
// kWordBytes for each word of its rows, and those of chain c from chain_at(c) on; word<c % 2>(data) reads a vector.

// As most are: what a tile takes are words as the arithmetic takes them.
template <class W>
struct Words {
    using Word = W;
    static constexpr bool kIsCheap = true;
    static constexpr bool kIsRaw = false;
    static constexpr int64_t kWordBytes = kPanel * 4;
    static constexpr int64_t chain_at(int c) { return c * kWordBytes; }
    template <int>
    static INLINE Word word(const char *data) { return load<Word>(data); }
};

struct FloatProducts : Words<V> {
    using Acc = V;
    static constexpr int kColumns = 1;
    static INLINE Acc mac(Acc acc, Word w, uint32_t x) { return fma(w, splat(bits_as<float>(x)), acc); }
};

struct ReadF32 : FloatProducts {
    static constexpr bool kIsRaw = true;
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

// Widened by each tile where it has registers for that.
constexpr bool kWidensInTiles = kLanes == 16;

struct ReadF16 : FloatProducts {
    static constexpr bool kIsRaw = kWidensInTiles;
    static constexpr int64_t kWordBytes = kIsRaw ? kPanel * 2 : kPanel * 4;
    static constexpr int64_t chain_at(int c) { return c * kWordBytes; }
    template <int>
    static INLINE V word(const char *data) {
        if constexpr (kIsRaw) return load_as_float(reinterpret_cast<const f16 *>(data));
        return load<V>(data);
    }
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
    static constexpr bool kIsRaw = kWidensInTiles;
    static constexpr int64_t kWordBytes = kIsRaw ? kPanel * 2 : kPanel * 4;
    static constexpr int64_t chain_at(int c) { return c / 2 * kPanel * 4; }
    template <int kHalf>
    static INLINE V word(const char *data) {
        const I both = load<I>(data);
        if constexpr (kIsRaw) return bits_as<V>(kHalf ? both & splat_word(0xFFFF0000) : both << 16);
        return bits_as<V>(both);
    }
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

// GGUF's blocks and w4.
template <Format format>
struct ReadBlocks : FloatProducts {
    static constexpr bool kIsCheap = false;
    static constexpr BlockShape kShape = BlockShape::of(format);
    BlockReader<format> blocks;
    int quad = 0;  // of the piece

    ReadBlocks(const Weight &weight, const char *panel) : blocks(weight, panel) {}

    INLINE void next(V (&w)[kChains][kVecs]) {
        if (quad == 0) blocks.next_piece();
        __builtin_prefetch(blocks.data + quad * 64 + kPrefetch);
        for (int v = 0; v < kVecs; ++v) {
            const I word = blocks.quad(quad, v);
            const V scale = blocks.scale[kShape.num_scales == 2 ? quad / 4 : 0][v];
            for (int c = 0; c < kChains; ++c) {
                if constexpr (kShape.bits == 8)
                    w[c][v] = to_float((word << (24 - 8 * c)) >> 24) * scale;
                else
                    w[c][v] = to_float(((word >> (8 * c)) & 255) - kShape.zero) * scale;
                if constexpr (kShape.has_offset) w[c][v] = w[c][v] + blocks.offset[v];
            }
        }
        if (++quad == 8) {
            quad = 0;
            blocks.end_piece();
        }
    }
};

#ifdef HEADRACE_HAS_DOT_I8
// Words that the arithmetic takes as they lie.
struct DotProducts : Words<I> {
    static constexpr bool kIsRaw = true;
    const char *data;
    DotProducts(const Weight &, const char *panel) : data(panel) {}
    INLINE void next(I (&w)[kChains][kVecs]) {
        for (int c = 0; c < kChains; ++c) {
            __builtin_prefetch(data + c * 64 + kPrefetch);
            for (int v = 0; v < kVecs; ++v) w[c][v] = load<I>(data + (c * kPanel + v * kLanes) * 4);
        }
        data += kChains * kPanel * 4;
    }
};

struct ReadInt8 : DotProducts {
    using Acc = I;
    using DotProducts::DotProducts;
    static constexpr int kColumns = 4;
    static INLINE Acc mac(Acc acc, Word w, uint32_t x) { return dot_u8_i8(acc, splat_word(x), w); }
};

#ifdef HEADRACE_HAS_DOT_BF16
struct ReadDotBF16 : DotProducts {
    using Acc = V;
    using DotProducts::DotProducts;
    static constexpr int kColumns = 2;
    static INLINE Acc mac(Acc acc, Word w, uint32_t x) { return dot_bf16(acc, w, splat_word(x)); }
};
#endif
#else
struct ReadInt8 : Words<I> {
    using Acc = I;
    static constexpr int kColumns = 2;
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
// Columns behind the end are zero.

template <class Reader, class T>
INLINE void row_to_words(const T *x, int64_t cols, int64_t num_words, uint32_t *words) {
    if constexpr (Reader::kColumns == 1) {
        int64_t j = 0;
        for (; j + kLanes <= cols; j += kLanes) store(words + j, load_as_float(x + j));
        for (; j < cols; ++j) words[j] = bits_as<uint32_t>(to_float(x[j]));
    } else {  // pairs of bf16
        memcpy(words, x, static_cast<size_t>(cols) * 2);
        if (cols % 2 != 0) words[cols / 2] = load<uint16_t>(x + cols - 1);
    }
    for (int64_t j = (cols + Reader::kColumns - 1) / Reader::kColumns; j < num_words; ++j) words[j] = 0;
}

// One row quantized to 255 levels: words of two int16, or of four uint8 with 128 added, in the order of the columns
// in a packed word. The rounding is to nearest even, by the sum with 1.5 * 2^23, whose low bits are the level.
template <class T>
INLINE void row_to_int8(const T *x, int64_t cols, int64_t num_words, uint32_t *words, float *scale) {
    V tops[4] = {};
    int64_t k = 0;
    for (; k + 4 * kLanes <= cols; k += 4 * kLanes)
        for (int i = 0; i < 4; ++i) tops[i] = max(abs(load_as_float(x + k + i * kLanes)), tops[i]);
    V top = max(max(tops[0], tops[1]), max(tops[2], tops[3]));
    for (; k + kLanes <= cols; k += kLanes) top = max(abs(load_as_float(x + k)), top);
    if (k < cols) top = max(abs(load_tail(x + k, cols - k)), top);
    const float high = highest(top);
    *scale = high / 127;
    const V inverse = splat(high > 0 ? 127 / high : 0), shift = splat(0x1.8p23f);
    for (k = 0; k < num_words * ReadInt8::kColumns; k += kLanes) {
        const int64_t left = cols - k;
        const V value = left >= kLanes ? load_as_float(x + k) : left > 0 ? load_tail(x + k, left) : V{};
        const U level = bits_as<U>(value * inverse + shift);
        if constexpr (ReadInt8::kColumns == 2) {
            store(reinterpret_cast<uint16_t *>(words) + k, low_halves(level));
        } else {
            const B bytes = low_bytes(level) ^ 128;
            B order;  // 0, 2, 1, 3 in each word
            for (int i = 0; i < kLanes; ++i) order[i] = static_cast<uint8_t>(i / 4 * 4 + i % 2 * 2 + i / 2 % 2);
            store(reinterpret_cast<uint8_t *>(words) + k, __builtin_shuffle(bytes, order));
        }
    }
}

template <class Reader, class T>
INLINE void read_x(const T *x, int64_t cols, int64_t num_words, uint32_t *words, float *scale) {
    if constexpr (__is_same(typename Reader::Acc, I))
        row_to_int8(x, cols, num_words, words, scale);
    else
        row_to_words<Reader>(x, cols, num_words, words);
}

// ---- the end of a sum --------------------------------------------------------------------------------------------

// int8: an integer sum as a float. `sums` are the weights' own, for x that was made unsigned.
INLINE V dequantize(I total, V w_scales, const int32_t *sums, float x_scale) {
#ifdef HEADRACE_HAS_DOT_I8
    total = total - load<I>(sums) * 128;
#else
    (void)sums;
#endif
    return to_float(total) * (w_scales * splat(x_scale));
}

INLINE V finish(const Weight &, V total, int64_t, float) { return total; }
INLINE V finish(const Weight &weight, I total, int64_t row, float x_scale) {
    return dequantize(total, load<V>(weight.scales + row), weight.sums + row, x_scale);
}

// What a tile of int8 needs to know beside its target.
template <class T>
struct ScaledTarget : Target<T> {
    const float *x_scales;  // of the block's first row
    const float *w_scales;  // of the tile's first output
    const int32_t *w_sums;

    using Target<T>::put;
    INLINE void put(int64_t r, int v, I total) const {
        if (this->left <= v * kLanes) return;  // behind the last panel
        put(r, v, dequantize(total, load<V>(w_scales + v * kLanes), w_sums + v * kLanes, x_scales[r]));
    }
};

// Store kLanes results of one token from output `row` on.
template <class T>
INLINE void put(const LinearArgs &args, int64_t token, int64_t row, V value) {
    const int64_t rows = args.weight.rows, left = rows - row;
    if (left <= 0) return;
    T *out = static_cast<T *>(args.out) + token * args.out_stride + row;
    if (left >= kLanes) {
        if (args.bias) value = value + load<V>(args.bias + row);
        store_from_float(out, value);
    } else {
        if (args.bias) value = value + load_tail(args.bias + row, left);
        store_tail(out, value, left);
    }
}

// Call Path::run<Reader, T>(args, context) for the format of the weight and the dtype of x.
template <class Path, class T>
void run_format(const LinearArgs &args, const Context &context) {
    switch (args.weight.format) {
        case Format::f32: return Path::template run<ReadF32, T>(args, context);
        case Format::bf16:
#ifdef HEADRACE_HAS_DOT_BF16
            if constexpr (__is_same(T, bf16)) return Path::template run<ReadDotBF16, T>(args, context);
#endif
            return Path::template run<ReadBF16, T>(args, context);
        case Format::f16: return Path::template run<ReadF16, T>(args, context);
        case Format::i8: return Path::template run<ReadInt8, T>(args, context);
        case Format::q8_0: return Path::template run<ReadBlocks<Format::q8_0>, T>(args, context);
        case Format::q4_0: return Path::template run<ReadBlocks<Format::q4_0>, T>(args, context);
        case Format::q4_1: return Path::template run<ReadBlocks<Format::q4_1>, T>(args, context);
        case Format::q5_0: return Path::template run<ReadBlocks<Format::q5_0>, T>(args, context);
        case Format::q5_1: return Path::template run<ReadBlocks<Format::q5_1>, T>(args, context);
        case Format::q4_k: return Path::template run<ReadBlocks<Format::q4_k>, T>(args, context);
        case Format::q5_k: return Path::template run<ReadBlocks<Format::q5_k>, T>(args, context);
        case Format::q6_k: return Path::template run<ReadBlocks<Format::q6_k>, T>(args, context);
        case Format::w4: return Path::template run<ReadBlocks<Format::w4>, T>(args, context);
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
