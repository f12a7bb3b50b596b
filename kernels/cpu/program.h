// A step as a list of kernels over one block of memory, walked by all threads inside one parallel region.
#pragma once

#include <algorithm>
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

// Which symbolic size counts the rows of a value: num_tokens, or those that leave the step, tokens whose logits are
// needed, means of rows or an encoder's frames; or a chunk of the tokens, as many as a mixture of experts takes at once.
enum class Rows : int { tokens, logits, chunk };
constexpr std::int64_t kChunkTokens = 512;

// [rows, cols] numbers of the arena: the first at byte `offset`, `stride` elements from one row to the next.
struct View {
    std::int64_t offset, cols, stride;
    Dtype dtype;
    Rows rows;

    bool is_dense() const { return cols == stride; }
    bool operator==(const View &) const = default;
};

// What an embedding is looked up by.
enum class Ids : int { input_ids, positions, token_types };

// The keys that a token attends to: those up to its own position; these and those that the step lets it see ahead;
// those of all of its request's rows; those that an encoder made of its request's other input.
enum class Sees : int { past, ahead, all, encoder };

// In the place of a KV group: keys and values of this step's own rows, in a cache that no other step reads.
constexpr std::int64_t kOwnRows = -1;

struct AttentionOptions {
    float scale;
    std::int64_t window = 0;
    float softcap = 0;
    std::vector<float> sinks, alibi_slopes;  // [num_heads] or empty
    std::vector<float> relative_bias;        // AttentionArgs::relative_bias, or empty
    Sees sees = Sees::past;
    std::int64_t chunk = 0;
};

// Matrices of one shape in one packed weight, each beginning a panel. The weight is the caller's.
struct Stack {
    const PackedWeight *weight;
    std::int64_t num_matrices, rows;  // rows: of one matrix
    bool quantize_x;

    std::int64_t num_panels() const { return (rows + kPanel - 1) / kPanel; }
};

// Of a chunk's rows, one for each token and expert: rows of kChunkTokens tokens, all dense.
struct ExpertBuffers {
    View inner, activated, outputs;  // [count * up.rows], [count * width], [count * down.rows]
    View scaled;                     // [count * x.cols], with scales_input only
};

struct ExpertOptions {
    std::vector<float> up_bias, down_bias;  // [num_matrices, rows] or empty
    Activation activation;
    bool is_gated;
    float clamp, alpha;
    bool scales_input;
};

// The states of one layer, [num_slots, numbers], which are the caller's; group: the KV group of their slots.
struct States {
    void *data;
    Dtype dtype;
    std::int64_t num_slots, numbers, group;
};

// Rows that are kept of images, [num_rows, cols], which are the caller's; of these, columns from `column` on.
struct KeptRows {
    const void *data;
    Dtype dtype;
    std::int64_t num_rows, cols, column;
};

struct ScanViews {
    View x, dt, b, c;
};

struct DeltaViews {
    View query, key, value, dt, beta;
};

// The arrays of one step. They live until the step has ended.
struct Step {
    std::int64_t num_tokens, num_reqs, num_logits;
    const std::int32_t *input_ids, *positions;             // [num_tokens]
    const std::int32_t *query_start_loc, *seq_lens;        // [num_reqs + 1], [num_reqs]
    const std::int32_t *logits_indices;                    // [num_logits]
    const std::int32_t *rope_rows;                         // [num_tokens], or null if no rope has variants
    const std::int32_t *token_types;                       // [num_tokens], or null if none are embedded
    const std::int32_t *encoder_lens;                      // [num_reqs], or null if nothing attends to an encoder
    const std::int32_t *reach;                             // [num_tokens], or null if none sees ahead
    const std::int32_t *image_rows;                        // [num_tokens], -1 for none, or null if none has one
    const std::int32_t *rope_positions;                    // [num_tokens, num_axes], or null without such ropes
    std::int64_t num_axes;
    const std::int32_t *starts, *ends;                     // [num_logits] ranges of rows, or null without mean_rows
    const float *features;                                 // [num_logits, num_features], or null without them
    std::int64_t num_features;
    struct Windows {
        const std::int32_t *rows;  // [num_rows, width], -1 is zeros
        std::int64_t num_rows, width;
    };
    std::vector<Windows> windows;                          // of each stack_rows
    std::vector<const std::int32_t *> slot_mappings;       // per KV group [num_tokens]
    std::vector<const std::int32_t *> block_tables;        // per KV group [num_reqs, max_num_blocks]
    std::vector<std::int64_t> max_num_blocks;              // per KV group

