// Paged attention.
//
// A softmax is summed by segments of 256 positions, cut at multiples of 256: within a segment all keys at once, from
// segment to segment by the running maximum. Every sum runs over ascending positions, and a position that a token
// does not see is left out or adds an exact zero. So a result depends on the token and its keys only, bit for bit:
// not on the batch, not on how the prompt was cut, not on who computed which segment.
#include "attention_tiles.h"

namespace headrace::HEADRACE_TIER {
namespace {

INLINE void prefetch(const char *data, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(data + i);
}

// Fetches keys and values of the segment behind the one that is computed, a little with each panel of that, so that
// memory is read meanwhile: in the order in which it lies, of all heads of a task.
class Ahead {
  public:
    explicit Ahead(const AttentionArgs &args) : args_(args) {}

    // From now on, a segment of a task; none of one whose keys are used more than once anyway.
    void start(const AttentionTask &task, int64_t segment) {
        end_ = 0;
        if (task.num_members > 1 || args_.cache.block_size > kSegment) return;
        const AttentionBlock &block = args_.blocks[task.first];
        if (block.num_tokens > 1) return;
        table_ = args_.block_table + block.request * args_.max_num_blocks;
        kv_head_ = block.kv_head;
        num_heads_ = task.num_heads;
        const int64_t seen = first_seen(args_, block.first_position), start = segment * kSegment;
        const int64_t stop = start + kSegment < block.num_keys ? start + kSegment : block.num_keys;
        first_ = (seen > start ? seen : start) / args_.cache.block_size;
        end_ = (stop + args_.cache.block_size - 1) / args_.cache.block_size;
        next_ = first_;
        at_ = stop_ = nullptr;
        is_values_ = false;
    }

    void stop() { end_ = 0; }

    // So many bytes more, if there are any.
    INLINE void fetch(int64_t num_bytes) {
        while (num_bytes > 0) {
            if (at_ == stop_ && !next_block()) return;
            const int64_t left = stop_ - at_, count = left < num_bytes ? left : num_bytes;
            for (int64_t i = 0; i < count; i += 64) __builtin_prefetch(at_ + i, 0, 2);
            at_ += count;
            num_bytes -= count;
        }
    }

  private:
    // The keys of all blocks, then the values.
    bool next_block() {
        if (next_ >= end_) {
            if (is_values_ || end_ == 0) return false;
            is_values_ = true;
            next_ = first_;
        }
        const KVCache &cache = args_.cache;
        const int64_t block = table_[next_++];
        at_ = is_values_ ? values_of(cache, block, kv_head_) : keys_of(cache, block, kv_head_);
        stop_ = at_ + num_heads_ * (is_values_ ? cache.value_bytes : cache.key_bytes);
        return true;
    }

    const AttentionArgs &args_;
    const int32_t *table_ = nullptr;
    int64_t kv_head_ = 0, num_heads_ = 0, first_ = 0, next_ = 0, end_ = 0;  // blocks of the table; end 0: nothing
    const char *at_ = nullptr, *stop_ = nullptr;
    bool is_values_ = false;
};

// A thread's scratch.
struct Work {
    uint32_t *query;    // [rows][head_dim + 1] words
    float *scores;      // [tile rows][kSegment]
    uint32_t *weights;  // [tile rows][kSegment] at most
    float *sums;        // [tile rows][value_stride], of the current segment
    float *total;       // [rows][value_stride], of all segments so far
    float *total_highest, *total_weight;  // [rows]
    char *panels;       // keys and values of a segment whose blocks are smaller than a panel
    float *unpacked;    // keys and values of a segment as floats

