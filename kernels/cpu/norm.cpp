// rms_norm, add_rms_norm, layer_norm and magnitude; a token is one thread's.
#include "simd.h"

namespace headrace::HEADRACE_TIER {
namespace {

// Call body(i, n) for the pieces of a row: n is kLanes, at the end maybe less.
template <class Body>
INLINE void pieces(int64_t n, Body body) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, int64_t{kLanes});
    if (i < n) body(i, n - i);
}

template <class T>
INLINE V get(const T *data, int64_t n) {
    return n == kLanes ? load_as_float(data) : load_tail(data, n);
}
template <class T>
INLINE void put(T *data, V value, int64_t n) {
    if (n == kLanes)
        store_from_float(data, value);
    else
        store_tail(data, value, n);
}

template <class T>
void rms_norm_of(const NormArgs &args, const Context &context) {
    int64_t begin, end;
    share(args.num_tokens, context, &begin, &end);
    for (int64_t token = begin; token < end; ++token) {
        const T *x =
            static_cast<const T *>(args.x) + token / args.group * args.x_stride + token % args.group * args.n;
        T *out = static_cast<T *>(args.out) + token * args.n;
        if (args.residual) {
            const T *residual = static_cast<const T *>(args.residual) + token * args.n;
            T *total = static_cast<T *>(args.sum) + token * args.n;
            pieces(args.n, [&](int64_t i, int64_t n) { put(total + i, get(x + i, n) + get(residual + i, n), n); });
            x = total;
        }
        V squares = {};
        pieces(args.n, [&](int64_t i, int64_t n) {
            const V value = get(x + i, n);
            squares = fma(value, value, squares);
        });
        const float mean = sum(squares) / static_cast<float>(args.n);
        const V factor = splat(1.0f / __builtin_sqrtf(mean + args.eps));
        pieces(args.n, [&](int64_t i, int64_t n) {
            V value = get(x + i, n) * factor;
            if (args.weight) value = value * get(args.weight + i, n);
            put(out + i, value, n);
        });
    }
}

template <class T>
INLINE float mean_of(const T *x, int64_t n) {
    V total = {};
    pieces(n, [&](int64_t i, int64_t count) { total = total + get(x + i, count); });
    return sum(total) / static_cast<float>(n);
}

template <class T>
INLINE float variance_of(const T *x, int64_t n, V mean) {
    V squares = {};
    pieces(n, [&](int64_t i, int64_t count) {
        const V value = get(x + i, count) - mean;
        float lanes[kLanes];
        store(lanes, value);
        for (int64_t lane = count; lane < kLanes; ++lane) lanes[lane] = 0;  // lanes behind the row hold -mean
        const V centred = load<V>(lanes);
        squares = fma(centred, centred, squares);
    });
    return sum(squares) / static_cast<float>(n);
}

template <class T>
void magnitude_of(const MagnitudeArgs &args, const Context &context) {
    int64_t begin, end;
    share(args.num_rows, context, &begin, &end);
    for (int64_t row = begin; row < end; ++row) {
        const T *x = static_cast<const T *>(args.x) + row * args.x_stride;
        const V mean = splat(args.is_centred ? mean_of(x, args.n) : 0.0f);
        args.out[row * args.out_stride] = __builtin_sqrtf(variance_of(x, args.n, mean));
    }
}

template <class T>
void layer_norm_of(const NormArgs &args, const Context &context) {
    int64_t begin, end;
    share(args.num_tokens, context, &begin, &end);
    for (int64_t token = begin; token < end; ++token) {
        const T *x =
            static_cast<const T *>(args.x) + token / args.group * args.x_stride + token % args.group * args.n;
        T *out = static_cast<T *>(args.out) + token * args.n;
        const V mean = splat(mean_of(x, args.n));
        const V factor = splat(1.0f / __builtin_sqrtf(variance_of(x, args.n, mean) + args.eps));
        pieces(args.n, [&](int64_t i, int64_t n) {
            V value = (get(x + i, n) - mean) * factor;
            if (args.weight) value = value * get(args.weight + i, n);
            if (args.bias) value = value + get(args.bias + i, n);
            put(out + i, value, n);
        });
    }
}

}  // namespace

void rms_norm(const NormArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return rms_norm_of<float>(args, context);
        case Dtype::bf16: return rms_norm_of<bf16>(args, context);
        case Dtype::f16: return rms_norm_of<f16>(args, context);
    }
}

void magnitude(const MagnitudeArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return magnitude_of<float>(args, context);
        case Dtype::bf16: return magnitude_of<bf16>(args, context);
        case Dtype::f16: return magnitude_of<f16>(args, context);
    }
}

void layer_norm(const NormArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return layer_norm_of<float>(args, context);
        case Dtype::bf16: return layer_norm_of<bf16>(args, context);
        case Dtype::f16: return layer_norm_of<f16>(args, context);
    }
}

}  // namespace headrace::HEADRACE_TIER
