// write_kv and paged attention.
//
// A softmax is summed by segments of 256 positions, cut at multiples of 256: within a segment all keys at once, from
// segment to segment by the running maximum. Every sum runs over ascending positions, and a position that a token
// does not see is left out or adds an exact zero. So a result depends on the token and its keys only, bit for bit:
// not on the batch, not on how the prompt was cut, not on who computed which segment.
#include "vmath.h"

namespace headrace::HEADRACE_TIER {
namespace {

constexpr int kVecs = kKeyPanel / kLanes;  // vectors of scores of a panel
constexpr int kScoreRows = kLanes == 16 ? 8 : kLanes == 8 ? 6 : 2;
constexpr int kValueRows = kLanes == 16 ? 8 : kLanes == 8 ? 6 : 2;
constexpr int kValueVecs = 2;

// ---- keys --------------------------------------------------------------------------------------------------------

// Products of kRows queries, [rows][stride], with one panel of keys.
template <class T, int kRows>
INLINE void panel_scores(const float *query, int64_t stride, const char *panel, int64_t head_dim, float *out) {
    V acc[kRows][kVecs] = {};
    if constexpr (__is_same(T, bf16)) {
        const I high = splat_word(0xFFFF0000);
        for (int64_t d = 0; d < head_dim; d += 2, panel += kKeyPanel * 4) {
            V even[kVecs], odd[kVecs];
            for (int v = 0; v < kVecs; ++v) {
                const I both = load<I>(panel + v * kLanes * 4);
                even[v] = bits_as<V>(both << 16);
                odd[v] = bits_as<V>(both & high);
            }
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kVecs; ++v) {
                    acc[r][v] = fma(even[v], splat(query[r * stride + d]), acc[r][v]);
                    acc[r][v] = fma(odd[v], splat(query[r * stride + d + 1]), acc[r][v]);
                }
        }
    } else {
        for (int64_t d = 0; d < head_dim; ++d, panel += kKeyPanel * sizeof(T))
            for (int v = 0; v < kVecs; ++v) {
                const V key = load_as_float(reinterpret_cast<const T *>(panel) + v * kLanes);
                for (int r = 0; r < kRows; ++r) acc[r][v] = fma(key, splat(query[r * stride + d]), acc[r][v]);
            }
    }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVecs; ++v) store(out + r * kSegment + v * kLanes, acc[r][v]);
}

#ifdef HEADRACE_HAS_DOT
// The same from pairs of bf16; `query` holds them as words.
template <int kRows>
INLINE void panel_scores_dot(const float *query, int64_t stride, const char *panel, int64_t head_dim, float *out) {
    V acc[kRows][kVecs] = {};
    for (int64_t d = 0; d < (head_dim + 1) / 2; ++d, panel += kKeyPanel * 4)
        for (int v = 0; v < kVecs; ++v) {
            const I key = load<I>(panel + v * kLanes * 4);
            for (int r = 0; r < kRows; ++r)
                acc[r][v] = dot_bf16(acc[r][v], key, splat_word(bits_as<uint32_t>(query[r * stride + d])));
        }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVecs; ++v) store(out + r * kSegment + v * kLanes, acc[r][v]);
}
#endif

// ---- values ------------------------------------------------------------------------------------------------------

// sums[r] += weights[r][j] * value j, for j in [begin, end) of a segment, ascending; a cell holds `cell` positions.
template <class T, int kRows, int kWidth>
INLINE void add_values_at(const float *weights, const char *const *cells, int64_t cell, int64_t begin, int64_t end,
                          int64_t d, int64_t stride, float *sums) {
    V acc[kRows][kWidth];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kWidth; ++v) acc[r][v] = load<V>(sums + r * stride + d + v * kLanes);
    for (int64_t j = begin; j < end;) {
        const int64_t stop = (j / cell + 1) * cell < end ? (j / cell + 1) * cell : end;
        const T *value = reinterpret_cast<const T *>(cells[j / cell]) + j % cell * stride + d;
        for (; j < stop; ++j, value += stride) {
            V vector[kWidth];
            for (int v = 0; v < kWidth; ++v) vector[v] = load_as_float(value + v * kLanes);
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kWidth; ++v)
                    acc[r][v] = fma(splat(weights[r * kSegment + j]), vector[v], acc[r][v]);
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kWidth; ++v) store(sums + r * stride + d + v * kLanes, acc[r][v]);
}

