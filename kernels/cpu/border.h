// Checks at the border to Python: dtypes, shapes, names. Included by the sources that bind.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

using Out = nb::ndarray<nb::c_contig, nb::device::cpu>;
using In = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Strided = nb::ndarray<nb::ro, nb::device::cpu>;  // rows contiguous, any distance between tokens
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints2 = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class Array>
std::int64_t dim(const Array &array, std::size_t axis) {
    return static_cast<std::int64_t>(array.shape(axis));
}

template <class Array>
std::string shape_text(const Array &array) {
    std::string text = "[";
    for (std::size_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
    return text + "]";
}

[[noreturn]] inline void refuse(const std::string &message) { throw std::invalid_argument(message); }

template <class Array>
Dtype dtype_of(const Array &array, const char *name) {
    if (array.dtype() == nb::dtype<float>()) return Dtype::f32;
    if (array.dtype() == nb::dtype<std::uint16_t>()) return Dtype::bf16;
    if (array.dtype().code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float) && array.dtype().bits == 16)
        return Dtype::f16;
    refuse(std::string(name) + " must be float32, float16 or uint16 (the bits of bfloat16)");
}

// The shape must be this one; -1 allows any size.
template <class Array>
void want(const Array &array, const char *name, std::initializer_list<std::int64_t> shape) {
    bool fits = array.ndim() == shape.size();
    std::size_t axis = 0;
    std::string text;
    for (const std::int64_t size : shape) {
        if (fits && size >= 0 && dim(array, axis) != size) fits = false;
        text += (axis++ ? ", " : "") + (size < 0 ? std::string("any") : std::to_string(size));
    }
    if (!fits) refuse(std::string(name) + " must have shape [" + text + "], got " + shape_text(array));
}

template <class Array>
void want_same(const Array &array, const char *name, Dtype dtype) {
    if (dtype_of(array, name) != dtype) refuse(std::string(name) + " must have the same dtype as the other arrays");
}

template <class Array>
const float *optional_floats(const std::optional<Array> &array, const char *name, std::int64_t size) {
    if (!array) return nullptr;
    want(*array, name, {size});
    return array->data();
}

// Elements from one token of [num_tokens, heads, head_dim] to the next.
inline std::int64_t token_stride(const Strided &array, const char *name) {
    const bool is_dense = array.ndim() == 3 && (array.shape(2) == 1 || array.stride(2) == 1) &&
                          (array.shape(1) == 1 || array.stride(1) == static_cast<std::int64_t>(array.shape(2)));
    if (!is_dense) refuse(std::string(name) + " must be [num_tokens, heads, head_dim], contiguous within a token");
    return array.stride(0);
}

inline Format format_named(const std::string &name) {
    static const std::pair<const char *, Format> names[] = {
        {"float32", Format::f32}, {"bfloat16", Format::bf16}, {"float16", Format::f16}, {"int8", Format::i8},
        {"q8_0", Format::q8_0},   {"q4_0", Format::q4_0},     {"q4_1", Format::q4_1},   {"q5_0", Format::q5_0},
        {"q5_1", Format::q5_1},   {"q4_k", Format::q4_k},     {"q5_k", Format::q5_k},   {"q6_k", Format::q6_k},
        {"int4", Format::w4}};
    std::string known;
    for (const auto &[text, format] : names) {
        if (name == text) return format;
        known += std::string(known.empty() ? "" : ", ") + text;
    }
    refuse("unknown weight format '" + name + "'; known: " + known);
}

inline Activation activation_named(const std::string &name) {
    static const std::pair<const char *, Activation> names[] = {
#define HEADRACE_PAIR(name) {#name, Activation::name},
        HEADRACE_ACTIVATIONS(HEADRACE_PAIR)
#undef HEADRACE_PAIR
    };
    std::string known;
    for (const auto &[text, activation] : names) {
        if (name == text) return activation;
        known += std::string(known.empty() ? "" : ", ") + text;
    }
    refuse("unknown activation '" + name + "'; known: " + known);
}

inline Dtype dtype_named(const std::string &name) {
    if (name == "float32") return Dtype::f32;
    if (name == "bfloat16") return Dtype::bf16;
    if (name == "float16") return Dtype::f16;
    refuse("unknown dtype '" + name + "'; known: float32, bfloat16, float16");
}

inline KVDtype kv_dtype_named(const std::string &name) {
    if (name == "float32") return KVDtype::f32;
    if (name == "bfloat16") return KVDtype::bf16;
    if (name == "float16") return KVDtype::f16;
    if (name == "int8") return KVDtype::i8;
    refuse("unknown dtype '" + name + "'; known: float32, bfloat16, float16, int8");
}

}  // namespace
}  // namespace headrace
