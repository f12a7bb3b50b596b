// Mixtures of experts beside their products: the choice of experts, and the sum of what they give.
#include "pieces.h"
#include "vmath.h"

namespace headrace::HEADRACE_TIER {
namespace {

// e^x of a row and their sum. Lanes behind the end hold zero.
float exponentials(float *row, int64_t n, float shift) {
    V total = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const V value = exp(load<V>(row + i) - splat(shift));
        store(row + i, value);
        total = total + value;
    }
    float rest = 0;
    for (; i < n; ++i) {
        row[i] = exp(splat(row[i] - shift))[0];
        rest += row[i];
    }
    return sum(total) + rest;
}

float highest_of(const float *row, int64_t n) {
    float top = row[0];
    for (int64_t i = 1; i < n; ++i) top = row[i] > top ? row[i] : top;
    return top;
}

// The largest number that is not taken yet, the first of several.
int64_t best_of(const float *row, const uint8_t *taken, int64_t n) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; ++i)
        if (!taken[i] && (best < 0 || row[i] > row[best])) best = i;
    return best;
}

// Mark the experts of groups that are not among the best as taken.
void close_groups(const RouteArgs &args, const float *choice, uint8_t *taken, float *groups, uint8_t *open) {
    const int64_t size = args.num_experts / args.num_groups;
    for (int64_t g = 0; g < args.num_groups; ++g) {
        const float *members = choice + g * size;
        int64_t first = 0;
        for (int64_t i = 1; i < size; ++i)
            if (members[i] > members[first]) first = i;
        groups[g] = members[first];
        if (args.scores_top2 && size > 1) {
            int64_t second = first == 0 ? 1 : 0;
            for (int64_t i = 0; i < size; ++i)
                if (i != first && members[i] > members[second]) second = i;
            groups[g] += members[second];
        }
        open[g] = 0;
    }
    for (int64_t i = 0; i < args.num_open_groups; ++i) open[best_of(groups, open, args.num_groups)] = 1;
    for (int64_t g = 0; g < args.num_groups; ++g)
        if (!open[g]) memset(taken + g * size, 1, static_cast<size_t>(size));
}

void route_by_scores(const RouteArgs &args, int64_t token, float *scores, float *choice, uint8_t *taken,
                     uint8_t *open) {
    const int64_t n = args.num_experts;
    memcpy(scores, args.logits + token * n, static_cast<size_t>(n) * 4);
    if (args.score == RouterScore::softmax) {
        const float total = exponentials(scores, n, highest_of(scores, n));
        for (int64_t i = 0; i < n; ++i) scores[i] = scores[i] / total;
    } else {
        for (int64_t i = 0; i < n; ++i) scores[i] = sigmoid(splat(scores[i]))[0];
    }
    for (int64_t i = 0; i < n; ++i) choice[i] = args.correction ? scores[i] + args.correction[i] : scores[i];
    memset(taken, 0, static_cast<size_t>(n));
    if (args.num_groups > 1) close_groups(args, choice, taken, choice + n, open);
    float total = 0;
    float *weights = args.weights + token * args.num_chosen;
    int32_t *experts = args.experts + token * args.num_chosen;
    for (int64_t j = 0; j < args.num_chosen; ++j) {
        const int64_t best = best_of(choice, taken, n);
        taken[best] = 1;
        experts[j] = static_cast<int32_t>(best);
        weights[j] = scores[best];
        total += weights[j];
    }
    if (args.renormalize)
        for (int64_t j = 0; j < args.num_chosen; ++j) weights[j] = weights[j] / (total > 1e-20f ? total : 1e-20f);
    for (int64_t j = 0; j < args.num_chosen; ++j) weights[j] = weights[j] * args.weight_scale;
}

// Of the experts that are near the best one that is left: a softmax over those.
void route_sparsely(const RouteArgs &args, int64_t token, float *near, uint8_t *taken) {
    const int64_t n = args.num_experts;
    const float *logits = args.logits + token * n;
    memset(taken, 0, static_cast<size_t>(n));
    for (int64_t j = 0; j < args.num_chosen; ++j) {
        const int64_t best = best_of(logits, taken, n);
        int64_t count = 0, place = 0;
        const float top = logits[best];
        for (int64_t i = 0; i < n; ++i) {
            const float size = fabsf(logits[i]) > top ? fabsf(logits[i]) : top;
            if (taken[i] || (top - logits[i]) / size > 2 * 0.01f) continue;
            if (i == best) place = count;
            near[count++] = logits[i];
        }
        const float total = exponentials(near, count, top);
        args.weights[token * args.num_chosen + j] = near[place] / total;
        args.experts[token * args.num_chosen + j] = static_cast<int32_t>(best);
        taken[best] = 1;
    }
}

template <class T>
void combine_of(const CombineArgs &args, const Context &context) {
    each_piece(args.num_tokens, args.n, context, [&](int64_t token, int64_t first, int64_t last) INLINE_LAMBDA {
        const int32_t *places = args.places + token * args.count;
        const float *weights = args.weights + token * args.count;
        T *out = static_cast<T *>(args.out) + token * args.out_stride;
        const auto total = [&](int64_t i, int64_t n) INLINE_LAMBDA {
            V sum = {};
            for (int64_t j = 0; j < args.count; ++j) {
                if (places[j] < 0) continue;  // of another rank
                const T *row = static_cast<const T *>(args.rows) + places[j] * args.n + i;
                const V value = n == kLanes ? load_as_float(row) : load_tail(row, n);
                sum = args.is_weighted ? fma(splat(weights[j]), value, sum) : sum + value;
            }
            return sum;
        };
        int64_t i = first;
        for (; i + kLanes <= last; i += kLanes) store_from_float(out + i, total(i, kLanes));
        if (i < last) store_tail(out + i, total(i, last - i), last - i);
    });
}

}  // namespace

size_t route_scratch(const RouteArgs &args) {
    const size_t floats = static_cast<size_t>(2 * args.num_experts + args.num_groups) * 4;
    return floats + static_cast<size_t>(args.num_experts + args.num_groups);
}

void route(const RouteArgs &args, const Context &context) {
    auto *scores = reinterpret_cast<float *>(context.scratch);
    float *choice = scores + args.num_experts;  // and the scores of groups behind it
    auto *taken = reinterpret_cast<uint8_t *>(choice + args.num_experts + args.num_groups);
    int64_t begin, end;
    share(args.num_tokens, context, &begin, &end);
    for (int64_t token = begin; token < end; ++token) {
        if (args.score == RouterScore::sparsemixer)
            route_sparsely(args, token, scores, taken);
        else
            route_by_scores(args, token, scores, choice, taken, taken + args.num_experts);
    }
}

void combine(const CombineArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return combine_of<float>(args, context);
        case Dtype::bf16: return combine_of<bf16>(args, context);
        case Dtype::f16: return combine_of<f16>(args, context);
    }
}

}  // namespace headrace::HEADRACE_TIER