template <class T, int kRows>
INLINE void add_values(const float *weights, const char *const *cells, int64_t cell, int64_t begin, int64_t end,
                       int64_t stride, float *sums) {
    constexpr int kWide = kRows == 1 ? 4 : kValueVecs;
    int64_t d = 0;
    for (; d + kWide * kLanes <= stride; d += kWide * kLanes)
        add_values_at<T, kRows, kWide>(weights, cells, cell, begin, end, d, stride, sums);
    for (; d < stride; d += kLanes) add_values_at<T, kRows, 1>(weights, cells, cell, begin, end, d, stride, sums);
}

INLINE void prefetch(const char *data, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(data + i);
}

// ---- one block of rows -------------------------------------------------------------------------------------------

// A thread's scratch.
struct Work {
    float *query;    // [rows][head_dim + 1]; pairs of bf16 in half of it on tiers with a dot product
    float *scores;   // [rows][kSegment]
    float *sums;     // [rows][value_stride], of the current segment
    float *total;    // [rows][value_stride], of all segments so far
    float *highest, *weight;              // [rows], of the current segment
    float *total_highest, *total_weight;  // [rows]
    int32_t *begin, *end;                 // [rows], the visible positions of the current segment
    const char **cells;                   // [kSegment], values by cell
};

size_t carve(const KVCache &cache, char *scratch, Work *work) {
    size_t used = 0;
    const auto take = [&](size_t bytes) {
        char *piece = scratch ? scratch + used : nullptr;
        used += (bytes + 63) / 64 * 64;
        return piece;
    };
    const auto floats = [&](int64_t n) { return reinterpret_cast<float *>(take(static_cast<size_t>(n) * 4)); };
    work->query = floats(kAttentionRows * (cache.head_dim + 1));
    work->scores = floats(kAttentionRows * kSegment);
    work->sums = floats(kAttentionRows * cache.value_stride);
    work->total = floats(kAttentionRows * cache.value_stride);
    work->highest = floats(kAttentionRows);
    work->weight = floats(kAttentionRows);
    work->total_highest = floats(kAttentionRows);
    work->total_weight = floats(kAttentionRows);
    work->begin = reinterpret_cast<int32_t *>(take(kAttentionRows * 4));
    work->end = reinterpret_cast<int32_t *>(take(kAttentionRows * 4));
    work->cells = reinterpret_cast<const char **>(take(kSegment * sizeof(char *)));
    return used;
}

// Whether scores come from bf16 dot products: both sides are bf16 and the tier has the instruction.
template <class T, class C>
constexpr bool uses_dot() {
#ifdef HEADRACE_HAS_DOT
    return __is_same(T, bf16) && __is_same(C, bf16);
#else
    return false;
#endif
}

// T: of query and output, C: of the cache.
template <class T, class C>
struct Rows {
    const AttentionArgs &args;
    const AttentionBlock &block;
    Work work;
    int64_t group, rows, query_stride;

    Rows(const AttentionArgs &a, const AttentionBlock &b, const Work &w)
        : args(a), block(b), work(w), group(a.num_heads / a.cache.num_kv_heads), rows(b.num_tokens * group),
          query_stride(a.cache.head_dim + 1) {
        const int64_t head_dim = args.cache.head_dim;
        for (int64_t r = 0; r < rows; ++r) {
            const T *from = static_cast<const T *>(args.query) +
                            (block.first_token + r / group) * args.query_stride + head(r) * head_dim;
            float *to = work.query + r * query_stride;
            if constexpr (uses_dot<T, C>()) {
                memset(to, 0, static_cast<size_t>(query_stride) * 4);
                memcpy(to, from, static_cast<size_t>(head_dim) * 2);
            } else {
                for (int64_t d = 0; d < head_dim; ++d) to[d] = to_float(from[d]);
                to[head_dim] = 0;  // the other half of the last pair
            }
        }
    }

    int64_t head(int64_t row) const { return block.kv_head * group + row % group; }
    int64_t position(int64_t row) const { return block.first_position + row / group; }