    std::int64_t rows_of(Rows rows) const { return rows == Rows::logits ? num_logits : num_tokens; }
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
    void embedding(const View &out, const PackedWeight &weight, Ids of);
    void linear(const View &out, const View &x, const PackedWeight &weight, std::vector<float> bias, bool quantize_x);
    void rms_norm(const View &out, const View &x, std::int64_t n, std::vector<float> weight, float eps);
    void add_rms_norm(const View &out, const View &total, const View &x, const View &residual,
                      std::vector<float> weight, float eps);
    void layer_norm(const View &out, const View &x, std::int64_t n, std::vector<float> weight, std::vector<float> bias,
                    float eps);
    // inv_freq: [variants, cols] for as many variants as there are factors; with several, rope_rows picks one a token.
    // axes: by which of rope_positions each column turns; empty: by positions.
    void rotary_angles(const View &cos, const View &sin, std::vector<float> inv_freq,
                       std::vector<float> attention_factors, std::vector<std::int64_t> axes);
    // head_stride: columns of x from one head to the next.
    void rope(const View &out, const View &x, const View &cos, const View &sin, std::int64_t head_dim,
              std::int64_t head_stride, bool interleaved);
    void act(const View &out, const View &x, Activation activation, bool is_gated);
    void add(const View &out, const View &x, const View &y);
    void scale(const View &out, const View &x, float factor);
    void softcap(const View &out, const View &x, float cap);
    void cast(const View &out, const View &x);
    void clamp(const View &out, const View &x, float limit);
    void xielu(const View &out, const View &x, float alpha_p, float alpha_n);
    // out = x * y, or x * sigmoid(y). y: [rows, n], each number of which serves as many columns of x; null: factors,
    // one for each column of x.
    void modulate(const View &out, const View &x, const View *y, std::vector<float> factors, bool is_gate);
    // The root of the mean square of each row of x, or of its variance.
    void magnitude(const View &out, const View &x, bool is_centred);
    void log_growth(const View &out, float factor, std::int64_t length, std::int64_t shift);
    // Of each head: columns x_step * head of x, head_dim of them, to columns out_step * head of out.
    void copy_heads(const View &out, const View &x, std::int64_t num_heads, std::int64_t head_dim, std::int64_t x_step,
                    std::int64_t out_step);
    void gather(const View &out, const View &x);  // rows logits_indices
    // x with the rows of images in the place of its own, or added to them, where the step has some.
    void place_rows(const View &out, const View &x, const KeptRows &rows, bool is_sum);
    void features(const View &out);               // the step's
    // Rows of x side by side, by the step's windows of this number, `width` of them.
    void stack_rows(const View &out, const View &x, std::int64_t number, std::int64_t width);
    void mean_rows(const View &out, const View &x);
    // For each matrix: out[:, out_step * i :] = x[:, x_step * i :] @ matrix i.
    void linear_heads(const View &out, const View &x, const Stack &stack, std::int64_t x_step, std::int64_t out_step);
    // experts: int32 in the place of float32. options: sizes and choices; the arrays are filled in here.
    void route_experts(const View &weights, const View &experts, const View &logits, std::vector<float> correction,
                       RouteArgs options);
    // Results: weights and experts without those from num_experts on, and the sum of the weights of these.
    void part_identities(const View &weights, const View &experts, const View &share_of, const View &from_weights,
                         const View &from_experts, std::int64_t num_experts);
    void grouped_experts(const View &out, const View &x, const View &weights, const View &experts,
                         const ExpertBuffers &buffers, const Stack &up, const Stack &down, ExpertOptions options);
    void write_kv(const KVMemory &memory, const View &key, const View &value, std::int64_t group);
    void attention(const View &out, const View &query, const KVMemory &memory, std::int64_t group,
                   AttentionOptions options);

    // rates: e^a_log, of each head or of each head and value of its states.
    void causal_conv(const View &out, const View &x, const States &states, std::vector<float> weight,
                     std::vector<float> bias, std::int64_t width, bool is_silu);
    void selective_scan(const View &out, const ScanViews &in, const States &states, std::int64_t num_heads,
                        std::int64_t num_groups, std::vector<float> rates, std::vector<float> d,
                        std::vector<float> dt_bias, float dt_min, float dt_max);
    void gated_delta(const View &out, const DeltaViews &in, const States &states, std::int64_t num_heads,
                     std::int64_t num_key_heads, std::vector<float> rates, std::vector<float> dt_bias,
                     float beta_scale);
    void lru_inputs(const View &taken, const View &dt, const View &one, const View &x, const View &input_gates,
                    const View &decay_gates, std::vector<float> input_bias, std::vector<float> decay_bias,
                    std::vector<float> log_rate);
    void wkv(const View &out, const View &key, const View &value, const States &states, std::vector<float> rates,
             std::vector<float> bonus);

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

