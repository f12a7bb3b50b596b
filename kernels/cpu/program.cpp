#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "convert.h"
#include "isa.h"
#include "thread_pool.h"

namespace headrace {
namespace {

[[noreturn]] void refuse(const std::string &message) { throw std::invalid_argument(message); }

const float *or_null(const std::vector<float> &values) { return values.empty() ? nullptr : values.data(); }

void want_length(const std::vector<float> &values, std::int64_t length, const char *name) {
    if (!values.empty() && static_cast<std::int64_t>(values.size()) != length)
        refuse(std::string(name) + " must have " + std::to_string(length) + " values, got " +
               std::to_string(values.size()));
}

void want_same(const View &a, const View &b, const char *what) {
    if (a.dtype != b.dtype || a.rows != b.rows) refuse(std::string(what) + " must have the same dtype and rows");
}

void want_dense(const View &view, const char *name) {
    if (!view.is_dense()) refuse(std::string(name) + " must have no gaps between its rows");
}

}  // namespace

Program::Program(std::int64_t arena_bytes, std::int64_t max_tokens, std::int64_t max_logits)
    : memory_(allocate(static_cast<std::size_t>(std::max<std::int64_t>(arena_bytes, 1)))),
      max_tokens_(max_tokens),
      max_logits_(max_logits) {
    if (max_tokens < 1 || max_logits < 1) refuse("a program needs room for at least one token and one row of logits");
}

void Program::check(const View &view, std::int64_t cols) const {
    const std::int64_t rows = view.rows == Rows::tokens ? max_tokens_ : max_logits_;
    const std::int64_t size = bytes_of(view.dtype);
    const std::int64_t end = view.offset + ((rows - 1) * view.stride + view.cols) * size;
    if (view.offset < 0 || view.offset % size != 0 || view.cols < 1 || view.stride < view.cols ||
        end > static_cast<std::int64_t>(memory_.num_bytes))
        refuse("a value of " + std::to_string(rows) + " rows at byte " + std::to_string(view.offset) + ", " +
               std::to_string(view.cols) + " columns, stride " + std::to_string(view.stride) +
               ", does not lie in an arena of " + std::to_string(memory_.num_bytes) + " bytes");
    if (view.cols != cols)
        refuse("a value has " + std::to_string(view.cols) + " columns where " + std::to_string(cols) + " are needed");
}

void Program::add_record(Record record, std::size_t scratch_bytes) {
    records_.push_back(std::move(record));
    scratch_bytes_ = std::max(scratch_bytes_, scratch_bytes);
}

void Program::embedding(const View &out, const PackedWeight &weight, bool of_positions) {
    check(out, weight.weight().cols);
    want_dense(out, "out");
    std::int64_t &limit = of_positions ? num_positions_ : vocab_size_;
    limit = std::min(limit, weight.weight().rows);
    char *data = at(out);
    add_record(
        [=, &weight](const Step &step, const Context &context) {
            std::int64_t begin, end;
            share(step.num_tokens, context, &begin, &end);
            const std::int32_t *ids = of_positions ? step.positions : step.input_ids;
            auto *row = reinterpret_cast<float *>(context.scratch);
            for (std::int64_t i = begin; i < end; ++i) {
                weight.read_row(ids[i], row);
                for (std::int64_t k = 0; k < out.cols; ++k) set_number(data, out.dtype, i * out.cols + k, row[k]);
            }
        },
        static_cast<std::size_t>(out.cols) * sizeof(float));
}

void Program::linear(const View &out, const View &x, const PackedWeight &weight, std::vector<float> bias,
                     bool quantize_x) {
    const Weight &packed = weight.weight();
    check(x, packed.cols);
    check(out, packed.rows);
    want_same(out, x, "out and x");
    want_dense(x, "x");
    want_dense(out, "out");
    want_length(bias, packed.rows, "bias");
    if (quantize_x && packed.format < Format::q8_0) refuse("quantize_x needs a weight of GGUF blocks or of int4");
    LinearArgs most{at(x), x.dtype, x.rows == Rows::tokens ? max_tokens_ : max_logits_, packed, nullptr, at(out)};
    const Kernels &table = kernels();
    const std::size_t scratch = quantize_x ? table.linear_blocks_scratch(most) : table.linear_scratch(most);
    add_record(
        [=, &table, bias = std::move(bias)](const Step &step, const Context &context) {
            LinearArgs args = most;
            args.num_tokens = step.rows_of(x.rows);
            args.bias = or_null(bias);
            if (args.num_tokens == 0) return;
            (quantize_x ? table.linear_blocks : table.linear)(args, context);
        },
        scratch);
}

void Program::norm(const View &out, const View &x, const NormArgs &args, std::int64_t n, std::vector<float> weight,
                   std::vector<float> bias, bool is_layer_norm) {
    check(x, x.cols);
    check(out, x.cols);
    want_same(out, x, "out and x");
    want_dense(out, "out");
    if (n < 1 || x.cols % n != 0) refuse("rows of " + std::to_string(n) + " values do not fill " + std::to_string(x.cols));
    want_length(weight, n, "weight");
    want_length(bias, n, "bias");
    const Kernels &table = kernels();
    add_record([=, this, &table, weight = std::move(weight), bias = std::move(bias)](const Step &step, const Context &context) {
        NormArgs now = args;
        now.x = at(x);
        now.out = at(out);
        now.dtype = x.dtype;
        now.weight = or_null(weight);
        now.bias = or_null(bias);
        now.n = n;
        now.group = x.cols / n;
        now.x_stride = x.stride;
        now.num_tokens = step.rows_of(x.rows) * now.group;
        (is_layer_norm ? table.layer_norm : table.rms_norm)(now, context);
    });
}

void Program::rms_norm(const View &out, const View &x, std::int64_t n, std::vector<float> weight, float eps) {
    NormArgs args{};
    args.eps = eps;
    norm(out, x, args, n, std::move(weight), {}, false);
}

void Program::layer_norm(const View &out, const View &x, std::vector<float> weight, std::vector<float> bias,
                         float eps) {
    NormArgs args{};
    args.eps = eps;
    norm(out, x, args, x.cols, std::move(weight), std::move(bias), true);
}

void Program::add_rms_norm(const View &out, const View &total, const View &x, const View &residual,
                           std::vector<float> weight, float eps) {
    check(total, x.cols);
    check(residual, x.cols);
    want_same(total, x, "total and x");
    want_same(residual, x, "residual and x");
    for (const View *view : {&total, &x, &residual}) want_dense(*view, "each operand of add_rms_norm");
    NormArgs args{};
    args.eps = eps;
    args.residual = at(residual);
    args.sum = at(total);
    norm(out, x, args, x.cols, std::move(weight), {}, false);
}

void Program::rotary_angles(const View &cos, const View &sin, std::vector<float> inv_freq,
                            std::vector<float> attention_factors) {
    const std::int64_t half = cos.cols, variants = static_cast<std::int64_t>(attention_factors.size());
    if (variants < 1) refuse("rotary_angles needs an attention factor for each variant");
    if (static_cast<std::int64_t>(inv_freq.size()) != variants * half)
        refuse("inv_freq must have " + std::to_string(variants * half) + " values, got " +
               std::to_string(inv_freq.size()));
    for (const View *view : {&cos, &sin}) {
        check(*view, half);
        want_dense(*view, "cos and sin");
        if (view->dtype != Dtype::f32 || view->rows != Rows::tokens) refuse("cos and sin must be float32, a row a token");
    }
    if (variants > 1)
        num_rope_variants_ = num_rope_variants_ > 1 ? std::min(num_rope_variants_, variants) : variants;
    auto *cosines = reinterpret_cast<float *>(at(cos)), *sines = reinterpret_cast<float *>(at(sin));
    add_record([=, inv_freq = std::move(inv_freq), factors = std::move(attention_factors)](const Step &step,
                                                                                          const Context &context) {
        std::int64_t begin, end;
        share(step.num_tokens, context, &begin, &end);
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t variant = variants > 1 ? step.rope_rows[i] : 0;
            const float *frequencies = inv_freq.data() + variant * half;
            const float factor = factors[static_cast<std::size_t>(variant)];
            for (std::int64_t j = 0; j < half; ++j) {
                const float angle = static_cast<float>(step.positions[i]) * frequencies[j];
                cosines[i * half + j] = std::cos(angle) * factor;
                sines[i * half + j] = std::sin(angle) * factor;
            }
        }
    });
}

