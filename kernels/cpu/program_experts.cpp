// The records of stacked weights: mixtures of experts, and products of heads.
//
// A stack of matrices is one packed weight in which each matrix begins a panel. Threads share the panels of all matrices
// that are needed, in order and weighed by the rows that read them: a few tokens read the weights of their experts as
// few long streams, many tokens are sorted by expert and read each weight once.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "block_shape.h"
#include "convert.h"
#include "isa.h"
#include "program_checks.h"

namespace headrace {
namespace {

// How many rows of x cost as much as reading a panel.
constexpr std::int64_t kReadCost = 8;

std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

// Call body(matrix, first panel, last panel) for this thread's share; rows_of(matrix) read a matrix.
template <class Rows, class Body>
void share_panels(std::int64_t num_matrices, std::int64_t num_panels, const Rows &rows_of, const Context &context,
                  const Body &body) {
    const auto cost_of = [&](std::int64_t m) { return rows_of(m) == 0 ? 0 : rows_of(m) + kReadCost; };
    std::int64_t total = 0;
    for (std::int64_t m = 0; m < num_matrices; ++m) total += cost_of(m) * num_panels;
    std::int64_t begin, end, at = 0;
    share(total, context, &begin, &end);
    for (std::int64_t m = 0; m < num_matrices && at < end; ++m) {
        const std::int64_t cost = cost_of(m);
        if (cost == 0) continue;
        const auto panel_at = [&](std::int64_t place) {
            return std::clamp<std::int64_t>((place - at + cost - 1) / cost, 0, num_panels);
        };
        const std::int64_t first = begin <= at ? 0 : panel_at(begin), last = panel_at(end);
        if (first < last) body(m, first, last);
        at += cost * num_panels;
    }
}

// Panels [first, last) of one matrix of a stack.
Weight panels_of(const Stack &stack, std::int64_t matrix, std::int64_t first, std::int64_t last) {
    Weight part = stack.weight->weight();
    const std::int64_t panel = matrix * stack.num_panels() + first;
    part.data += panel * part.panel_bytes;
    part.rows = std::min(stack.rows, last * kPanel) - first * kPanel;
    if (part.scales != nullptr) part.scales += panel * kPanel;
    if (part.sums != nullptr) part.sums += panel * kPanel;
    return part;
}

// The rows of a chunk of tokens, sorted by expert. An expert of another rank has the number behind the last one.
struct Sorted {
    std::int32_t *ends;    // [num_experts + 1], of its rows
    std::int32_t *tokens;  // [rows], of each row
    std::int32_t *places;  // [tokens, count], the row of each of a token's experts; -1: of another rank

    static std::size_t bytes(std::int64_t num_experts, std::int64_t num_rows) {
        return static_cast<std::size_t>(num_experts + 1 + 2 * num_rows) * sizeof(std::int32_t);
    }

    Sorted(char *scratch, const std::int32_t *experts, std::int64_t num_experts, std::int64_t num_tokens,
           std::int64_t count)
        : ends(reinterpret_cast<std::int32_t *>(scratch)),
          tokens(ends + num_experts + 1),
          places(tokens + num_tokens * count) {
        std::fill(ends, ends + num_experts + 1, 0);
        for (std::int64_t i = 0; i < num_tokens * count; ++i) ++ends[experts[i]];
        std::int32_t start = 0;
        for (std::int64_t e = 0; e <= num_experts; ++e) {
            start += ends[e];
            ends[e] = start - ends[e];
        }
        for (std::int64_t i = 0; i < num_tokens * count; ++i) {
            const std::int32_t row = ends[experts[i]]++;
            tokens[row] = static_cast<std::int32_t>(i / count);
            places[i] = experts[i] < num_experts ? row : -1;
        }
    }

