// The border between the shared code and the kernels, which are compiled once for each ISA tier.
//
// Kernel sources are compiled with instructions that this CPU may lack. If the linker took the copy of an inline
// function from such an object file, shared code would fault. So kernel sources include C headers only, their own
// code lives in a namespace of the tier, and helpers in shared headers are static. ci/wheels checks the symbols.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace headrace {

// Numbers of activations. bf16 and f16 are held as uint16_t.
enum class Dtype : int { f32, bf16, f16 };

// Numbers of KV caches. i8: integers, and a float scale for each token and head.
enum class KVDtype : int { f32, bf16, f16, i8 };

// Numbers of packed weights. Rows come in panels of kPanel: see pack.h for each layout.
enum class Format : int { f32, bf16, f16, i8, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, w4 };

// out = x (converted), x * factor, factor * tanh(x / factor), x + y, x cut to [-factor, factor], xIELU
// (core/ops/elementwise.py) with the softplus of its parameters as factors.
enum class Elementwise : int { copy, scale, softcap, add, clamp, xielu };

#define HEADRACE_ACTIVATIONS(X)                                                                          \
    X(silu) X(gelu) X(gelu_tanh) X(gelu_10) X(quick_gelu) X(relu) X(relu2) X(relu6) X(leaky_relu)        \
    X(hardswish) X(mish) X(laplace) X(linear) X(tanh) X(sigmoid) X(softplus) X(sqrtsoftplus)
#define HEADRACE_NAME(name) name,
enum class Activation : int { HEADRACE_ACTIVATIONS(HEADRACE_NAME) };
#undef HEADRACE_NAME

enum class RouterScore : int { softmax, sigmoid, sparsemixer };

constexpr int kPanel = 16;     // output rows that are packed side by side
constexpr int kKeyPanel = 16;  // keys of a KV block that are stored side by side

// How many pieces of a thread's share of a record have been begun, by whichever thread. The upper half is the step that
// counted, so that nobody has to set it back.
struct alignas(64) Begun {
    uint64_t count;
};

// What a thread of a parallel region knows.
struct Context {
    int thread;
    int num_threads;
    char *scratch;  // of this thread, 64-byte aligned
    void *pool;
    void (*wait)(const Context &);  // barrier over all threads of the region
    Begun *begun;                   // [num_threads] of one record, or null: each thread keeps to its share
    uint32_t step;                  // of that record, never 0
};

// [*begin, *end) is a thread's share of n items, this one's by default.
static inline void share(int64_t n, const Context &context, int64_t *begin, int64_t *end, int thread) {
    *begin = n * thread / context.num_threads;
    *end = n * (thread + 1) / context.num_threads;
}
static inline void share(int64_t n, const Context &context, int64_t *begin, int64_t *end) {
    share(n, context, begin, end, context.thread);
}

struct Weight {
    Format format;
    int64_t rows, cols;    // out_features, in_features
    int64_t padded_cols;   // cols rounded up to the format's unit; the padding is zero
    int64_t panel_bytes;   // from one panel to the next
    int64_t group;         // formats of block_shape.h: columns of a group
    const char *data;
    const float *scales;   // i8: [padded rows]
    const int32_t *sums;   // i8: sum of each row's integers, [padded rows]
};

struct LinearArgs {
    const void *x;  // [num_tokens, cols]
    Dtype dtype;    // of x and out
    int64_t num_tokens;
    Weight weight;
    const float *bias;  // [rows] or null
    void *out;          // [num_tokens, rows]
    int64_t x_stride, out_stride;  // elements from one row to the next
    const int32_t *x_rows;         // [num_tokens], which rows of x; null: all in order
};

constexpr int64_t kMaxQuantizedGroup = 256;

// Dense rows to integers with scales.
struct QuantizeArgs {
    const float *x;  // [num_rows, cols]
    int64_t num_rows, cols;
    int64_t group;      // columns that share a scale; those of int8 may be all
    int bits;           // of codes with offsets: 4 or 5
    bool is_symmetric;  // offset = -2^(bits - 1) * scale
    void *codes;        // int8, or uint8 with offsets: [num_rows, cols]
    float *scales;      // [num_rows, cols / group]; NaN where x holds a NaN or an infinity
    float *offsets;     // likewise; null for int8
};

struct NormArgs {
    const void *x;         // [num_tokens, n]
    const void *residual;  // [num_tokens, n] or null
    const float *weight;   // [n] or null
    const float *bias;     // [n] or null; layer_norm only
    void *out;             // [num_tokens, n]
    void *sum;             // [num_tokens, n], x + residual; null without a residual
    Dtype dtype;
    int64_t num_tokens, n;     // rows, values in a row
    int64_t group, x_stride;   // x: `group` rows side by side, x_stride elements from one group to the next
    float eps;
};

