// The records of attention: keys and values into caches, queries against them, and what they share in a step.
#include <algorithm>
#include <string>
#include <utility>

#include "isa.h"
#include "program_checks.h"
#include "thread_pool.h"

namespace headrace {

void Program::write_kv(const KVMemory &memory, const View &key, const View &value, std::int64_t group) {
    const KVCache &cache = memory.cache();
    check(key, cache.num_kv_heads * cache.head_dim);
    check(value, cache.num_kv_heads * cache.head_dim);
    want_same(key, value, "key and value");
    if (group < kOwnRows) refuse("a KV group must not be negative");
    if (group >= 0) {
        use_group(group);
        const std::int64_t slots = cache.num_blocks * cache.block_size;
        num_slots_.resize(static_cast<std::size_t>(num_groups_), INT64_MAX);
        num_slots_[static_cast<std::size_t>(group)] = std::min(num_slots_[static_cast<std::size_t>(group)], slots);
    }
    WriteKVArgs args{};
    args.cache = cache;
    args.key = at(key);
    args.value = at(value);
    args.key_stride = key.stride;
    args.value_stride = value.stride;
    args.dtype = key.dtype;
    const Kernels &table = kernels();
    add_record(
        [=, this, &table](const Step &step, const Context &context) {
            WriteKVArgs now = args;
            now.num_tokens = step.num_tokens;
            now.slot_mapping =
                group < 0 ? own_.slots.data() : step.slot_mappings[static_cast<std::size_t>(group)];
            table.write_kv(now, context);
        },
        {reads(key, cache.num_kv_heads), reads(value, cache.num_kv_heads), cache_access(memory, true)});
}

void Program::attention(const View &out, const View &query, const KVMemory &memory, std::int64_t group,
                        AttentionOptions options) {
    const KVCache &cache = memory.cache();
    check(query, query.cols);
    check(out, query.cols);
    want_same(out, query, "out and query");
    want_dense(out, "out");
    const std::int64_t heads = query.cols / cache.head_dim;
    if (heads * cache.head_dim != query.cols || heads % cache.num_kv_heads != 0 || group < kOwnRows ||
        options.window < 0 || options.chunk < 0)
        refuse("query heads do not fit a cache of " + std::to_string(cache.num_kv_heads) + " heads of " +
               std::to_string(cache.head_dim) + ", or the group, window or chunk is negative");
    want_length(options.sinks, heads, "sinks");
    want_length(options.alibi_slopes, heads, "alibi_slopes");
    want_length(options.relative_bias, heads * (2 * kMaxDistance + 1), "relative_bias");
    if (group >= 0) use_group(group);
    Tasks *tasks = tasks_for(cache, group, heads, options);
    const int turn = tasks->num_records++ % 2;
    const char *counters = reinterpret_cast<const char *>(tasks->counters);
    AttentionArgs probe{};
    probe.cache = cache;
    const Kernels &table = kernels();
    add_record(
        [=, this, &table, options = std::move(options)](const Step &, const Context &context) {
            if (context.thread == 0) tasks->counters[1 - turn] = tasks->counters_ahead[1 - turn] = 0;
            AttentionArgs args = tasks->args;
            args.cache = cache;
            args.query = at(query);
            args.query_stride = query.stride;
            args.out = at(out);
            args.dtype = query.dtype;
            args.scale = options.scale;
            args.softcap = options.softcap;
            args.sinks = or_null(options.sinks);
            args.alibi_slopes = or_null(options.alibi_slopes);
            args.relative_bias = or_null(options.relative_bias);
            args.next_task = &tasks->counters[turn];
            table.attention(args, context);
            const AttentionArgs &ahead = tasks->args_ahead;
            if (ahead.num_tasks == 0) return;
            args.reach = ahead.reach;
            args.blocks = ahead.blocks;
            args.tasks = ahead.tasks;
            args.num_tasks = ahead.num_tasks;
            args.partials = ahead.partials;
            args.next_task = &tasks->counters_ahead[turn];
            table.attention(args, context);
        },
        {reads(query), writes(out), cache_access(memory, false),
         {counters, counters + sizeof tasks->counters, Rows::tokens, 0, 0, 0, true}},
        table.attention_scratch(probe));
}

Program::Tasks *Program::tasks_for(const KVCache &cache, std::int64_t group, std::int64_t heads,
                                   const AttentionOptions &options) {
    const bool is_causal = options.sees == Sees::past || options.sees == Sees::ahead;
    const std::int64_t reach = is_causal ? 1 : options.window > 0 ? options.window : kEveryKey;
    const auto same = [&](const std::unique_ptr<Tasks> &t) {
        return t->group == group && t->sees == options.sees && t->args.num_heads == heads &&
               t->args.window == options.window && t->args.chunk == options.chunk && t->args.reach == reach &&
               t->args.cache.num_kv_heads == cache.num_kv_heads && t->args.cache.head_dim == cache.head_dim &&
               t->args.cache.block_size == cache.block_size && t->args.cache.num_blocks == cache.num_blocks;
    };
    const auto found = std::find_if(tasks_.begin(), tasks_.end(), same);
    if (found != tasks_.end()) return found->get();
    tasks_.push_back(std::make_unique<Tasks>());
    Tasks *tasks = tasks_.back().get();
    tasks->group = group;
    tasks->sees = options.sees;
    tasks->args = AttentionArgs{};
    tasks->args.cache = cache;
    tasks->args.num_heads = heads;
    tasks->args.window = options.window;
    tasks->args.chunk = options.chunk;
    tasks->args.reach = reach;
    tasks->args_ahead = tasks->args;
    tasks->args_ahead.reach = kEveryKey;
    if (group == kOwnRows) {
        own_.block_size = cache.block_size;
        own_.num_blocks = own_.num_blocks == 0 ? cache.num_blocks : std::min(own_.num_blocks, cache.num_blocks);
    }
    return tasks;
}

void Program::plan_attention(const Step &step) {
    if (own_.num_blocks > 0) place_own_rows(step);
    for (const auto &tasks : tasks_) {
        const bool is_own = tasks->group == kOwnRows;
        const auto group = static_cast<std::size_t>(tasks->group);
        const std::int32_t *lens = tasks->sees == Sees::encoder ? step.encoder_lens : step.seq_lens;
        if (lens == nullptr) refuse("the program attends to an encoder's output, and the step brings no encoder_lens");
        const std::int32_t *reach = tasks->sees == Sees::ahead ? step.reach : nullptr;
        tasks->args.block_table = is_own ? own_.tables.data() : step.block_tables[group];
        tasks->args.max_num_blocks = is_own ? own_.max_num_blocks : step.max_num_blocks[group];
        tasks->plan.make(tasks->args, step.query_start_loc, is_own ? own_.lens.data() : lens, step.num_reqs,
                         step.num_tokens, num_threads(), reach);
        tasks->args_ahead.num_tasks = 0;
        if (reach != nullptr) {
            tasks->args_ahead.block_table = tasks->args.block_table;
            tasks->args_ahead.max_num_blocks = tasks->args.max_num_blocks;
            tasks->plan_ahead.make(tasks->args_ahead, step.query_start_loc, lens, step.num_reqs, step.num_tokens,
                                   num_threads(), reach, true);
        }
        for (std::int64_t *counters : {tasks->counters, tasks->counters_ahead}) counters[0] = counters[1] = 0;
    }
}

// Each request's rows in blocks of their own, one after another.
void Program::place_own_rows(const Step &step) {
    const std::int64_t size = own_.block_size;
    std::int64_t longest = 0, next_block = 0;
    own_.slots.assign(static_cast<std::size_t>(step.num_tokens), -1);
    own_.lens.resize(static_cast<std::size_t>(step.num_reqs));
    for (std::int64_t r = 0; r < step.num_reqs; ++r) {
        const std::int64_t begin = step.query_start_loc[r], count = step.query_start_loc[r + 1] - begin;
        if (begin < 0 || count < 0 || begin + count > step.num_tokens)
            refuse("query_start_loc must rise from 0 to at most the number of tokens, " +
                   std::to_string(step.num_tokens));
        own_.lens[static_cast<std::size_t>(r)] = static_cast<std::int32_t>(count);
        longest = std::max(longest, (count + size - 1) / size);
    }
    own_.max_num_blocks = longest;
    own_.tables.assign(static_cast<std::size_t>(step.num_reqs * longest), -1);
    for (std::int64_t r = 0; r < step.num_reqs; ++r) {
        const std::int64_t begin = step.query_start_loc[r], count = own_.lens[static_cast<std::size_t>(r)];
        for (std::int64_t i = 0; i < count; ++i)
            own_.slots[static_cast<std::size_t>(begin + i)] = static_cast<std::int32_t>(next_block * size + i);
        for (std::int64_t b = 0; b * size < count; ++b)
            own_.tables[static_cast<std::size_t>(r * longest + b)] = static_cast<std::int32_t>(next_block++);
    }
    if (next_block > own_.num_blocks)
        refuse("the step's requests take " + std::to_string(next_block) + " blocks of " + std::to_string(size) +
               " rows, the program has " + std::to_string(own_.num_blocks));
}

}  // namespace headrace
