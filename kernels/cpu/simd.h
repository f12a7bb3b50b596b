// The vector type of a tier and the few instructions that plain C++ does not reach.
//
// V holds kLanes floats and I as many int32. Arithmetic, comparisons and shifts are the compiler's vector operators;
// contraction is off (CMakeLists.txt), so a fused multiply-add happens exactly where fma() is written: the bits of
// a result may not depend on which loop computed it. With HEADRACE_EMULATE a tier of wide vectors is built from
// plain C++, so that its code can be tested on any CPU.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#ifdef __ARM_FEATURE_SVE
#include <arm_sve.h>
#endif

#include "kernels.h"

#if HEADRACE_LANES == 16 && defined(__AVX512F__) && !defined(HEADRACE_EMULATE)
#define HEADRACE_HAS_512 1
#elif HEADRACE_LANES == 8 && defined(__AVX2__)
#define HEADRACE_HAS_256 1
#elif HEADRACE_LANES == 4 && defined(__ARM_FEATURE_DOTPROD)
#define HEADRACE_HAS_NEON 1
#elif HEADRACE_LANES == 8 && __ARM_FEATURE_SVE_BITS == 256
#define HEADRACE_HAS_SVE 1
#endif
#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace headrace::HEADRACE_TIER {
namespace {

constexpr int kLanes = HEADRACE_LANES;

typedef float V __attribute__((vector_size(4 * kLanes)));
typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));
typedef int16_t S __attribute__((vector_size(4 * kLanes)));
typedef uint16_t H __attribute__((vector_size(2 * kLanes)));
typedef uint8_t B __attribute__((vector_size(kLanes)));

#if defined(HEADRACE_HAS_SVE)
typedef svfloat32_t SveFloats __attribute__((arm_sve_vector_bits(256)));
typedef svint32_t SveInts __attribute__((arm_sve_vector_bits(256)));
typedef svuint32_t SveWords __attribute__((arm_sve_vector_bits(256)));
typedef svuint8_t SveBytes __attribute__((arm_sve_vector_bits(256)));
typedef svint8_t SveSigned __attribute__((arm_sve_vector_bits(256)));
typedef svbfloat16_t SveHalves __attribute__((arm_sve_vector_bits(256)));
#endif

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
struct i8 {
    int8_t number;
};

template <class To, class From>
INLINE To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}

template <class T>
INLINE T load(const void *data) {
    T result;
    memcpy(&result, data, sizeof result);
    return result;
}
template <class T>
INLINE void store(void *data, T value) {
    memcpy(data, &value, sizeof value);
}

INLINE V splat(float value) {
#if defined(HEADRACE_HAS_512)
    return _mm512_set1_ps(value);
#elif defined(HEADRACE_HAS_256)
    return _mm256_set1_ps(value);
#else
    V result;
    for (int i = 0; i < kLanes; ++i) result[i] = value;
    return result;
#endif
}
INLINE I splat_word(uint32_t word) { return I{} + static_cast<int32_t>(word); }

// a * b + c. Rounds once where the tier has the instruction.
INLINE V fma(V a, V b, V c) {
#if defined(HEADRACE_HAS_512)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(HEADRACE_HAS_256)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(HEADRACE_HAS_NEON)
    return vfmaq_f32(c, a, b);
#elif defined(HEADRACE_HAS_SVE)
    return svmla_f32_x(svptrue_b32(), static_cast<SveFloats>(c), static_cast<SveFloats>(a), static_cast<SveFloats>(b));
#elif defined(__aarch64__)
    V result;
    for (int i = 0; i < kLanes; ++i) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return result;
#else
    return a * b + c;
#endif
}

