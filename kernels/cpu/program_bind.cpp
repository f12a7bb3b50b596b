// Python's side of Program.
#include "program.h"

#include <cstring>

#include "border.h"

namespace headrace {
namespace {

using IntList = std::vector<Ints>;
using TableList = std::vector<Ints2>;
using FloatList = std::vector<float>;

View make_view(std::int64_t offset, std::int64_t cols, std::int64_t stride, const std::string &dtype,
               const std::string &rows) {
    if (rows != "tokens" && rows != "logits") refuse("rows must be 'tokens' or 'logits', got '" + rows + "'");
    return {offset, cols, stride, dtype_named(dtype), rows == "tokens" ? Rows::tokens : Rows::logits};
}

void run(Program &program, Ints input_ids, Ints positions, Ints query_start_loc, Ints seq_lens,
         const TableList &block_tables, const IntList &slot_mappings, Ints logits_indices,
         std::optional<Ints> rope_rows) {
    Step step{};
    step.num_tokens = dim(input_ids, 0);
    step.num_reqs = dim(seq_lens, 0);
    step.num_logits = dim(logits_indices, 0);
    want(positions, "positions", {step.num_tokens});
    want(query_start_loc, "query_start_loc", {step.num_reqs + 1});
    step.input_ids = input_ids.data();
    step.positions = positions.data();
    step.query_start_loc = query_start_loc.data();
    step.seq_lens = seq_lens.data();
    step.logits_indices = logits_indices.data();
    if (rope_rows) {
        want(*rope_rows, "rope_rows", {step.num_tokens});
        step.rope_rows = rope_rows->data();
    }
    for (const Ints2 &table : block_tables) {
        want(table, "block_table", {step.num_reqs, -1});
        step.block_tables.push_back(table.data());
        step.max_num_blocks.push_back(dim(table, 1));
    }
    for (const Ints &slots : slot_mappings) {
        want(slots, "slot_mapping", {step.num_tokens});
        step.slot_mappings.push_back(slots.data());
    }
    nb::gil_scoped_release release;
    program.run(step);
}

void read(const Program &program, Out out, const View &view) {
    want(out, "out", {-1, view.cols});
    if (dtype_of(out, "out") != view.dtype) refuse("out must have the dtype of the value");
    const auto size = static_cast<std::size_t>(view.dtype == Dtype::f32 ? 4 : 2);
    const std::size_t row = static_cast<std::size_t>(view.cols) * size;
    for (std::size_t i = 0; i < out.shape(0); ++i)
        std::memcpy(static_cast<char *>(out.data()) + i * row,
                    program.data(view) + i * static_cast<std::size_t>(view.stride) * size, row);
}

}  // namespace

void bind_program(nb::module_ &m) {
    nb::class_<View>(m, "View")
        .def("__init__",
             [](View *self, std::int64_t offset, std::int64_t cols, std::int64_t stride, const std::string &dtype,
                const std::string &rows) { new (self) View(make_view(offset, cols, stride, dtype, rows)); },
             "offset"_a, "cols"_a, "stride"_a, "dtype"_a, "rows"_a = "tokens");

    nb::class_<Program>(m, "Program")
        .def(nb::init<std::int64_t, std::int64_t, std::int64_t>(), "arena_bytes"_a, "max_tokens"_a, "max_logits"_a)
        .def_prop_ro("num_records", &Program::num_records)
        .def_prop_ro(
            "arena",
            [](Program &p) {
                return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(p.arena(), {p.arena_bytes()}, nb::find(&p));
            },
            nb::rv_policy::reference)
        .def("embedding", &Program::embedding, "out"_a, "weight"_a, "of_positions"_a = false, nb::keep_alive<1, 3>())
        .def("linear", &Program::linear, "out"_a, "x"_a, "weight"_a, "bias"_a = FloatList{}, "quantize_x"_a = false,
             nb::keep_alive<1, 4>())
        .def("rms_norm", &Program::rms_norm, "out"_a, "x"_a, "n"_a, "weight"_a, "eps"_a)
        .def("add_rms_norm", &Program::add_rms_norm, "out"_a, "total"_a, "x"_a, "residual"_a, "weight"_a, "eps"_a)
        .def("layer_norm", &Program::layer_norm, "out"_a, "x"_a, "weight"_a, "bias"_a, "eps"_a)
        .def("rotary_angles", &Program::rotary_angles, "cos"_a, "sin"_a, "inv_freq"_a, "attention_factors"_a)
        .def("rope", &Program::rope, "out"_a, "x"_a, "cos"_a, "sin"_a, "head_dim"_a, "interleaved"_a = false)
        .def("act",
             [](Program &p, const View &out, const View &x, const std::string &activation) {
                 p.act(out, x, activation_named(activation), false);
             },
             "out"_a, "x"_a, "activation"_a)
        .def("act_mul",
             [](Program &p, const View &out, const View &x, const std::string &activation) {
                 p.act(out, x, activation_named(activation), true);
             },
             "out"_a, "x"_a, "activation"_a)
        .def("add", &Program::add, "out"_a, "x"_a, "y"_a)
        .def("scale", &Program::scale, "out"_a, "x"_a, "factor"_a)
        .def("softcap", &Program::softcap, "out"_a, "x"_a, "cap"_a)
        .def("cast", &Program::cast, "out"_a, "x"_a)
        .def("gather", &Program::gather, "out"_a, "x"_a)
        .def("write_kv", &Program::write_kv, "kv_cache"_a, "key"_a, "value"_a, "group"_a = 0, nb::keep_alive<1, 2>())
        .def("paged_attention", &Program::attention, "out"_a, "query"_a, "kv_cache"_a, "group"_a, "scale"_a,
             "window"_a = 0, "softcap"_a = 0.0f, "sinks"_a = FloatList{}, "alibi_slopes"_a = FloatList{},
             nb::keep_alive<1, 4>())
        .def("call",
             [](Program &p, nb::callable function) {
                 p.call([function](const Step &) {
                     nb::gil_scoped_acquire acquire;
                     function();
                 });
             },
             "function"_a)
        .def("run", &run, nb::arg("input_ids").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("query_start_loc").noconvert(), nb::arg("seq_lens").noconvert(), "block_tables"_a,
             "slot_mappings"_a, nb::arg("logits_indices").noconvert(),
             nb::arg("rope_rows").noconvert() = nb::none())
        .def("read", &read, nb::arg("out").noconvert(), "view"_a);
}

}  // namespace headrace