void Program::rope(const View &out, const View &x, const View &cos, const View &sin, std::int64_t head_dim,
                   bool interleaved) {
    check(x, x.cols);
    check(out, x.cols);
    check(cos, cos.cols);
    check(sin, cos.cols);
    want_same(out, x, "out and x");
    want_dense(out, "out");
    want_dense(cos, "cos");
    want_dense(sin, "sin");
    if (head_dim < 1 || x.cols % head_dim != 0 || 2 * cos.cols > head_dim)
        refuse("heads of " + std::to_string(head_dim) + " values do not fit " + std::to_string(x.cols) +
               " columns and " + std::to_string(cos.cols) + " angles");
    RopeArgs args{};
    args.x = at(x);
    args.out = at(out);
    args.cos = reinterpret_cast<const float *>(at(cos));
    args.sin = reinterpret_cast<const float *>(at(sin));
    args.dtype = x.dtype;
    args.num_heads = x.cols / head_dim;
    args.head_dim = head_dim;
    args.rotary_dim = 2 * cos.cols;
    args.x_stride = x.stride;
    args.interleaved = interleaved;
    const Kernels &table = kernels();
    add_record([=, &table](const Step &step, const Context &context) {
        RopeArgs now = args;
        now.num_tokens = step.num_tokens;
        table.rope(now, context);
    });
}

