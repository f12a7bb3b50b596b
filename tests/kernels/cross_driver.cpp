// Runs kernels on a machine that has no Python: reads cases from stdin, writes what they give to stdout.
//
// A case begins with a header of int64: which kernel, then the numbers that its function below lists; arrays follow.
// Without input it prints the tiers that this CPU can run.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "attention_plan.h"
#include "block_shape.h"
#include "isa.h"
#include "pack.h"
#include "thread_pool.h"

using namespace headrace;

namespace {

bool try_read(void *data, std::size_t num_bytes) { return std::fread(data, 1, num_bytes, stdin) == num_bytes; }

template <class T>
std::vector<T> read(std::int64_t count) {
    std::vector<T> values(static_cast<std::size_t>(count));
    if (!try_read(values.data(), values.size() * sizeof(T))) std::exit(1);
    return values;
}

template <class T>
void write(const std::vector<T> &values) {
    std::fwrite(values.data(), sizeof(T), values.size(), stdout);
}

std::int64_t number() { return read<std::int64_t>(1)[0]; }

std::size_t bytes_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// format, rows, cols, group, dtype, num_tokens, quantize_x, bytes of the weight; the weight (float32, GGUF's blocks, or
// w4's codes, scales and offsets) and x. Gives what the packed weight means, in float32, and the product.
void linear() {
    const auto format = static_cast<Format>(number());
    const std::int64_t rows = number(), cols = number(), group = number();
    const auto dtype = static_cast<Dtype>(number());
    const std::int64_t num_tokens = number(), quantize_x = number(), num_bytes = number();
    PackedWeight weight(format, rows, cols, group);
    if (format == Format::w4) {
        const auto codes = read<std::uint8_t>(rows * cols);
        const std::int64_t num_groups = (cols + group - 1) / group;
        const auto scales = read<float>(rows * num_groups), offsets = read<float>(rows * num_groups);
        weight.write_int4(0, rows, codes.data(), scales.data(), offsets.data());
    } else if (has_blocks(format)) {
        weight.write_blocks(0, rows, read<std::uint8_t>(num_bytes).data());
    } else {
        weight.write_dense(0, rows, read<float>(rows * cols).data(), Dtype::f32, false);
    }
    const auto x = read<char>(num_tokens * cols * static_cast<std::int64_t>(bytes_of(dtype)));
    std::vector<float> meaning(static_cast<std::size_t>(rows * cols));
    for (std::int64_t row = 0; row < rows; ++row) weight.read_row(row, meaning.data() + row * cols);
    std::vector<char> out(static_cast<std::size_t>(num_tokens * rows) * bytes_of(dtype));
    const LinearArgs args{x.data(), dtype, num_tokens, weight.weight(), nullptr, out.data(), cols, rows, nullptr};
    const Kernels &table = kernels();
    if (quantize_x)
        parallel(table.linear_blocks_scratch(args), [&](const Context &c) { table.linear_blocks(args, c); });
    else
        parallel(table.linear_scratch(args), [&](const Context &c) { table.linear(args, c); });
    write(meaning);
    write(out);
}

// dtype, KV dtype, num_heads, num_kv_heads, head_dim, block_size, num_tokens; keys, values and queries of one request,
// whose blocks lie in the cache from its end. Gives the output of all tokens.
void attention() {
    const auto dtype = static_cast<Dtype>(number());
    const auto kv_dtype = static_cast<KVDtype>(number());
    const std::int64_t num_heads = number(), num_kv_heads = number(), head_dim = number(), block_size = number();
    const auto num_tokens = static_cast<std::int32_t>(number());
    const auto size = static_cast<std::int64_t>(bytes_of(dtype));
    const auto key = read<char>(num_tokens * num_kv_heads * head_dim * size);
    const auto value = read<char>(num_tokens * num_kv_heads * head_dim * size);
    const auto query = read<char>(num_tokens * num_heads * head_dim * size);
    const std::int64_t num_blocks = (num_tokens + block_size - 1) / block_size;
    const KVMemory memory(num_blocks + 1, block_size, num_kv_heads, head_dim, kv_dtype);
    std::vector<std::int32_t> table_row, slots;
    for (std::int64_t i = 0; i < num_blocks; ++i) table_row.push_back(static_cast<std::int32_t>(num_blocks - i));
    for (std::int64_t i = 0; i < num_tokens; ++i)
        slots.push_back(static_cast<std::int32_t>(table_row[static_cast<std::size_t>(i / block_size)] * block_size +
                                                  i % block_size));
    const Kernels &table = kernels();
    WriteKVArgs kv{};
    kv.cache = memory.cache();
    kv.key = key.data();
    kv.value = value.data();
    kv.key_stride = kv.value_stride = num_kv_heads * head_dim;
    kv.dtype = dtype;
    kv.slot_mapping = slots.data();
    kv.num_tokens = num_tokens;
    parallel(0, [&](const Context &c) { table.write_kv(kv, c); });

    std::vector<char> out(query.size());
    AttentionArgs args{};
    args.cache = memory.cache();
    args.query = query.data();
    args.query_stride = num_heads * head_dim;
    args.out = out.data();
    args.dtype = dtype;
    args.num_heads = num_heads;
    args.block_table = table_row.data();
    args.max_num_blocks = num_blocks;
    args.scale = 1.0f / 8;
    args.reach = 1;
    const std::int32_t starts[] = {0, num_tokens};
    AttentionPlan plan;
    plan.make(args, starts, &num_tokens, 1, num_tokens, num_threads());
    parallel(table.attention_scratch(args), [&](const Context &c) { table.attention(args, c); });
    write(out);
}

}  // namespace

int main() {
    set_num_threads(2);
    std::int64_t kernel;
    bool has_input = false;
    while (try_read(&kernel, sizeof kernel)) {
        has_input = true;
        kernel == 0 ? linear() : attention();
    }
    if (!has_input)
        for (const Tier &tier : compiled_tiers())
            if (tier.is_supported()) std::puts(tier.name);
    return 0;
}
