// Recurrences over the positions of a ragged batch (core/ops/state.py): positions are taken one after the other, so there
// is one order of sums, whatever steps a request is computed in.
#include "pieces.h"
#include "vmath.h"

namespace headrace::HEADRACE_TIER {
namespace {

int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// ---- the short convolution ---------------------------------------------------------------------------------------

template <class T, int kWidth>
void conv_of(const ConvArgs &args, const Context &context) {
    const StateRows &rows = args.rows;
    const int64_t pieces = (args.n + kPiece - 1) / kPiece, state_size = (kWidth - 1) * args.n;
    int64_t begin, end;
    share(pieces * rows.num_reqs, context, &begin, &end);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t r = item % rows.num_reqs, piece = item / rows.num_reqs * kPiece;
        const int64_t last = piece + kPiece < args.n ? piece + kPiece : args.n, from = rows.from_slots[r * rows.from_stride];
        const T *before = from < 0 ? nullptr : static_cast<const T *>(args.state) + from * state_size;
        for (int64_t i = piece; i < last; i += kLanes) {
            const int64_t n = last - i < kLanes ? last - i : kLanes;
            const auto get = [=](const T *data) INLINE_LAMBDA { return n == kLanes ? load_as_float(data) : load_tail(data, n); };
            const auto get32 = [=](const float *data) INLINE_LAMBDA { return n == kLanes ? load<V>(data) : load_tail(data, n); };
            const auto put = [=](T *data, V value) INLINE_LAMBDA {
                if (n == kLanes)
                    store_from_float(data, value);
                else
                    store_tail(data, value, n);
            };
            V window[kWidth], weight[kWidth];
            for (int w = 0; w < kWidth; ++w) weight[w] = get32(args.weight + w * args.n + i);
            for (int w = 1; w < kWidth; ++w) window[w] = before ? get(before + (w - 1) * args.n + i) : V{};
            const V bias = args.bias ? get32(args.bias + i) : V{};
            for (int64_t t = rows.query_start_loc[r]; t < rows.query_start_loc[r + 1]; ++t) {
                for (int w = 1; w < kWidth; ++w) window[w - 1] = window[w];
                window[kWidth - 1] = get(static_cast<const T *>(args.x) + t * args.x_stride + i);
                V total = window[0] * weight[0];
                for (int w = 1; w < kWidth; ++w) total = fma(window[w], weight[w], total);
                total = total + bias;
                if (args.is_silu) total = total * sigmoid(total);
                put(static_cast<T *>(args.out) + t * args.n + i, total);
                if (rows.to_slots[t] < 0) continue;
                T *after = static_cast<T *>(args.state) + rows.to_slots[t] * state_size + i;
                for (int w = 1; w < kWidth; ++w) put(after + (w - 1) * args.n, window[w]);
            }
        }
    }
}

template <class T>
void conv_for(const ConvArgs &args, const Context &context) {
    switch (args.width) {
        case 1: return conv_of<T, 1>(args, context);
        case 2: return conv_of<T, 2>(args, context);
        case 3: return conv_of<T, 3>(args, context);
        case 4: return conv_of<T, 4>(args, context);
        case 5: return conv_of<T, 5>(args, context);
        case 6: return conv_of<T, 6>(args, context);
        case 7: return conv_of<T, 7>(args, context);
        case 8: return conv_of<T, 8>(args, context);
    }
}

// ---- what the recurrences have in common -------------------------------------------------------------------------

// log(1 + e^x) of one number.
float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

float exp_of(float x) { return exp(splat(x))[0]; }

// Call body(request, head) for this thread's share: heads of all requests, so that a long prompt is everybody's work.
template <class Body>
void each_head(const StateRows &rows, int64_t num_heads, const Context &context, const Body &body) {
    int64_t begin, end;
    share(num_heads * rows.num_reqs, context, &begin, &end);
    for (int64_t item = begin; item < end; ++item) body(item % rows.num_reqs, item / rows.num_reqs);
}

// The state of one head, [count, width], with rows that are padded with zeros to `stride`.
void load_state(const float *state, int64_t count, int64_t width, int64_t stride, float *local) {
    if (state == nullptr) {
        memset(local, 0, static_cast<size_t>(count * stride) * 4);
        return;
    }
    for (int64_t i = 0; i < count; ++i) {
        memcpy(local + i * stride, state + i * width, static_cast<size_t>(width) * 4);
        memset(local + i * stride + width, 0, static_cast<size_t>(stride - width) * 4);
    }
}

void keep_state(float *state, int64_t count, int64_t width, int64_t stride, const float *local) {
    for (int64_t i = 0; i < count; ++i)
        memcpy(state + i * width, local + i * stride, static_cast<size_t>(width) * 4);
}

template <class T>
void widen(const T *from, int64_t n, int64_t stride, float *to) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, load_as_float(from + i));
    if (i < stride) store(to + i, load_tail(from + i, n - i));
}

