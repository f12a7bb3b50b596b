// The records of what is done number by number, and of numbers that change their place.
#include <cmath>
#include <cstring>
#include <utility>

#include "convert.h"
#include "isa.h"
#include "program_checks.h"

namespace headrace {

// Activations of so many numbers at most are done by each thread for itself, as norms are (program.cpp).
static constexpr std::int64_t kPrivateActivations = 4096;

// How act and elementwise split a row. Pieces are not as even as heads are: a number of their own.
std::int64_t Program::pieces_of(const View &view) {
    return view.cols <= kPiece ? 1 : -((view.cols + kPiece - 1) / kPiece);
}

void Program::act(const View &out, const View &x, Activation activation, bool is_gated) {
    check(x, x.cols);
    check(out, is_gated ? x.cols / 2 : x.cols);
    want_same(out, x, "out and x");
    want_dense(x, "x");
    want_dense(out, "out");
    if (is_gated && x.cols % 2 != 0) refuse("gate and up do not have the same number of columns");
    const ActArgs args{at(x), at(out), x.dtype, activation, 0, out.cols, is_gated, 0, 0};
    const Kernels &table = kernels();
    const Accesses accesses{reads(x, is_gated ? 0 : pieces_of(x)), writes(out, pieces_of(out))};
    Prologue last{
        [=, &table](const Step &step, void *to, void *, const Context &context) {
            ActArgs now = args;
            now.out = to;
            now.num_tokens = step.rows_of(x.rows);
            table.act(now, context);
        },
        out, nullptr, accesses, since_barrier_, kPrivateActivations / out.cols};
    char *to = at(out);
    add_record([=, run = last.run](const Step &step, const Context &context) { run(step, to, nullptr, context); }, accesses);
    prologue_ = std::move(last);
}

void Program::elementwise(Elementwise op, const View &out, const View &x, const View *y, float factor,
                          float second_factor) {
    check(x, x.cols);
    check(out, x.cols);
    if (out.rows != x.rows) refuse("out and x must have the same rows");
    const std::int64_t pieces = pieces_of(x);
    Accesses accesses{reads(x, pieces), writes(out, pieces)};
    if (y != nullptr) accesses.push_back(reads(*y, pieces));
    const ElementwiseArgs args{op, at(x), y == nullptr ? nullptr : at(*y), at(out), x.dtype, out.dtype, 0, x.cols,
                               x.stride, y == nullptr ? 0 : y->stride, out.stride, factor, second_factor};
    const Kernels &table = kernels();
    add_record(
        [=, &table](const Step &step, const Context &context) {
            ElementwiseArgs now = args;
            now.num_rows = step.rows_of(x.rows);
            table.elementwise(now, context);
        },
        accesses);
}

void Program::scale(const View &out, const View &x, float factor) {
    std::uint8_t rounded[4];
    set_number(rounded, x.dtype, 0, factor);  // as the definition holds it
    elementwise(Elementwise::scale, out, x, nullptr, number(rounded, x.dtype, 0));
}

void Program::softcap(const View &out, const View &x, float cap) {
    elementwise(Elementwise::softcap, out, x, nullptr, cap);
}

void Program::cast(const View &out, const View &x) { elementwise(Elementwise::copy, out, x, nullptr, 0); }

void Program::add(const View &out, const View &x, const View &y) {
    for (const View *view : {&out, &y}) {
        check(*view, x.cols);
        want_same(*view, x, "out, x and y");
    }
    elementwise(Elementwise::add, out, x, &y, 0);
}

void Program::clamp(const View &out, const View &x, float limit) {
    std::uint8_t rounded[4];
    set_number(rounded, x.dtype, 0, limit);
    elementwise(Elementwise::clamp, out, x, nullptr, number(rounded, x.dtype, 0));
}

void Program::xielu(const View &out, const View &x, float alpha_p, float alpha_n) {
    const auto softplus = [](float value) { return value > 20 ? value : std::log1p(std::exp(value)); };
    elementwise(Elementwise::xielu, out, x, nullptr, softplus(alpha_p), softplus(alpha_n));
}

void Program::modulate(const View &out, const View &x, const View *y, std::vector<float> factors, bool is_gate) {
    check(x, x.cols);
    check(out, x.cols);
    want_same(out, x, "out and x");
    want_dense(out, "out");
    ModulateArgs args{};
    args.is_gate = is_gate;
    args.x = at(x);
    args.out = at(out);
    args.dtype = x.dtype;
    args.y_dtype = Dtype::f32;
    args.n = x.cols;
    args.x_stride = x.stride;
    const std::int64_t pieces = pieces_of(x);
    Accesses accesses{reads(x, pieces), writes(out, pieces)};
    if (y == nullptr) {
        if (static_cast<std::int64_t>(factors.size()) != x.cols) refuse("there must be a factor for each column of x");
    } else {
        if (y->cols < 1 || x.cols % y->cols != 0) refuse("each number of y must serve as many columns of x");
        args.y_span = x.cols / y->cols;
        check(*y, y->cols);
        if (y->rows != x.rows || (y->dtype != x.dtype && y->dtype != Dtype::f32))
            refuse("y must have the rows of x, and its dtype or float32");
        args.y = at(*y);
        args.y_dtype = y->dtype;
        args.y_stride = y->stride;
        accesses.push_back(reads(*y, args.y_span > 1 ? 0 : pieces));
    }
    const Kernels &table = kernels();
    add_record(
        [=, &table, factors = std::move(factors)](const Step &step, const Context &context) {
            ModulateArgs now = args;
            if (!factors.empty()) now.y = factors.data();
            now.num_rows = step.rows_of(x.rows);
            table.modulate(now, context);
        },
        accesses);
}

void Program::magnitude(const View &out, const View &x, bool is_centred) {
    check(x, x.cols);
    check(out, 1);
    if (out.dtype != Dtype::f32 || out.rows != x.rows) refuse("a magnitude is in float32, one of each row of x");
    MagnitudeArgs args{at(x), reinterpret_cast<float *>(at(out)), x.dtype, 0, x.cols, x.stride, out.stride, is_centred};
    const Kernels &table = kernels();
    add_record(
        [=, &table](const Step &step, const Context &context) {
            MagnitudeArgs now = args;
            now.num_rows = step.rows_of(x.rows);
            table.magnitude(now, context);
        },
        {reads(x), writes(out, 1)});
}

void Program::log_growth(const View &out, float factor, std::int64_t length, std::int64_t shift) {
    check(out, 1);
    if (out.dtype != Dtype::f32 || out.rows != Rows::tokens || length < 1)
        refuse("log_growth is in float32, a number a token, by lengths of at least one");
    auto *numbers = reinterpret_cast<float *>(at(out));
    add_record(
        [=](const Step &step, const Context &context) {
            std::int64_t begin, end;
            share(step.num_tokens, context, &begin, &end);
            for (std::int64_t i = begin; i < end; ++i) {
                const std::int64_t steps = (step.positions[i] + shift) / length;
                numbers[i * out.stride] = 1 + factor * std::log1p(static_cast<float>(steps));
            }
        },
        {writes(out, 1)});
}

void Program::features(const View &out) {
    check(out, out.cols);
    if (out.rows != Rows::logits) refuse("features are rows of logits");
    num_features_ = out.cols;
    char *data = at(out);
    add_record(
        [=](const Step &step, const Context &context) {
            std::int64_t begin, end;
            share(step.num_logits, context, &begin, &end);
            for (std::int64_t i = begin; i < end; ++i)
                for (std::int64_t k = 0; k < out.cols; ++k)
                    set_number(data, out.dtype, i * out.stride + k, step.features[i * out.cols + k]);
        },
        {writes(out, 1)});
}

void Program::stack_rows(const View &out, const View &x, std::int64_t number, std::int64_t width) {
    check(x, x.cols);
    check(out, x.cols * width);
    if (out.dtype != x.dtype || number < 0) refuse("out and x must have the same dtype, and windows a number");
    windows_.push_back({number, width, x.rows, out.rows});
    const std::int64_t size = bytes_of(x.dtype);
    const auto row_bytes = static_cast<std::size_t>(x.cols * size);
    add_record(
        [=, this](const Step &step, const Context &context) {
            std::int64_t begin, end;
            share(step.rows_of(out.rows), context, &begin, &end);
            const std::int32_t *rows = step.windows[static_cast<std::size_t>(number)].rows;
            for (std::int64_t i = begin; i < end; ++i)
                for (std::int64_t w = 0; w < width; ++w) {
                    char *to = at(out) + (i * out.stride + w * x.cols) * size;
                    const std::int64_t row = rows[i * width + w];
                    if (row < 0)
                        std::memset(to, 0, row_bytes);
                    else
                        std::memcpy(to, at(x) + row * x.stride * size, row_bytes);
                }
        },
        {reads(x), writes(out, 1)});
}

void Program::copy_heads(const View &out, const View &x, std::int64_t num_heads, std::int64_t head_dim,
                         std::int64_t x_step, std::int64_t out_step) {
    check(x, (num_heads - 1) * x_step + head_dim);
    check(out, (num_heads - 1) * out_step + head_dim);
    want_same(out, x, "out and x");
    if (num_heads < 1 || head_dim < 1 || x_step < 0 || out_step < head_dim) refuse("heads overlap");
    const std::int64_t size = bytes_of(x.dtype);
    add_record(
        [=, this](const Step &step, const Context &context) {
            std::int64_t begin, end;
            share(step.rows_of(x.rows) * num_heads, context, &begin, &end);
            for (std::int64_t item = begin; item < end; ++item) {
                const std::int64_t row = item / num_heads, head = item % num_heads;
                std::memcpy(at(out) + (row * out.stride + head * out_step) * size,
                            at(x) + (row * x.stride + head * x_step) * size,
                            static_cast<std::size_t>(head_dim * size));
            }
        },
        {reads(x), writes(out)});
}

}  // namespace headrace