INLINE V max(V a, V b) {
#if defined(HEADRACE_HAS_512)
    return _mm512_max_ps(a, b);
#elif defined(HEADRACE_HAS_256)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}
INLINE V min(V a, V b) { return a < b ? a : b; }
INLINE V abs(V a) { return bits_as<V>(bits_as<I>(a) & 0x7FFFFFFF); }

INLINE V sqrt(V a) {
#if defined(HEADRACE_HAS_512)
    return _mm512_sqrt_ps(a);
#elif defined(HEADRACE_HAS_256)
    return _mm256_sqrt_ps(a);
#elif defined(HEADRACE_HAS_NEON)
    return vsqrtq_f32(a);
#elif defined(HEADRACE_HAS_SVE)
    return svsqrt_f32_x(svptrue_b32(), static_cast<SveFloats>(a));
#else
    V result;
    for (int i = 0; i < kLanes; ++i) result[i] = __builtin_sqrtf(a[i]);
    return result;
#endif
}

INLINE V to_float(I a) { return __builtin_convertvector(a, V); }

// Sum of the lanes, as a tree.
INLINE float sum(V a) {
#if defined(HEADRACE_HAS_512)
    return _mm512_reduce_add_ps(a);
#else
    float lanes[kLanes];
    store(lanes, a);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] = lanes[i] + lanes[i + width];
    return lanes[0];
#endif
}
INLINE int32_t sum(I a) {
#if defined(HEADRACE_HAS_512)
    return _mm512_reduce_add_epi32(bits_as<__m512i>(a));
#else
    int32_t total = 0;
    for (int i = 0; i < kLanes; ++i) total += a[i];
    return total;
#endif
}
INLINE float highest(V a) {
#if defined(HEADRACE_HAS_512)
    return _mm512_reduce_max_ps(a);
#else
    float best = a[0];
    for (int i = 1; i < kLanes; ++i) best = a[i] > best ? a[i] : best;
    return best;
#endif
}

// Lanes made wider or narrower. GCC's own conversions take vectors apart, some lane by lane.
INLINE U widen(H a) {
#if defined(HEADRACE_HAS_512)
    return bits_as<U>(_mm512_cvtepu16_epi32(bits_as<__m256i>(a)));
#elif defined(HEADRACE_HAS_256)
    return bits_as<U>(_mm256_cvtepu16_epi32(bits_as<__m128i>(a)));
#elif defined(HEADRACE_HAS_SVE)
    return bits_as<U>(SveWords(svld1uh_u32(svptrue_b32(), reinterpret_cast<const uint16_t *>(&a))));
#else
    return __builtin_convertvector(a, U);
#endif
}
INLINE U widen(B a) {
#if defined(HEADRACE_HAS_512)
    return bits_as<U>(_mm512_cvtepu8_epi32(bits_as<__m128i>(a)));
#elif defined(HEADRACE_HAS_256)
    return bits_as<U>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits_as<int64_t>(a))));
#elif defined(HEADRACE_HAS_SVE)
    return bits_as<U>(SveWords(svld1ub_u32(svptrue_b32(), reinterpret_cast<const uint8_t *>(&a))));
#else
    return __builtin_convertvector(a, U);
#endif
}
INLINE H low_halves(U a) {
#if defined(HEADRACE_HAS_512)
    return bits_as<H>(_mm512_cvtepi32_epi16(bits_as<__m512i>(a)));
#elif defined(HEADRACE_HAS_256)
    const __m256i words = bits_as<__m256i>(a & 0xFFFF), packed = _mm256_packus_epi32(words, words);
    return bits_as<H>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#elif defined(HEADRACE_HAS_SVE)
    H result;
    svst1h_u32(svptrue_b32(), reinterpret_cast<uint16_t *>(&result), bits_as<SveWords>(a));
    return result;
#else
    return __builtin_convertvector(a, H);
#endif
}
INLINE B low_bytes(U a) {
#if defined(HEADRACE_HAS_512)
    return bits_as<B>(_mm512_cvtepi32_epi8(bits_as<__m512i>(a)));
#elif defined(HEADRACE_HAS_256)
    const __m256i order = _mm256_set1_epi32(0x0C080400), first = _mm256_shuffle_epi8(bits_as<__m256i>(a), order);
    const __m128i ends = _mm_unpacklo_epi32(_mm256_castsi256_si128(first), _mm256_extracti128_si256(first, 1));
    return bits_as<B>(_mm_cvtsi128_si64(ends));
#elif defined(HEADRACE_HAS_SVE)
    B result;
    svst1b_u32(svptrue_b32(), reinterpret_cast<uint8_t *>(&result), bits_as<SveWords>(a));
    return result;
#else
    return __builtin_convertvector(a, B);
#endif
}

// Sum of the bytes as int8.
INLINE int32_t sum_signed(B bytes) {
    [[maybe_unused]] const B raised = bytes ^ 128;  // by 128
#if defined(HEADRACE_HAS_512)
    const __m128i totals = _mm_sad_epu8(bits_as<__m128i>(raised), _mm_setzero_si128());
    return _mm_cvtsi128_si32(totals) + _mm_extract_epi32(totals, 2) - kLanes * 128;
#elif defined(HEADRACE_HAS_256)
    const __m128i all = _mm_cvtsi64_si128(bits_as<int64_t>(raised));
    return _mm_cvtsi128_si32(_mm_sad_epu8(all, _mm_setzero_si128())) - kLanes * 128;
#else
    int32_t total = 0;
    for (int i = 0; i < kLanes; ++i) total += static_cast<int8_t>(bytes[i]);
    return total;
#endif
}

