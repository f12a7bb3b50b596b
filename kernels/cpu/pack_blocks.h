// One row of a panel of weights in blocks: written from a GGUF file's blocks or from integers, and read as floats.
#pragma once

#include <cstdint>

#include "block_shape.h"

namespace headrace {

// `block`, as it stands in a file, becomes row `lane` of the group at `group`. The integers there must be zero.
void write_block(Format format, const std::uint8_t *block, char *group, std::int64_t lane);

// 32 integers into row `lane` of the piece whose integers begin at `integers`, which must be zero.
void write_integers(int bits, const std::uint8_t *values, char *integers, std::int64_t lane);

// Row `lane` of a panel, as floats [cols].
void read_block_row(const Weight &weight, const char *panel, std::int64_t lane, float *out);

}  // namespace headrace
