#include "attention_plan.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "convert.h"
#include "numa.h"

namespace headrace {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

// Parts that the query heads of a KV head are cut into.
std::int64_t parts_of(const AttentionArgs &args) {
    return (args.num_heads / args.cache.num_kv_heads + kAttentionRows - 1) / kAttentionRows;
}

KVCache layout(std::int64_t num_blocks, std::int64_t block_size, std::int64_t num_kv_heads, std::int64_t head_dim,
               KVDtype dtype) {
    if (num_blocks < 1 || num_kv_heads < 1 || head_dim < 1 || block_size < 1 || (block_size & (block_size - 1)) != 0)
        throw std::invalid_argument("a KV cache needs a block size that is a power of two and sizes of at least one, "
                                    "got num_blocks=" + std::to_string(num_blocks) + " block_size=" +
                                    std::to_string(block_size) + " num_kv_heads=" + std::to_string(num_kv_heads) +
                                    " head_dim=" + std::to_string(head_dim));
    // So that no size below overflows.
    constexpr double kMaxNumbers = 1e14;
    if (static_cast<double>(num_blocks) * static_cast<double>(block_size + 16) *
            static_cast<double>(num_kv_heads) * static_cast<double>(head_dim + 16) > kMaxNumbers)
        throw std::bad_alloc();
    KVCache cache{};
    cache.dtype = dtype;
    cache.num_blocks = num_blocks;
    cache.block_size = block_size;
    cache.num_kv_heads = num_kv_heads;
    cache.head_dim = head_dim;
    cache.value_stride = round_up(head_dim, 16);
    cache.scales_at = round_up(head_dim, 2) * kKeyPanel * bytes_of(dtype);
    cache.key_panel_bytes = cache.scales_at + (dtype == KVDtype::i8 ? 2 * kKeyPanel * 4 : 0);
    cache.key_bytes = (block_size + kKeyPanel - 1) / kKeyPanel * cache.key_panel_bytes;
    cache.value_bytes = (dtype == KVDtype::bf16 ? round_up(block_size, 2) : block_size) * cache.value_stride *
                        bytes_of(dtype);
    return cache;
}

// Bytes of so many blocks of a layer.
std::int64_t bytes_of_blocks(const KVCache &cache, std::int64_t num_blocks) {
    return num_blocks * cache.num_kv_heads * (cache.key_bytes + cache.value_bytes);
}

// KV heads of a token that one task takes: as many as have their rows in a thread's scratch and a segment of their keys and
// values in half of a usual L2, and as leave enough tasks of `num_tokens` tokens for all threads.
std::int64_t heads_of_a_task(const AttentionArgs &args, std::int64_t num_tokens, int num_threads) {
    constexpr std::int64_t kMostBytes = 512 << 10;
    const KVCache &cache = args.cache;
    const std::int64_t group = args.num_heads / cache.num_kv_heads;
    const std::int64_t bytes = kSegment / cache.block_size * (cache.key_bytes + cache.value_bytes);
    const std::int64_t most = std::min({kAttentionRows / group, kMostBytes / std::max<std::int64_t>(bytes, 1),
                                        num_tokens * cache.num_kv_heads / (4 * num_threads), cache.num_kv_heads});
    return std::max<std::int64_t>(most, 1);
}

}  // namespace

std::int64_t kv_bytes(std::int64_t num_blocks, std::int64_t block_size, std::int64_t num_kv_heads,
                      std::int64_t head_dim, KVDtype dtype) {
    return bytes_of_blocks(layout(num_blocks, block_size, num_kv_heads, head_dim, dtype), num_blocks);
}

KVMemory::KVMemory(Allocation memory, const KVCache &cache, std::int64_t offset)
    : memory_(std::move(memory)), cache_(cache), num_bytes_(bytes_of_blocks(cache, cache.num_blocks)) {
    cache_.keys = memory_.data + offset;
    cache_.values = cache_.keys + kRunBlocks * cache_.num_kv_heads * cache_.key_bytes;
}

KVMemory::KVMemory(std::int64_t num_blocks, std::int64_t block_size, std::int64_t num_kv_heads, std::int64_t head_dim,
                   KVDtype dtype)
    : KVMemory(of_layers(num_blocks, block_size, {{num_kv_heads, head_dim}}, dtype).front()) {}