void Program::act(const View &out, const View &x, Activation activation, bool is_gated) {
    check(x, x.cols);
    check(out, is_gated ? x.cols / 2 : x.cols);
    want_same(out, x, "out and x");
    want_dense(x, "x");
    want_dense(out, "out");
    if (is_gated && x.cols % 2 != 0) refuse("gate and up do not have the same number of columns");
    const ActArgs args{at(x), at(out), x.dtype, activation, 0, out.cols, is_gated};
    const Kernels &table = kernels();
    add_record([=, &table](const Step &step, const Context &context) {
        ActArgs now = args;
        now.num_tokens = step.rows_of(x.rows);
        table.act(now, context);
    });
}

// out = function(x), one number at a time.
void Program::each(const View &out, const View &x, std::function<float(float)> function) {
    check(x, x.cols);
    check(out, x.cols);
    if (out.rows != x.rows) refuse("out and x must have the same rows");
    add_record([=, this, function = std::move(function)](const Step &step, const Context &context) {
        std::int64_t begin, end;
        share(step.rows_of(x.rows) * x.cols, context, &begin, &end);
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t row = i / x.cols, col = i % x.cols;
            set_number(at(out), out.dtype, row * out.stride + col,
                       function(number(at(x), x.dtype, row * x.stride + col)));
        }
    });
}

void Program::scale(const View &out, const View &x, float factor) {
    std::uint8_t rounded[4];
    set_number(rounded, x.dtype, 0, factor);
    float value;
    if (x.dtype == Dtype::f32) {
        value = factor;
    } else {
        std::uint16_t bits;
        std::memcpy(&bits, rounded, sizeof bits);
        value = number(&bits, x.dtype, 0);
    }
    each(out, x, [value](float v) { return v * value; });
}

void Program::softcap(const View &out, const View &x, float cap) {
    each(out, x, [cap](float v) { return cap * std::tanh(v / cap); });
}

