// rope, the activations, and what is done number by number.
#include "pieces.h"
#include "vmath.h"

namespace headrace::HEADRACE_TIER {
namespace {

template <class T>
void rope_of(const RopeArgs &args, const Context &context) {
    int64_t begin, end;
    share(args.num_tokens * args.num_heads, context, &begin, &end);
    const int64_t half = args.rotary_dim / 2;
    for (int64_t item = begin; item < end; ++item) {
        const int64_t token = item / args.num_heads, head = item % args.num_heads;
        const T *x = static_cast<const T *>(args.x) + token * args.x_stride + head * args.x_head_stride;
        T *out = static_cast<T *>(args.out) + (token * args.num_heads + head) * args.head_dim;
        const float *cos = args.cos + token * half, *sin = args.sin + token * half;
        if (args.interleaved) {
            for (int64_t i = 0; i < half; ++i) {
                const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
                from_float(out + 2 * i, a * cos[i] - b * sin[i]);
                from_float(out + 2 * i + 1, b * cos[i] + a * sin[i]);
            }
        } else {
            int64_t i = 0;
            for (; i + kLanes <= half; i += kLanes) {
                const V a = load_as_float(x + i), b = load_as_float(x + half + i);
                const V c = load<V>(cos + i), s = load<V>(sin + i);
                store_from_float(out + i, a * c - b * s);
                store_from_float(out + half + i, b * c + a * s);
            }
            for (; i < half; ++i) {
                const float a = to_float(x[i]), b = to_float(x[half + i]);
                from_float(out + i, a * cos[i] - b * sin[i]);
                from_float(out + half + i, b * cos[i] + a * sin[i]);
            }
        }
        if (out != x)
            memcpy(out + 2 * half, x + 2 * half, static_cast<size_t>(args.head_dim - 2 * half) * sizeof(T));
    }
}

INLINE V normal_integral(V x) { return splat(0.5f) * (splat(1.0f) + each(x, [](float v) { return erff(v); })); }

INLINE V gelu(V x) { return x * normal_integral(x * splat(0x1.6a09e6p-1f)); }

INLINE V softplus(V x) {  // F.softplus is x itself above 20
    return x > splat(20.0f) ? x : each(x, [](float v) { return log1pf(expf(v)); });
}

INLINE V activate(V x, Activation activation) {
    const V zero = {};
    switch (activation) {
        case Activation::silu: return x * sigmoid(x);
        case Activation::gelu: return gelu(x);
        case Activation::gelu_10: return max(min(gelu(x), splat(10.0f)), splat(-10.0f));
        case Activation::gelu_tanh: {
            const V inner = splat(0x1.988454p-1f) * (x + splat(0.044715f) * x * x * x);
            return x * splat(0.5f) * (splat(1.0f) + tanh(inner));
        }
        case Activation::relu: return x < zero ? zero : x;
        case Activation::relu2: {
            const V positive = x < zero ? zero : x;
            return positive * positive;
        }
        case Activation::relu6: return max(min(x, splat(6.0f)), zero);
        case Activation::leaky_relu: return x < zero ? x * splat(0.01f) : x;
        case Activation::quick_gelu: return x * sigmoid(splat(1.702f) * x);
        case Activation::hardswish: return x * max(min(x + splat(3.0f), splat(6.0f)), zero) / splat(6.0f);
        case Activation::mish: return x * tanh(softplus(x));
        case Activation::laplace: return normal_integral((x - splat(0.707107f)) / splat(0.3989425748461166f));
        case Activation::linear: return x;
        case Activation::tanh: return tanh(x);
        case Activation::sigmoid: return sigmoid(x);
        case Activation::softplus: return softplus(x);
        case Activation::sqrtsoftplus: return each(softplus(x), [](float v) { return sqrtf(v); });
    }
    return x;
}

template <class T, Activation activation>
void act_of(const ActArgs &args, const Context &context) {
    each_piece(args.num_tokens, args.n, context, [&](int64_t token, int64_t first, int64_t last) INLINE_LAMBDA {
        const T *gate = static_cast<const T *>(args.x) + token * args.n * (args.is_gated ? 2 : 1), *up = gate + args.n;
        T *out = static_cast<T *>(args.out) + token * args.n;
        int64_t i = first;
        for (; i + kLanes <= last; i += kLanes) {
            V value = activate(load_as_float(gate + i), activation);
            if (args.is_gated) value = value * load_as_float(up + i);
            store_from_float(out + i, value);
        }
        if (i < last) {
            V value = activate(load_tail(gate + i, last - i), activation);
            if (args.is_gated) value = value * load_tail(up + i, last - i);
            store_tail(out + i, value, last - i);
        }
    });
}

// gpt-oss's gated unit (core/ops/moe.py, glu).
template <class T>
void clamped_of(const ActArgs &args, const Context &context) {
    const V limit = splat(args.clamp), one = splat(1.0f), alpha = splat(args.alpha);
    int64_t begin, end;
    share(args.num_tokens, context, &begin, &end);
    for (int64_t token = begin; token < end; ++token) {
        const T *gates = static_cast<const T *>(args.x) + token * args.n * 2, *ups = gates + args.n;
        T *out = static_cast<T *>(args.out) + token * args.n;
        for (int64_t i = 0; i < args.n; i += kLanes) {
            const int64_t left = args.n - i;
            V gate = left >= kLanes ? load_as_float(gates + i) : load_tail(gates + i, left);
            V up = left >= kLanes ? load_as_float(ups + i) : load_tail(ups + i, left);
            gate = min(gate, limit);
            up = max(min(up, limit), -limit);
            const V value = (up + one) * gate * sigmoid(alpha * gate);
            if (left >= kLanes)
                store_from_float(out + i, value);
            else
                store_tail(out + i, value, left);
        }
    }
}

template <class T>
void act_for(const ActArgs &args, const Context &context) {
    if (args.clamp != 0) return clamped_of<T>(args, context);
    switch (args.activation) {
#define HEADRACE_CASE(name) \
    case Activation::name: return act_of<T, Activation::name>(args, context);
        HEADRACE_ACTIVATIONS(HEADRACE_CASE)
#undef HEADRACE_CASE
    }
}

// Below zero, (e^x - 1 - x) (b + down) + b x, above it up x^2 + b x, with b = 0.5.
INLINE V xielu(V x, V up, V down) {
    const V half = splat(0.5f), tiny = splat(-1e-6f), below = each(min(x, tiny), [](float v) { return expm1f(v); });
    return x > V{} ? up * x * x + half * x : (below - x) * (half + down) + half * x;
}

template <Elementwise op>
INLINE V apply(V x, V y, V factor, V second_factor) {
    switch (op) {
        case Elementwise::copy: return x;
        case Elementwise::scale: return x * factor;
        case Elementwise::softcap: return factor * tanh(x / factor);
        case Elementwise::add: return x + y;
        case Elementwise::clamp: return max(min(x, factor), -factor);
        case Elementwise::xielu: return xielu(x, factor, second_factor);
    }
}

template <Elementwise op, class T, class Out>
void elementwise_of(const ElementwiseArgs &args, const Context &context) {
    const V factor = splat(args.factor), second = splat(args.second_factor);
    each_piece(args.num_rows, args.n, context, [&](int64_t row, int64_t first, int64_t last) INLINE_LAMBDA {
        const T *x = static_cast<const T *>(args.x) + row * args.x_stride;
        const T *y = op == Elementwise::add ? static_cast<const T *>(args.y) + row * args.y_stride : x;
        Out *out = static_cast<Out *>(args.out) + row * args.out_stride;
        int64_t i = first;
        for (; i + kLanes <= last; i += kLanes)
            store_from_float(out + i, apply<op>(load_as_float(x + i), load_as_float(y + i), factor, second));
        if (i < last)
            store_tail(out + i, apply<op>(load_tail(x + i, last - i), load_tail(y + i, last - i), factor, second),
                       last - i);
    });
}

template <class T, class Out>
void elementwise_for(const ElementwiseArgs &args, const Context &context) {
    switch (args.op) {
        case Elementwise::copy: return elementwise_of<Elementwise::copy, T, Out>(args, context);
        case Elementwise::scale: return elementwise_of<Elementwise::scale, T, Out>(args, context);
        case Elementwise::softcap: return elementwise_of<Elementwise::softcap, T, Out>(args, context);
        case Elementwise::add: return elementwise_of<Elementwise::add, T, Out>(args, context);
        case Elementwise::clamp: return elementwise_of<Elementwise::clamp, T, Out>(args, context);
        case Elementwise::xielu: return elementwise_of<Elementwise::xielu, T, Out>(args, context);
    }
}

template <class T>
void elementwise_to(const ElementwiseArgs &args, const Context &context) {
    switch (args.out_dtype) {
        case Dtype::f32: return elementwise_for<T, float>(args, context);
        case Dtype::bf16: return elementwise_for<T, bf16>(args, context);
        case Dtype::f16: return elementwise_for<T, f16>(args, context);
    }
}

}  // namespace

void elementwise(const ElementwiseArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return elementwise_to<float>(args, context);
        case Dtype::bf16: return elementwise_to<bf16>(args, context);
        case Dtype::f16: return elementwise_to<f16>(args, context);
    }
}

void rope(const RopeArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return rope_of<float>(args, context);
        case Dtype::bf16: return rope_of<bf16>(args, context);
        case Dtype::f16: return rope_of<f16>(args, context);
    }
}

void act(const ActArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return act_for<float>(args, context);
        case Dtype::bf16: return act_for<bf16>(args, context);
        case Dtype::f16: return act_for<f16>(args, context);
    }
}

}  // namespace headrace::HEADRACE_TIER