struct RopeArgs {
    const void *x;  // [num_tokens, num_heads, head_dim]
    void *out;      // may be x
    const float *cos, *sin;  // [num_tokens, rotary_dim / 2]
    Dtype dtype;
    int64_t num_tokens, num_heads, head_dim, rotary_dim;
    int64_t x_stride, x_head_stride;  // elements from one token of x, and from one head, to the next
    bool interleaved;
};

struct ActArgs {
    const void *x;  // [num_tokens, 2 * n] if is_gated, else [num_tokens, n]
    void *out;      // [num_tokens, n]
    Dtype dtype;
    Activation activation;
    int64_t num_tokens, n;
    bool is_gated;
    // 0, or the limit of gpt-oss's (up + 1) * gate * sigmoid(alpha * gate), whatever the activation
    float clamp;
    float alpha;
};

struct ElementwiseArgs {
    Elementwise op;
    const void *x, *y;  // [num_rows, n] of `dtype`; y: add only
    void *out;          // [num_rows, n] of `out_dtype`
    Dtype dtype, out_dtype;
    int64_t num_rows, n;
    int64_t x_stride, y_stride, out_stride;  // elements from one row to the next
    float factor, second_factor;
};

// out = x * y, or x * sigmoid(y).
struct ModulateArgs {
    bool is_gate;
    const void *x, *y;  // [num_rows, n] of `dtype`; y: [num_rows, n / y_span] of that or f32
    void *out;          // [num_rows, n]
    Dtype dtype, y_dtype;
    int64_t num_rows, n, x_stride, y_stride;
    int64_t y_span;  // columns of x that one number of y serves
};

// The root of the mean square of a row, or of its variance.
struct MagnitudeArgs {
    const void *x;  // [num_rows, n]
    float *out;     // [num_rows]
    Dtype dtype;
    int64_t num_rows, n, x_stride, out_stride;
    bool is_centred;
};

// Columns of a row that act and elementwise give to a thread at once, so that one row is work for all threads too.
constexpr int64_t kPiece = 256;

// Blocks of one layer that lie side by side, before those of the next layer: a start touches a few pages for all layers.
constexpr int64_t kRunBlocks = 8;

// One layer's KV cache, in runs of kRunBlocks blocks: their keys, then their values. All keys of a block and head are
// one piece of memory, and so are all values; values of a run lie as [blocks, num_kv_heads, block_size, value_stride],
// or, for bf16, [.., block_size / 2, value_stride, 2], rounded up. Keys lie in panels of 16 positions (fewer if a block
// is smaller): [blocks, num_kv_heads, panels, head_dim, 16], or, for bf16, [.., head_dim / 2, 16, 2]. A panel of i8 ends
// with the scales of its keys, then those of its values.
struct KVCache {
    char *keys, *values;  // of block 0
    KVDtype dtype;
    int64_t num_blocks, block_size, num_kv_heads, head_dim;
    int64_t value_stride;           // head_dim rounded up to a vector; the padding is zero
    int64_t key_panel_bytes;        // of one panel, head_dim rounded up to even
    int64_t scales_at;              // i8: where the scales lie in a panel, in bytes
    int64_t key_bytes, value_bytes;  // of one block and head
    int64_t run_bytes;               // from one run to the next, with those of other layers between
};

static inline char *keys_of(const KVCache &cache, int64_t block, int64_t head) {
    return cache.keys + block / kRunBlocks * cache.run_bytes +
           (block % kRunBlocks * cache.num_kv_heads + head) * cache.key_bytes;
}
static inline char *values_of(const KVCache &cache, int64_t block, int64_t head) {
    return cache.values + block / kRunBlocks * cache.run_bytes +
           (block % kRunBlocks * cache.num_kv_heads + head) * cache.value_bytes;
}

struct WriteKVArgs {
    KVCache cache;
    const void *key, *value;           // [num_tokens, num_kv_heads, head_dim]
    int64_t key_stride, value_stride;  // elements from one token to the next
    Dtype dtype;
    const int32_t *slot_mapping;  // [num_tokens], -1 is padding
    int64_t num_tokens;
};

// Positions of a softmax that are summed at once. Segments start at multiples of it, whatever the batch.
constexpr int64_t kSegment = 256;

