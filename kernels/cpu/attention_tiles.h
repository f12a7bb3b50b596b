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
#ifdef HEADRACE_HAS_DOT
    return __is_same(T, bf16) && __is_same(C, bf16);
#else
    return false;
#endif
}

// Positions whose values lie side by side.
template <class C>
constexpr int positions_in_a_row() {
    return __is_same(C, bf16) ? 2 : 1;
}

// Queries and weights: pairs of bf16 in words with a dot product, floats without.

// scores[r][position] for kTilePanels panels. query: [kRows][stride] words.
template <bool kDot, class C, int kRows>
INLINE void score_panels(const uint32_t *query, int64_t stride, const char *const *panels, int64_t head_dim,
                         float *scores) {
    V acc[kRows][kTilePanels * kVecs] = {};
    const auto add = [&](int r, int p, int v, auto key, uint32_t word) INLINE_LAMBDA {
        V &sum = acc[r][p * kVecs + v];
        if constexpr (kDot) {
#ifdef HEADRACE_HAS_DOT
            sum = dot_bf16(sum, key, splat_word(word));
#endif
        } else {
            sum = fma(key, splat(bits_as<float>(word)), sum);
        }
    };
    if constexpr (kDot) {
        for (int64_t d = 0; d < (head_dim + 1) / 2; ++d)
            for (int p = 0; p < kTilePanels; ++p)
                for (int v = 0; v < kVecs; ++v) {
                    const I key = load<I>(panels[p] + (d * kKeyPanel + v * kLanes) * 4);
                    for (int r = 0; r < kRows; ++r) add(r, p, v, key, query[r * stride + d]);
                }
    } else if constexpr (__is_same(C, bf16)) {
        for (int64_t d = 0; d < head_dim; d += 2)
            for (int p = 0; p < kTilePanels; ++p)
                for (int v = 0; v < kVecs; ++v) {
                    const I both = load<I>(panels[p] + (d / 2 * kKeyPanel + v * kLanes) * 4);
                    for (int r = 0; r < kRows; ++r) {
                        add(r, p, v, bits_as<V>(both << 16), query[r * stride + d]);
                        add(r, p, v, bits_as<V>(both & splat_word(0xFFFF0000)), query[r * stride + d + 1]);
                    }
                }
    } else {
        for (int64_t d = 0; d < head_dim; ++d)
            for (int p = 0; p < kTilePanels; ++p)
                for (int v = 0; v < kVecs; ++v) {
                    const V key = load_as_float(reinterpret_cast<const C *>(panels[p]) + d * kKeyPanel + v * kLanes);
                    for (int r = 0; r < kRows; ++r) add(r, p, v, key, query[r * stride + d]);
                }
    }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kTilePanels * kVecs; ++v) store(scores + r * kSegment + v * kLanes, acc[r][v]);
}

// What a softmax needs to know of a row.
struct Softmax {
    float scale;       // of a score, to powers of 2
    float natural;     // of a score, to powers of e; used with a softcap or a slope only
    float softcap, slope;
    int32_t distance;  // of the segment's start from the row's position
    float highest, weight;  // results: the highest power of 2, the sum of weights
};

constexpr float kLog2E = 0x1.715476p+0f;