    // Scores, weights and sums of one segment, for all rows.
    void segment(int64_t index) {
        const KVCache &cache = args.cache;
        const int64_t start = index * kSegment;
        int64_t low = kSegment, high = 0;
        for (int64_t r = 0; r < rows; ++r) {
            int64_t first = args.window ? position(r) - args.window + 1 - start : 0;
            first = first < 0 ? 0 : first > kSegment ? kSegment : first;
            int64_t last = position(r) + 1 - start;
            last = last < first ? first : last > kSegment ? kSegment : last;
            work.begin[r] = static_cast<int32_t>(first);
            work.end[r] = static_cast<int32_t>(last);
            if (first == last) continue;
            low = first < low ? first : low;
            high = last > high ? last : high;
        }
        score(start, low, high);
        const int64_t stride = cache.value_stride;
        for (int64_t r = 0; r < rows; ++r) weigh(r, start);
        memset(work.sums, 0, static_cast<size_t>(rows * stride) * 4);
        for (int64_t r = 0; r < rows;) {
            const int64_t left = rows - r;
            if (left >= kValueRows)
                r += values<kValueRows>(r);
            else if (left >= 4 && kValueRows > 4)
                r += values<4>(r);
            else if (left >= 2 && kValueRows > 2)
                r += values<2>(r);
            else
                r += values<1>(r);
        }
    }

    void score(int64_t start, int64_t low, int64_t high) {
        const KVCache &cache = args.cache;
        const int32_t *table = args.block_table + block.request * args.max_num_blocks;
        const int64_t step = cache.block_size < kKeyPanel ? cache.block_size : kKeyPanel;
        const int64_t cell = cell_size();
        const auto panel_at = [&](int64_t position) {
            const int64_t place = table[position / cache.block_size] * cache.num_kv_heads + block.kv_head;
            const int64_t in_block = position % cache.block_size;
            return cache.keys + place * cache.key_bytes + in_block / kKeyPanel * cache.key_panel_bytes;
        };
        for (int64_t j = low / step * step; j < high; j += step) {
            const int64_t position = start + j, in_block = position % cache.block_size;
            const int64_t place = table[position / cache.block_size] * cache.num_kv_heads + block.kv_head;
            const char *panel = panel_at(position);
            const char *values = cache.values + place * cache.value_bytes +
                                 in_block * cache.value_stride * static_cast<int64_t>(sizeof(C));
            work.cells[j / cell] = values - in_block % cell * cache.value_stride * static_cast<int64_t>(sizeof(C));
            // Blocks lie anywhere, so the hardware does not see what comes next.
            if (j + step < high) prefetch(panel_at(position + step), cache.key_panel_bytes);
            prefetch(values, step * cache.value_stride * static_cast<int64_t>(sizeof(C)));
            float *out = work.scores + j;
            float narrow[kScoreRows * kSegment];  // a panel of a small block has fewer keys than lanes
            for (int64_t r = 0; r < rows;) {
                float *target = step == kKeyPanel ? out + r * kSegment : narrow;
                const float *query = work.query + r * query_stride;
                const int64_t left = rows - r;
                const int64_t count = left >= kScoreRows             ? kScoreRows
                                      : left >= 4 && kScoreRows > 4 ? 4
                                      : left >= 2                   ? 2
                                                                    : 1;
                if (count == kScoreRows)
                    panel_of<kScoreRows>(query, panel, target);
                else if (count == 4)
                    panel_of<4>(query, panel, target);
                else if (count == 2)
                    panel_of<2>(query, panel, target);
                else
                    panel_of<1>(query, panel, target);
                if (step != kKeyPanel)
                    for (int64_t i = 0; i < count; ++i)
                        memcpy(out + (r + i) * kSegment, narrow + i * kSegment, static_cast<size_t>(step) * 4);
                r += count;
            }
        }
    }

    template <int kRows>
    INLINE void panel_of(const float *query, const char *panel, float *target) const {
#ifdef HEADRACE_HAS_DOT
        if constexpr (uses_dot<T, C>())
            return panel_scores_dot<kRows>(query, query_stride, panel, args.cache.head_dim, target);
#endif
        panel_scores<C, kRows>(query, query_stride, panel, args.cache.head_dim, target);
    }

    // Positions of a segment whose values are one run of memory.
    int64_t cell_size() const { return args.cache.block_size < kSegment ? args.cache.block_size : kSegment; }