    // The norm or activation that was added last: a linear of its result takes it in. `run` puts the results where it is
    // told to.
    struct Prologue {
        std::function<void(const Step &, void *out, void *sum, const Context &)> run;
        View out;
        char *sum;                  // null: it makes none
        Accesses accesses, before;  // its own; the others since the barrier before it
        std::int64_t private_rows;  // so many at most are made by each thread for itself
    };
    using Linear = std::function<void(const Step &, const void *x, std::int64_t x_stride, const Context &)>;

    // Attention records of equal shape share the tasks of a step. Two counters take turns: a record hands out tasks
    // with one and sets the other back, which nobody touches before the next barrier.
    struct Tasks {
        std::int64_t group;
        Sees sees;
        AttentionPlan plan, plan_ahead;
        AttentionArgs args, args_ahead;  // ahead: of the tokens that see more than their past
        std::int64_t counters[2] = {0, 0}, counters_ahead[2] = {0, 0};
        int num_records = 0;
    };

    // Where this step's own keys and values lie.
    struct OwnRows {
        std::int64_t block_size = 0, num_blocks = 0, max_num_blocks = 0;  // num_blocks: 0 if nothing attends to them
        std::vector<std::int32_t> slots, lens, tables;
    };

    void check(const View &view, std::int64_t cols) const;
    char *at(const View &view) const { return memory_.data + view.offset; }
    Access reads(const View &view, std::int64_t items = 0) const { return access(view, items, false); }
    Access writes(const View &view, std::int64_t items = 0) const { return access(view, items, true); }
    Access access(const View &view, std::int64_t items, bool is_write) const;
    static Access cache_access(const KVMemory &memory, bool is_write);
    static std::int64_t pieces_of(const View &view);
    std::int64_t max_rows(const View &view) const {
        return view.rows == Rows::tokens ? max_tokens_
               : view.rows == Rows::logits ? max_logits_
                                           : std::min(max_tokens_, kChunkTokens);
    }
    void add_record(Body body, const Accesses &accesses, std::size_t scratch_bytes = 0);
    bool take_in_prologue(const View &out, const View &x, const Linear &linear, std::size_t scratch_bytes);
    void norm(const View &out, const View &x, const View *residual, const View *total, std::int64_t n,
              std::vector<float> weight, std::vector<float> bias, float eps, bool is_layer_norm);
    void elementwise(Elementwise op, const View &out, const View &x, const View *y, float factor,
                     float second_factor = 0);
    static StateRows state_rows(const Step &step, std::int64_t group);
    Access use_states(const States &states, std::int64_t numbers);
    void use_group(std::int64_t group) { num_groups_ = group + 1 > num_groups_ ? group + 1 : num_groups_; }
    void validate(const Step &step) const;
    struct Chunk {
        std::int64_t start, num_tokens;
    };

    static std::size_t stack_scratch(const Stack &stack, Dtype dtype, std::int64_t num_tokens);
    void run_experts(const Chunk &chunk, const View &out, const View &x, const View &weights, const View &experts,
                     const ExpertBuffers &buffers, const Stack &up, const Stack &down, const ExpertOptions &options,
                     std::size_t scratch_bytes, const Context &context) const;
    static void scale_rows(const char *source, const View &x, const float *factors, const std::int32_t *places,
                           std::int64_t num_rows, std::int64_t count, char *scaled, const Context &context);
    Tasks *tasks_for(const KVCache &cache, std::int64_t group, std::int64_t heads, const AttentionOptions &options);
    void plan_attention(const Step &step);
    void place_own_rows(const Step &step);

    Allocation memory_;
    std::int64_t max_tokens_, max_logits_, num_groups_ = 0;
    std::int64_t vocab_size_ = INT32_MAX, num_positions_ = INT32_MAX, num_types_ = INT32_MAX;
    bool has_means_ = false;
    std::int64_t num_features_ = 0;
    struct WindowUse {
        std::int64_t number, width;
        Rows from, to;
    };
    std::vector<WindowUse> windows_;
    std::int64_t num_rope_variants_ = 1;  // of the rope that has the fewest, among those that have several
    std::int64_t num_axes_ = 0, num_kept_rows_ = INT32_MAX;
    std::vector<std::int64_t> num_slots_;  // per KV group, of the smallest cache
    std::vector<std::int64_t> state_groups_;
    struct Call {
        std::size_t at;  // records before it
        std::function<void(const Step &)> function;
    };

    void run_records(const Step &step, std::size_t begin, std::size_t end);

    std::vector<Record> records_;
    std::vector<Call> calls_;
    Accesses since_barrier_;
    std::optional<Prologue> prologue_;
    std::uint32_t step_number_ = 0;  // of Context
    std::vector<std::unique_ptr<Tasks>> tasks_;
    OwnRows own_;
    std::size_t scratch_bytes_ = 0;
};

}  // namespace headrace