// Scores of a row to weights. It sees [begin, end); [low, high), multiples of kLanes, is set, the rest of it to zero.
template <bool kDot>
INLINE void weigh(float *scores, uint32_t *weights, int64_t begin, int64_t end, int64_t low, int64_t high, Softmax *row) {
    const V none = splat(-__builtin_inff());
    I lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    const int64_t first = begin / kLanes * kLanes, last = (end + kLanes - 1) / kLanes * kLanes;
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
    float scale = row->scale;
    if (row->softcap != 0 || row->slope != 0 || scale < 0) {
        const V cap = splat(row->softcap);
        for (int64_t j = first; j < last; j += kLanes) {
            V score = load<V>(scores + j) * splat(row->natural);
            if (row->softcap != 0) score = cap * tanh(score / cap);
            score = score + splat(row->slope) * to_float(lane + (static_cast<int32_t>(j) + row->distance));
            store(scores + j, score);
        }
        scale = kLog2E;
    }
    const auto hide = [&](int64_t j) INLINE_LAMBDA {
        const I index = lane + static_cast<int32_t>(j);
        const I hidden = (index < static_cast<int32_t>(begin)) | (index >= static_cast<int32_t>(end));
        store(scores + j, hidden ? none : load<V>(scores + j));
    };
    hide(first);
    hide(last - kLanes);
    V top = none;
    for (int64_t j = first; j < last; j += kLanes) top = max(load<V>(scores + j), top);
    row->highest = highest(top) * scale;
    const V factor = splat(scale), shift = splat(-row->highest);
    V total = {};
    for (int64_t j = low; j < first; j += kLanes) put(j, V{});
    for (int64_t j = first; j < last; j += kLanes) {
        const V weight = exp2(fma(load<V>(scores + j), factor, shift));
        put(j, weight);
        total = total + weight;
    }
    for (int64_t j = last; j < high; j += kLanes) put(j, V{});
    row->weight = sum(total);
}

// sums[r] = weights[r][j] * value j over j in [begin, end) of a segment, in ascending order, from vector `d` on.
template <bool kDot, class C, int kRows, int kWidth>
INLINE void add_values(const uint32_t *weights, const char *const *panels, int64_t begin, int64_t end, int64_t stride,
                       int64_t d, float *sums) {
    constexpr int kStep = positions_in_a_row<C>();
    constexpr int64_t kWeights = kDot ? kSegment / 2 : kSegment;  // words of a row
    V acc[kRows][kWidth] = {};
    // Values of kStep positions from j on; `mask` clears those that nobody may see.
    const auto add = [&](const char *values, int64_t j, [[maybe_unused]] uint32_t mask) INLINE_LAMBDA {
        for (int v = 0; v < kWidth; ++v) {
            if constexpr (kStep == 2) {
                const I both = load<I>(values + v * kLanes * 4) & splat_word(mask);
                for (int r = 0; r < kRows; ++r) {
                    const uint32_t *weight = weights + r * kWeights;
                    if constexpr (kDot) {
#ifdef HEADRACE_HAS_DOT
                        acc[r][v] = dot_bf16(acc[r][v], both, splat_word(weight[j / 2]));
#endif
                    } else {
                        acc[r][v] = fma(splat(bits_as<float>(weight[j])), bits_as<V>(both << 16), acc[r][v]);
                        acc[r][v] = fma(splat(bits_as<float>(weight[j + 1])),
                                        bits_as<V>(both & splat_word(0xFFFF0000)), acc[r][v]);
                    }
                }
            } else {
                const V value = load_as_float(reinterpret_cast<const C *>(values) + v * kLanes);
                for (int r = 0; r < kRows; ++r)
                    acc[r][v] = fma(splat(bits_as<float>(weights[r * kWeights + j])), value, acc[r][v]);
            }
        }
    };
    const int64_t row_bytes = stride * kStep * static_cast<int64_t>(sizeof(C));
    const int64_t whole = end / kStep * kStep;
    const auto at = [&](int64_t j) INLINE_LAMBDA {
        return panels[j / kKeyPanel] + j % kKeyPanel / kStep * row_bytes + d * kStep * static_cast<int64_t>(sizeof(C));
    };
    for (int64_t j = begin / kStep * kStep; j < whole;) {
        const int64_t next = (j / kKeyPanel + 1) * kKeyPanel, stop = next < whole ? next : whole;
        const char *values = at(j);
        for (; j < stop; j += kStep, values += row_bytes) add(values, j, 0xFFFFFFFF);
    }
    if (whole < end) add(at(whole), whole, 0xFFFF);
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kWidth; ++v) store(sums + r * stride + d + v * kLanes, acc[r][v]);
}

}  // namespace
}  // namespace headrace::HEADRACE_TIER