    // Behind the rows of the KV heads that share a task; what a segment needs for itself is the same.
    Work behind(const KVCache &cache, int64_t rows) const {
        Work work = *this;
        work.query += rows * (cache.head_dim + 1);
        work.total += rows * cache.value_stride;
        work.total_highest += rows;
        work.total_weight += rows;
        return work;
    }
};

// Rows from which on keys and values are unpacked to floats once for all their tiles, and the bytes that may take: half
// of a usual L2. A tile of several rows has no registers left to unpack into.
constexpr int64_t kUnpackRows = 2 * kTileRows, kUnpackBytes = 256 << 10;

int64_t floats_of_key_panel(const KVCache &cache) { return (cache.head_dim + 1) / 2 * 2 * kKeyPanel; }
int64_t floats_unpacked(const KVCache &cache) {
    return kNumPanels * (floats_of_key_panel(cache) + kKeyPanel * cache.value_stride);
}

bool fits_unpacked(const KVCache &cache) { return floats_unpacked(cache) * 4 <= kUnpackBytes; }

size_t carve(const KVCache &cache, char *scratch, Work *work) {
    size_t used = 0;
    const auto take = [&](int64_t words) {
        char *piece = scratch ? scratch + used : nullptr;
        used += (static_cast<size_t>(words) * 4 + 63) / 64 * 64;
        return piece;
    };
    const auto floats = [&](int64_t n) { return reinterpret_cast<float *>(take(n)); };
    work->query = reinterpret_cast<uint32_t *>(take(kAttentionRows * (cache.head_dim + 1)));
    work->scores = floats(kTileRows * kSegment);
    work->weights = reinterpret_cast<uint32_t *>(take(kTileRows * kSegment));
    work->sums = floats(kTileRows * cache.value_stride);
    work->total = floats(kAttentionRows * cache.value_stride);
    work->total_highest = floats(kAttentionRows);
    work->total_weight = floats(kAttentionRows);
    const bool is_gathered = cache.block_size < kKeyPanel;
    work->panels = take(is_gathered ? kNumPanels * (cache.key_panel_bytes + kKeyPanel * cache.value_stride * 4) / 4 : 0);
    work->unpacked = floats(fits_unpacked(cache) ? floats_unpacked(cache) : 0);
    return used;
}

// The rows of a block against one segment after the other, or those of several blocks against one that they share.
// C: of the cache; kDot: queries are pairs of bf16.
template <bool kDot, class C>
struct Rows {
    // Wide tiers have registers for it, and two bf16 cost a tile two instructions.
    static constexpr bool kUnpacks = !kDot && !__is_same(C, float) && !(kLanes == 16 && __is_same(C, bf16));
    const AttentionArgs &args;
    const int32_t *members;       // or null
    const AttentionBlock &block;  // or the first of them
    Work work;
    int64_t group, rows, query_stride, saved;  // saved: the segment that is a task of its own, or -1
    const char *keys[kNumPanels], *values[kNumPanels];  // panels of the current segment
    const float *scales[kNumPanels];                    // i8: of their keys, then of their values

    // Those of a task, of so many heads from its first on.
    Rows(const AttentionArgs &a, const AttentionTask &task, int64_t head, const Work &w)
        : args(a), members(task.num_members > 1 ? a.members + task.first : nullptr),
          block(a.blocks[members ? members[0] : task.first + head]), work(w.behind(a.cache, head * block.num_heads)),
          group(block.num_heads), rows(task.num_members * block.num_tokens * group),
          query_stride(kDot ? (a.cache.head_dim + 1) / 2 : a.cache.head_dim + 1), saved(task.segment) {}

    void clear() {
        for (int64_t r = 0; r < rows; ++r) work.total_weight[r] = 0;
        if (saved >= 0)
            for (int64_t r = 0; r < rows; ++r) partial(saved, r)[args.cache.value_stride + 1] = 0;
    }

    template <class T>
    void read_queries() {
        const int64_t head_dim = args.cache.head_dim;
        for (int64_t r = 0; r < rows; ++r) {
            const T *from = static_cast<const T *>(args.query) + token(r) * args.query_stride + head(r) * head_dim;
            uint32_t *to = work.query + r * query_stride;
            to[query_stride - 1] = 0;  // the other half of the last pair
            if constexpr (kDot)
                memcpy(to, from, static_cast<size_t>(head_dim) * 2);
            else
                for (int64_t d = 0; d < head_dim; ++d) to[d] = bits_as<uint32_t>(to_float(from[d]));
        }
    }

    // The block that a row is of, and which row of it.
    const AttentionBlock &owner(int64_t row) const { return members ? args.blocks[members[row / group]] : block; }
    int64_t row_of_owner(int64_t row) const { return members ? row % group : row; }