// Rows (tokens times query heads of one KV head) that share one pass over keys and values.
constexpr int64_t kAttentionRows = 96;

// Floats behind a partial result's sums: the maximum, the sum of weights, and room to keep the next one aligned.
constexpr int64_t kPartialTail = 16;

// As many positions behind a token as there can be: it sees all keys.
constexpr int64_t kEveryKey = int64_t{1} << 40;

// Biases by distance lie as [num_heads, 2 * kMaxDistance + 1]; keys farther away than that have the last one's.
constexpr int64_t kMaxDistance = 128;

// Tokens of one request and heads of one KV head. Its segments are one task, or a task each.
struct AttentionBlock {
    int32_t request, kv_head, first_token, num_tokens;  // first_token: row of the query
    int32_t first_head, num_heads;                      // query heads, all of kv_head
    int32_t first_position;                             // of first_token
    int32_t num_keys;                                   // of the request
    int32_t first_segment, num_segments;
    int32_t pending;        // segments not yet done, if they are tasks of their own
    int64_t partials;       // where theirs begin in AttentionArgs::partials; -1: one task
};

// All segments of a block (segment -1) or one. num_heads: so many blocks from `first` on, of one token, are taken segment by
// segment, as their keys lie side by side. num_members > 1: a segment that blocks of several requests have in common, since
// their tables name the same memory: those are members [first, first + num_members).
struct AttentionTask {
    int32_t first, num_heads, num_members, segment;
};

struct AttentionArgs {
    KVCache cache;
    const void *query;     // [num_tokens, num_heads, head_dim]
    int64_t query_stride;  // elements from one token to the next
    void *out;             // [num_tokens, num_heads, head_dim]
    Dtype dtype;
    int64_t num_heads;
    const int32_t *block_table;  // [num_reqs, max_num_blocks]
    int64_t max_num_blocks;
    float scale, softcap;
    int64_t window;  // a token sees itself and so many positions before it, less one; 0: all
    int64_t chunk;   // and none before the last multiple of this up to its own position; 0: all
    int64_t reach;   // and so many from itself on: 1 is causal
    const float *sinks, *alibi_slopes;  // [num_heads] or null
    const float *relative_bias;         // by key - query, or null
    AttentionBlock *blocks;
    const AttentionTask *tasks;
    const int32_t *members;  // blocks of one token each, of one KV head
    int64_t num_tasks;
    int64_t *next_task;  // shared counter, zero at the start
    float *partials;     // per segment and row: value_stride sums and the tail
};

// The first position that a token at `position` sees; below 0 is 0.
static inline int64_t first_seen(const AttentionArgs &args, int64_t position) {
    if (args.chunk) return position - position % args.chunk;
    return args.window ? position - args.window + 1 : 0;
}

struct MeanRowsArgs {
    const void *x;  // [num_tokens, n]
    void *out;      // [num_rows, n]: row i is the mean of x[starts[i] : ends[i]]
    Dtype dtype;
    int64_t num_rows, n, x_stride;
    const int32_t *starts, *ends;
};

// Which experts a token passes. core/ops/moe.py says what the fields mean.
struct RouteArgs {
    const float *logits;      // [num_tokens, num_experts]
    const float *correction;  // [num_experts] or null
    float *weights;           // [num_tokens, num_chosen]
    int32_t *experts;         // [num_tokens, num_chosen]
    int64_t num_tokens, num_experts, num_chosen;
    RouterScore score;
    bool renormalize;
    float weight_scale;
    int64_t num_groups, num_open_groups;
    bool scores_top2;  // a group's score is the sum of its best two, else its best
};

// out[token] = sum over j of weights[token, j] * rows[places[token, j]], in ascending j.
struct CombineArgs {
    const void *rows;  // [.., n]
    void *out;         // [num_tokens, n]
    Dtype dtype;
    const int32_t *places;  // [num_tokens, count]
    const float *weights;   // [num_tokens, count]
    int64_t num_tokens, count, n, out_stride;
    bool is_weighted;  // else the weights count as 1
};

// The rows of a ragged batch over states. Request r owns tokens query_start_loc[r] : query_start_loc[r + 1], begins
// behind the state in slot from_slots[r * from_stride] (-1: zeros) and leaves the state after token t in slot
// to_slots[t] (-1: nowhere).
struct StateRows {
    const int32_t *query_start_loc, *from_slots, *to_slots;
    int64_t num_reqs, from_stride;
};

