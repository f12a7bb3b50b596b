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
#include "thread_pool.h"

namespace headrace {
namespace {

// A norm of so many rows at most is done by each thread for itself: that takes less time than a barrier.
constexpr std::int64_t kPrivateRows = 4;

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
    const auto *begin = static_cast<const char *>(memory.data());
    return {begin, begin + memory.num_bytes(), Rows::tokens, 0, 0, 0, is_write};
}

// How act and elementwise split a row. Pieces are not as even as heads are: a number of their own.
std::int64_t Program::pieces_of(const View &view) {
    return view.cols <= kPiece ? 1 : -((view.cols + kPiece - 1) / kPiece);
}

void Program::add_record(Body body, const Accesses &accesses, std::size_t scratch_bytes) {
    const bool waits = std::any_of(since_barrier_.begin(), since_barrier_.end(), [&](const Access &before) {
        return std::any_of(accesses.begin(), accesses.end(), [&](const Access &now) { return now.conflicts(before); });
    });
    if (waits) since_barrier_.clear();
    since_barrier_.insert(since_barrier_.end(), accesses.begin(), accesses.end());
    records_.push_back({std::move(body), waits});
    scratch_bytes_ = std::max(scratch_bytes_, scratch_bytes);
    last_norm_.reset();
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
        {writes(out, 1)}, static_cast<std::size_t>(out.cols) * sizeof(float));
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
    if (quantize_x && !has_blocks(packed.format)) refuse("quantize_x needs a weight of GGUF blocks or of int4");
    LinearArgs most{at(x), x.dtype, max_rows(x), packed, nullptr, at(out)};
    const Kernels &table = kernels();
    const std::size_t scratch = quantize_x ? table.linear_blocks_scratch(most) : table.linear_scratch(most);
    const Linear run = [=, &table, bias = std::move(bias)](const Step &step, const void *rows, const Context &context) {
        LinearArgs args = most;
        args.x = rows;
        args.num_tokens = step.rows_of(x.rows);
        args.bias = or_null(bias);
        if (args.num_tokens == 0) return;
        (quantize_x ? table.linear_blocks : table.linear)(args, context);
    };
    if (take_in_norm(out, x, run, scratch)) return;
    const char *rows = at(x);
    add_record([=](const Step &step, const Context &context) { run(step, rows, context); }, {reads(x), writes(out)},
               scratch);
}

// Put the last norm and a linear of its result in one record, so that no barrier stands between them when rows are
// few: then each thread makes all the rows it reads. False if that cannot be.
bool Program::take_in_norm(const View &out, const View &x, const Linear &linear, std::size_t scratch_bytes) {
    if (!last_norm_ || !(last_norm_->out == x)) return false;
    Accesses all = last_norm_->accesses;
    for (Access &access : all)
        if (!access.is_write) access.items = 0;
    all.push_back(writes(out));
    for (const Access &a : all)
        for (const Access &b : all)
            if (!a.is_write && a.conflicts(b)) return false;
    const LastNorm norm = *std::move(last_norm_);
    since_barrier_ = norm.before;
    records_.pop_back();
    const std::size_t row_bytes = static_cast<std::size_t>(x.cols * bytes_of(x.dtype));
    const std::size_t rows_bytes = (kPrivateRows * row_bytes + 63) / 64 * 64, offset = (scratch_bytes + 63) / 64 * 64;
    char *shared = at(x);
    add_record(
        [=](const Step &step, const Context &context) {
            const std::int64_t num_rows = step.rows_of(x.rows);
            if (num_rows > kPrivateRows) {
                norm.run(step, shared, norm.sum, context);
                context.wait(context);
                linear(step, shared, context);
                return;
            }
            char *mine = context.scratch + offset, *sum = mine + rows_bytes;
            Context alone = context;
            alone.thread = 0;
            alone.num_threads = 1;
            norm.run(step, mine, sum, alone);
            std::int64_t begin, end;
            share(num_rows, context, &begin, &end);
            const std::size_t start = static_cast<std::size_t>(begin) * row_bytes;
            const std::size_t size = static_cast<std::size_t>(end - begin) * row_bytes;
            std::memcpy(shared + start, mine + start, size);
            if (norm.sum != nullptr) std::memcpy(norm.sum + start, sum + start, size);
            linear(step, mine, context);
        },
        all, offset + 2 * rows_bytes);
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
    LastNorm last{
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
        out, total == nullptr ? nullptr : at(*total), accesses, since_barrier_};
    char *to = at(out);
    add_record([=, run = last.run, sum = last.sum](const Step &step, const Context &context) { run(step, to, sum, context); },
               accesses);
    if (group == 1) last_norm_ = std::move(last);
}

