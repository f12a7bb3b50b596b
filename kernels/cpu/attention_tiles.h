// The three steps of a tile of attention, over one segment: scores of some rows, their softmax, the sums of values.
//
// Rows are kRows queries. Keys and values come as panels of kKeyPanel positions (kernels.h, KVCache). A position that a
// row does not see weighs exactly zero, so it changes no bit of a sum.
#pragma once

#include "vmath.h"

namespace headrace::HEADRACE_TIER {
namespace {

constexpr int kVecs = kKeyPanel / kLanes;               // vectors of scores of a panel
constexpr int kTilePanels = kLanes == 16 ? 2 : 1;       // panels of keys that a tile takes at a time
constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 2;
constexpr int kTileWidth = kLanes == 16 ? 2 : kLanes == 8 ? 2 : 4;  // vectors of values that a tile takes at a time
constexpr int kNumPanels = kSegment / kKeyPanel;

// Whether the products are bf16 dot products: query (T) and cache (C) are bf16 and the tier has the instruction.
template <class T, class C>
constexpr bool uses_dot() {
#ifdef HEADRACE_HAS_DOT_BF16
    return __is_same(T, bf16) && __is_same(C, bf16);
#else
    return false;
#endif
}

template <bool which, class A, class B>
struct Choose {
    using Type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
    using Type = B;
};

// Positions whose values lie side by side.
template <class C>
constexpr int positions_in_a_row() {
    return __is_same(C, bf16) ? 2 : 1;
}

// acc + the products of a vector with a word: two bf16 in each lane with a dot product, one float without.
template <bool kDot, class Vector>
INLINE V mac(V acc, Vector a, uint32_t word) {
#ifdef HEADRACE_HAS_DOT_BF16
    if constexpr (kDot) return dot_bf16(acc, a, splat_word(word));
    else
#endif
        return fma(a, splat(bits_as<float>(word)), acc);
}

// kWidth vectors of a panel as `mac` takes them; without a dot product, pairs of bf16 are two parts.
template <bool kDot, class C, int kWidth>
struct Vectors {
    static constexpr int kParts = kDot ? 1 : positions_in_a_row<C>();
    typename Choose<kDot, I, V>::Type parts[kParts][kWidth];

