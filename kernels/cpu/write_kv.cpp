// write_kv: keys and values of new tokens to their slots of a KV cache.
#include "simd.h"

namespace headrace::HEADRACE_TIER {
namespace {

// What a token's key or value of one head is multiplied by before it is stored.
template <class T, class C>
struct Rounding {
    static INLINE Rounding of(const T *, int64_t, float *) { return {}; }
    INLINE void operator()(C *to, T from) const { from_float(to, to_float(from)); }
};

// To integers of at most 127 by one scale, to nearest even. A NaN or an infinity makes the scale NaN.
template <class T>
struct Rounding<T, i8> {
    float inverse;

    static Rounding of(const T *x, int64_t n, float *scale) {
        V top = {}, poison = {};
        const auto look = [&](V value) INLINE_LAMBDA {
            top = max(abs(value), top);
            poison = poison + value * splat(0);
        };
        int64_t d = 0;
        for (; d + kLanes <= n; d += kLanes) look(load_as_float(x + d));
        if (d < n) look(load_tail(x + d, n - d));
        const float high = highest(top);
        *scale = high / 127 + sum(poison);
        return {*scale > 0 ? 127 / high : 0};
    }
    // By the sum with 1.5 * 2^23, whose low bits are the integer.
    INLINE void operator()(i8 *to, T from) const {
        to->number = static_cast<int8_t>(bits_as<uint32_t>(to_float(from) * inverse + 0x1.8p23f));
    }
};

template <class T, class C>
void write_kv_of(const WriteKVArgs &args, const Context &context) {
    const KVCache &cache = args.cache;
    int64_t begin, end;
    share(args.num_tokens * cache.num_kv_heads, context, &begin, &end);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t token = item / cache.num_kv_heads, head = item % cache.num_kv_heads;
        const int64_t slot = args.slot_mapping[token];
        if (slot < 0) continue;
        const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
        const T *key = static_cast<const T *>(args.key) + token * args.key_stride + head * cache.head_dim;
        const T *value = static_cast<const T *>(args.value) + token * args.value_stride + head * cache.head_dim;
        char *panel = keys_of(cache, block, head) + offset / kKeyPanel * cache.key_panel_bytes;
        const int64_t lane = offset % kKeyPanel;
        float *scales = reinterpret_cast<float *>(panel + cache.scales_at) + lane;
        C *keys = reinterpret_cast<C *>(panel);
        const auto round_key = Rounding<T, C>::of(key, cache.head_dim, scales);
        for (int64_t d = 0; d < cache.head_dim; ++d) {
            const int64_t at = __is_same(C, bf16) ? (d / 2 * kKeyPanel + lane) * 2 + d % 2 : d * kKeyPanel + lane;
            round_key(keys + at, key[d]);
        }
        const int64_t step = __is_same(C, bf16) ? 2 : 1;  // positions side by side
        C *values = reinterpret_cast<C *>(values_of(cache, block, head)) +
                    offset / step * cache.value_stride * step + offset % step;
        const auto round_value = Rounding<T, C>::of(value, cache.head_dim, scales + kKeyPanel);
        for (int64_t d = 0; d < cache.head_dim; ++d) round_value(values + step * d, value[d]);
    }
}

template <class T>
void write_kv_for(const WriteKVArgs &args, const Context &context) {
    switch (args.cache.dtype) {
        case KVDtype::f32: return write_kv_of<T, float>(args, context);
        case KVDtype::bf16: return write_kv_of<T, bf16>(args, context);
        case KVDtype::f16: return write_kv_of<T, f16>(args, context);
        case KVDtype::i8: return write_kv_of<T, i8>(args, context);
    }
}

}  // namespace

void write_kv(const WriteKVArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return write_kv_for<float>(args, context);
        case Dtype::bf16: return write_kv_for<bf16>(args, context);
        case Dtype::f16: return write_kv_for<f16>(args, context);
    }
}

}  // namespace headrace::HEADRACE_TIER
