// Checks of what a record is added with, and a step run with.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "program.h"

namespace headrace {
namespace {

[[noreturn]] inline void refuse(const std::string &message) { throw std::invalid_argument(message); }

inline const float *or_null(const std::vector<float> &values) { return values.empty() ? nullptr : values.data(); }

inline void want_length(const std::vector<float> &values, std::int64_t length, const char *name) {
    if (!values.empty() && static_cast<std::int64_t>(values.size()) != length)
        refuse(std::string(name) + " must have " + std::to_string(length) + " values, got " +
               std::to_string(values.size()));
}

inline void want_same(const View &a, const View &b, const char *what) {
    if (a.dtype != b.dtype || a.rows != b.rows) refuse(std::string(what) + " must have the same dtype and rows");
}

inline void want_dense(const View &view, const char *name) {
    if (!view.is_dense()) refuse(std::string(name) + " must have no gaps between its rows");
}

}  // namespace
}  // namespace headrace
