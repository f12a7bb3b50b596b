// mean_rows: means of ranges of rows.
#include "pieces.h"
#include "simd.h"

namespace headrace::HEADRACE_TIER {
namespace {

template <class T>
void mean_rows_of(const MeanRowsArgs &args, const Context &context) {
    each_piece(args.num_rows, args.n, context, [&](int64_t row, int64_t first, int64_t last) INLINE_LAMBDA {
        const int64_t start = args.starts[row], count = args.ends[row] - start;
        const T *x = static_cast<const T *>(args.x) + start * args.x_stride;
        T *out = static_cast<T *>(args.out) + row * args.n;
        const V size = splat(static_cast<float>(count));
        int64_t i = first;
        for (; i + kLanes <= last; i += kLanes) {
            V total = {};
            for (int64_t r = 0; r < count; ++r) total = total + load_as_float(x + r * args.x_stride + i);
            store_from_float(out + i, total / size);
        }
        if (i == last) return;
        V total = {};
        for (int64_t r = 0; r < count; ++r) total = total + load_tail(x + r * args.x_stride + i, last - i);
        store_tail(out + i, total / size, last - i);
    });
}

}  // namespace

void mean_rows(const MeanRowsArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return mean_rows_of<float>(args, context);
        case Dtype::bf16: return mean_rows_of<bf16>(args, context);
        case Dtype::f16: return mean_rows_of<f16>(args, context);
    }
}

}  // namespace headrace::HEADRACE_TIER