    int64_t head(int64_t row) const { return block.first_head + row % group; }
    int64_t token(int64_t row) const { return owner(row).first_token + row_of_owner(row) / group; }
    int64_t position(int64_t row) const { return owner(row).first_position + row_of_owner(row) / group; }

    // The positions of a segment that a row sees.
    void visible(int64_t row, int64_t start, int64_t *begin, int64_t *end) const {
        const int64_t first = first_seen(args, position(row)) - start;
        const int64_t reach = position(row) + args.reach;
        const int64_t num_keys = owner(row).num_keys;
        const int64_t last = (reach < num_keys ? reach : num_keys) - start;
        *begin = first < 0 ? 0 : first > kSegment ? kSegment : first;
        *end = last < *begin ? *begin : last > kSegment ? kSegment : last;
    }

    void segment(int64_t index, Ahead &ahead) {
        const int64_t start = index * kSegment;
        int64_t low, high, unused;
        visible(0, start, &low, &unused);  // the first row begins first, the last row ends last; members see all
        visible(rows - 1, start, &unused, &high);
        if (low >= high) return;
        find_panels(start, low, high);
        if constexpr (kUnpacks)
            if (rows >= kUnpackRows && fits_unpacked(args.cache)) {
                unpack(low, high);
                return tiles<float>(start, ahead);
            }
        tiles<C>(start, ahead);
    }

    // P: of panels as they lie now.
    template <class P>
    void tiles(int64_t start, Ahead &ahead) {
        for (int64_t r = 0; r < rows;) {
            const int64_t left = rows - r;
            if (left >= kTileRows)
                r += tile<P, kTileRows>(r, start, ahead);
            else if (left >= 4 && kTileRows > 4)
                r += tile<P, 4>(r, start, ahead);
            else if (left == 3 && kTileRows > 4)
                r += tile<P, 3>(r, start, ahead);
            else if (left >= 2 && kTileRows > 2)
                r += tile<P, 2>(r, start, ahead);
            else
                r += tile<P, 1>(r, start, ahead);
        }
    }

    // Where the panels of positions [low, high) of a segment are; the others repeat one of them.
    void find_panels(int64_t start, int64_t low, int64_t high) {
        const KVCache &cache = args.cache;
        const int32_t *table = args.block_table + block.request * args.max_num_blocks;
        const int64_t first = low / kKeyPanel, last = (high - 1) / kKeyPanel;
        for (int64_t p = first; p <= last; ++p) {
            const int64_t position = start + p * kKeyPanel, in_block = position % cache.block_size;
            if (cache.block_size < kKeyPanel) {
                gather(p, position, start + high);
                continue;
            }
            const int64_t number = table[position / cache.block_size];
            keys[p] = keys_of(cache, number, block.kv_head) + in_block / kKeyPanel * cache.key_panel_bytes;
            values[p] = values_of(cache, number, block.kv_head) +
                        in_block * cache.value_stride * static_cast<int64_t>(sizeof(C));
        }
        for (int64_t p = 0; p < kNumPanels; ++p) {
            if (p < first || p > last) keys[p] = keys[first];
            if constexpr (__is_same(C, i8)) scales[p] = reinterpret_cast<const float *>(keys[p] + cache.scales_at);
        }
    }

    // Panels of positions [low, high) to floats, in ascending dimensions and positions.
    void unpack(int64_t low, int64_t high) {
        constexpr int64_t kStep = positions_in_a_row<C>(), kVectorBytes = kLanes * kStep * sizeof(C);
        const KVCache &cache = args.cache;
        const int64_t key_floats = floats_of_key_panel(cache), key_rows = (cache.head_dim + kStep - 1) / kStep;
        // kStep rows of `vectors` vectors from each row of a panel.
        const auto widen = [](float *to, const char *from, int64_t panel_rows, int64_t vectors) INLINE_LAMBDA {
            for (int64_t row = 0; row < panel_rows; ++row)
                for (int64_t v = 0; v < vectors; ++v, from += kVectorBytes) {
                    Vectors<false, C, 1> both;
                    both.read(0, from, ~0u);
                    for (int64_t i = 0; i < kStep; ++i)
                        store(to + ((row * kStep + i) * vectors + v) * kLanes, both.parts[i][0]);
                }
        };
        const int64_t first = low / kKeyPanel, last = (high - 1) / kKeyPanel;
        for (int64_t p = first; p <= last; ++p) {
            float *key = work.unpacked + p * key_floats;
            float *value = work.unpacked + kNumPanels * key_floats + p * kKeyPanel * cache.value_stride;
            if (p < last) prefetch(keys[p + 1], cache.key_panel_bytes);
            widen(key, keys[p], key_rows, kVecs);
            widen(value, values[p], kKeyPanel / kStep, cache.value_stride / kLanes);
            keys[p] = reinterpret_cast<const char *>(key);
            values[p] = reinterpret_cast<const char *>(value);
        }
        for (int64_t p = 0; p < kNumPanels; ++p)
            if (p < first || p > last) keys[p] = keys[first];
    }