    // Scores of a row to weights; vectors start at multiples of kLanes, lanes that the row does not see weigh 0.
    void weigh(int64_t r, int64_t start) {
        float *scores = work.scores + r * kSegment;
        const int64_t begin = work.begin[r], end = work.end[r];
        work.weight[r] = 0;
        if (begin == end) return;
        const V scale = splat(args.scale), cap = splat(args.softcap);
        const float slope = args.alibi_slopes ? args.alibi_slopes[head(r)] : 0;
        V top = splat(-__builtin_inff());
        I lane;
        for (int i = 0; i < kLanes; ++i) lane[i] = i;
        for (int64_t j = begin / kLanes * kLanes; j < end; j += kLanes) {
            const I index = lane + static_cast<int32_t>(j);
            V score = load<V>(scores + j) * scale;
            if (args.softcap != 0) score = cap * tanh(score / cap);
            if (args.alibi_slopes)
                score = score + splat(slope) * to_float(index + static_cast<int32_t>(start - position(r)));
            const I hidden = (index < static_cast<int32_t>(begin)) | (index >= static_cast<int32_t>(end));
            score = hidden ? splat(-__builtin_inff()) : score;
            store(scores + j, score);
            top = max(score, top);
        }
        const V highest_score = splat(highest(top));
        V total = {};
        for (int64_t j = begin / kLanes * kLanes; j < end; j += kLanes) {
            const V weight = exp(load<V>(scores + j) - highest_score);
            store(scores + j, weight);
            total = total + weight;
        }
        work.highest[r] = highest_score[0];
        work.weight[r] = sum(total);
    }

    // Sums of values for kRows rows from r on: together for the positions that all see, else one by one.
    template <int kRows>
    int values(int64_t r) {
        int64_t begin = 0, end = kSegment;
        for (int64_t i = r; i < r + kRows; ++i) {
            begin = work.begin[i] > begin ? work.begin[i] : begin;
            end = work.end[i] < end ? work.end[i] : end;
        }
        if (kRows == 1 || begin >= end) {
            for (int64_t i = r; i < r + kRows; ++i) add_row(i, work.begin[i], work.end[i]);
            return kRows;
        }
        for (int64_t i = r; i < r + kRows; ++i) add_row(i, work.begin[i], begin);
        add_values<C, kRows>(work.scores + r * kSegment, work.cells, cell_size(), begin, end, args.cache.value_stride,
                             work.sums + r * args.cache.value_stride);
        for (int64_t i = r; i < r + kRows; ++i) add_row(i, end, work.end[i]);
        return kRows;
    }

    void add_row(int64_t r, int64_t begin, int64_t end) {
        if (begin >= end) return;
        add_values<C, 1>(work.scores + r * kSegment, work.cells, cell_size(), begin, end, args.cache.value_stride,
                         work.sums + r * args.cache.value_stride);
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
        const V before = exp(splat(work.total_highest[r] - top)), now = exp(splat(highest_score - top));
        for (int64_t d = 0; d < stride; d += kLanes)
            store(total + d, load<V>(total + d) * before + load<V>(sums + d) * now);
        work.total_weight[r] = work.total_weight[r] * before[0] + weight * now[0];
        work.total_highest[r] = top;
    }

    void clear_total() {
        for (int64_t r = 0; r < rows; ++r) work.total_weight[r] = 0;
    }

    void merge_segment() {
        for (int64_t r = 0; r < rows; ++r)
            merge(r, work.sums + r * args.cache.value_stride, work.highest[r], work.weight[r]);
    }

    // Where the results of a segment that is a task of its own lie: per row the sums, the maximum and the weight.
    float *partial(int64_t index, int64_t r) const {
        return args.partials + block.partials +
               ((index - block.first_segment) * rows + r) * (args.cache.value_stride + kPartialTail);
    }

    void save_segment(int64_t index) {
        const int64_t stride = args.cache.value_stride;
        for (int64_t r = 0; r < rows; ++r) {
            float *to = partial(index, r);
            memcpy(to, work.sums + r * stride, static_cast<size_t>(stride) * 4);
            to[stride] = work.highest[r];
            to[stride + 1] = work.weight[r];
        }
    }

    void merge_saved() {
        const int64_t stride = args.cache.value_stride;
        for (int64_t i = block.first_segment; i < block.first_segment + block.num_segments; ++i)
            for (int64_t r = 0; r < rows; ++r) {
                const float *from = partial(i, r);
                merge(r, from, from[stride], from[stride + 1]);
            }
    }

