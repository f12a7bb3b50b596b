#include "pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "convert.h"
#include "numa.h"
#include "pack_blocks.h"
#include "thread_pool.h"

namespace headrace {
namespace {

constexpr std::int64_t kMaxNumbers = std::int64_t{1} << 46;  // so that no size below overflows
constexpr int kByteOf[4] = {0, 2, 1, 3};  // i8: where column k % 4 stands

struct Shape {
    std::int64_t padded_cols, panel_bytes, num_panels;
};

std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

// Columns of a group of a format of blocks.
std::int64_t group_columns(Format format, std::int64_t group) {
    const std::int64_t own = BlockShape::of(format).group_columns;
    return own ? own : group;
}

Shape shape_of(Format format, std::int64_t rows, std::int64_t cols, std::int64_t group) {
    if (rows < 1 || cols < 1 || rows > INT32_MAX || cols > INT32_MAX)
        throw std::invalid_argument("a packed weight needs at least one row and one column, got [" +
                                    std::to_string(rows) + ", " + std::to_string(cols) + "]");
    if (rows > kMaxNumbers / cols) throw std::bad_alloc();
    if (is_gguf(format) && cols % group_columns(format, group) != 0)
        throw std::invalid_argument("these GGUF blocks hold " + std::to_string(group_columns(format, group)) +
                                    " columns, got " + std::to_string(cols) + " columns");
    if (format == Format::w4 ? group < kPieceColumns || group % kPieceColumns != 0 : group != 0)
        throw std::invalid_argument("group must be a multiple of 32 for format w4 and 0 for others, got " +
                                    std::to_string(group));
    // 2^31 / 127^2: an int32 sum of more products could overflow.
    if (format == Format::i8 && cols > 133000)
        throw std::invalid_argument("format i8 takes at most 133000 columns, got " + std::to_string(cols));
    const std::int64_t num_panels = (rows + kPanel - 1) / kPanel;
    std::int64_t padded, bytes;
    switch (format) {
        case Format::f32: padded = round_up(cols, 8), bytes = padded * kPanel * 4; break;
        case Format::bf16:
        case Format::f16: padded = round_up(cols, 8), bytes = padded * kPanel * 2; break;
        case Format::i8: padded = round_up(cols, 16), bytes = padded * kPanel; break;
        default:
            const std::int64_t columns = group_columns(format, group);
            padded = round_up(cols, columns);
            bytes = padded / columns * BlockShape::of(format).group_bytes(columns);
    }
    return {padded, bytes, num_panels};
}

}  // namespace

std::int64_t packed_bytes(Format format, std::int64_t rows, std::int64_t cols, std::int64_t group) {
    const Shape shape = shape_of(format, rows, cols, group);
    const std::int64_t per_row = format == Format::i8 ? 8 : 0;  // scale and sum
    return shape.num_panels * (shape.panel_bytes + kPanel * per_row);
}

PackedWeight::PackedWeight(Format format, std::int64_t rows, std::int64_t cols, std::int64_t group) {
    const Shape shape = shape_of(format, rows, cols, group);
    memory_ = allocate(static_cast<std::size_t>(packed_bytes(format, rows, cols, group)));
    place_by_threads(memory_);
    const std::int64_t columns = has_blocks(format) ? group_columns(format, group) : 0;
    weight_ = {format, rows, cols, shape.padded_cols, shape.panel_bytes, columns, memory_.data, nullptr, nullptr};
    if (format == Format::i8) {
        char *behind = memory_.data + shape.num_panels * shape.panel_bytes;
        weight_.scales = reinterpret_cast<const float *>(behind);
        weight_.sums = reinterpret_cast<const std::int32_t *>(behind + shape.num_panels * kPanel * 4);
    }
}

void PackedWeight::check_rows(std::int64_t start, std::int64_t num_rows) const {
    if (start < 0 || num_rows < 0 || start + num_rows > weight_.rows)
        throw std::invalid_argument("rows " + std::to_string(start) + " to " + std::to_string(start + num_rows) +
                                    " are not all in a weight of " + std::to_string(weight_.rows) + " rows");
}

namespace {

// Run write(row) for the rows in parallel; a panel is written by one thread.
template <class Write>
void for_rows(std::int64_t start, std::int64_t num_rows, std::size_t scratch_bytes, const Write &write) {
    const std::int64_t first = start / kPanel, last = (start + num_rows + kPanel - 1) / kPanel;
    parallel(scratch_bytes, [&](const Context &context) {
        std::int64_t begin, end;
        share(last - first, context, &begin, &end);
        const std::int64_t from = std::max(start, (first + begin) * kPanel);
        const std::int64_t to = std::min(start + num_rows, (first + end) * kPanel);
        for (std::int64_t row = from; row < to; ++row) write(row, context.scratch);
    });
}

// True if no number has all bits of its exponent set. Without a branch, so that the compiler makes vectors of it.
template <class Word>
bool has_no_full_exponent(const void *data, std::int64_t count, Word exponent) {
    const auto *words = static_cast<const Word *>(data);
    unsigned bad = 0;
    for (std::int64_t k = 0; k < count; ++k) bad |= (words[k] & exponent) == exponent;
    return bad == 0;
}

bool is_finite(const void *data, std::int64_t count, Dtype dtype) {
    switch (dtype) {
        case Dtype::f32: return has_no_full_exponent<std::uint32_t>(data, count, 0x7F800000);
        case Dtype::bf16: return has_no_full_exponent<std::uint16_t>(data, count, 0x7F80);
        default: return has_no_full_exponent<std::uint16_t>(data, count, 0x7C00);
    }
}

}  // namespace

void PackedWeight::write_dense(std::int64_t start, std::int64_t num_rows, const void *data, Dtype dtype,
                               bool any_value) {
    check_rows(start, num_rows);
    const Format format = weight_.format;
    if (has_blocks(format))
        throw std::invalid_argument("a weight of 4-bit or GGUF blocks is not written from dense rows");
    const std::int64_t cols = weight_.cols;
    std::atomic<std::int64_t> bad_row{-1};
    for_rows(start, num_rows, static_cast<std::size_t>(cols), [&](std::int64_t row, char *scratch) {
        const char *source = static_cast<const char *>(data) + (row - start) * cols * bytes_of(dtype);
        char *target = panel(row);
        const std::int64_t lane = row % kPanel;
        if (!any_value && !is_finite(source, cols, dtype)) {
            bad_row = row;
            return;
        }
        switch (format) {
            case Format::f32:
                for (std::int64_t k = 0; k < cols; ++k)
                    reinterpret_cast<float *>(target)[k * kPanel + lane] = number(source, dtype, k);
                return;
            case Format::bf16:
                for (std::int64_t k = 0; k < cols; ++k)
                    set_number(target, Dtype::bf16, (k / 2 * kPanel + lane) * 2 + k % 2, number(source, dtype, k));
                return;
            case Format::f16:
                for (std::int64_t k = 0; k < cols; ++k)
                    set_number(target, Dtype::f16, k * kPanel + lane, number(source, dtype, k));
                return;
            default: break;
        }
        float highest = 0;
        for (std::int64_t k = 0; k < cols; ++k) highest = std::max(highest, std::fabs(number(source, dtype, k)));
        const float scale = highest / 127, inverse = highest > 0 ? 127 / highest : 0;
        auto *values = reinterpret_cast<std::int8_t *>(scratch);
        for (std::int64_t k = 0; k < cols; ++k) {
            const float level = std::nearbyint(number(source, dtype, k) * inverse);
            values[k] = static_cast<std::int8_t>(std::clamp(level, -127.0f, 127.0f));
        }
        write_int8_row(row, values, scale);
    });
    if (bad_row >= 0)
        throw std::invalid_argument("row " + std::to_string(bad_row.load()) + " holds a NaN or an infinity");
}

void PackedWeight::write_int8_row(std::int64_t row, const std::int8_t *values, float scale) {
    char *target = panel(row);
    std::int32_t total = 0;
    for (std::int64_t k = 0; k < weight_.cols; ++k) {
        target[(k / 4 * kPanel + row % kPanel) * 4 + kByteOf[k % 4]] = static_cast<char>(values[k]);
        total += values[k];
    }
    const_cast<float *>(weight_.scales)[row] = scale;
    const_cast<std::int32_t *>(weight_.sums)[row] = total;
}

void PackedWeight::write_int8(std::int64_t start, std::int64_t num_rows, const std::int8_t *values,
                              const float *scales) {
    check_rows(start, num_rows);
    if (weight_.format != Format::i8) throw std::invalid_argument("the weight is not of format i8");
    const std::int64_t cols = weight_.cols;
    if (std::find(values, values + num_rows * cols, std::int8_t{-128}) != values + num_rows * cols)
        throw std::invalid_argument("int8 weights must lie in [-127, 127], got -128");
    for_rows(start, num_rows, 0, [&](std::int64_t row, char *) {
        write_int8_row(row, values + (row - start) * cols, scales[row - start]);
    });
}

void PackedWeight::write_blocks(std::int64_t start, std::int64_t num_rows, const std::uint8_t *blocks) {
    check_rows(start, num_rows);
    const Format format = weight_.format;
    if (!is_gguf(format)) throw std::invalid_argument("the weight is not of a GGUF block format");
    const BlockShape shape = BlockShape::of(format);
    const std::int64_t num_blocks = weight_.cols / weight_.group, stride = shape.group_bytes(weight_.group);
    for_rows(start, num_rows, 0, [&](std::int64_t row, char *) {
        const std::uint8_t *source = blocks + (row - start) * num_blocks * shape.file_bytes;
        for (std::int64_t g = 0; g < num_blocks; ++g)
            write_block(format, source + g * shape.file_bytes, panel(row) + g * stride, row % kPanel);
    });
}

void PackedWeight::write_int4(std::int64_t start, std::int64_t num_rows, const std::uint8_t *values,
                              const float *scales, const float *offsets) {
    check_rows(start, num_rows);
    if (weight_.format != Format::w4) throw std::invalid_argument("the weight is not of format w4");
    const std::int64_t cols = weight_.cols, group = weight_.group, num_groups = weight_.padded_cols / group;
    if (std::any_of(values, values + num_rows * cols, [](std::uint8_t value) { return value > 15; }))
        throw std::invalid_argument("int4 weights must lie in [0, 15]");
    for_rows(start, num_rows, 0, [&](std::int64_t row, char *) {
        const std::int64_t lane = row % kPanel;
        const BlockShape shape = BlockShape::of(Format::w4);
        const std::uint8_t *row_values = values + (row - start) * cols;
        for (std::int64_t g = 0; g < num_groups; ++g) {
            char *target = panel(row) + g * shape.group_bytes(group);
            std::memcpy(target + lane * 4, scales + (row - start) * num_groups + g, 4);
            std::memcpy(target + (kPanel + lane) * 4, offsets + (row - start) * num_groups + g, 4);
            target += shape.group_head_bytes;
            for (std::int64_t k = g * group; k < std::min(cols, (g + 1) * group); k += kPieceColumns) {
                std::uint8_t piece[kPieceColumns] = {};
                std::copy(row_values + k, row_values + std::min(cols, k + kPieceColumns), piece);
                write_integers(shape.bits, piece, target + k % group / kPieceColumns * shape.piece_bytes, lane);
            }
        }
    });
}

void PackedWeight::read_row(std::int64_t row, float *out) const {
    check_rows(row, 1);
    const char *source = panel(row);
    const std::int64_t lane = row % kPanel, cols = weight_.cols;
    const Format format = weight_.format;
    if (format == Format::f32 || format == Format::f16) {
        const Dtype dtype = format == Format::f32 ? Dtype::f32 : Dtype::f16;
        for (std::int64_t k = 0; k < cols; ++k) out[k] = number(source, dtype, k * kPanel + lane);
        return;
    }
    if (format == Format::bf16) {
        for (std::int64_t k = 0; k < cols; ++k)
            out[k] = number(source, Dtype::bf16, (k / 2 * kPanel + lane) * 2 + k % 2);
        return;
    }
    if (format == Format::i8) {
        for (std::int64_t k = 0; k < cols; ++k) {
            const char value = source[(k / 4 * kPanel + lane) * 4 + kByteOf[k % 4]];
            out[k] = static_cast<float>(static_cast<std::int8_t>(value)) * weight_.scales[row];
        }
        return;
    }
    read_block_row(weight_, source, lane, out);
}

}  // namespace headrace
