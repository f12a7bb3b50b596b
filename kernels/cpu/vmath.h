// Functions of vectors of floats, to about one unit in the last place.
#pragma once

#include <math.h>

#include "simd.h"

namespace headrace::HEADRACE_TIER {
namespace {

// e^x. Below -104 it is 0, above 88.8 infinity; NaN stays.
INLINE V exp(V x) {
    const V shift = splat(0x1.8p23f);
    const V limited = min(max(x, splat(-105.0f)), splat(89.0f));  // a NaN becomes a number here and comes back below
    const V n = (limited * splat(0x1.715476p+0f) + shift) - shift;
    // r = x - n ln 2, with ln 2 in two parts; |r| <= 0.35
    V r = fma(n, splat(-0x1.62e4p-1f), limited);
    r = fma(n, splat(-0x1.7f7d1cp-20f), r);
    V p = splat(0x1.a0d2cep-13f);
    p = fma(p, r, splat(0x1.6e8718p-10f));
    p = fma(p, r, splat(0x1.111284p-7f));
    p = fma(p, r, splat(0x1.555554p-5f));
    p = fma(p, r, splat(0x1.555556p-3f));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    // 2^n in two factors, since n runs from -151 to 128.
    const I whole = __builtin_convertvector(n, I), half = whole >> 1;
    const V low = bits_as<V>((half + 127) << 23), high = bits_as<V>((whole - half + 127) << 23);
    const V result = p * low * high;
    return x == x ? result : x;
}

// 2^x for the weights of a softmax: 0 from -150 down (and for -infinity), x at most 127.
INLINE V exp2(V x) {
    // n + r = x, n whole and |r| <= 0.5
#if defined(HEADRACE_HAS_512)
    const V r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);  // 0 for infinities
    const V n = x - r;
#else
    const V limited = max(x, splat(-200.0f));
    const V n = (limited + splat(0x1.8p23f)) - splat(0x1.8p23f), r = limited - n;
#endif
    V p = splat(0x1.5c08d2p-10f);
    p = fma(p, r, splat(0x1.3d0c52p-7f));
    p = fma(p, r, splat(0x1.c6b6e6p-5f));
    p = fma(p, r, splat(0x1.ebf918p-3f));
    p = fma(p, r, splat(0x1.62e428p-1f));
    p = fma(p, r, splat(1.0f));
#if defined(HEADRACE_HAS_512)
    return _mm512_scalef_ps(p, n);
#else
    const I whole = __builtin_convertvector(n, I), half = whole >> 1;
    const V low = bits_as<V>((half + 127) << 23), high = bits_as<V>((whole - half + 127) << 23);
    const V result = p * low * high;
    return x == x ? result : x;
#endif
}

INLINE V sigmoid(V x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

INLINE V tanh(V x) {
    const V size = abs(x);
    // Near zero an odd polynomial (Cephes), elsewhere 1 - 2 / (e^2x + 1).
    const V z = x * x;
    V p = splat(-5.70498872745e-3f);
    p = fma(p, z, splat(2.06390887954e-2f));
    p = fma(p, z, splat(-5.37397155531e-2f));
    p = fma(p, z, splat(1.33314422036e-1f));
    p = fma(p, z, splat(-3.33332819422e-1f));
    const V small = fma(p * z, x, x);
    const V large = splat(1.0f) - splat(2.0f) / (exp(size + size) + splat(1.0f));
    const V signed_large = x < splat(0.0f) ? -large : large;
    return size < splat(0.625f) ? small : signed_large;
}

template <class F>
INLINE V each(V x, F function) {
    float lanes[kLanes];
    store(lanes, x);
    for (int i = 0; i < kLanes; ++i) lanes[i] = function(lanes[i]);
    return load<V>(lanes);
}

}  // namespace
}  // namespace headrace::HEADRACE_TIER