    // Panel p, of positions from `position` on, from blocks that are smaller than a panel.
    void gather(int64_t p, int64_t position, int64_t end) {
        const KVCache &cache = args.cache;
        const int32_t *table = args.block_table + block.request * args.max_num_blocks;
        constexpr int64_t kStep = positions_in_a_row<C>();
        const int64_t value_bytes = kKeyPanel * cache.value_stride * static_cast<int64_t>(sizeof(C));
        char *key_panel = work.panels + p * (cache.key_panel_bytes + value_bytes);
        char *value_panel = key_panel + cache.key_panel_bytes;
        memset(key_panel, 0, static_cast<size_t>(cache.key_panel_bytes + value_bytes));
        keys[p] = key_panel;
        values[p] = value_panel;
        for (int64_t i = 0; i < kKeyPanel && position + i < end; ++i) {
            const int64_t at = position + i, in_block = at % cache.block_size;
            const int64_t number = table[at / cache.block_size];
            // Blocks before what is seen have gone.
            if (number < 0 || number >= cache.num_blocks) continue;
            const C *key = reinterpret_cast<const C *>(keys_of(cache, number, block.kv_head));
            const C *value = reinterpret_cast<const C *>(values_of(cache, number, block.kv_head));
            for (int64_t d = 0; d < cache.head_dim; ++d) {
                const int64_t row = d / kStep * kKeyPanel * kStep + d % kStep;
                reinterpret_cast<C *>(key_panel)[row + i * kStep] = key[row + in_block * kStep];
                reinterpret_cast<C *>(value_panel)[(i / kStep * cache.value_stride + d) * kStep + i % kStep] =
                    value[(in_block / kStep * cache.value_stride + d) * kStep + in_block % kStep];
            }
            if constexpr (__is_same(C, i8)) {
                const char *scales = reinterpret_cast<const char *>(key) + cache.scales_at + in_block * 4;
                for (int64_t k = 0; k < 2; ++k)
                    memcpy(key_panel + cache.scales_at + (k * kKeyPanel + i) * 4, scales + k * kKeyPanel * 4, 4);
            }
        }
    }