// ---- selective scan ----------------------------------------------------------------------------------------------

// Scratch: state [head_dim][stride], b, c, decays and their rates [stride] each.
template <class T>
void scan_of(const ScanArgs &args, const Context &context) {
    const StateRows &rows = args.rows;
    const int64_t size = args.state_size, dim = args.head_dim, stride = padded(size);
    float *state = reinterpret_cast<float *>(context.scratch), *b = state + dim * stride, *c = b + stride;
    float *decays = c + stride, *rates = decays + stride;
    const int64_t state_numbers = args.num_heads * dim * size;
    each_head(rows, args.num_heads, context, [&](int64_t r, int64_t head) {
        const int64_t from = rows.from_slots[r * rows.from_stride], place = head * dim * size;
        const int64_t group = head / (args.num_heads / args.num_groups);
        load_state(from < 0 ? nullptr : args.state + from * state_numbers + place, dim, size, stride, state);
        if (args.has_matrix) widen(args.rates + head * size, size, stride, rates);
        for (int64_t t = rows.query_start_loc[r]; t < rows.query_start_loc[r + 1]; ++t) {
            const T *x = static_cast<const T *>(args.x) + t * args.x_stride + head * dim;
            const float dt = to_float(static_cast<const T *>(args.dt)[t * args.dt_stride + head]);
            float step = softplus(dt + args.dt_bias[head]);
            step = step < args.dt_min ? args.dt_min : step > args.dt_max ? args.dt_max : step;
            widen(static_cast<const T *>(args.b) + t * args.b_stride + group * size, size, stride, b);
            widen(static_cast<const T *>(args.c) + t * args.c_stride + group * size, size, stride, c);
            const V one_decay = splat(args.has_matrix ? 0 : exp_of(-step * args.rates[head]));
            for (int64_t i = 0; args.has_matrix && i < stride; i += kLanes)
                store(decays + i, exp(splat(-step) * load<V>(rates + i)));
            T *y = static_cast<T *>(args.out) + t * args.num_heads * dim + head * dim;
            for (int64_t d = 0; d < dim; ++d) {
                const float value = to_float(x[d]);
                const V input = splat(value * step);
                float *row = state + d * stride;
                V total = {};
                for (int64_t i = 0; i < stride; i += kLanes) {
                    const V decay = args.has_matrix ? load<V>(decays + i) : one_decay;
                    const V now = fma(load<V>(row + i), decay, input * load<V>(b + i));
                    store(row + i, now);
                    total = fma(now, load<V>(c + i), total);
                }
                from_float(y + d, sum(total) + value * args.d[head]);
            }
            if (rows.to_slots[t] >= 0)
                keep_state(args.state + rows.to_slots[t] * state_numbers + place, dim, size, stride, state);
        }
    });
}

// ---- gated delta rule --------------------------------------------------------------------------------------------

// A vector divided by its length, times `factor`.
template <class T>
void unit_of(const T *x, int64_t n, float factor, float *to) {
    float total = 0;
    for (int64_t i = 0; i < n; ++i) {
        to[i] = to_float(x[i]);
        total += to[i] * to[i];
    }
    const float scale = factor / sqrtf(total + 1e-6f);
    for (int64_t i = 0; i < n; ++i) to[i] *= scale;
}

