// What multiplies rows by others: gates, and factors of a row, of a head, of a column or of each number.
#include "pieces.h"
#include "vmath.h"

namespace headrace::HEADRACE_TIER {
namespace {

// The numbers of y that serve the columns from i on, each of them `span` columns.
template <class Y>
INLINE V spread(const Y *y, int64_t i, int64_t count, int64_t span) {
    const int64_t first = i / span;
    if ((i + count - 1) / span == first) return splat(to_float(y[first]));
    float lanes[kLanes] = {};
    for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = to_float(y[(i + lane) / span]);
    return load<V>(lanes);
}

template <class T, class Y>
void modulate_of(const ModulateArgs &args, const Context &context) {
    each_piece(args.num_rows, args.n, context, [&](int64_t row, int64_t first, int64_t last) INLINE_LAMBDA {
        const T *x = static_cast<const T *>(args.x) + row * args.x_stride;
        const Y *y = static_cast<const Y *>(args.y) + row * args.y_stride;
        T *out = static_cast<T *>(args.out) + row * args.n;
        for (int64_t i = first; i < last; i += kLanes) {
            const int64_t left = last - i;
            const bool is_whole = left >= kLanes;
            V factor = args.y_span > 1 ? spread(y, i, is_whole ? kLanes : left, args.y_span)
                       : is_whole      ? load_as_float(y + i)
                                       : load_tail(y + i, left);
            if (args.is_gate) factor = sigmoid(factor);
            const V value = (is_whole ? load_as_float(x + i) : load_tail(x + i, left)) * factor;
            if (is_whole)
                store_from_float(out + i, value);
            else
                store_tail(out + i, value, left);
        }
    });
}

template <class T>
void modulate_for(const ModulateArgs &args, const Context &context) {
    if (args.y_dtype == Dtype::f32) return modulate_of<T, float>(args, context);
    modulate_of<T, T>(args, context);
}

}  // namespace

void modulate(const ModulateArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return modulate_for<float>(args, context);
        case Dtype::bf16: return modulate_for<bf16>(args, context);
        case Dtype::f16: return modulate_for<f16>(args, context);
    }
}

}  // namespace headrace::HEADRACE_TIER