    template <class P, int kRows>
    int tile(int64_t r, int64_t start, Ahead &ahead) {
        [[maybe_unused]] constexpr bool kScaled = __is_same(C, i8);
        const KVCache &cache = args.cache;
        int64_t begin[kRows], end[kRows], low = kSegment, high = 0;
        for (int i = 0; i < kRows; ++i) {
            visible(r + i, start, &begin[i], &end[i]);
            if (begin[i] == end[i]) continue;
            low = begin[i] < low ? begin[i] : low;
            high = end[i] > high ? end[i] : high;
        }
        if (low >= high) return kRows;
        constexpr int64_t kAtOnce = kTilePanels * kKeyPanel;
        for (int64_t j = low / kAtOnce * kAtOnce; j < high; j += kAtOnce) {
            // Blocks lie anywhere, so the hardware does not see what comes next.
            if (r == 0 && j + kAtOnce < kSegment)
                for (int p = 0; p < kTilePanels; ++p)
                    prefetch(keys[(j + kAtOnce) / kKeyPanel + p], cache.key_panel_bytes);
            if (r == 0) ahead.fetch(kTilePanels * cache.key_panel_bytes);
            score_panels<kDot, P, kScaled, kRows>(work.query + r * query_stride, query_stride, keys + j / kKeyPanel,
                                                  cache.head_dim, scales + j / kKeyPanel, work.scores + j);
        }
        Softmax softmax[kRows];
        for (int i = 0; i < kRows; ++i) {
            const float slope = args.alibi_slopes ? args.alibi_slopes[head(r + i)] : 0;
            const float *bias = args.relative_bias ? args.relative_bias + head(r + i) * (2 * kMaxDistance + 1) : nullptr;
            softmax[i] = {args.scale * kLog2E, args.scale, args.softcap, slope, bias,
                          static_cast<int32_t>(start - position(r + i)), 0, 0};
            weigh<kDot>(work.scores + i * kSegment, work.weights + i * (kDot ? kSegment / 2 : kSegment), begin[i],
                        end[i], low / kStride * kStride, (high + kStride - 1) / kStride * kStride, &softmax[i]);
            if constexpr (kScaled) scale_weights(work.weights + i * kSegment, scales, low, high);
        }
        constexpr int kWide = kRows <= 4 ? 2 * kTileWidth : kTileWidth;
        const int64_t value_panel_bytes = kKeyPanel * cache.value_stride * static_cast<int64_t>(sizeof(C));
        int64_t d = 0;
        for (; d + kWide * kLanes <= cache.value_stride; d += kWide * kLanes)
            add_values<kDot, P, kRows, kWide>(work.weights, values, low, high, cache.value_stride, d, work.sums,
                                              [&]() INLINE_LAMBDA { if (r == 0 && d == 0) ahead.fetch(value_panel_bytes); });
        for (; d < cache.value_stride; d += kLanes)
            add_values<kDot, P, kRows, 1>(work.weights, values, low, high, cache.value_stride, d, work.sums, [] {});
        for (int i = 0; i < kRows; ++i)
            if (softmax[i].weight != 0) keep(r + i, work.sums + i * cache.value_stride, softmax[i]);
        return kRows;
    }

    // A row's results of a segment: for whoever merges all of them, or to the total.
    void keep(int64_t r, const float *sums, const Softmax &row) {
        if (saved < 0) return merge(r, sums, row.highest, row.weight);
        const int64_t stride = args.cache.value_stride;
        float *to = partial(saved, r);
        memcpy(to, sums, static_cast<size_t>(stride) * 4);
        to[stride] = row.highest;
        to[stride + 1] = row.weight;
    }

    // Add a segment's results to the total of row r. A weight of 0 says that the row saw nothing of it.
    void merge(int64_t r, const float *sums, float highest_score, float weight) {
        if (weight == 0) return;
        const int64_t stride = args.cache.value_stride;
        float *total = work.total + r * stride;
        if (work.total_weight[r] == 0) {
            memcpy(total, sums, static_cast<size_t>(stride) * 4);
            work.total_highest[r] = highest_score;
            work.total_weight[r] = weight;
            return;
        }
        const float top = highest_score > work.total_highest[r] ? highest_score : work.total_highest[r];
        const V before = exp2(splat(work.total_highest[r] - top)), now = exp2(splat(highest_score - top));
        for (int64_t d = 0; d < stride; d += kLanes)
            store(total + d, load<V>(total + d) * before + load<V>(sums + d) * now);
        work.total_weight[r] = work.total_weight[r] * before[0] + weight * now[0];
        work.total_highest[r] = top;
    }

    // Where the results of a segment that is a task of its own lie: per row the sums, the maximum and the weight.
    float *partial(int64_t index, int64_t r) const {
        const AttentionBlock &of = owner(r);
        return args.partials + of.partials +
               ((index - of.first_segment) * of.num_tokens * group + row_of_owner(r)) *
                   (args.cache.value_stride + kPartialTail);
    }

    void merge_saved() {
        const int64_t stride = args.cache.value_stride;
        for (int64_t i = block.first_segment; i < block.first_segment + block.num_segments; ++i)
            for (int64_t r = 0; r < rows; ++r) {
                const float *from = partial(i, r);
                merge(r, from, from[stride], from[stride + 1]);
            }
    }