std::vector<KVMemory> KVMemory::of_layers(std::int64_t num_blocks, std::int64_t block_size,
                                          const std::vector<KVHeads> &layers, KVDtype dtype) {
    std::vector<KVCache> caches;
    std::int64_t run_bytes = 0;
    for (const KVHeads &heads : layers) {
        caches.push_back(layout(num_blocks, block_size, heads.num_kv_heads, heads.head_dim, dtype));
        run_bytes += bytes_of_blocks(caches.back(), kRunBlocks);
    }
    // Blocks that the last run lacks are never touched, so they take address space alone.
    const std::int64_t num_runs = (num_blocks + kRunBlocks - 1) / kRunBlocks;
    const Allocation memory = allocate(static_cast<std::size_t>(num_runs * run_bytes));
    place_by_turns(memory);
    std::vector<KVMemory> result;
    std::int64_t offset = 0;
    for (KVCache &cache : caches) {
        cache.run_bytes = run_bytes;
        result.push_back(KVMemory(memory, cache, offset));
        offset += bytes_of_blocks(cache, kRunBlocks);
    }
    return result;
}

std::size_t KVMemory::extent(std::int64_t num_blocks) const {
    const std::int64_t num_runs = (std::clamp<std::int64_t>(num_blocks, 0, cache_.num_blocks) + kRunBlocks - 1) / kRunBlocks;
    return static_cast<std::size_t>(num_runs * cache_.run_bytes);
}

template <class Copy>
void KVMemory::each_piece(std::int64_t block, const Copy &copy) const {
    if (block < 0 || block >= cache_.num_blocks)
        throw std::invalid_argument("block " + std::to_string(block) + " is not in a cache of " +
                                    std::to_string(cache_.num_blocks) + " blocks");
    const std::int64_t size = bytes_of(cache_.dtype), tokens = cache_.block_size, heads = cache_.num_kv_heads;
    const bool is_paired = cache_.dtype == KVDtype::bf16, has_scales = cache_.dtype == KVDtype::i8;
    const std::int64_t row_bytes = cache_.head_dim * size + (has_scales ? 4 : 0);
    for (std::int64_t o = 0; o < tokens; ++o)
        for (std::int64_t h = 0; h < heads; ++h) {
            const std::int64_t lane = o % kKeyPanel;
            const std::int64_t key_row = (o * heads + h) * row_bytes, value_row = key_row + tokens * heads * row_bytes;
            char *panel = keys_of(cache_, block, h) + o / kKeyPanel * cache_.key_panel_bytes;
            char *values = values_of(cache_, block, h);
            for (std::int64_t d = 0; d < cache_.head_dim; ++d) {
                const std::int64_t key_at = is_paired ? (d / 2 * kKeyPanel + lane) * 2 + d % 2 : d * kKeyPanel + lane;
                const std::int64_t value_at = is_paired ? (o / 2 * cache_.value_stride + d) * 2 + o % 2
                                                        : o * cache_.value_stride + d;
                copy(key_row + d * size, panel + key_at * size, size);
                copy(value_row + d * size, values + value_at * size, size);
            }
            if (!has_scales) continue;
            char *scales = panel + cache_.scales_at + lane * 4;
            copy(key_row + cache_.head_dim, scales, 4);
            copy(value_row + cache_.head_dim, scales + kKeyPanel * 4, 4);
        }
}

void KVMemory::read_block(std::int64_t block, void *out) const {
    each_piece(block, [&](std::int64_t at, const char *piece, std::int64_t size) {
        std::memcpy(static_cast<char *>(out) + at, piece, static_cast<std::size_t>(size));
    });
}

void KVMemory::write_block(std::int64_t block, const void *in) {
    each_piece(block, [&](std::int64_t at, char *piece, std::int64_t size) {
        std::memcpy(piece, static_cast<const char *>(in) + at, static_cast<std::size_t>(size));
    });
}

