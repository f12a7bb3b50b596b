// KV caches, and how a ragged batch is cut into tasks of the attention kernel.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace headrace {

// Keys and values of one layer.
struct KVHeads {
    std::int64_t num_kv_heads, head_dim;
};

// Owns the KV cache of one layer, zeroed, or its share of one that holds several layers.
class KVMemory {
  public:
    // Throws std::invalid_argument if block_size is no power of two or a size is below one.
    KVMemory(std::int64_t num_blocks, std::int64_t block_size, std::int64_t num_kv_heads, std::int64_t head_dim,
             KVDtype dtype);
    static std::vector<KVMemory> of_layers(std::int64_t num_blocks, std::int64_t block_size,
                                           const std::vector<KVHeads> &layers, KVDtype dtype);

    const KVCache &cache() const { return cache_; }
    std::int64_t num_bytes() const { return num_bytes_; }

    // The memory of all layers that share it, and how much of it the first so many blocks of all of them take.
    const Allocation &memory() const { return memory_; }
    std::size_t extent(std::int64_t num_blocks) const;

    // Copy one block from or to the canonical host layout [2, block_size, num_kv_heads, head_dim] (keys, values) in
    // the cache's dtype. Integers are bytes, followed by the four of their scale.
    void read_block(std::int64_t block, void *out) const;
    void write_block(std::int64_t block, const void *in);

  private:
    // Call copy(byte in the canonical layout, place in the cache, number of bytes) for all of a block.
    template <class Copy>
    void each_piece(std::int64_t block, const Copy &copy) const;

    KVMemory(Allocation memory, const KVCache &cache, std::int64_t offset);

    Allocation memory_;
    KVCache cache_;
    std::int64_t num_bytes_;
};

std::int64_t kv_bytes(std::int64_t num_blocks, std::int64_t block_size, std::int64_t num_kv_heads,
                      std::int64_t head_dim, KVDtype dtype);

// Owns what AttentionArgs points at for one call; kept between calls so that a step allocates nothing new.
class AttentionPlan {
  public:
    // Fill in blocks, tasks and partials of `args` from the batch. reach: [num_tokens] or null; a token also sees the
    // positions before this. Those that then see more than their past are left to a plan of their own, which has
    // `is_ahead`. Throws std::invalid_argument for lengths that do not fit together and for a needed entry of the
    // block table outside the cache.
    void make(AttentionArgs &args, const std::int32_t *query_start_loc, const std::int32_t *seq_lens,
              std::int64_t num_reqs, std::int64_t num_tokens, int num_threads, const std::int32_t *reach = nullptr,
              bool is_ahead = false);

  private:
    // Blocks of the tokens [begin, end) of one request that this plan takes. first_position: of the first of them.
    void add_blocks(const AttentionArgs &args, std::int64_t request, std::int64_t begin, std::int64_t end,
                    std::int64_t first_position, std::int64_t seq_len, const std::int32_t *reach, bool is_ahead);
    // Tasks of segments that single tokens of several requests have in common.
    void share_segments(const AttentionArgs &args, int num_threads);
    void add_tasks(const AttentionArgs &args, int num_threads);

    // The first blocks of single tokens; members [first, first + count) of these see the same memory in a segment.
    struct Sharing {
        std::int64_t first, count;
        std::int32_t segment;
    };

    std::vector<AttentionBlock> blocks_;
    std::vector<AttentionTask> tasks_;
    std::vector<std::int32_t> single_, sharers_, members_;
    std::vector<std::int32_t> num_shared_;  // leading segments of a block that are not tasks of its own
    std::vector<Sharing> sharings_;
    std::vector<float> partials_;
    std::int64_t next_task_ = 0;
};

}  // namespace headrace