    template <class T>
    void finish() {
        const int64_t head_dim = args.cache.head_dim, stride = args.cache.value_stride;
        for (int64_t r = 0; r < rows; ++r) {
            if (work.total_weight[r] == 0) {  // a request without keys
                memset(work.total + r * stride, 0, static_cast<size_t>(stride) * 4);
                work.total_highest[r] = 0;
            }
            float factor = 1, weight = work.total_weight[r];
            if (args.sinks) {
                const float sink = args.sinks[head(r)] * kLog2E;
                const float top = sink > work.total_highest[r] ? sink : work.total_highest[r];
                factor = exp2(splat(work.total_highest[r] - top))[0];
                weight = weight * factor + exp2(splat(sink - top))[0];
            }
            const V inverse = splat(weight == 0 ? 0 : factor / weight);
            T *out = static_cast<T *>(args.out) + (token(r) * args.num_heads + head(r)) * head_dim;
            const float *total = work.total + r * stride;
            int64_t d = 0;
            for (; d + kLanes <= head_dim; d += kLanes) store_from_float(out + d, load<V>(total + d) * inverse);
            if (d < head_dim) store_tail(out + d, load<V>(total + d) * inverse, head_dim - d);
        }
    }
};

// A segment of a block is done. Whoever does the last one has seen the results of the others, and merges them.
template <class T, class C>
void end_segment(const AttentionArgs &args, int32_t index, const Work &work) {
    AttentionBlock &block = args.blocks[index];
    if (__atomic_sub_fetch(&block.pending, 1, __ATOMIC_ACQ_REL) != 0) return;
    block.pending = block.num_segments;  // for the next layer that uses these tasks
    Rows<uses_dot<T, C>(), C> rows(args, {index, 1, 1, -1}, 0, work);
    rows.clear();
    rows.merge_saved();
    rows.template finish<T>();
}

template <class T, class C>
void attention_of(const AttentionArgs &args, const Context &context) {
    Work work;
    carve(args.cache, context.scratch, &work);
    Ahead ahead(args);
    const auto claim = [&] { return __atomic_fetch_add(args.next_task, 1, __ATOMIC_RELAXED); };
    int64_t next;
    for (int64_t index = claim(); index < args.num_tasks; index = next < 0 ? claim() : next) {
        const AttentionTask &task = args.tasks[index];
        const auto each = [&](const auto &body) {
            for (int64_t head = 0; head < task.num_heads; ++head) {
                Rows<uses_dot<T, C>(), C> rows(args, task, head, work);
                body(rows);
            }
        };
        each([](auto &rows) {
            rows.clear();
            rows.template read_queries<T>();
        });
        next = -1;
        const auto first_of = [&](const AttentionTask &of) -> int64_t {
            return of.segment >= 0 ? of.segment : args.blocks[of.first].first_segment;
        };
        const int64_t first = first_of(task), end = task.segment >= 0 ? first + 1 : first + args.blocks[task.first].num_segments;
        for (int64_t i = first; i < end; ++i) {
            ahead.stop();
            if (i + 1 < end) {
                ahead.start(task, i + 1);
            } else if (index + 2 * context.num_threads < args.num_tasks) {  // else the last ones could be unfairly shared
                next = claim();
                if (next < args.num_tasks) ahead.start(args.tasks[next], first_of(args.tasks[next]));
            }
            each([&](auto &rows) { rows.segment(i, ahead); });
        }
        if (task.segment < 0)
            each([](auto &rows) { rows.template finish<T>(); });
        else if (task.num_members > 1)
            for (int32_t i = 0; i < task.num_members; ++i) end_segment<T, C>(args, args.members[task.first + i], work);
        else
            for (int32_t i = 0; i < task.num_heads; ++i) end_segment<T, C>(args, task.first + i, work);
    }
}

template <class T>
void attention_for(const AttentionArgs &args, const Context &context) {
    switch (args.cache.dtype) {
        case KVDtype::f32: return attention_of<T, float>(args, context);
        case KVDtype::bf16: return attention_of<T, bf16>(args, context);
        case KVDtype::f16: return attention_of<T, f16>(args, context);
        case KVDtype::i8: return attention_of<T, i8>(args, context);
    }
}

}  // namespace

size_t attention_scratch(const AttentionArgs &args) {
    Work work;
    return carve(args.cache, nullptr, &work);
}

void attention(const AttentionArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return attention_for<float>(args, context);
        case Dtype::bf16: return attention_for<bf16>(args, context);
        case Dtype::f16: return attention_for<f16>(args, context);
    }
}

}  // namespace headrace::HEADRACE_TIER
