// write_kv: keys and values of new tokens to their slots of a KV cache.
#include "simd.h"

namespace headrace::HEADRACE_TIER {
namespace {

template <class T, class C>
void write_kv_of(const WriteKVArgs &args, const Context &context) {
    const KVCache &cache = args.cache;
    int64_t begin, end;
    share(args.num_tokens * cache.num_kv_heads, context, &begin, &end);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t token = item / cache.num_kv_heads, head = item % cache.num_kv_heads;
        const int64_t slot = args.slot_mapping[token];
        if (slot < 0) continue;
        const int64_t place = slot / cache.block_size * cache.num_kv_heads + head, offset = slot % cache.block_size;
        const T *key = static_cast<const T *>(args.key) + token * args.key_stride + head * cache.head_dim;
        const T *value = static_cast<const T *>(args.value) + token * args.value_stride + head * cache.head_dim;
        C *keys = reinterpret_cast<C *>(cache.keys + place * cache.key_bytes +
                                        offset / kKeyPanel * cache.key_panel_bytes);
        const int64_t lane = offset % kKeyPanel;
        for (int64_t d = 0; d < cache.head_dim; ++d) {
            const int64_t at = __is_same(C, bf16) ? (d / 2 * kKeyPanel + lane) * 2 + d % 2 : d * kKeyPanel + lane;
            from_float(keys + at, to_float(key[d]));
        }
        C *values = reinterpret_cast<C *>(cache.values + place * cache.value_bytes);
        if constexpr (__is_same(C, bf16)) {
            values += offset / 2 * cache.value_stride * 2 + offset % 2;
            for (int64_t d = 0; d < cache.head_dim; ++d) from_float(values + 2 * d, to_float(value[d]));
        } else {
            values += offset * cache.value_stride;
            for (int64_t d = 0; d < cache.head_dim; ++d) from_float(values + d, to_float(value[d]));
        }
    }
}

template <class T>
void write_kv_for(const WriteKVArgs &args, const Context &context) {
    switch (args.cache.dtype) {
        case Dtype::f32: return write_kv_of<T, float>(args, context);
        case Dtype::bf16: return write_kv_of<T, bf16>(args, context);
        case Dtype::f16: return write_kv_of<T, f16>(args, context);
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