struct ConvArgs {
    StateRows rows;
    const void *x;  // [num_tokens, n]
    void *out;      // [num_tokens, n]
    void *state;    // [num_slots, width - 1, n]
    Dtype dtype;    // of x, out and state
    const float *weight;  // [width, n], the newest input last
    const float *bias;    // [n] or null
    int64_t n, width, x_stride;
    bool is_silu;
};

struct ScanArgs {
    StateRows rows;
    const void *x, *dt, *b, *c;  // [num_tokens, num_heads * head_dim], [.., num_heads], [.., num_groups * state_size]
    void *out;                   // [num_tokens, num_heads * head_dim]
    float *state;                // [num_slots, num_heads, head_dim, state_size]
    Dtype dtype;                 // of inputs and out
    const float *rates;          // e^a_log, [num_heads] or, with has_matrix, [num_heads, state_size]
    const float *d, *dt_bias;    // [num_heads]
    int64_t num_heads, head_dim, num_groups, state_size;
    int64_t x_stride, dt_stride, b_stride, c_stride;
    bool has_matrix;
    float dt_min, dt_max;
};

struct DeltaArgs {
    StateRows rows;
    const void *query, *key;  // [num_tokens, num_key_heads * key_dim]
    const void *value;        // [num_tokens, num_heads * head_dim]
    const void *dt, *beta;    // [num_tokens, num_heads] or, with has_key_decays, [.., num_heads * key_dim]; [.., num_heads]
    void *out;                // [num_tokens, num_heads * head_dim]
    float *state;             // [num_slots, num_heads, key_dim, head_dim]
    Dtype dtype;
    const float *rates;    // e^a_log, [num_heads]
    const float *dt_bias;  // as dt
    int64_t num_heads, head_dim, num_key_heads, key_dim;
    int64_t query_stride, key_stride, value_stride, dt_stride, beta_stride;
    bool has_key_decays;
    float beta_scale;
};

// What a real-gated linear recurrent unit takes into a scan (core/ops/state.py says what the fields mean).
struct LruArgs {
    const void *x, *input_gates, *decay_gates;  // [num_tokens, n]
    void *taken, *dt;                           // [num_tokens, n]
    void *one;                                  // [num_tokens]
    Dtype dtype;
    int64_t num_tokens, n;
    int64_t x_stride, input_stride, decay_stride;
    const float *input_bias, *decay_bias, *log_rate;  // [n]
    const int32_t *positions;                         // [num_tokens]
};

struct WkvArgs {
    StateRows rows;
    const void *key, *value;  // [num_tokens, n]
    void *out;                // [num_tokens, n]
    float *state;             // [num_slots, 3, n]: weighted values, weights, the exponent that both are divided by
    Dtype dtype;              // of inputs and out
    const float *rates;       // e^a_log, [n]
    const float *bonus;       // [n]
    int64_t n, key_stride, value_stride;
};

// The kernels of one tier. Each is called by every thread of a region with the same arguments, does its share, and
// returns without waiting for the others.
struct Kernels {
    size_t (*linear_scratch)(const LinearArgs &);
    void (*linear)(const LinearArgs &, const Context &);
    size_t (*linear_blocks_scratch)(const LinearArgs &);
    void (*linear_blocks)(const LinearArgs &, const Context &);  // x is quantized; formats of blocks and w4
    void (*quantize)(const QuantizeArgs &, const Context &);
    void (*rms_norm)(const NormArgs &, const Context &);
    void (*layer_norm)(const NormArgs &, const Context &);
    void (*magnitude)(const MagnitudeArgs &, const Context &);
    void (*rope)(const RopeArgs &, const Context &);
    void (*act)(const ActArgs &, const Context &);
    void (*elementwise)(const ElementwiseArgs &, const Context &);
    void (*write_kv)(const WriteKVArgs &, const Context &);
    size_t (*attention_scratch)(const AttentionArgs &);
    void (*attention)(const AttentionArgs &, const Context &);
    void (*mean_rows)(const MeanRowsArgs &, const Context &);
    size_t (*route_scratch)(const RouteArgs &);
    void (*route)(const RouteArgs &, const Context &);
    void (*combine)(const CombineArgs &, const Context &);
    void (*modulate)(const ModulateArgs &, const Context &);
    void (*conv)(const ConvArgs &, const Context &);
    size_t (*scan_scratch)(const ScanArgs &);
    void (*scan)(const ScanArgs &, const Context &);
    size_t (*delta_scratch)(const DeltaArgs &);
    void (*delta)(const DeltaArgs &, const Context &);
    void (*wkv)(const WkvArgs &, const Context &);
    void (*lru)(const LruArgs &, const Context &);
};

}  // namespace headrace
