// Python's side of Program.
#include "program.h"

#include <cstring>

#include "border.h"

namespace headrace {
namespace {

using IntList = std::vector<Ints>;
using TableList = std::vector<Ints2>;
using FloatList = std::vector<float>;

// The value that `name` stands for.
template <class Value, std::size_t n>
Value named(const std::pair<const char *, Value> (&names)[n], const char *what, const std::string &name) {
    std::string known;
    for (const auto &[text, value] : names) {
        if (name == text) return value;
        known += std::string(known.empty() ? "'" : ", '") + text + "'";
    }
    refuse(std::string(what) + " must be one of " + known + ", got '" + name + "'");
}

View make_view(std::int64_t offset, std::int64_t cols, std::int64_t stride, const std::string &dtype,
               const std::string &rows) {
    static const std::pair<const char *, Rows> names[] = {
        {"tokens", Rows::tokens}, {"logits", Rows::logits}, {"chunk", Rows::chunk}};
    return {offset, cols, stride, dtype_named(dtype), named(names, "rows", rows)};
}

void attention(Program &program, const View &out, const View &query, const KVMemory &memory, std::int64_t group,
               float scale, std::int64_t window, float softcap, FloatList sinks, FloatList alibi_slopes,
               FloatList relative_bias, const std::string &sees, std::int64_t chunk) {
    static const std::pair<const char *, Sees> names[] = {
        {"past", Sees::past}, {"ahead", Sees::ahead}, {"all", Sees::all}, {"encoder", Sees::encoder}};
    program.attention(out, query, memory, group,
                      {scale, window, softcap, std::move(sinks), std::move(alibi_slopes), std::move(relative_bias),
                       named(names, "sees", sees), chunk});
}

void route_experts(Program &program, const View &weights, const View &experts, const View &logits,
                   FloatList correction, const std::string &score, bool renormalize, float weight_scale,
                   std::int64_t num_groups, std::int64_t num_open_groups, bool scores_top2) {
    static const std::pair<const char *, RouterScore> names[] = {{"softmax", RouterScore::softmax},
                                                                 {"sigmoid", RouterScore::sigmoid},
                                                                 {"sparsemixer", RouterScore::sparsemixer}};
    RouteArgs options{};
    options.num_experts = logits.cols;
    options.num_chosen = experts.cols;
    options.score = named(names, "score", score);
    options.renormalize = renormalize;
    options.weight_scale = weight_scale;
    options.num_groups = num_groups;
    options.num_open_groups = num_open_groups;
    options.scores_top2 = scores_top2;
    program.route_experts(weights, experts, logits, std::move(correction), options);
}

void grouped_experts(Program &program, const View &out, const View &x, const View &weights, const View &experts,
                     const std::vector<View> &buffers, const Stack &up, const Stack &down, FloatList up_bias,
                     FloatList down_bias, const std::string &activation, bool is_gated, float clamp, float alpha) {
    if (buffers.size() != 3 && buffers.size() != 4) refuse("buffers must be inner, activated, outputs and maybe scaled");
    const bool scales_input = buffers.size() == 4;
    program.grouped_experts(out, x, weights, experts,
                            {buffers[0], buffers[1], buffers[2], scales_input ? buffers[3] : View{}}, up, down,
                            {std::move(up_bias), std::move(down_bias), activation_named(activation), is_gated, clamp,
                             alpha, scales_input});
}

// y: a value, or a factor for each column.
void modulate(Program &program, const View &out, const View &x, std::variant<View, FloatList> y, bool is_gate) {
    if (const View *view = std::get_if<View>(&y)) return program.modulate(out, x, view, {}, is_gate);
    program.modulate(out, x, nullptr, std::get<FloatList>(std::move(y)), is_gate);
}

States states_of(const Out &array, std::int64_t group) {
    if (array.ndim() < 2) refuse("states must be an array of at least two axes");
    const auto slots = dim(array, 0), size = static_cast<std::int64_t>(array.size());
    return {array.data(), dtype_of(array, "states"), slots, slots == 0 ? 0 : size / slots, group};
}

void place_rows(Program &program, const View &out, const View &x, const In &rows, std::int64_t column, bool is_sum) {
    want(rows, "rows", {-1, -1});
    program.place_rows(out, x, {rows.data(), dtype_of(rows, "rows"), dim(rows, 0), dim(rows, 1), column}, is_sum);
}

void causal_conv(Program &program, const View &out, const View &x, Out states, std::int64_t group, FloatList weight,
                 FloatList bias, std::int64_t width, bool is_silu) {
    program.causal_conv(out, x, states_of(states, group), std::move(weight), std::move(bias), width, is_silu);
}

void selective_scan(Program &program, const View &out, const std::vector<View> &in, Out states, std::int64_t group,
                    std::int64_t num_heads, std::int64_t num_groups, FloatList rates, FloatList d, FloatList dt_bias,
                    float dt_min, float dt_max) {
    if (in.size() != 4) refuse("inputs must be x, dt, b and c");
    program.selective_scan(out, {in[0], in[1], in[2], in[3]}, states_of(states, group), num_heads, num_groups,
                           std::move(rates), std::move(d), std::move(dt_bias), dt_min, dt_max);
}

void gated_delta(Program &program, const View &out, const std::vector<View> &in, Out states, std::int64_t group,
                 std::int64_t num_heads, std::int64_t num_key_heads, FloatList rates, FloatList dt_bias,
                 float beta_scale) {
    if (in.size() != 5) refuse("inputs must be query, key, value, dt and beta");
    program.gated_delta(out, {in[0], in[1], in[2], in[3], in[4]}, states_of(states, group), num_heads, num_key_heads,
                        std::move(rates), std::move(dt_bias), beta_scale);
}

void wkv(Program &program, const View &out, const std::vector<View> &in, Out states, std::int64_t group,
         FloatList rates, FloatList bonus) {
    if (in.size() != 2) refuse("inputs must be key and value");
    program.wkv(out, in[0], in[1], states_of(states, group), std::move(rates), std::move(bonus));
}

void run(Program &program, Ints input_ids, Ints positions, Ints query_start_loc, Ints seq_lens,
         const TableList &block_tables, const IntList &slot_mappings, Ints logits_indices,
         std::optional<Ints> rope_rows, std::optional<Ints> token_types, std::optional<Ints> encoder_lens,
         std::optional<std::pair<Ints, Ints>> ranges, std::optional<Floats2> features, const TableList &windows,
         std::optional<Ints> reach, std::optional<Ints> image_rows, std::optional<Ints2> rope_positions) {
    Step step{};
    step.num_tokens = dim(input_ids, 0);
    step.num_reqs = dim(seq_lens, 0);
    step.num_logits = dim(ranges ? ranges->first : logits_indices, 0);
    want(positions, "positions", {step.num_tokens});
    want(query_start_loc, "query_start_loc", {step.num_reqs + 1});
    step.input_ids = input_ids.data();
    step.positions = positions.data();
    step.query_start_loc = query_start_loc.data();
    step.seq_lens = seq_lens.data();
    step.logits_indices = logits_indices.data();
    const auto optional = [](const std::optional<Ints> &array, const char *name, std::int64_t size) {
        if (array) want(*array, name, {size});
        return array ? array->data() : nullptr;
    };
    step.rope_rows = optional(rope_rows, "rope_rows", step.num_tokens);
    step.token_types = optional(token_types, "token_types", step.num_tokens);
    step.encoder_lens = optional(encoder_lens, "encoder_lens", step.num_reqs);
    step.reach = optional(reach, "reach", step.num_tokens);
    step.image_rows = optional(image_rows, "image_rows", step.num_tokens);
    if (rope_positions) {
        want(*rope_positions, "rope_positions", {step.num_tokens, -1});
        step.rope_positions = rope_positions->data();
        step.num_axes = dim(*rope_positions, 1);
    }
    if (ranges) {
        want(ranges->second, "ends", {step.num_logits});
        step.starts = ranges->first.data();
        step.ends = ranges->second.data();
    }
    if (features) {  // an encoder has no logits, and as many rows of that kind as it has frames
        step.num_logits = dim(*features, 0);
        step.logits_indices = nullptr;
        step.features = features->data();
        step.num_features = dim(*features, 1);
    }
    for (const Ints2 &rows : windows) step.windows.push_back({rows.data(), dim(rows, 0), dim(rows, 1)});
    for (const Ints2 &table : block_tables) {
        want(table, "block_table", {step.num_reqs, -1});
        step.block_tables.push_back(table.data());
        step.max_num_blocks.push_back(dim(table, 1));
    }
    for (const Ints &slots : slot_mappings) {
        const bool is_none = dim(slots, 0) == 0;  // of a group that the step writes nothing into
        if (!is_none) want(slots, "slot_mapping", {step.num_tokens});
        step.slot_mappings.push_back(is_none ? nullptr : slots.data());
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
    m.attr("OWN_ROWS") = kOwnRows;
    m.attr("MAX_DISTANCE") = kMaxDistance;
    m.attr("CHUNK_TOKENS") = kChunkTokens;
    m.attr("PANEL_ROWS") = kPanel;

    nb::class_<View>(m, "View")
        .def("__init__",
             [](View *self, std::int64_t offset, std::int64_t cols, std::int64_t stride, const std::string &dtype,
                const std::string &rows) { new (self) View(make_view(offset, cols, stride, dtype, rows)); },
             "offset"_a, "cols"_a, "stride"_a, "dtype"_a, "rows"_a = "tokens");

    nb::class_<Stack>(m, "Stack")
        .def("__init__",
             [](Stack *self, const PackedWeight &weight, std::int64_t num_matrices, std::int64_t rows,
                bool quantize_x) { new (self) Stack{&weight, num_matrices, rows, quantize_x}; },
             "weight"_a, "num_matrices"_a, "rows"_a, "quantize_x"_a = false, nb::keep_alive<1, 2>());

    nb::class_<Program>(m, "Program")
        .def(nb::init<std::int64_t, std::int64_t, std::int64_t>(), "arena_bytes"_a, "max_tokens"_a, "max_logits"_a)
        .def_prop_ro("num_records", &Program::num_records)
        .def_prop_ro(
            "arena",
            [](Program &p) {
                return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(p.arena(), {p.arena_bytes()}, nb::find(&p));
            },
            nb::rv_policy::reference)
        .def("embedding",
             [](Program &p, const View &out, const PackedWeight &weight, const std::string &of) {
                 static const std::pair<const char *, Ids> names[] = {{"input_ids", Ids::input_ids},
                                                                      {"positions", Ids::positions},
                                                                      {"token_types", Ids::token_types}};
                 p.embedding(out, weight, named(names, "of", of));
             },
             "out"_a, "weight"_a, "of"_a = "input_ids", nb::keep_alive<1, 3>())
        .def("linear", &Program::linear, "out"_a, "x"_a, "weight"_a, "bias"_a = FloatList{}, "quantize_x"_a = false,
             nb::keep_alive<1, 4>())
        .def("rms_norm", &Program::rms_norm, "out"_a, "x"_a, "n"_a, "weight"_a, "eps"_a)
        .def("add_rms_norm", &Program::add_rms_norm, "out"_a, "total"_a, "x"_a, "residual"_a, "weight"_a, "eps"_a)
        .def("layer_norm", &Program::layer_norm, "out"_a, "x"_a, "n"_a, "weight"_a, "bias"_a, "eps"_a)
        .def("rotary_angles", &Program::rotary_angles, "cos"_a, "sin"_a, "inv_freq"_a, "attention_factors"_a,
             "axes"_a = std::vector<std::int64_t>{})
        .def("rope", &Program::rope, "out"_a, "x"_a, "cos"_a, "sin"_a, "head_dim"_a, "head_stride"_a,
             "interleaved"_a = false)
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
        .def("clamp", &Program::clamp, "out"_a, "x"_a, "limit"_a)
        .def("xielu", &Program::xielu, "out"_a, "x"_a, "alpha_p"_a, "alpha_n"_a)
        .def("modulate", &modulate, "out"_a, "x"_a, "y"_a, "is_gate"_a)
        .def("magnitude", &Program::magnitude, "out"_a, "x"_a, "is_centred"_a)
        .def("log_growth", &Program::log_growth, "out"_a, "factor"_a, "length"_a, "shift"_a)
        .def("features", &Program::features, "out"_a)
        .def("stack_rows", &Program::stack_rows, "out"_a, "x"_a, "number"_a, "width"_a)
        .def("copy_heads", &Program::copy_heads, "out"_a, "x"_a, "num_heads"_a, "head_dim"_a, "x_step"_a, "out_step"_a)
        .def("causal_conv", &causal_conv, "out"_a, "x"_a, "states"_a, "group"_a, "weight"_a, "bias"_a, "width"_a,
             "is_silu"_a, nb::keep_alive<1, 4>())
        .def("selective_scan", &selective_scan, "out"_a, "inputs"_a, "states"_a, "group"_a, "num_heads"_a,
             "num_groups"_a, "rates"_a, "d"_a, "dt_bias"_a, "dt_min"_a, "dt_max"_a, nb::keep_alive<1, 4>())
        .def("gated_delta", &gated_delta, "out"_a, "inputs"_a, "states"_a, "group"_a, "num_heads"_a,
             "num_key_heads"_a, "rates"_a, "dt_bias"_a, "beta_scale"_a, nb::keep_alive<1, 4>())
        .def("wkv", &wkv, "out"_a, "inputs"_a, "states"_a, "group"_a, "rates"_a, "bonus"_a, nb::keep_alive<1, 4>())
        .def("lru_inputs", &Program::lru_inputs, "taken"_a, "dt"_a, "one"_a, "x"_a, "input_gates"_a, "decay_gates"_a,
             "input_bias"_a, "decay_bias"_a, "log_rate"_a)
        .def("gather", &Program::gather, "out"_a, "x"_a)
        .def("place_rows", &place_rows, "out"_a, "x"_a, nb::arg("rows").noconvert(), "column"_a, "is_sum"_a,
             nb::keep_alive<1, 4>())
        .def("write_kv", &Program::write_kv, "kv_cache"_a, "key"_a, "value"_a, "group"_a = 0, nb::keep_alive<1, 2>())
        .def("mean_rows", &Program::mean_rows, "out"_a, "x"_a)
        .def("paged_attention", &attention, "out"_a, "query"_a, "kv_cache"_a, "group"_a, "scale"_a, "window"_a = 0,
             "softcap"_a = 0.0f, "sinks"_a = FloatList{}, "alibi_slopes"_a = FloatList{},
             "relative_bias"_a = FloatList{}, "sees"_a = "past", "chunk"_a = 0,
             nb::keep_alive<1, 4>())
        .def("linear_heads", &Program::linear_heads, "out"_a, "x"_a, "stack"_a, "x_step"_a, "out_step"_a,
             nb::keep_alive<1, 4>())
        .def("route_experts", &route_experts, "weights"_a, "experts"_a, "logits"_a, "correction"_a = FloatList{},
             "score"_a = "softmax", "renormalize"_a = true, "weight_scale"_a = 1.0f, "num_groups"_a = 1,
             "num_open_groups"_a = 1, "scores_top2"_a = true)
        .def("part_identities", &Program::part_identities, "weights"_a, "experts"_a, "share_of"_a, "from_weights"_a,
             "from_experts"_a, "num_experts"_a)
        .def("grouped_experts", &grouped_experts, "out"_a, "x"_a, "weights"_a, "experts"_a, "buffers"_a, "up"_a,
             "down"_a, "up_bias"_a = FloatList{}, "down_bias"_a = FloatList{}, "activation"_a = "silu",
             "is_gated"_a = true, "clamp"_a = 0.0f, "alpha"_a = 1.702f, nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>())
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
             nb::arg("rope_rows").noconvert() = nb::none(), nb::arg("token_types").noconvert() = nb::none(),
             nb::arg("encoder_lens").noconvert() = nb::none(), "ranges"_a = nb::none(),
             "features"_a = nb::none(), "windows"_a = TableList{},
             nb::arg("reach").noconvert() = nb::none(), nb::arg("image_rows").noconvert() = nb::none(),
             nb::arg("rope_positions").noconvert() = nb::none())
        .def("read", &read, nb::arg("out").noconvert(), "view"_a);
}

}  // namespace headrace
