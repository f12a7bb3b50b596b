// A step as a list of kernels over one block of memory, walked by all threads inside one parallel region.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "attention_plan.h"
#include "kernels.h"
#include "memory.h"
#include "pack.h"

namespace headrace {

// Which symbolic size counts the rows of a value.
enum class Rows : int { tokens, logits };

// [rows, cols] numbers of the arena: the first at byte `offset`, `stride` elements from one row to the next.
struct View {
    std::int64_t offset, cols, stride;
    Dtype dtype;
    Rows rows;

    bool is_dense() const { return cols == stride; }
    bool operator==(const View &) const = default;
};

// The arrays of one step. They live until the step has ended.
struct Step {
    std::int64_t num_tokens, num_reqs, num_logits;
    const std::int32_t *input_ids, *positions;             // [num_tokens]
    const std::int32_t *query_start_loc, *seq_lens;        // [num_reqs + 1], [num_reqs]
    const std::int32_t *logits_indices;                    // [num_logits]
    const std::int32_t *rope_rows;                         // [num_tokens], or null if no rope has variants
    std::vector<const std::int32_t *> slot_mappings;       // per KV group [num_tokens]
    std::vector<const std::int32_t *> block_tables;        // per KV group [num_reqs, max_num_blocks]
    std::vector<std::int64_t> max_num_blocks;              // per KV group

    std::int64_t rows_of(Rows rows) const { return rows == Rows::tokens ? num_tokens : num_logits; }
};

// Owns the arena and the records. Weights and caches are the caller's and outlive it.
// Inside a step's parallel region nothing is allocated.
class Program {
  public:
    // Throws std::bad_alloc.
    Program(std::int64_t arena_bytes, std::int64_t max_tokens, std::int64_t max_logits);
    Program(const Program &) = delete;  // records point into it
    Program &operator=(const Program &) = delete;

    // Each adds a record; the definitions of core/ops say what it does. They throw std::invalid_argument for a view
    // outside the arena and for shapes that do not fit together.
    void embedding(const View &out, const PackedWeight &weight, bool of_positions);
    void linear(const View &out, const View &x, const PackedWeight &weight, std::vector<float> bias, bool quantize_x);
    void rms_norm(const View &out, const View &x, std::int64_t n, std::vector<float> weight, float eps);
    void add_rms_norm(const View &out, const View &total, const View &x, const View &residual,
                      std::vector<float> weight, float eps);
    void layer_norm(const View &out, const View &x, std::vector<float> weight, std::vector<float> bias, float eps);
    // inv_freq: [variants, cols] for as many variants as there are factors; with several, rope_rows picks one a token.
    void rotary_angles(const View &cos, const View &sin, std::vector<float> inv_freq,
                       std::vector<float> attention_factors);
    void rope(const View &out, const View &x, const View &cos, const View &sin, std::int64_t head_dim,
              bool interleaved);
    void act(const View &out, const View &x, Activation activation, bool is_gated);
    void add(const View &out, const View &x, const View &y);
    void scale(const View &out, const View &x, float factor);
    void softcap(const View &out, const View &x, float cap);
    void cast(const View &out, const View &x);
    void gather(const View &out, const View &x);  // rows logits_indices
    void write_kv(const KVMemory &memory, const View &key, const View &value, std::int64_t group);
    void attention(const View &out, const View &query, const KVMemory &memory, std::int64_t group, float scale,
                   std::int64_t window, float softcap, std::vector<float> sinks, std::vector<float> alibi_slopes);

    // Behind all records so far, in the caller's thread and outside of any region: for what has no kernel.
    void call(std::function<void(const Step &)> function);

    // One step, in one parallel region for each run of records between calls. Throws std::invalid_argument for values out of range, before anything runs.
    void run(const Step &step);

    char *arena() const { return memory_.data; }
    std::size_t arena_bytes() const { return memory_.num_bytes; }
    const char *data(const View &view) const { return memory_.data + view.offset; }
    std::int64_t num_records() const { return static_cast<std::int64_t>(records_.size()); }
    std::int64_t num_groups() const { return num_groups_; }

  private:
    using Body = std::function<void(const Step &, const Context &)>;

    // Memory that a record reads or writes. With `items`, the items of all rows are split evenly among the threads, in
    // order: two records that split the same view alike meet on no number of another thread's.
    struct Access {
        const char *begin, *end;
        Rows rows;
        std::int64_t cols, stride, items;  // items of a row; 0: any thread may touch any of it
        bool is_write;

        bool conflicts(const Access &other) const;
    };
    using Accesses = std::vector<Access>;

    struct Record {
        Body body;
        bool waits;  // behind a barrier: it conflicts with a record since the last one
    };

    // The norm that was added last: a linear of its result takes it in. `run` puts the results where it is told to.
    struct LastNorm {
        std::function<void(const Step &, void *out, void *sum, const Context &)> run;
        View out;
        char *sum;                  // null: it makes none
        Accesses accesses, before;  // its own; the others since the barrier before it
    };
    using Linear = std::function<void(const Step &, const void *x, const Context &)>;

    // Attention records of equal shape share the tasks of a step. Two counters take turns: a record hands out tasks
    // with one and sets the other back, which nobody touches before the next barrier.
    struct Tasks {
        std::int64_t group, num_heads, window;
        KVCache shape;
        AttentionPlan plan;
        AttentionArgs args;
        std::int64_t counters[2] = {0, 0};
        int num_records = 0;
    };

    void check(const View &view, std::int64_t cols) const;
    char *at(const View &view) const { return memory_.data + view.offset; }
    Access reads(const View &view, std::int64_t items = 0) const { return access(view, items, false); }
    Access writes(const View &view, std::int64_t items = 0) const { return access(view, items, true); }
    Access access(const View &view, std::int64_t items, bool is_write) const;
    static Access cache_access(const KVMemory &memory, bool is_write);
    static std::int64_t pieces_of(const View &view);
    std::int64_t max_rows(const View &view) const { return view.rows == Rows::tokens ? max_tokens_ : max_logits_; }
    void add_record(Body body, const Accesses &accesses, std::size_t scratch_bytes = 0);
    bool take_in_norm(const View &out, const View &x, const Linear &linear, std::size_t scratch_bytes);
    void norm(const View &out, const View &x, const View *residual, const View *total, std::int64_t n,
              std::vector<float> weight, std::vector<float> bias, float eps, bool is_layer_norm);
    void elementwise(Elementwise op, const View &out, const View &x, const View *y, float factor);
    void use_group(std::int64_t group) { num_groups_ = group + 1 > num_groups_ ? group + 1 : num_groups_; }
    void validate(const Step &step) const;

    Allocation memory_;
    std::int64_t max_tokens_, max_logits_, num_groups_ = 0;
    std::int64_t vocab_size_ = INT32_MAX, num_positions_ = INT32_MAX;
    std::int64_t num_rope_variants_ = 1;  // of the rope that has the fewest, among those that have several
    std::vector<std::int64_t> num_slots_;  // per KV group, of the smallest cache
    struct Call {
        std::size_t at;  // records before it
        std::function<void(const Step &)> function;
    };

    void run_records(const Step &step, std::size_t begin, std::size_t end);

    std::vector<Record> records_;
    std::vector<Call> calls_;
    Accesses since_barrier_;
    std::optional<LastNorm> last_norm_;
    std::vector<std::unique_ptr<Tasks>> tasks_;
    std::size_t scratch_bytes_ = 0;
};

}  // namespace headrace
