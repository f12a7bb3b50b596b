// From logits to token ids, as core/ops/sampling.py defines it.
#pragma once

#include <cstdint>

namespace headrace {

struct SampleArgs {
    const float *logits;  // [num_rows, vocab_size]
    std::int64_t num_rows, vocab_size;
    const std::int32_t *seeds, *positions;  // [num_rows]
    const float *temperature;               // [num_rows] or null: all greedy
    const std::int32_t *top_k;              // [num_rows] or null; 0 keeps all
    const float *top_p, *min_p;             // [num_rows] or null
    std::int32_t *out;                      // [num_rows]
};

// One token a row, rows in parallel.
void sample(const SampleArgs &args);

// The Gumbel noise of one token: a function of (seed, position, token) only.
float gumbel_noise(std::uint32_t seed, std::uint32_t position, std::uint32_t token);

}  // namespace headrace