void Program::rms_norm(const View &out, const View &x, std::int64_t n, std::vector<float> weight, float eps) {
    norm(out, x, nullptr, nullptr, n, std::move(weight), {}, eps, false);
}

void Program::layer_norm(const View &out, const View &x, std::vector<float> weight, std::vector<float> bias,
                         float eps) {
    norm(out, x, nullptr, nullptr, x.cols, std::move(weight), std::move(bias), eps, true);
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
    Body body = [=, inv_freq = std::move(inv_freq), factors = std::move(attention_factors)](const Step &step,
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
    };
    add_record(std::move(body), {writes(cos, 1), writes(sin, 1)});
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
    add_record(
        [=, &table](const Step &step, const Context &context) {
            RopeArgs now = args;
            now.num_tokens = step.num_tokens;
            table.rope(now, context);
        },
        {reads(x, args.num_heads), reads(cos), reads(sin), writes(out, args.num_heads)});
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
    add_record(
        [=, &table](const Step &step, const Context &context) {
            ActArgs now = args;
            now.num_tokens = step.rows_of(x.rows);
            table.act(now, context);
        },
        {reads(x, is_gated ? 0 : pieces_of(x)), writes(out, pieces_of(out))});
}

void Program::elementwise(Elementwise op, const View &out, const View &x, const View *y, float factor) {
    check(x, x.cols);
    check(out, x.cols);
    if (out.rows != x.rows) refuse("out and x must have the same rows");
    const std::int64_t pieces = pieces_of(x);
    Accesses accesses{reads(x, pieces), writes(out, pieces)};
    if (y != nullptr) accesses.push_back(reads(*y, pieces));
    const ElementwiseArgs args{op, at(x), y == nullptr ? nullptr : at(*y), at(out), x.dtype, out.dtype, 0, x.cols,
                               x.stride, y == nullptr ? 0 : y->stride, out.stride, factor};
    const Kernels &table = kernels();
    add_record(
        [=, &table](const Step &step, const Context &context) {
            ElementwiseArgs now = args;
            now.num_rows = step.rows_of(x.rows);
            table.elementwise(now, context);
        },
        accesses);
}

void Program::scale(const View &out, const View &x, float factor) {
    std::uint8_t rounded[4];
    set_number(rounded, x.dtype, 0, factor);  // as the definition holds it
    elementwise(Elementwise::scale, out, x, nullptr, number(rounded, x.dtype, 0));
}

void Program::softcap(const View &out, const View &x, float cap) {
    elementwise(Elementwise::softcap, out, x, nullptr, cap);
}

void Program::cast(const View &out, const View &x) { elementwise(Elementwise::copy, out, x, nullptr, 0); }

void Program::add(const View &out, const View &x, const View &y) {
    for (const View *view : {&out, &y}) {
        check(*view, x.cols);
        want_same(*view, x, "out, x and y");
    }
    elementwise(Elementwise::add, out, x, &y, 0);
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
    add_record(
        [=, &table](const Step &step, const Context &context) {
            WriteKVArgs now = args;
            now.num_tokens = step.num_tokens;
            now.slot_mapping = step.slot_mappings[static_cast<std::size_t>(group)];
            table.write_kv(now, context);
        },
        {reads(key, cache.num_kv_heads), reads(value, cache.num_kv_heads), cache_access(memory, true)});
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
               std::to_string(cache.head_dim) + " (at most " + std::to_string(kAttentionRows) +
               " to a head), or the group or window is negative");
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
    const char *counters = reinterpret_cast<const char *>(tasks->counters);
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
        {reads(query), writes(out), cache_access(memory, false),
         {counters, counters + sizeof tasks->counters, Rows::tokens, 0, 0, 0, true}},
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
    last_norm_.reset();
}

}  // namespace headrace
