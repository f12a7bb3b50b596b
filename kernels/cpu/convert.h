// bf16, f16 and float32, one number at a time, for shared code (kernels have their own, in vectors).
#pragma once

#include <bit>
#include <cstdint>

#include "kernels.h"

namespace headrace {

static inline float bf16_to_float(std::uint16_t bits) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// To nearest even; a NaN stays one.
static inline std::uint16_t float_to_bf16(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    if (value != value) return static_cast<std::uint16_t>(word >> 16 | 0x40);
    return static_cast<std::uint16_t>((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

static inline float f16_to_float(std::uint16_t bits) {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7FFF;
    if (rest >= 0x7C00) return std::bit_cast<float>(sign | 0x7F800000 | (rest & 0x3FF) << 13);
    if (rest >= 0x400) return std::bit_cast<float>(sign | (0x38000000 + (rest << 13)));
    // A denormal of f16 is a normal float; as an integer it takes no part in what is done with denormals.
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(static_cast<float>(rest) * 0x1p-24f));
}

// To nearest even; a NaN stays one.
static inline std::uint16_t float_to_f16(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = word >> 16 & 0x8000, rest = word & 0x7FFFFFFF;
    std::uint32_t result;
    if (rest > 0x7F800000) {
        result = 0x7E00;
    } else if (rest >= 0x477FF000) {  // rounds to 65536 or more
        result = 0x7C00;
    } else if (rest < 0x38800000) {  // subnormal: adding 0.5 rounds at the last bit that f16 has
        result = std::bit_cast<std::uint32_t>(std::bit_cast<float>(rest) + 0.5f) - 0x3F000000;
    } else {
        result = (rest - 0x38000000 + 0xFFF + (rest >> 13 & 1)) >> 13;
    }
    return static_cast<std::uint16_t>(sign | result);
}

static inline float number(const void *data, Dtype dtype, std::int64_t index) {
    switch (dtype) {
        case Dtype::f32: return static_cast<const float *>(data)[index];
        case Dtype::bf16: return bf16_to_float(static_cast<const std::uint16_t *>(data)[index]);
        default: return f16_to_float(static_cast<const std::uint16_t *>(data)[index]);
    }
}

static inline void set_number(void *data, Dtype dtype, std::int64_t index, float value) {
    switch (dtype) {
        case Dtype::f32: static_cast<float *>(data)[index] = value; return;
        case Dtype::bf16: static_cast<std::uint16_t *>(data)[index] = float_to_bf16(value); return;
        default: static_cast<std::uint16_t *>(data)[index] = float_to_f16(value); return;
    }
}

static inline std::int64_t bytes_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }
static inline std::int64_t bytes_of(KVDtype dtype) {
    return dtype == KVDtype::f32 ? 4 : dtype == KVDtype::i8 ? 1 : 2;
}

}  // namespace headrace