// Scratch: state [key_dim][stride], values and results [stride] each, query, key and decays [key_dim].
template <class T>
void delta_of(const DeltaArgs &args, const Context &context) {
    const StateRows &rows = args.rows;
    const int64_t keys = args.key_dim, dim = args.head_dim, stride = padded(dim);
    float *state = reinterpret_cast<float *>(context.scratch), *value = state + keys * stride;
    float *result = value + stride, *query = result + stride, *key = query + keys, *decays = key + keys;
    const int64_t state_numbers = args.num_heads * keys * dim, dts = args.has_key_decays ? keys : 1;
    const float query_factor = 1 / sqrtf(static_cast<float>(keys));
    each_head(rows, args.num_heads, context, [&](int64_t r, int64_t head) {
        const int64_t from = rows.from_slots[r * rows.from_stride], place = head * keys * dim;
        const int64_t key_head = head / (args.num_heads / args.num_key_heads);
        load_state(from < 0 ? nullptr : args.state + from * state_numbers + place, keys, dim, stride, state);
        for (int64_t t = rows.query_start_loc[r]; t < rows.query_start_loc[r + 1]; ++t) {
            unit_of(static_cast<const T *>(args.query) + t * args.query_stride + key_head * keys, keys, query_factor, query);
            unit_of(static_cast<const T *>(args.key) + t * args.key_stride + key_head * keys, keys, 1, key);
            widen(static_cast<const T *>(args.value) + t * args.value_stride + head * dim, dim, stride, value);
            const T *dt = static_cast<const T *>(args.dt) + t * args.dt_stride + head * dts;
            for (int64_t k = 0; k < keys; ++k)
                decays[k] = k < dts ? exp_of(-args.rates[head] * softplus(to_float(dt[k]) + args.dt_bias[head * dts + k]))
                                    : decays[0];
            const float beta = to_float(static_cast<const T *>(args.beta)[t * args.beta_stride + head]);
            const V rate = splat(args.beta_scale * sigmoid(splat(beta))[0]);
            T *y = static_cast<T *>(args.out) + t * args.num_heads * dim + head * dim;
            for (int64_t i = 0; i < stride; i += kLanes) {
                V total = {};
                for (int64_t k = 0; k < keys; ++k) {
                    const V now = load<V>(state + k * stride + i) * splat(decays[k]);
                    store(state + k * stride + i, now);
                    total = fma(now, splat(key[k]), total);
                }
                const V news = (load<V>(value + i) - total) * rate;
                V out = {};
                for (int64_t k = 0; k < keys; ++k) {
                    const V now = fma(splat(key[k]), news, load<V>(state + k * stride + i));
                    store(state + k * stride + i, now);
                    out = fma(now, splat(query[k]), out);
                }
                store(result + i, out);
            }
            for (int64_t i = 0; i < dim; ++i) from_float(y + i, result[i]);
            if (rows.to_slots[t] >= 0)
                keep_state(args.state + rows.to_slots[t] * state_numbers + place, keys, dim, stride, state);
        }
    });
}

// ---- the weighted mean of RWKV-4 ---------------------------------------------------------------------------------

// Sums divided by e^top, of which a sum of 0 has none.
struct Weighted {
    V values, weights, top;
};

constexpr float kNothing = -1e38f;  // an exponent beside which all others are larger

// Sums, and one value of weight e^key: of the two exponentials, one is 1.
INLINE Weighted join(const Weighted &held, V key, V value) {
    const V gap = key - held.top, small = exp(-abs(gap));
    const V old = gap > V{} ? small : splat(1.0f), now = gap > V{} ? splat(1.0f) : small;
    return {fma(old, held.values, now * value), fma(old, held.weights, now), max(held.top, key)};
}