// kLanes numbers of a dtype, as floats.
INLINE V load_as_float(const float *data) { return load<V>(data); }
INLINE V load_as_float(const bf16 *data) {
    return bits_as<V>(widen(load<H>(data)) << 16);
}
INLINE float to_float(float value) { return value; }
INLINE float to_float(bf16 value) { return bits_as<float>(static_cast<uint32_t>(value.bits) << 16); }
INLINE float to_float(f16 value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16, rest = value.bits & 0x7FFF;
    if (rest >= 0x7C00) return bits_as<float>(sign | 0x7F800000 | (rest & 0x3FF) << 13);
    if (rest >= 0x400) return bits_as<float>(sign | (0x38000000 + (rest << 13)));
    // A denormal of f16 is a normal float; as an integer it takes no part in what is done with denormals.
    return bits_as<float>(sign | bits_as<uint32_t>(static_cast<float>(rest) * 0x1p-24f));
}
INLINE V load_as_float(const f16 *data) {
#if defined(HEADRACE_HAS_512)
    return _mm512_cvtph_ps(load<__m256i>(data));
#elif defined(HEADRACE_HAS_256)
    return _mm256_cvtph_ps(load<__m128i>(data));
#elif defined(HEADRACE_HAS_NEON)
    return vcvt_f32_f16(bits_as<float16x4_t>(load<H>(data)));
#elif defined(HEADRACE_HAS_SVE)
    return svcvt_f32_f16_x(svptrue_b32(), svreinterpret_f16(bits_as<SveWords>(widen(load<H>(data)))));
#else
    V result;
    for (int i = 0; i < kLanes; ++i) result[i] = to_float(data[i]);
    return result;
#endif
}

INLINE V load_as_float(const i8 *data) {
#if defined(HEADRACE_HAS_512)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(data)));
#elif defined(HEADRACE_HAS_256)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(data))));
#else
    return to_float((bits_as<I>(widen(load<B>(data))) << 24) >> 24);
#endif
}

// Floats to a dtype, to nearest even; a NaN stays one.
INLINE void store_from_float(float *data, V value) { store(data, value); }
INLINE void store_from_float(bf16 *data, V value) {
#if defined(HEADRACE_HAS_512) && defined(HEADRACE_HAS_DOT_BF16)
    store(data, _mm512_cvtneps_pbh(value));  // takes subnormal numbers for zero
#else
    const U word = bits_as<U>(value);
    const U rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16;
    const U quiet = (word >> 16) | 0x40;
    const U result = value == value ? rounded : quiet;
    store(data, low_halves(result));
#endif
}
INLINE void from_float(float *data, float value) { *data = value; }
INLINE void from_float(bf16 *data, float value) {
    const uint32_t word = bits_as<uint32_t>(value);
    const uint32_t rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16;
    data->bits = static_cast<uint16_t>(value == value ? rounded : ((word >> 16) | 0x40));
}
INLINE void from_float(f16 *data, float value) {
    const uint32_t word = bits_as<uint32_t>(value), sign = word >> 16 & 0x8000, rest = word & 0x7FFFFFFF;
    uint32_t result;
    if (rest >= 0x7F800001) {
        result = 0x7E00;
    } else if (rest >= 0x477FF000) {  // rounds to 65536 or more
        result = 0x7C00;
    } else if (rest < 0x38800000) {  // subnormal: adding 0.5 rounds at the last bit that f16 has
        result = bits_as<uint32_t>(bits_as<float>(rest) + 0.5f) - 0x3F000000;
    } else {
        result = (rest - 0x38000000 + 0xFFF + (rest >> 13 & 1)) >> 13;
    }
    data->bits = static_cast<uint16_t>(sign | result);
}
INLINE void store_from_float(f16 *data, V value) {
#if defined(HEADRACE_HAS_512)
    store(data, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(HEADRACE_HAS_256)
    store(data, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(HEADRACE_HAS_NEON)
    store(data, vcvt_f16_f32(value));
#elif defined(HEADRACE_HAS_SVE)
    const SveWords halves = svreinterpret_u32(svcvt_f16_f32_x(svptrue_b32(), static_cast<SveFloats>(value)));
    store(data, low_halves(bits_as<U>(halves)));
#else
    for (int i = 0; i < kLanes; ++i) from_float(data + i, value[i]);
#endif
}

// The first n < kLanes numbers of a row's end; the lanes behind them are zero.
template <class T>
INLINE V load_tail(const T *data, int64_t n) {
    T lanes[kLanes] = {};
    memcpy(lanes, data, static_cast<size_t>(n) * sizeof(T));
    return load_as_float(lanes);
}
template <class T>
INLINE void store_tail(T *data, V value, int64_t n) {
    T lanes[kLanes];
    store_from_float(lanes, value);
    memcpy(data, lanes, static_cast<size_t>(n) * sizeof(T));
}

// acc + w.lo * x.lo + w.hi * x.hi, for pairs of int16 in each lane.
INLINE I dot_i16(I acc, I w, I x) {
#if defined(HEADRACE_HAS_512)
    return acc + bits_as<I>(_mm512_madd_epi16(bits_as<__m512i>(w), bits_as<__m512i>(x)));
#elif defined(HEADRACE_HAS_256)
    return acc + bits_as<I>(_mm256_madd_epi16(bits_as<__m256i>(w), bits_as<__m256i>(x)));
#elif defined(HEADRACE_HAS_NEON)
    const int16x8_t a = bits_as<int16x8_t>(w), b = bits_as<int16x8_t>(x);
    return acc + bits_as<I>(vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b)));
#elif defined(__SSE2__) && HEADRACE_LANES == 4
    return acc + bits_as<I>(_mm_madd_epi16(bits_as<__m128i>(w), bits_as<__m128i>(x)));
#else
    return acc + ((w << 16) >> 16) * ((x << 16) >> 16) + (w >> 16) * (x >> 16);
#endif
}