void Program::cast(const View &out, const View &x) {
    each(out, x, [](float v) { return v; });
}

void Program::add(const View &out, const View &x, const View &y) {
    for (const View *view : {&out, &x, &y}) {
        check(*view, x.cols);
        want_same(*view, x, "out, x and y");
    }
    add_record([=, this](const Step &step, const Context &context) {
        std::int64_t begin, end;
        share(step.rows_of(x.rows) * x.cols, context, &begin, &end);
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t row = i / x.cols, col = i % x.cols;
            set_number(at(out), out.dtype, row * out.stride + col,
                       number(at(x), x.dtype, row * x.stride + col) + number(at(y), y.dtype, row * y.stride + col));
        }
    });
}

void Program::gather(const View &out, const View &x) {
    check(x, x.cols);
    check(out, x.cols);
    if (out.rows != Rows::logits || x.rows != Rows::tokens || out.dtype != x.dtype)
        refuse("gather takes rows of tokens to rows of logits of the same dtype");
    const std::int64_t size = bytes_of(x.dtype);
    add_record([=, this](const Step &step, const Context &context) {
        std::int64_t begin, end;
        share(step.num_logits, context, &begin, &end);
        for (std::int64_t i = begin; i < end; ++i)
            std::memcpy(at(out) + i * out.stride * size, at(x) + step.logits_indices[i] * x.stride * size,
                        static_cast<std::size_t>(x.cols * size));
    });
}

void Program::write_kv(const KVMemory &memory, const View &key, const View &value, std::int64_t group) {
    const KVCache &cache = memory.cache();
    check(key, cache.num_kv_heads * cache.head_dim);
    check(value, cache.num_kv_heads * cache.head_dim);
    want_same(key, value, "key and value");
    if (group < 0) refuse("a KV group must not be negative");
    use_group(group);
    const std::int64_t slots = cache.num_blocks * cache.block_size;
    num_slots_.resize(static_cast<std::size_t>(num_groups_), INT64_MAX);
    num_slots_[static_cast<std::size_t>(group)] = std::min(num_slots_[static_cast<std::size_t>(group)], slots);
    WriteKVArgs args{};
    args.cache = cache;
    args.key = at(key);
    args.value = at(value);
    args.key_stride = key.stride;
    args.value_stride = value.stride;
    args.dtype = key.dtype;
    const Kernels &table = kernels();
    add_record([=, &table](const Step &step, const Context &context) {
        WriteKVArgs now = args;
        now.num_tokens = step.num_tokens;
        now.slot_mapping = step.slot_mappings[static_cast<std::size_t>(group)];
        table.write_kv(now, context);
    });
}