void AttentionPlan::add_blocks(const AttentionArgs &args, std::int64_t request, std::int64_t begin, std::int64_t end,
                               std::int64_t first_position, std::int64_t seq_len, const std::int32_t *reach,
                               bool is_ahead) {
    const KVCache &cache = args.cache;
    const std::int64_t group = args.num_heads / cache.num_kv_heads;
    const std::int64_t num_parts = parts_of(args);
    const std::int64_t step = std::max<std::int64_t>(1, kAttentionRows / group);
    const auto sees_ahead = [&](std::int64_t token) {
        return reach != nullptr && reach[token] > first_position + token - begin + 1;
    };
    std::int64_t count;
    for (std::int64_t token = begin; token < end; token += count) {
        count = std::min(step, end - token);
        for (std::int64_t k = 1; reach != nullptr && k < count; ++k)
            if (sees_ahead(token + k) != sees_ahead(token) || (is_ahead && reach[token + k] != reach[token])) count = k;
        if (sees_ahead(token) != is_ahead) continue;
        const std::int64_t position = first_position + token - begin;
        const std::int64_t num_keys = is_ahead ? std::min<std::int64_t>(seq_len, reach[token]) : seq_len;
        const std::int64_t low = std::max<std::int64_t>(0, first_seen(args, position));
        const std::int64_t high = std::min(num_keys, position + count - 1 + args.reach);
        const std::int64_t first = low / kSegment, last = (high + kSegment - 1) / kSegment;
        if (count == 1 && args.reach == 1 && !is_ahead) single_.push_back(static_cast<std::int32_t>(blocks_.size()));
        for (std::int64_t h = 0; h < cache.num_kv_heads; ++h)
            for (std::int64_t part = 0; part < num_parts; ++part) {
                const std::int64_t head = h * group + part * group / num_parts;
                const std::int64_t next_head = h * group + (part + 1) * group / num_parts;
                blocks_.push_back({static_cast<std::int32_t>(request), static_cast<std::int32_t>(h),
                                   static_cast<std::int32_t>(token), static_cast<std::int32_t>(count),
                                   static_cast<std::int32_t>(head), static_cast<std::int32_t>(next_head - head),
                                   static_cast<std::int32_t>(position), static_cast<std::int32_t>(num_keys),
                                   static_cast<std::int32_t>(first), static_cast<std::int32_t>(last - first), 0, -1});
            }
    }
}

// Requests with a common prefix have its blocks in their tables: its keys and values are read once for all of them, and a
// tile of many rows takes less time than many tiles of a few. Their sums are those that each would have alone.
void AttentionPlan::share_segments(const AttentionArgs &args, int num_threads) {
    const KVCache &cache = args.cache;
    const std::int64_t num_entries = std::max<std::int64_t>(1, kSegment / cache.block_size);
    const std::int64_t num_heads = cache.num_kv_heads * parts_of(args);  // blocks of a token
    const std::int64_t most = kAttentionRows * parts_of(args) / (args.num_heads / cache.num_kv_heads);
    sharers_.assign(single_.begin(), single_.end());
    sharings_.clear();
    if (most < 2) return;
    std::int64_t begin = 0, num_pairs = 0;
    for (std::int64_t segment = 0; static_cast<std::int64_t>(sharers_.size()) - begin > 1; ++segment) {
        const std::int64_t start = segment * kSegment;
        const auto sees_all = [&](std::int32_t b) {
            const std::int64_t position = blocks_[static_cast<std::size_t>(b)].first_position;
            return position + 1 >= start + kSegment && first_seen(args, position) <= start;
        };
        const auto entries = [&](std::int32_t b) {
            return args.block_table + blocks_[static_cast<std::size_t>(b)].request * args.max_num_blocks +
                   start / cache.block_size;
        };
        const auto is_same = [&](std::int32_t a, std::int32_t b) {
            return std::equal(entries(a), entries(a) + num_entries, entries(b));
        };
        const auto low = sharers_.begin() + begin;
        sharers_.erase(std::remove_if(low, sharers_.end(), [&](std::int32_t b) { return !sees_all(b); }), sharers_.end());
        std::sort(low, sharers_.end(), [&](std::int32_t a, std::int32_t b) {
            if (is_same(a, b)) return a < b;
            return std::lexicographical_compare(entries(a), entries(a) + num_entries, entries(b), entries(b) + num_entries);
        });
        // Those that share this segment are looked at for the next one too, behind the ones that it keeps.
        const auto end = static_cast<std::int64_t>(sharers_.size());
        for (std::int64_t i = begin, next; i < end; i = next) {
            const std::int32_t leader = sharers_[static_cast<std::size_t>(i)];
            for (next = i + 1; next < end && is_same(leader, sharers_[static_cast<std::size_t>(next)]);) ++next;
            if (next - i < 2) continue;
            sharings_.push_back({i, next - i, static_cast<std::int32_t>(segment)});
            num_pairs += next - i;
            for (std::int64_t k = i; k < next; ++k) sharers_.push_back(sharers_[static_cast<std::size_t>(k)]);
        }
        begin = end;
    }
    // As many to a task as leaves enough tasks for all threads.
    const std::int64_t size = std::clamp<std::int64_t>(num_pairs * num_heads / (2 * num_threads), 2, most);
    for (const Sharing &sharing : sharings_) {
        const std::int64_t num_pieces = (sharing.count + size - 1) / size;
        for (std::int64_t head = 0; head < num_heads; ++head)
            for (std::int64_t piece = 0; piece < num_pieces; ++piece) {
                const auto first = static_cast<std::int32_t>(members_.size());
                for (std::int64_t k = piece * sharing.count / num_pieces; k < (piece + 1) * sharing.count / num_pieces; ++k) {
                    const std::int64_t block = sharers_[static_cast<std::size_t>(sharing.first + k)] + head;
                    members_.push_back(static_cast<std::int32_t>(block));
                    num_shared_[static_cast<std::size_t>(block)] = sharing.segment + 1;
                }
                const auto count = static_cast<std::int32_t>(members_.size()) - first;
                tasks_.push_back({count > 1 ? first : members_.back(), 1, count, sharing.segment});
            }
    }
}