    std::int64_t begin_of(std::int64_t expert) const { return expert == 0 ? 0 : ends[expert - 1]; }
    std::int64_t rows_of(std::int64_t expert) const { return ends[expert] - begin_of(expert); }
};

Context alone(const Context &context) {
    Context one = context;
    one.thread = 0;
    one.num_threads = 1;
    return one;
}

void want_stack(const Stack &stack, const char *name) {
    const Weight &weight = stack.weight->weight();
    if (stack.rows < 1 || stack.num_panels() * kPanel * stack.num_matrices != round_up(weight.rows, kPanel))
        refuse(std::string(name) + " must hold " + std::to_string(stack.num_matrices) + " matrices of " +
               std::to_string(stack.rows) + " rows, each beginning a panel of " + std::to_string(kPanel) +
               ", got " + std::to_string(weight.rows) + " rows");
    if (stack.quantize_x && !has_blocks(weight.format)) refuse("quantize_x needs a weight of GGUF blocks or of int4");
}

}  // namespace

std::size_t Program::stack_scratch(const Stack &stack, Dtype dtype, std::int64_t num_tokens) {
    const LinearArgs most{nullptr, dtype, num_tokens, stack.weight->weight(), nullptr, nullptr, 0, 0, nullptr};
    return stack.quantize_x ? kernels().linear_blocks_scratch(most) : kernels().linear_scratch(most);
}

void Program::linear_heads(const View &out, const View &x, const Stack &stack, std::int64_t x_step,
                           std::int64_t out_step) {
    const Weight &weight = stack.weight->weight();
    check(x, (stack.num_matrices - 1) * x_step + weight.cols);
    check(out, (stack.num_matrices - 1) * out_step + stack.rows);
    want_same(out, x, "out and x");
    want_stack(stack, "weight");
    const Kernels &table = kernels();
    add_record(
        [=, this, &table](const Step &step, const Context &context) {
            const std::int64_t size = bytes_of(x.dtype), num_tokens = step.rows_of(x.rows);
            if (num_tokens == 0) return;
            share_panels(
                stack.num_matrices, stack.num_panels(), [&](std::int64_t) { return num_tokens; }, context,
                [&](std::int64_t head, std::int64_t first, std::int64_t last) {
                    const LinearArgs args{at(x) + head * x_step * size,
                                          x.dtype,
                                          num_tokens,
                                          panels_of(stack, head, first, last),
                                          nullptr,
                                          at(out) + (head * out_step + first * kPanel) * size,
                                          x.stride,
                                          out.stride,
                                          nullptr};
                    (stack.quantize_x ? table.linear_blocks : table.linear)(args, alone(context));
                });
        },
        {reads(x), writes(out)}, stack_scratch(stack, x.dtype, max_rows(x)));
}

void Program::route_experts(const View &weights, const View &experts, const View &logits, std::vector<float> correction,
                            RouteArgs options) {
    check(logits, options.num_experts);
    check(weights, options.num_chosen);
    check(experts, options.num_chosen);
    for (const View *view : {&weights, &experts, &logits}) {
        want_dense(*view, "each operand of route_experts");
        if (view->dtype != Dtype::f32 || view->rows != logits.rows) refuse("routing is in float32, a row a token");
    }
    want_length(correction, options.num_experts, "correction");
    const std::int64_t groups = options.num_groups;
    if (options.num_chosen < 1 || options.num_chosen > options.num_experts || groups < 1 ||
        options.num_experts % groups != 0 || options.num_open_groups < 1 || options.num_open_groups > groups ||
        options.num_open_groups * (options.num_experts / groups) < options.num_chosen)
        refuse("cannot choose " + std::to_string(options.num_chosen) + " of " + std::to_string(options.num_experts) +
               " experts in " + std::to_string(options.num_open_groups) + " of " + std::to_string(groups) + " groups");
    options.logits = reinterpret_cast<const float *>(at(logits));
    options.weights = reinterpret_cast<float *>(at(weights));
    options.experts = reinterpret_cast<std::int32_t *>(at(experts));
    const Kernels &table = kernels();
    add_record(
        [=, &table, correction = std::move(correction)](const Step &step, const Context &context) {
            RouteArgs args = options;
            args.correction = or_null(correction);
            args.num_tokens = step.rows_of(logits.rows);
            table.route(args, context);
        },
        {reads(logits, 1), writes(weights, 1), writes(experts, 1)}, table.route_scratch(options));
}

void Program::part_identities(const View &weights, const View &experts, const View &share_of, const View &from_weights,
                              const View &from_experts, std::int64_t num_experts) {
    const std::int64_t count = from_weights.cols;
    for (const View *view : {&weights, &experts, &from_weights, &from_experts}) check(*view, count);
    check(share_of, 1);
    for (const View *view : {&weights, &experts, &share_of, &from_weights, &from_experts})
        if (view->dtype != Dtype::f32 || view->rows != from_weights.rows) refuse("routing is in float32, a row a token");
    if (num_experts < 1) refuse("there must be an expert besides those that give back their input");
    add_record(
        [=, this](const Step &step, const Context &context) {
            std::int64_t begin, end;
            share(step.rows_of(from_weights.rows), context, &begin, &end);
            const auto floats = [this](const View &view, std::int64_t row) {
                return reinterpret_cast<float *>(at(view)) + row * view.stride;
            };
            const auto numbers = [this](const View &view, std::int64_t row) {
                return reinterpret_cast<std::int32_t *>(at(view)) + row * view.stride;
            };
            for (std::int64_t row = begin; row < end; ++row) {
                float total = 0;
                for (std::int64_t i = 0; i < count; ++i) {
                    const float weight = floats(from_weights, row)[i];
                    const std::int32_t expert = numbers(from_experts, row)[i];
                    const bool is_identity = expert >= num_experts;
                    total += is_identity ? weight : 0;
                    floats(weights, row)[i] = is_identity ? 0 : weight;
                    numbers(experts, row)[i] = is_identity ? 0 : expert;
                }
                floats(share_of, row)[0] = total;
            }
        },
        {reads(from_weights, 1), reads(from_experts, 1), writes(weights, 1), writes(experts, 1), writes(share_of, 1)});
}

void Program::grouped_experts(const View &out, const View &x, const View &weights, const View &experts,
                              const ExpertBuffers &buffers, const Stack &up, const Stack &down,
                              ExpertOptions options) {
    const std::int64_t count = experts.cols, width = options.is_gated ? up.rows / 2 : up.rows;
    check(x, up.weight->weight().cols);
    check(out, down.rows);
    check(weights, count);
    check(experts, count);
    check(buffers.inner, count * up.rows);
    check(buffers.activated, count * width);
    check(buffers.outputs, count * down.rows);
    want_stack(up, "up");
    want_stack(down, "down");
    if (down.weight->weight().cols != width || up.num_matrices != down.num_matrices ||
        (options.is_gated && up.rows % 2 != 0))
        refuse("the experts' two weights do not fit together");
    want_length(options.up_bias, up.num_matrices * up.rows, "up_bias");
    want_length(options.down_bias, up.num_matrices * down.rows, "down_bias");
    for (const View *view : {&out, &buffers.inner, &buffers.activated, &buffers.outputs}) {
        want_dense(*view, "out and each buffer");
        if (view->dtype != x.dtype) refuse("out and each buffer must have the dtype of x");
    }
    if (options.scales_input) check(buffers.scaled, count * x.cols);
    const std::int64_t most_tokens = max_rows(buffers.inner);
    const std::size_t linear_bytes = (std::max(stack_scratch(up, x.dtype, most_tokens),
                                               stack_scratch(down, x.dtype, most_tokens)) + 63) / 64 * 64;
    Accesses accesses{reads(x),     reads(weights), reads(experts), writes(out), writes(buffers.inner),
                      writes(buffers.activated), writes(buffers.outputs)};
    if (options.scales_input) accesses.push_back(writes(buffers.scaled));
    add_record(
        [=, this, options = std::move(options)](const Step &step, const Context &context) {
            for (std::int64_t start = 0; start < step.num_tokens; start += most_tokens) {
                if (start > 0) context.wait(context);
                const Chunk chunk{start, std::min(most_tokens, step.num_tokens - start)};
                run_experts(chunk, out, x, weights, experts, buffers, up, down, options, linear_bytes, context);
            }
        },
        accesses, linear_bytes + Sorted::bytes(up.num_matrices, most_tokens * count));
}

void Program::run_experts(const Chunk &chunk, const View &out, const View &x, const View &weights, const View &experts,
                          const ExpertBuffers &buffers, const Stack &up, const Stack &down,
                          const ExpertOptions &options, std::size_t scratch_bytes, const Context &context) const {
    const Kernels &table = kernels();
    const std::int64_t count = experts.cols, size = bytes_of(x.dtype), num_rows = chunk.num_tokens * count;
    const std::int64_t width = buffers.activated.cols / count;
    const auto *factors = reinterpret_cast<const float *>(at(weights)) + chunk.start * count;
    const Sorted sorted(context.scratch + scratch_bytes,
                        reinterpret_cast<const std::int32_t *>(at(experts)) + chunk.start * count, up.num_matrices,
                        chunk.num_tokens, count);
    const char *source = at(x) + chunk.start * x.stride * size;
    std::int64_t source_stride = x.stride;
    if (options.scales_input) {
        scale_rows(source, x, factors, sorted.places, num_rows, count, at(buffers.scaled), context);
        source = at(buffers.scaled);
        source_stride = x.cols;
        context.wait(context);
    }
    const auto multiply = [&](const Stack &stack, const std::vector<float> &bias, const auto &args_of) {
        share_panels(
            stack.num_matrices, stack.num_panels(), [&](std::int64_t e) { return sorted.rows_of(e); }, context,
            [&](std::int64_t e, std::int64_t first, std::int64_t last) {
                LinearArgs args = args_of(sorted.begin_of(e), first * kPanel);
                args.dtype = x.dtype;
                args.num_tokens = sorted.rows_of(e);
                args.weight = panels_of(stack, e, first, last);
                args.bias = bias.empty() ? nullptr : bias.data() + e * stack.rows + first * kPanel;
                args.out_stride = stack.rows;
                (stack.quantize_x ? table.linear_blocks : table.linear)(args, alone(context));
            });
    };
    multiply(up, options.up_bias, [&](std::int64_t row, std::int64_t column) {
        LinearArgs args{};
        args.x = options.scales_input ? source + row * x.cols * size : source;
        args.x_rows = options.scales_input ? nullptr : sorted.tokens + row;
        args.x_stride = source_stride;
        args.out = at(buffers.inner) + (row * up.rows + column) * size;
        return args;
    });
    context.wait(context);
    table.act({at(buffers.inner), at(buffers.activated), x.dtype, options.activation, num_rows, width,
               options.is_gated, options.clamp, options.alpha},
              context);
    context.wait(context);
    multiply(down, options.down_bias, [&](std::int64_t row, std::int64_t column) {
        LinearArgs args{};
        args.x = at(buffers.activated) + row * width * size;
        args.x_stride = width;
        args.out = at(buffers.outputs) + (row * down.rows + column) * size;
        return args;
    });
    context.wait(context);
    table.combine({at(buffers.outputs), at(out) + chunk.start * out.stride * size, x.dtype, sorted.places, factors,
                   chunk.num_tokens, count, down.rows, out.stride, !options.scales_input},
                  context);
}

// Each row of x times the weight of each of its experts, sorted.
void Program::scale_rows(const char *source, const View &x, const float *factors, const std::int32_t *places,
                         std::int64_t num_rows, std::int64_t count, char *scaled, const Context &context) {
    std::int64_t begin, end;
    share(num_rows, context, &begin, &end);
    for (std::int64_t i = begin; i < end; ++i)
        for (std::int64_t k = 0; k < x.cols && places[i] >= 0; ++k)
            set_number(scaled, x.dtype, places[i] * x.cols + k,
                       number(source, x.dtype, i / count * x.stride + k) * factors[i]);
}

}  // namespace headrace