void Program::attention(const View &out, const View &query, const KVMemory &memory, std::int64_t group, float scale,
                        std::int64_t window, float softcap, std::vector<float> sinks,
                        std::vector<float> alibi_slopes) {
    const KVCache &cache = memory.cache();
    check(query, query.cols);
    check(out, query.cols);
    want_same(out, query, "out and query");
    want_dense(out, "out");
    const std::int64_t heads = query.cols / cache.head_dim;
    if (heads * cache.head_dim != query.cols || heads % cache.num_kv_heads != 0 ||
        heads / cache.num_kv_heads > kAttentionRows || group < 0 || window < 0)
        refuse("query heads do not fit a cache of " + std::to_string(cache.num_kv_heads) + " heads of " +
               std::to_string(cache.head_dim) + " (at most 32 to a head), or the group or window is negative");
    want_length(sinks, heads, "sinks");
    want_length(alibi_slopes, heads, "alibi_slopes");
    use_group(group);
    const auto same = [&](const std::unique_ptr<Tasks> &t) {
        return t->group == group && t->num_heads == heads && t->window == window &&
               t->shape.num_kv_heads == cache.num_kv_heads && t->shape.head_dim == cache.head_dim &&
               t->shape.block_size == cache.block_size && t->shape.num_blocks == cache.num_blocks;
    };
    auto found = std::find_if(tasks_.begin(), tasks_.end(), same);
    if (found == tasks_.end()) {
        tasks_.push_back(std::make_unique<Tasks>());
        found = tasks_.end() - 1;
        (*found)->group = group;
        (*found)->num_heads = heads;
        (*found)->window = window;
        (*found)->shape = cache;
        (*found)->args = AttentionArgs{};
        (*found)->args.cache = cache;
        (*found)->args.num_heads = heads;
        (*found)->args.window = window;
    }
    Tasks *tasks = found->get();
    const int turn = tasks->num_records++ % 2;
    AttentionArgs probe{};
    probe.cache = cache;
    const Kernels &table = kernels();
    add_record(
        [=, this, &table, sinks = std::move(sinks), slopes = std::move(alibi_slopes)](const Step &,
                                                                                     const Context &context) {
            if (context.thread == 0) tasks->counters[1 - turn] = 0;
            AttentionArgs args = tasks->args;
            args.cache = cache;
            args.query = at(query);
            args.query_stride = query.stride;
            args.out = at(out);
            args.dtype = query.dtype;
            args.scale = scale;
            args.softcap = softcap;
            args.sinks = or_null(sinks);
            args.alibi_slopes = or_null(slopes);
            args.next_task = &tasks->counters[turn];
            table.attention(args, context);
        },
        table.attention_scratch(probe));
}

void Program::validate(const Step &step) const {
    if (step.num_tokens < 0 || step.num_tokens > max_tokens_ || step.num_logits < 0 || step.num_logits > max_logits_)
        refuse("a step of " + std::to_string(step.num_tokens) + " tokens and " + std::to_string(step.num_logits) +
               " rows of logits exceeds the program's " + std::to_string(max_tokens_) + " and " +
               std::to_string(max_logits_));
    if (static_cast<std::int64_t>(step.block_tables.size()) < num_groups_ ||
        static_cast<std::int64_t>(step.slot_mappings.size()) < num_groups_)
        refuse("the program uses " + std::to_string(num_groups_) + " KV groups, the step brings fewer");
    const auto within = [](const std::int32_t *values, std::int64_t count, std::int64_t low, std::int64_t limit,
                           const char *name) {
        for (std::int64_t i = 0; i < count; ++i)
            if (values[i] < low || values[i] >= limit)
                refuse(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(values[i]) +
                       ", not in [" + std::to_string(low) + ", " + std::to_string(limit) + ")");
    };
    within(step.input_ids, step.num_tokens, 0, vocab_size_, "input_ids");
    within(step.positions, step.num_tokens, 0, num_positions_, "positions");
    within(step.logits_indices, step.num_logits, 0, step.num_tokens, "logits_indices");
    if (num_rope_variants_ > 1) {
        if (step.rope_rows == nullptr) refuse("a rope has variants, and the step brings no rope_rows");
        within(step.rope_rows, step.num_tokens, 0, num_rope_variants_, "rope_rows");
    }
    for (std::size_t group = 0; group < num_slots_.size(); ++group)
        within(step.slot_mappings[group], step.num_tokens, -1, num_slots_[group], "slot_mapping");
}

void Program::run(const Step &step) {
    validate(step);
    for (const auto &tasks : tasks_) {
        const auto group = static_cast<std::size_t>(tasks->group);
        tasks->args.block_table = step.block_tables[group];
        tasks->args.max_num_blocks = step.max_num_blocks[group];
        tasks->plan.make(tasks->args, step.query_start_loc, step.seq_lens, step.num_reqs, step.num_tokens,
                         num_threads());
        tasks->counters[0] = tasks->counters[1] = 0;
    }
    parallel(scratch_bytes_, [&](const Context &context) {
        for (const Record &record : records_) {
            record(step, context);
            context.wait(context.pool);
        }
    });
}

}  // namespace headrace