void AttentionPlan::add_tasks(const AttentionArgs &args, int num_threads) {
    // With few blocks their segments are shared among the threads; the sums are the same.
    const bool is_split = num_threads > 1 && static_cast<int>(blocks_.size()) < 4 * num_threads;
    const std::int64_t most_heads = is_split ? 1 : heads_of_a_task(args, static_cast<std::int64_t>(single_.size()), num_threads);
    std::int64_t num_partials = 0;
    for (std::size_t end = blocks_.size(); end > 0;) {  // the last tokens of a prompt have the most keys: first
        AttentionBlock &block = blocks_[end - 1];
        const bool is_single = block.num_tokens == 1;
        const std::size_t num_heads = is_single ? static_cast<std::size_t>(std::min<std::int64_t>(most_heads, block.kv_head + 1)) : 1;
        end -= num_heads;
        const auto index = static_cast<std::int32_t>(end);
        if (num_shared_[end] == 0 && (!is_split || block.num_segments <= 1)) {
            tasks_.push_back({index, static_cast<std::int32_t>(num_heads), 1, -1});
            continue;
        }
        for (std::size_t b = end; b < end + num_heads; ++b) {
            blocks_[b].pending = block.num_segments;
            blocks_[b].partials = num_partials;
            num_partials += block.num_segments * block.num_tokens * block.num_heads *
                            (args.cache.value_stride + kPartialTail);
        }
        for (std::int32_t s = num_shared_[end]; s < block.num_segments; ++s)
            tasks_.push_back({index, static_cast<std::int32_t>(num_heads), 1, block.first_segment + s});
    }
    if (static_cast<std::size_t>(num_partials) > partials_.size())
        partials_.resize(static_cast<std::size_t>(num_partials));
}

void AttentionPlan::make(AttentionArgs &args, const std::int32_t *query_start_loc, const std::int32_t *seq_lens,
                         std::int64_t num_reqs, std::int64_t num_tokens, int num_threads, const std::int32_t *reach,
                         bool is_ahead) {
    blocks_.clear();
    tasks_.clear();
    single_.clear();
    members_.clear();
    const KVCache &cache = args.cache;
    const bool sees_all = args.reach >= kEveryKey && !is_ahead;
    for (std::int64_t r = 0; r < num_reqs; ++r) {
        const std::int64_t begin = query_start_loc[r], end = query_start_loc[r + 1], seq_len = seq_lens[r];
        if (begin < 0 || end < begin || end > num_tokens)
            throw std::invalid_argument("query_start_loc must rise from 0 to at most the number of tokens (" +
                                        std::to_string(num_tokens) + "); request " + std::to_string(r) + " has [" +
                                        std::to_string(begin) + ", " + std::to_string(end) + ")");
        if (begin == end) continue;
        if ((!sees_all && seq_len < end - begin) || seq_len < 0 || seq_len > args.max_num_blocks * cache.block_size)
            throw std::invalid_argument("request " + std::to_string(r) + " has " + std::to_string(end - begin) +
                                        " tokens, a sequence length of " + std::to_string(seq_len) +
                                        " and a block table for " +
                                        std::to_string(args.max_num_blocks * cache.block_size));
        const std::int64_t first_position = sees_all ? 0 : seq_len - (end - begin);
        const std::int64_t seen = std::max<std::int64_t>(0, first_seen(args, first_position));
        for (std::int64_t b = seen / cache.block_size; b * cache.block_size < seq_len; ++b) {
            const std::int32_t block = args.block_table[r * args.max_num_blocks + b];
            if (block < 0 || block >= cache.num_blocks)
                throw std::invalid_argument("block table entry [" + std::to_string(r) + ", " + std::to_string(b) +
                                            "] is " + std::to_string(block) + ", the cache has " +
                                            std::to_string(cache.num_blocks) + " blocks");
        }
        add_blocks(args, r, begin, end, first_position, seq_len, reach, is_ahead);
    }
    num_shared_.assign(blocks_.size(), 0);
    share_segments(args, num_threads);
    add_tasks(args, num_threads);
    next_task_ = 0;
    args.blocks = blocks_.data();
    args.tasks = tasks_.data();
    args.members = members_.data();
    args.num_tasks = static_cast<std::int64_t>(tasks_.size());
    args.next_task = &next_task_;
    args.partials = partials_.data();
}

}  // namespace headrace