template <class T>
void wkv_of(const WkvArgs &args, const Context &context) {
    const StateRows &rows = args.rows;
    const int64_t pieces = (args.n + kPiece - 1) / kPiece, state_size = 3 * args.n;
    int64_t begin, end;
    share(pieces * rows.num_reqs, context, &begin, &end);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t r = item % rows.num_reqs, piece = item / rows.num_reqs * kPiece;
        const int64_t last = piece + kPiece < args.n ? piece + kPiece : args.n, from = rows.from_slots[r * rows.from_stride];
        const float *before = from < 0 ? nullptr : args.state + from * state_size;
        for (int64_t i = piece; i < last; i += kLanes) {
            const int64_t n = last - i < kLanes ? last - i : kLanes;
            const auto get = [=](const T *data) INLINE_LAMBDA { return n == kLanes ? load_as_float(data) : load_tail(data, n); };
            const auto get32 = [=](const float *data) INLINE_LAMBDA { return n == kLanes ? load<V>(data) : load_tail(data, n); };
            const auto put32 = [=](float *data, V value) INLINE_LAMBDA {
                if (n == kLanes)
                    store(data, value);
                else
                    store_tail(data, value, n);
            };
            const V rate = get32(args.rates + i), bonus = get32(args.bonus + i);
            Weighted held = {V{}, V{}, splat(kNothing)};
            if (before) {
                held = {get32(before + i), get32(before + args.n + i), get32(before + 2 * args.n + i)};
                held.top = held.weights == V{} ? splat(kNothing) : held.top;
            }
            for (int64_t t = rows.query_start_loc[r]; t < rows.query_start_loc[r + 1]; ++t) {
                const V key = get(static_cast<const T *>(args.key) + t * args.key_stride + i);
                const V value = get(static_cast<const T *>(args.value) + t * args.value_stride + i);
                const Weighted mean = join(held, key + bonus, value);
                T *out = static_cast<T *>(args.out) + t * args.n + i;
                const V y = mean.values / mean.weights;
                if (n == kLanes)
                    store_from_float(out, y);
                else
                    store_tail(out, y, n);
                held.top = held.top - rate;
                held = join(held, key, value);
                if (rows.to_slots[t] < 0) continue;
                float *after = args.state + rows.to_slots[t] * state_size + i;
                put32(after, held.values);
                put32(after + args.n, held.weights);
                put32(after + 2 * args.n, held.top);
            }
        }
    }
}

template <class T>
void lru_of(const LruArgs &args, const Context &context) {
    each_piece(args.num_tokens, args.n, context, [&](int64_t token, int64_t first, int64_t last) INLINE_LAMBDA {
        const auto row = [=](const void *data, int64_t stride) { return static_cast<const T *>(data) + token * stride; };
        const T *x = row(args.x, args.x_stride), *inputs = row(args.input_gates, args.input_stride);
        const T *decays = row(args.decay_gates, args.decay_stride);
        T *taken = static_cast<T *>(args.taken) + token * args.n, *dt = static_cast<T *>(args.dt) + token * args.n;
        if (first == 0) from_float(static_cast<T *>(args.one) + token, 1.0f);
        for (int64_t i = first; i < last; i += kLanes) {
            const int64_t left = last - i;
            const bool is_whole = left >= kLanes;
            const auto read = [=](const auto *from) INLINE_LAMBDA {
                return is_whole ? load_as_float(from + i) : load_tail(from + i, left);
            };
            const auto write = [=](T *to, V value) INLINE_LAMBDA {
                is_whole ? store_from_float(to + i, value) : store_tail(to + i, value, left);
            };
            const V log_rate = read(args.log_rate);
            const V u = exp(log_rate) * sigmoid(read(decays) + read(args.decay_bias));
            const V root = args.positions[token] == 0 ? splat(1.0f)
                                                      : each(u, [](float v) { return sqrtf(-expm1f(-2 * v)); });
            write(taken, root * sigmoid(read(inputs) + read(args.input_bias)) * read(x) / u);
            write(dt, each(u, [](float v) { return logf(expm1f(v)); }) - log_rate);
        }
    });
}

}  // namespace

void conv(const ConvArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return conv_for<float>(args, context);
        case Dtype::bf16: return conv_for<bf16>(args, context);
        case Dtype::f16: return conv_for<f16>(args, context);
    }
}

size_t scan_scratch(const ScanArgs &args) { return static_cast<size_t>((args.head_dim + 4) * padded(args.state_size)) * 4; }

void scan(const ScanArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return scan_of<float>(args, context);
        case Dtype::bf16: return scan_of<bf16>(args, context);
        case Dtype::f16: return scan_of<f16>(args, context);
    }
}

size_t delta_scratch(const DeltaArgs &args) {
    return static_cast<size_t>((args.key_dim + 2) * padded(args.head_dim) + 3 * args.key_dim) * 4;
}

void delta(const DeltaArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return delta_of<float>(args, context);
        case Dtype::bf16: return delta_of<bf16>(args, context);
        case Dtype::f16: return delta_of<f16>(args, context);
    }
}

void lru(const LruArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return lru_of<float>(args, context);
        case Dtype::bf16: return lru_of<bf16>(args, context);
        case Dtype::f16: return lru_of<f16>(args, context);
    }
}

void wkv(const WkvArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return wkv_of<float>(args, context);
        case Dtype::bf16: return wkv_of<bf16>(args, context);
        case Dtype::f16: return wkv_of<f16>(args, context);
    }
}

}  // namespace headrace::HEADRACE_TIER
