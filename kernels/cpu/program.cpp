#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "block_shape.h"
#include "convert.h"
#include "isa.h"
#include "program_checks.h"
#include "thread_pool.h"

namespace headrace {
namespace {

// A norm of so many rows at most is done by each thread for itself: that takes less time than a barrier.
constexpr std::int64_t kPrivateNorms = 4;

}  // namespace

Program::Program(std::int64_t arena_bytes, std::int64_t max_tokens, std::int64_t max_logits)
    : memory_(allocate(static_cast<std::size_t>(std::max<std::int64_t>(arena_bytes, 1)))),
      max_tokens_(max_tokens),
      max_logits_(max_logits) {
    if (max_tokens < 1 || max_logits < 1) refuse("a program needs room for at least one token and one row of logits");
}

void Program::check(const View &view, std::int64_t cols) const {
    const std::int64_t rows = max_rows(view);
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

bool Program::Access::conflicts(const Access &other) const {
    if (!is_write && !other.is_write) return false;
    if (begin >= other.end || other.begin >= end) return false;
    const bool same = begin == other.begin && end == other.end && rows == other.rows && cols == other.cols &&
                      stride == other.stride;
    return !same || items == 0 || items != other.items;
}

Program::Access Program::access(const View &view, std::int64_t items, bool is_write) const {
    const char *begin = at(view);
    const std::int64_t numbers = (max_rows(view) - 1) * view.stride + view.cols;
    return {begin, begin + numbers * bytes_of(view.dtype), view.rows, view.cols, view.stride, items, is_write};
}

Program::Access Program::cache_access(const KVMemory &memory, bool is_write) {
    const char *begin = memory.cache().keys;  // stands for all of it: layers lie between each other
    return {begin, begin + 1, Rows::tokens, 0, 0, 0, is_write};
}

void Program::add_record(Body body, const Accesses &accesses, std::size_t scratch_bytes) {
    const bool waits = std::any_of(since_barrier_.begin(), since_barrier_.end(), [&](const Access &before) {
        return std::any_of(accesses.begin(), accesses.end(), [&](const Access &now) { return now.conflicts(before); });
    });
    if (waits) since_barrier_.clear();
    since_barrier_.insert(since_barrier_.end(), accesses.begin(), accesses.end());
    records_.push_back({std::move(body), waits});
    scratch_bytes_ = std::max(scratch_bytes_, scratch_bytes);
    prologue_.reset();
}

void Program::embedding(const View &out, const PackedWeight &weight, Ids of) {
    check(out, weight.weight().cols);
    want_dense(out, "out");
    std::int64_t &limit = of == Ids::positions ? num_positions_ : of == Ids::token_types ? num_types_ : vocab_size_;
    limit = std::min(limit, weight.weight().rows);
    char *data = at(out);
    add_record(
        [=, &weight](const Step &step, const Context &context) {
            std::int64_t begin, end;
            share(step.num_tokens, context, &begin, &end);
            const std::int32_t *ids = of == Ids::positions ? step.positions
                                      : of == Ids::token_types ? step.token_types
                                                               : step.input_ids;
            auto *row = reinterpret_cast<float *>(context.scratch);
            for (std::int64_t i = begin; i < end; ++i) {
                weight.read_row(ids[i], row);
                for (std::int64_t k = 0; k < out.cols; ++k) set_number(data, out.dtype, i * out.cols + k, row[k]);
            }
        },
        {writes(out, 1)}, static_cast<std::size_t>(out.cols) * sizeof(float));
}

void Program::linear(const View &out, const View &x, const PackedWeight &weight, std::vector<float> bias,
                     bool quantize_x) {
    const Weight &packed = weight.weight();
    check(x, packed.cols);
    check(out, packed.rows);
    want_same(out, x, "out and x");
    want_length(bias, packed.rows, "bias");
    if (quantize_x && !has_blocks(packed.format)) refuse("quantize_x needs a weight of GGUF blocks or of int4");
    const LinearArgs most{at(x),   x.dtype,  max_rows(x), packed, nullptr,
                          at(out), x.stride, out.stride,  nullptr};
    const Kernels &table = kernels();
    const std::size_t scratch = quantize_x ? table.linear_blocks_scratch(most) : table.linear_scratch(most);
    auto begun = std::make_shared<std::vector<Begun>>(static_cast<std::size_t>(num_threads()));
    const Linear run = [=, this, &table, bias = std::move(bias)](const Step &step, const void *rows, std::int64_t stride,
                                                                 Context context) {
        if (static_cast<std::size_t>(context.num_threads) <= begun->size()) context.begun = begun->data();
        context.step = step_number_;
        LinearArgs args = most;
        args.x = rows;
        args.x_stride = stride;
        args.num_tokens = step.rows_of(x.rows);
        args.bias = or_null(bias);
        if (args.num_tokens == 0) return;
        (quantize_x ? table.linear_blocks : table.linear)(args, context);
    };
    if (take_in_prologue(out, x, run, scratch)) return;
    const char *rows = at(x);
    add_record([=](const Step &step, const Context &context) { run(step, rows, x.stride, context); },
               {reads(x), writes(out)}, scratch);
}

// Put the last norm or activation and a linear of its result in one record, so that no barrier stands between them when
// rows are few: then each thread makes all the rows it reads. False if that cannot be.
bool Program::take_in_prologue(const View &out, const View &x, const Linear &linear, std::size_t scratch_bytes) {
    if (!prologue_ || !(prologue_->out == x)) return false;
    Accesses all = prologue_->accesses;
    for (Access &access : all)
        if (!access.is_write) access.items = 0;
    all.push_back(writes(out));
    for (const Access &a : all)
        for (const Access &b : all)
            if (!a.is_write && a.conflicts(b)) return false;
    const Prologue first = *std::move(prologue_);
    since_barrier_ = first.before;
    records_.pop_back();
    const std::size_t row_bytes = static_cast<std::size_t>(x.cols * bytes_of(x.dtype));
    const std::size_t rows_bytes = (static_cast<std::size_t>(first.private_rows) * row_bytes + 63) / 64 * 64;
    const std::size_t offset = (scratch_bytes + 63) / 64 * 64;
    char *shared = at(x);
    add_record(
        [=](const Step &step, const Context &context) {
            const std::int64_t num_rows = step.rows_of(x.rows);
            if (num_rows > first.private_rows) {
                first.run(step, shared, first.sum, context);
                context.wait(context);
                linear(step, shared, x.stride, context);
                return;
            }
            char *mine = context.scratch + offset, *sum = mine + rows_bytes;
            Context alone = context;
            alone.thread = 0;
            alone.num_threads = 1;
            first.run(step, mine, sum, alone);
            std::int64_t begin, end;
            share(num_rows, context, &begin, &end);
            const std::size_t start = static_cast<std::size_t>(begin) * row_bytes;
            const std::size_t size = static_cast<std::size_t>(end - begin) * row_bytes;
            std::memcpy(shared + start, mine + start, size);
            if (first.sum != nullptr) std::memcpy(first.sum + start, sum + start, size);
            linear(step, mine, x.stride, context);
        },
        all, offset + (first.sum == nullptr ? 1 : 2) * rows_bytes);
    return true;
}

void Program::norm(const View &out, const View &x, const View *residual, const View *total, std::int64_t n,
                   std::vector<float> weight, std::vector<float> bias, float eps, bool is_layer_norm) {
    check(x, x.cols);
    check(out, x.cols);
    want_same(out, x, "out and x");
    want_dense(out, "out");
    if (n < 1 || x.cols % n != 0) refuse("rows of " + std::to_string(n) + " values do not fill " + std::to_string(x.cols));
    want_length(weight, n, "weight");
    want_length(bias, n, "bias");
    const std::int64_t group = x.cols / n;
    NormArgs args{};
    args.x = at(x);
    args.dtype = x.dtype;
    args.n = n;
    args.group = group;
    args.x_stride = x.stride;
    args.eps = eps;
    Accesses accesses{reads(x, group), writes(out, group)};
    if (residual != nullptr) {
        args.residual = at(*residual);
        accesses.push_back(reads(*residual, group));
        accesses.push_back(writes(*total, group));
    }
    const Kernels &table = kernels();
    Prologue last{
        [=, &table, weight = std::move(weight), bias = std::move(bias)](const Step &step, void *to, void *sum,
                                                                        const Context &context) {
            NormArgs now = args;
            now.out = to;
            now.sum = sum;
            now.weight = or_null(weight);
            now.bias = or_null(bias);
            now.num_tokens = step.rows_of(x.rows) * group;
            (is_layer_norm ? table.layer_norm : table.rms_norm)(now, context);
        },
        out, total == nullptr ? nullptr : at(*total), accesses, since_barrier_, kPrivateNorms};
    char *to = at(out);
    add_record([=, run = last.run, sum = last.sum](const Step &step, const Context &context) { run(step, to, sum, context); },
               accesses);
    if (group == 1) prologue_ = std::move(last);
}

void Program::rms_norm(const View &out, const View &x, std::int64_t n, std::vector<float> weight, float eps) {
    norm(out, x, nullptr, nullptr, n, std::move(weight), {}, eps, false);
}

void Program::layer_norm(const View &out, const View &x, std::int64_t n, std::vector<float> weight,
                         std::vector<float> bias, float eps) {
    norm(out, x, nullptr, nullptr, n, std::move(weight), std::move(bias), eps, true);
}

void Program::add_rms_norm(const View &out, const View &total, const View &x, const View &residual,
                           std::vector<float> weight, float eps) {
    check(total, x.cols);
    check(residual, x.cols);
    want_same(total, x, "total and x");
    want_same(residual, x, "residual and x");
    for (const View *view : {&total, &x, &residual}) want_dense(*view, "each operand of add_rms_norm");
    norm(out, x, &residual, &total, x.cols, std::move(weight), {}, eps, false);
}

void Program::rotary_angles(const View &cos, const View &sin, std::vector<float> inv_freq,
                            std::vector<float> attention_factors, std::vector<std::int64_t> axes) {
    const std::int64_t half = cos.cols, variants = static_cast<std::int64_t>(attention_factors.size());
    if (!axes.empty() && static_cast<std::int64_t>(axes.size()) != half)
        refuse("there must be an axis for each of " + std::to_string(half) + " columns");
    for (const std::int64_t axis : axes) {
        if (axis < 0) refuse("an axis must not be negative");
        num_axes_ = std::max(num_axes_, axis + 1);
    }
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
    Body body = [=, inv_freq = std::move(inv_freq), factors = std::move(attention_factors),
                 axes = std::move(axes)](const Step &step, const Context &context) {
        std::int64_t begin, end;
        share(step.num_tokens, context, &begin, &end);
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t variant = variants > 1 ? step.rope_rows[i] : 0;
            const float *frequencies = inv_freq.data() + variant * half;
            const float factor = factors[static_cast<std::size_t>(variant)];
            for (std::int64_t j = 0; j < half; ++j) {
                const std::int32_t position =
                    axes.empty() ? step.positions[i]
                                 : step.rope_positions[i * step.num_axes + axes[static_cast<std::size_t>(j)]];
                const float angle = static_cast<float>(position) * frequencies[j];
                cosines[i * half + j] = std::cos(angle) * factor;
                sines[i * half + j] = std::sin(angle) * factor;
            }
        }
    };
    add_record(std::move(body), {writes(cos, 1), writes(sin, 1)});
}

void Program::rope(const View &out, const View &x, const View &cos, const View &sin, std::int64_t head_dim,
                   std::int64_t head_stride, bool interleaved) {
    const std::int64_t num_heads = out.cols / std::max<std::int64_t>(head_dim, 1);
    check(x, (num_heads - 1) * head_stride + head_dim);
    check(out, out.cols);
    check(cos, cos.cols);
    check(sin, cos.cols);
    want_same(out, x, "out and x");
    want_dense(out, "out");
    want_dense(cos, "cos");
    want_dense(sin, "sin");
    if (head_dim < 1 || out.cols % head_dim != 0 || head_stride < head_dim || 2 * cos.cols > head_dim)
        refuse("heads of " + std::to_string(head_dim) + " values do not fit " + std::to_string(out.cols) +
               " columns and " + std::to_string(cos.cols) + " angles");
    RopeArgs args{};
    args.x = at(x);
    args.out = at(out);
    args.cos = reinterpret_cast<const float *>(at(cos));
    args.sin = reinterpret_cast<const float *>(at(sin));
    args.dtype = x.dtype;
    args.num_heads = num_heads;
    args.head_dim = head_dim;
    args.rotary_dim = 2 * cos.cols;
    args.x_stride = x.stride;
    args.x_head_stride = head_stride;
    args.interleaved = interleaved;
    const Kernels &table = kernels();
    add_record(
        [=, &table](const Step &step, const Context &context) {
            RopeArgs now = args;
            now.num_tokens = step.num_tokens;
            table.rope(now, context);
        },
        {reads(x, head_stride == head_dim ? num_heads : 0), reads(cos), reads(sin), writes(out, num_heads)});
}

void Program::gather(const View &out, const View &x) {
    check(x, x.cols);
    check(out, x.cols);
    if (out.rows != Rows::logits || x.rows != Rows::tokens || out.dtype != x.dtype)
        refuse("gather takes rows of tokens to rows of logits of the same dtype");
    const std::int64_t size = bytes_of(x.dtype);
    add_record(
        [=, this](const Step &step, const Context &context) {
            std::int64_t begin, end;
            share(step.num_logits, context, &begin, &end);
            for (std::int64_t i = begin; i < end; ++i)
                std::memcpy(at(out) + i * out.stride * size, at(x) + step.logits_indices[i] * x.stride * size,
                            static_cast<std::size_t>(x.cols * size));
        },
        {reads(x), writes(out, 1)});
}

void Program::place_rows(const View &out, const View &x, const KeptRows &rows, bool is_sum) {
    check(x, x.cols);
    check(out, x.cols);
    want_same(out, x, "out and x");
    if (x.rows != Rows::tokens || rows.num_rows < 1 || rows.column < 0 || rows.column + x.cols > rows.cols)
        refuse("place_rows takes rows of tokens, and columns that the rows of images have");
    num_kept_rows_ = std::min(num_kept_rows_, rows.num_rows);
    const std::int64_t size = bytes_of(x.dtype);
    add_record(
        [=, this](const Step &step, const Context &context) {
            std::int64_t begin, end;
            share(step.num_tokens, context, &begin, &end);
            for (std::int64_t i = begin; i < end; ++i) {
                const char *from = at(x) + i * x.stride * size;
                char *to = at(out) + i * out.stride * size;
                std::memcpy(to, from, static_cast<std::size_t>(x.cols * size));
                const std::int64_t row = step.image_rows == nullptr ? -1 : step.image_rows[i];
                const std::int64_t first = row * rows.cols + rows.column;
                for (std::int64_t k = 0; row >= 0 && k < x.cols; ++k) {
                    set_number(to, x.dtype, k, number(rows.data, rows.dtype, first + k));
                    if (is_sum) set_number(to, x.dtype, k, number(from, x.dtype, k) + number(to, x.dtype, k));
                }
            }
        },
        {reads(x, 1), writes(out, 1)});
}

void Program::mean_rows(const View &out, const View &x) {
    check(x, x.cols);
    check(out, x.cols);
    want_dense(out, "out");
    if (out.rows != Rows::logits || x.rows != Rows::tokens || out.dtype != x.dtype)
        refuse("mean_rows takes rows of tokens to rows of logits of the same dtype");
    has_means_ = true;
    const MeanRowsArgs args{at(x), at(out), x.dtype, 0, x.cols, x.stride, nullptr, nullptr};
    const Kernels &table = kernels();
    add_record(
        [=, &table](const Step &step, const Context &context) {
            MeanRowsArgs now = args;
            now.num_rows = step.num_logits;
            now.starts = step.starts;
            now.ends = step.ends;
            table.mean_rows(now, context);
        },
        {reads(x), writes(out, pieces_of(out))});
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
    if (num_types_ < INT32_MAX) {
        if (step.token_types == nullptr) refuse("the program embeds token types, and the step brings none");
        within(step.token_types, step.num_tokens, 0, num_types_, "token_types");
    }
    if ((num_features_ > 0) != (step.features != nullptr) || step.num_features != num_features_)
        refuse("the program reads " + std::to_string(num_features_) + " features a row, and the step brings others");
    for (const WindowUse &use : windows_) {
        if (static_cast<std::size_t>(use.number) >= step.windows.size()) refuse("the step brings too few windows");
        const Step::Windows &windows = step.windows[static_cast<std::size_t>(use.number)];
        if (windows.num_rows != step.rows_of(use.to) || windows.width != use.width)
            refuse("windows " + std::to_string(use.number) + " must be [" + std::to_string(step.rows_of(use.to)) +
                   ", " + std::to_string(use.width) + "]");
        within(windows.rows, windows.num_rows * windows.width, -1, step.rows_of(use.from), "windows");
    }
    if (has_means_) {
        if (step.starts == nullptr) refuse("the program makes means of rows, and the step does not say of which");
        within(step.starts, step.num_logits, 0, step.num_tokens, "starts");
        for (std::int64_t i = 0; i < step.num_logits; ++i)
            within(step.ends + i, 1, step.starts[i] + 1, step.num_tokens + 1, "ends");
    } else if (step.logits_indices != nullptr) {
        within(step.logits_indices, step.num_logits, 0, step.num_tokens, "logits_indices");
    }
    if (num_axes_ > 0 && (step.rope_positions == nullptr || step.num_axes < num_axes_))
        refuse("a rope turns by " + std::to_string(num_axes_) + " axes, and the step brings fewer");
    if (step.image_rows != nullptr) within(step.image_rows, step.num_tokens, -1, num_kept_rows_, "image_rows");
    if (num_rope_variants_ > 1) {
        if (step.rope_rows == nullptr) refuse("a rope has variants, and the step brings no rope_rows");
        within(step.rope_rows, step.num_tokens, 0, num_rope_variants_, "rope_rows");
    }
    for (std::size_t group = 0; group < num_slots_.size() && step.num_tokens > 0; ++group) {
        if (num_slots_[group] == INT64_MAX) continue;
        if (step.slot_mappings[group] == nullptr) refuse("slot_mapping must have a slot for each token");
        within(step.slot_mappings[group], step.num_tokens, -1, num_slots_[group], "slot_mapping");
    }
    for (const std::int64_t group : state_groups_) {
        const auto index = static_cast<std::size_t>(group);
        if (step.max_num_blocks[index] < 1) refuse("the block table of a state group needs a column");
        for (std::int64_t r = 0; r < step.num_reqs; ++r)
            within(step.block_tables[index] + r * step.max_num_blocks[index], 1, -1, num_slots_[index], "state slot");
        within(step.query_start_loc, step.num_reqs + 1, 0, step.num_tokens + 1, "query_start_loc");
        for (std::int64_t r = 0; r < step.num_reqs; ++r)
            if (step.query_start_loc[r] > step.query_start_loc[r + 1]) refuse("query_start_loc must rise");
    }
}

void Program::run(const Step &step) {
    validate(step);
    plan_attention(step);
    if (++step_number_ == 0) ++step_number_;
    std::size_t done = 0;
    for (const Call &call : calls_) {
        run_records(step, done, call.at);
        done = call.at;
        call.function(step);
    }
    run_records(step, done, records_.size());
}

void Program::run_records(const Step &step, std::size_t begin, std::size_t end) {
    if (begin == end) return;
    parallel(scratch_bytes_, [&](const Context &context) {
        for (std::size_t i = begin; i < end; ++i) {
            if (records_[i].waits) context.wait(context);
            records_[i].body(step, context);
        }
    });
}

void Program::call(std::function<void(const Step &)> function) {
    calls_.push_back({records_.size(), std::move(function)});
    since_barrier_.clear();
    prologue_.reset();
}

}  // namespace headrace
