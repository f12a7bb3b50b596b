// Dense rows to integers with scales, as core/weights/quantize.py defines it; an item is one thread's.
#include "simd.h"

namespace headrace::HEADRACE_TIER {
namespace {

constexpr int kFits = 2;  // times that scale and offset are fitted to the codes that they gave
constexpr float kCuts[] = {0.0f, 0.03f, 0.08f};
constexpr float kShrinks[] = {1.06f, 1.0f, 0.94f, 0.88f, 0.82f, 0.75f};
constexpr float kSigns[] = {-1.0f, 1.0f};
constexpr float kRounder = 0x1.8p23f;  // adding and subtracting it rounds to nearest even

INLINE V half(V value) {
    f16 bits[kLanes];
    store_from_float(bits, value);
    return load_as_float(bits);
}
INLINE V select(I mask, V yes, V no) { return bits_as<V>((bits_as<I>(yes) & mask) | (bits_as<I>(no) & ~mask)); }
INLINE V reciprocal(V scale) { return select(scale != V{}, splat(1.0f) / scale, V{}); }
INLINE V round(V value) { return value + splat(kRounder) - splat(kRounder); }
INLINE V encode(V x, V inverse, V offset, V top) { return min(max(round((x - offset) * inverse), V{}), top); }

// What is left of a NaN or an infinity: NaN; of other numbers: 0.
INLINE V taint(V x) { return x * V{}; }

// One group of int8, or a whole row, whose scale stays float32.
void int8_group(const float *x, int64_t cols, bool is_row, int8_t *codes, float *scale) {
    V top = {}, bad = {};
    float high = 0, tail_bad = 0;
    int64_t k = 0;
    for (; k + kLanes <= cols; k += kLanes) {
        const V value = load<V>(x + k);
        top = max(abs(value), top);
        bad = bad + taint(value);
    }
    high = highest(top);
    for (; k < cols; ++k) {
        const float value = __builtin_fabsf(x[k]);
        high = value > high ? value : high;
        tail_bad += value * 0.0f;
    }
    *scale = high / 127;
    if (!is_row) *scale = half(splat(*scale))[0];
    const float inverse = *scale > 0 ? 1 / *scale : 0;
    for (k = 0; k < cols; ++k) {
        const float level = x[k] * inverse + kRounder - kRounder;
        codes[k] = static_cast<int8_t>(level < -127 ? -127 : level > 127 ? 127 : level);
    }
    *scale += sum(bad) + tail_bad;
}

// kLanes groups side by side: lane l is a value of group l.
struct Groups {
    V x[kMaxQuantizedGroup];
    V top, middle;  // the highest code, and half of their number
    V low, high, total, bad, largest;
    V error, scale, offset;  // the best so far
};

INLINE void look(Groups *g, int64_t group) {
    g->low = g->high = g->total = g->largest = g->x[0];
    g->bad = taint(g->x[0]);
    for (int64_t k = 1; k < group; ++k) {
        const V x = g->x[k];
        g->low = min(x, g->low);
        g->high = max(x, g->high);
        g->total = g->total + x;
        g->bad = g->bad + taint(x);
        g->largest = select(abs(x) > abs(g->largest), x, g->largest);
    }
    g->error = splat(__builtin_inff());
    g->scale = g->offset = V{};
}

INLINE void keep_better(Groups *g, int64_t group, V scale, V offset) {
    const V inverse = reciprocal(scale);
    V error = {};
    for (int64_t k = 0; k < group; ++k) {
        const V difference = fma(encode(g->x[k], inverse, offset, g->top), scale, offset) - g->x[k];
        error = fma(difference, difference, error);
    }
    const I is_better = error < g->error;
    g->error = select(is_better, error, g->error);
    g->scale = select(is_better, scale, g->scale);
    g->offset = select(is_better, offset, g->offset);
}

INLINE void fit(Groups *g, int64_t group) {
    const V size = splat(static_cast<float>(group));
    const V range = g->high - g->low;
    for (const float below : kCuts)
        for (const float above : kCuts) {
            V scale = half(range * splat(1 - below - above) / g->top);
            V offset = half(g->low + range * splat(below));
            for (int i = 0; i < kFits; ++i) {
                const V inverse = reciprocal(scale);
                V sum_1 = {}, sum_2 = {}, product = {};
                for (int64_t k = 0; k < group; ++k) {
                    const V code = encode(g->x[k], inverse, offset, g->top);
                    sum_1 = sum_1 + code;
                    sum_2 = fma(code, code, sum_2);
                    product = fma(code, g->x[k], product);
                }
                const V spread = size * sum_2 - sum_1 * sum_1;
                const V slope = (size * product - sum_1 * g->total) / select(spread > V{}, spread, splat(1.0f));
                scale = half(select((spread > V{}) & (slope > V{}), slope, scale));
                offset = half((g->total - scale * sum_1) / size);
            }
            keep_better(g, group, scale, offset);
        }
}

INLINE void fit_symmetric(Groups *g, int64_t group) {
    for (const float sign : kSigns)
        for (const float shrink : kShrinks) {
            V scale = half(g->largest * splat(sign * shrink) / g->middle);
            for (int i = 0; i < kFits; ++i) {
                const V inverse = reciprocal(scale), offset = -(scale * g->middle);
                V squares = {}, product = {};
                for (int64_t k = 0; k < group; ++k) {
                    const V code = encode(g->x[k], inverse, offset, g->top) - g->middle;
                    squares = fma(code, code, squares);
                    product = fma(code, g->x[k], product);
                }
                const I is_spread = squares > V{};
                scale = half(select(is_spread, product / select(is_spread, squares, splat(1.0f)), scale));
            }
            keep_better(g, group, scale, -(scale * g->middle));
        }
}

// Groups first .. first + count - 1, at most kLanes of them.
void code_groups(const QuantizeArgs &args, int64_t first, int64_t count) {
    Groups g;
    g.x[0] = V{};  // for the compiler, which fears a group of no columns
    g.middle = splat(static_cast<float>(1 << (args.bits - 1)));
    g.top = g.middle + g.middle - splat(1.0f);
    const int64_t group = args.group;
    for (int64_t k = 0; k < group; ++k) {
        float lanes[kLanes];
        for (int64_t l = 0; l < kLanes; ++l) lanes[l] = args.x[(first + (l < count ? l : 0)) * group + k];
        g.x[k] = load<V>(lanes);
    }
    look(&g, group);
    if (args.is_symmetric)
        fit_symmetric(&g, group);
    else
        fit(&g, group);
    const V inverse = reciprocal(g.scale);
    auto *codes = static_cast<uint8_t *>(args.codes);
    for (int64_t k = 0; k < group; ++k) {
        const V code = encode(g.x[k], inverse, g.offset, g.top);
        for (int64_t l = 0; l < count; ++l) codes[(first + l) * group + k] = static_cast<uint8_t>(code[l]);
    }
    for (int64_t l = 0; l < count; ++l) {
        args.scales[first + l] = g.scale[l] + g.bad[l];
        args.offsets[first + l] = g.offset[l] + g.bad[l];
    }
}

}  // namespace

void quantize(const QuantizeArgs &args, const Context &context) {
    int64_t begin, end;
    const int64_t num_groups = args.num_rows * (args.cols / args.group), group = args.group;
    if (args.offsets == nullptr) {
        share(num_groups, context, &begin, &end);
        for (int64_t i = begin; i < end; ++i)
            int8_group(args.x + i * group, group, group == args.cols, static_cast<int8_t *>(args.codes) + i * group,
                       args.scales + i);
        return;
    }
    share((num_groups + kLanes - 1) / kLanes, context, &begin, &end);
    for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i * kLanes, left = num_groups - first;
        code_groups(args, first, left < kLanes ? left : int64_t{kLanes});
    }
}

}  // namespace headrace::HEADRACE_TIER