    void finish() {
        const int64_t head_dim = args.cache.head_dim, stride = args.cache.value_stride;
        for (int64_t r = 0; r < rows; ++r) {
            float factor = 1, weight = work.total_weight[r];
            if (args.sinks) {
                const float sink = args.sinks[head(r)];
                const float top = sink > work.total_highest[r] ? sink : work.total_highest[r];
                factor = exp(splat(work.total_highest[r] - top))[0];
                weight = weight * factor + exp(splat(sink - top))[0];
            }
            const V inverse = splat(factor / weight);
            T *out = static_cast<T *>(args.out) +
                     ((block.first_token + r / group) * args.num_heads + head(r)) * head_dim;
            const float *total = work.total + r * stride;
            int64_t d = 0;
            for (; d + kLanes <= head_dim; d += kLanes) store_from_float(out + d, load<V>(total + d) * inverse);
            if (d < head_dim) store_tail(out + d, load<V>(total + d) * inverse, head_dim - d);
        }
    }
};

template <class T, class C>
void attention_of(const AttentionArgs &args, const Context &context) {
    Work work;
    carve(args.cache, context.scratch, &work);
    for (;;) {
        const int64_t index = __atomic_fetch_add(args.next_task, 1, __ATOMIC_RELAXED);
        if (index >= args.num_tasks) return;
        const AttentionTask &task = args.tasks[index];
        AttentionBlock &block = args.blocks[task.block];
        Rows<T, C> rows(args, block, work);
        rows.clear_total();
        if (task.segment < 0) {
            for (int64_t i = block.first_segment; i < block.first_segment + block.num_segments; ++i) {
                rows.segment(i);
                rows.merge_segment();
            }
        } else {
            rows.segment(task.segment);
            rows.save_segment(task.segment);
            // Whoever is last has seen the results of the others.
            if (__atomic_sub_fetch(&block.pending, 1, __ATOMIC_ACQ_REL) != 0) continue;
            block.pending = block.num_segments;  // for the next layer that uses these tasks
            rows.merge_saved();
        }
        rows.finish();
    }
}

template <class T>
void attention_for(const AttentionArgs &args, const Context &context) {
    switch (args.cache.dtype) {
        case Dtype::f32: return attention_of<T, float>(args, context);
        case Dtype::bf16: return attention_of<T, bf16>(args, context);
        case Dtype::f16: return attention_of<T, f16>(args, context);
    }
}

template <class T, class C>
void write_kv_of(const WriteKVArgs &args, const Context &context) {
    const KVCache &cache = args.cache;
    int64_t begin, end;
    share(args.num_tokens * cache.num_kv_heads, context, &begin, &end);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t token = item / cache.num_kv_heads, head = item % cache.num_kv_heads;
        const int64_t slot = args.slot_mapping[token];
        if (slot < 0) continue;
        const int64_t place = slot / cache.block_size * cache.num_kv_heads + head, offset = slot % cache.block_size;
        const T *key = static_cast<const T *>(args.key) + token * args.key_stride + head * cache.head_dim;
        const T *value = static_cast<const T *>(args.value) + token * args.value_stride + head * cache.head_dim;
        C *keys = reinterpret_cast<C *>(cache.keys + place * cache.key_bytes +
                                        offset / kKeyPanel * cache.key_panel_bytes);
        const int64_t lane = offset % kKeyPanel;
        for (int64_t d = 0; d < cache.head_dim; ++d) {
            const int64_t at = __is_same(C, bf16) ? (d / 2 * kKeyPanel + lane) * 2 + d % 2 : d * kKeyPanel + lane;
            from_float(keys + at, to_float(key[d]));
        }
        C *values = reinterpret_cast<C *>(cache.values + place * cache.value_bytes) + offset * cache.value_stride;
        for (int64_t d = 0; d < cache.head_dim; ++d) from_float(values + d, to_float(value[d]));
    }
}

template <class T>
void write_kv_for(const WriteKVArgs &args, const Context &context) {
    switch (args.cache.dtype) {
        case Dtype::f32: return write_kv_of<T, float>(args, context);
        case Dtype::bf16: return write_kv_of<T, bf16>(args, context);
        case Dtype::f16: return write_kv_of<T, f16>(args, context);
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

void write_kv(const WriteKVArgs &args, const Context &context) {
    switch (args.dtype) {
        case Dtype::f32: return write_kv_for<float>(args, context);
        case Dtype::bf16: return write_kv_for<bf16>(args, context);
        case Dtype::f16: return write_kv_for<f16>(args, context);
    }
}

}  // namespace headrace::HEADRACE_TIER