    INLINE void read(int v, const char *data, [[maybe_unused]] uint32_t mask) {
        if constexpr (kDot) {
            parts[0][v] = load<I>(data) & splat_word(mask);
        } else if constexpr (kParts == 2) {
            const I both = load<I>(data) & splat_word(mask);
            parts[0][v] = bits_as<V>(both << 16);
            parts[1][v] = bits_as<V>(both & splat_word(0xFFFF0000));
        } else {
            parts[0][v] = load_as_float(reinterpret_cast<const C *>(data));
        }
    }
};

// Queries and weights: pairs of bf16 in words with a dot product, floats without.

// scores[r][position] for kTilePanels panels. query: [kRows][stride] words. kScaled: times a scale for each key.
template <bool kDot, class C, bool kScaled, int kRows>
INLINE void score_panels(const uint32_t *query, int64_t stride, const char *const *panels, int64_t head_dim,
                         [[maybe_unused]] const float *const *scales, float *scores) {
    constexpr int kWidth = kTilePanels * kVecs;
    constexpr int kStep = Vectors<kDot, C, kWidth>::kParts;  // words of the query that a row of a panel meets
    const int64_t steps = (head_dim + positions_in_a_row<C>() - 1) / positions_in_a_row<C>();
    constexpr int64_t kVectorBytes = kLanes * positions_in_a_row<C>() * sizeof(C), kRowBytes = kVecs * kVectorBytes;
    V acc[kRows][kWidth] = {};
    for (int64_t d = 0; d < steps; ++d) {
        // All vectors first, then row by row: the registers hold no more than that beside the sums.
        Vectors<kDot, C, kWidth> key;
        for (int v = 0; v < kWidth; ++v)
            key.read(v, panels[v / kVecs] + d * kRowBytes + v % kVecs * kVectorBytes, ~0u);
        for (int r = 0; r < kRows; ++r)
            for (int i = 0; i < kStep; ++i)
                for (int v = 0; v < kWidth; ++v)
                    acc[r][v] = mac<kDot>(acc[r][v], key.parts[i][v], query[r * stride + d * kStep + i]);
    }
    if constexpr (kScaled)
        for (int v = 0; v < kWidth; ++v) {
            const V scale = load<V>(scales[v / kVecs] + v % kVecs * kLanes);
            for (int r = 0; r < kRows; ++r) acc[r][v] = acc[r][v] * scale;
        }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kWidth; ++v) store(scores + r * kSegment + v * kLanes, acc[r][v]);
}

// What a softmax needs to know of a row.
struct Softmax {
    float scale;       // of a score, to powers of 2
    float natural;     // of a score, to powers of e; used with a softcap or a slope only
    float softcap, slope;
    const float *bias;  // by key - query + kMaxDistance, or null
    int32_t distance;  // of the segment's start from the row's position
    float highest, weight;  // results: the highest power of 2, the sum of weights
};

constexpr float kLog2E = 0x1.715476p+0f;

// Biases of kLanes keys, the first of which is so far from the query.
INLINE V biases(const float *bias, int64_t distance) {
    if (distance >= kMaxDistance) return splat(bias[2 * kMaxDistance]);
    if (distance + kLanes - 1 <= -kMaxDistance) return splat(bias[0]);
    if (distance >= -kMaxDistance && distance + kLanes - 1 <= kMaxDistance) return load<V>(bias + distance + kMaxDistance);
    V result;
    for (int i = 0; i < kLanes; ++i) {
        const int64_t at = distance + i + kMaxDistance;
        result[i] = bias[at < 0 ? 0 : at > 2 * kMaxDistance ? 2 * kMaxDistance : at];
    }
    return result;
}

// Positions of a softmax come two vectors at a time, and each of the two has sums of its own.
constexpr int64_t kStride = 2 * kLanes;

// Scores of a row to weights. It sees [begin, end); [low, high), multiples of kStride, is set, the rest of it to zero.
template <bool kDot>
INLINE void weigh(float *scores, uint32_t *weights, int64_t begin, int64_t end, int64_t low, int64_t high, Softmax *row) {
    const auto put = [&](int64_t j, V weight) INLINE_LAMBDA {
        if constexpr (kDot)
            store_from_float(reinterpret_cast<bf16 *>(weights) + j, weight);
        else
            store(weights + j, weight);
    };
    row->weight = 0;
    if (begin == end) {
        for (int64_t j = low; j < high; j += kLanes) put(j, V{});
        return;
    }
    const int64_t first = begin / kStride * kStride, last = (end + kStride - 1) / kStride * kStride;
    I lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    float scale = row->scale;
    if (row->softcap != 0 || row->slope != 0 || row->bias || scale < 0) {
        const V cap = splat(row->softcap);
        for (int64_t j = first; j < last; j += kLanes) {
            V score = load<V>(scores + j) * splat(row->natural);
            if (row->softcap != 0) score = cap * tanh(score / cap);
            score = score + splat(row->slope) * to_float(lane + (static_cast<int32_t>(j) + row->distance));
            if (row->bias) score = score + biases(row->bias, j + row->distance);
            store(scores + j, score);
        }
        scale = kLog2E;
    }
    const auto hide = [&](int64_t from) INLINE_LAMBDA {
        for (int64_t j = from; j < from + kStride; j += kLanes) {
            const I index = lane + static_cast<int32_t>(j);
            const I hidden = (index < static_cast<int32_t>(begin)) | (index >= static_cast<int32_t>(end));
            store(scores + j, hidden ? splat(-__builtin_inff()) : load<V>(scores + j));
        }
    };
    if (begin != first) hide(first);
    if (end != last) hide(last - kStride);
    V top[2] = {splat(-__builtin_inff()), splat(-__builtin_inff())}, total[2] = {};
    for (int64_t j = first; j < last; j += kStride)
        for (int i = 0; i < 2; ++i) top[i] = max(load<V>(scores + j + i * kLanes), top[i]);
    row->highest = highest(max(top[0], top[1])) * scale;
    const V factor = splat(scale), shift = splat(-row->highest);
    for (int64_t j = low; j < first; j += kLanes) put(j, V{});
    for (int64_t j = first; j < last; j += kStride)
        for (int i = 0; i < 2; ++i) {
            const V weight = exp2(fma(load<V>(scores + j + i * kLanes), factor, shift));
            put(j + i * kLanes, weight);
            total[i] = total[i] + weight;
        }
    for (int64_t j = last; j < high; j += kLanes) put(j, V{});
    row->weight = sum(total[0] + total[1]);
}

// i8: a row's weights of positions [begin, end) times the scales of the values, which are integers from here on.
INLINE void scale_weights(uint32_t *weights, const float *const *scales, int64_t begin, int64_t end) {
    for (int64_t j = begin / kLanes * kLanes; j < end; j += kLanes)
        store(weights + j, load<V>(weights + j) * load<V>(scales[j / kKeyPanel] + kKeyPanel + j % kKeyPanel));
}

// sums[r] = weights[r][j] * value j over j in [begin, end) of a segment, in ascending order, from vector `d` on. Calls
// meanwhile() once for each panel.
template <bool kDot, class C, int kRows, int kWidth, class Meanwhile>
INLINE void add_values(const uint32_t *weights, const char *const *panels, int64_t begin, int64_t end, int64_t stride,
                       int64_t d, float *sums, const Meanwhile &meanwhile) {
    constexpr int kStep = positions_in_a_row<C>();
    constexpr int64_t kWeights = kDot ? kSegment / 2 : kSegment;  // words of a row
    V acc[kRows][kWidth] = {};
    // Values of kStep positions from j on; `mask` clears those that nobody may see.
    const auto add = [&](const char *data, int64_t j, uint32_t mask) INLINE_LAMBDA {
        Vectors<kDot, C, kWidth> value;
        for (int v = 0; v < kWidth; ++v) value.read(v, data + v * kLanes * kStep * static_cast<int>(sizeof(C)), mask);
        for (int r = 0; r < kRows; ++r)
            for (int i = 0; i < value.kParts; ++i)
                for (int v = 0; v < kWidth; ++v)
                    acc[r][v] = mac<kDot>(acc[r][v], value.parts[i][v], weights[r * kWeights + (kDot ? j / 2 : j + i)]);
    };
    const int64_t row_bytes = stride * kStep * static_cast<int64_t>(sizeof(C));
    const int64_t whole = end / kStep * kStep;
    const auto at = [&](int64_t j) INLINE_LAMBDA {
        return panels[j / kKeyPanel] + j % kKeyPanel / kStep * row_bytes + d * kStep * static_cast<int64_t>(sizeof(C));
    };
    for (int64_t j = begin / kStep * kStep; j < whole;) {
        const int64_t next = (j / kKeyPanel + 1) * kKeyPanel, stop = next < whole ? next : whole;
        const char *values = at(j);
        meanwhile();
        for (; j < stop; j += kStep, values += row_bytes) add(values, j, 0xFFFFFFFF);
    }
    if (whole < end) add(at(whole), whole, 0xFFFF);
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kWidth; ++v) store(sums + r * stride + d + v * kLanes, acc[r][v]);
}

}  // namespace
}  // namespace headrace::HEADRACE_TIER