#ifdef HEADRACE_HAS_DOT_I8
// acc + dot product of four uint8 of x and four int8 of w, in each lane.
INLINE I dot_u8_i8(I acc, I x, I w) {
#if defined(HEADRACE_HAS_512)
    return bits_as<I>(_mm512_dpbusd_epi32(bits_as<__m512i>(acc), bits_as<__m512i>(x), bits_as<__m512i>(w)));
#elif defined(HEADRACE_HAS_NEON) && defined(__ARM_FEATURE_MATMUL_INT8)
    return bits_as<I>(vusdotq_s32(bits_as<int32x4_t>(acc), bits_as<uint8x16_t>(x), bits_as<int8x16_t>(w)));
#elif defined(HEADRACE_HAS_SVE)
    return svusdot_s32(static_cast<SveInts>(acc), bits_as<SveBytes>(x), bits_as<SveSigned>(w));
#elif defined(HEADRACE_HAS_NEON)
    // x = (x - 128) + 2 * 64, of which signed bytes hold each part.
    const int8x16_t weights = bits_as<int8x16_t>(w), below = veorq_s8(bits_as<int8x16_t>(x), vdupq_n_s8(-128));
    const int32x4_t rest = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(64), weights);
    return bits_as<I>(vdotq_s32(bits_as<int32x4_t>(acc), below, weights)) + bits_as<I>(rest) * 2;
#else
    for (int shift = 0; shift < 32; shift += 8) acc += ((x >> shift) & 255) * ((w << (24 - shift)) >> 24);
    return acc;
#endif
}
#endif

#ifdef HEADRACE_HAS_DOT_BF16
// acc + w.lo * x.lo + w.hi * x.hi, for pairs of bf16 in each lane.
INLINE V dot_bf16(V acc, I w, I x) {
#if defined(HEADRACE_HAS_512)
    return _mm512_dpbf16_ps(acc, bits_as<__m512bh>(w), bits_as<__m512bh>(x));
#elif defined(HEADRACE_HAS_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return vbfdotq_f32(acc, bits_as<bfloat16x8_t>(w), bits_as<bfloat16x8_t>(x));
#elif defined(HEADRACE_HAS_SVE)
    return svbfdot_f32(static_cast<SveFloats>(acc), bits_as<SveHalves>(w), bits_as<SveHalves>(x));
#else
    const I high = splat_word(0xFFFF0000);
    acc = acc + bits_as<V>(w << 16) * bits_as<V>(x << 16);
    return acc + bits_as<V>(w & high) * bits_as<V>(x & high);
#endif
}
#endif

}  // namespace
}  // namespace headrace::HEADRACE_TIER
