// The Python module headrace.kernels.cpu._ops: checks shapes and dtypes, releases the GIL, calls kernels.
//
// Arrays are numpy's. uint16 stands for bfloat16. Outputs come first and are written in place.
#include <cstring>

#include "attention_plan.h"
#include "block_shape.h"
#include "border.h"
#include "convert.h"
#include "isa.h"
#include "memory.h"
#include "numa.h"
#include "pack.h"
#include "prefault.h"
#include "sampling.h"
#include "thread_pool.h"

namespace headrace {

void bind_program(nb::module_ &m);  // program_bind.cpp

namespace {

// Rows and columns of an array whose last axis is the row.
template <class Array>
std::pair<std::int64_t, std::int64_t> rows_of(const Array &array, const char *name) {
    if (array.ndim() == 0) refuse(std::string(name) + " must have at least one axis");
    std::int64_t rows = 1;
    for (std::size_t i = 0; i + 1 < array.ndim(); ++i) rows *= dim(array, i);
    return {rows, dim(array, array.ndim() - 1)};
}

// ---- ops -----------------------------------------------------------------------------------------------------------

void linear(Out out, In x, const PackedWeight &weight, std::optional<Floats> bias, bool quantize_x) {
    const Weight &packed = weight.weight();
    want(x, "x", {-1, packed.cols});
    want(out, "out", {dim(x, 0), packed.rows});
    LinearArgs args{x.data(),    dtype_of(x, "x"), dim(x, 0),   packed, optional_floats(bias, "bias", packed.rows),
                    out.data(), packed.cols,      packed.rows, nullptr};
    want_same(out, "out", args.dtype);
    if (quantize_x && !has_blocks(packed.format)) refuse("quantize_x needs a weight of GGUF blocks or of int4");
    if (args.num_tokens == 0) return;
    const Kernels &table = kernels();
    nb::gil_scoped_release release;
    if (quantize_x)
        return parallel(table.linear_blocks_scratch(args), [&](const Context &c) { table.linear_blocks(args, c); });
    parallel(table.linear_scratch(args), [&](const Context &context) { table.linear(args, context); });
}

void embedding(Out out, Ints token_ids, const PackedWeight &weight) {
    const Weight &packed = weight.weight();
    const std::int64_t num_tokens = dim(token_ids, 0);
    want(out, "out", {num_tokens, packed.cols});
    const Dtype dtype = dtype_of(out, "out");
    const std::int32_t *ids = token_ids.data();
    for (std::int64_t i = 0; i < num_tokens; ++i)
        if (ids[i] < 0 || ids[i] >= packed.rows)
            refuse("token id " + std::to_string(ids[i]) + " at " + std::to_string(i) + " is not in [0, " +
                   std::to_string(packed.rows) + ")");
    nb::gil_scoped_release release;
    parallel(static_cast<std::size_t>(packed.cols) * sizeof(float), [&](const Context &context) {
        std::int64_t begin, end;
        share(num_tokens, context, &begin, &end);
        auto *row = reinterpret_cast<float *>(context.scratch);
        for (std::int64_t i = begin; i < end; ++i) {
            weight.read_row(ids[i], row);
            for (std::int64_t k = 0; k < packed.cols; ++k) set_number(out.data(), dtype, i * packed.cols + k, row[k]);
        }
    });
}

void norm(const NormArgs &args, void (*kernel)(const NormArgs &, const Context &)) {
    if (args.num_tokens == 0 || args.n == 0) return;
    nb::gil_scoped_release release;
    parallel(0, [&](const Context &context) { kernel(args, context); });
}

NormArgs norm_args(Out &out, const In &x, const std::optional<Floats> &weight, const std::optional<Floats> &bias,
                   float eps) {
    const auto [num_tokens, n] = rows_of(x, "x");
    if (rows_of(out, "out") != std::pair(num_tokens, n)) refuse("out must have the shape of x, " + shape_text(x));
    NormArgs args{};
    args.x = x.data();
    args.out = out.data();
    args.weight = optional_floats(weight, "weight", n);
    args.bias = optional_floats(bias, "bias", n);
    args.dtype = dtype_of(x, "x");
    want_same(out, "out", args.dtype);
    args.num_tokens = num_tokens;
    args.n = n;
    args.group = 1;
    args.x_stride = n;
    args.eps = eps;
    return args;
}

void rms_norm(Out out, In x, std::optional<Floats> weight, float eps) {
    norm(norm_args(out, x, weight, std::nullopt, eps), kernels().rms_norm);
}

void add_rms_norm(Out out, Out total, In x, In residual, std::optional<Floats> weight, float eps) {
    NormArgs args = norm_args(out, x, weight, std::nullopt, eps);
    if (rows_of(residual, "residual") != rows_of(x, "x") || rows_of(total, "total") != rows_of(x, "x"))
        refuse("residual and total must have the shape of x, " + shape_text(x));
    want_same(residual, "residual", args.dtype);
    want_same(total, "total", args.dtype);
    args.residual = residual.data();
    args.sum = total.data();
    norm(args, kernels().rms_norm);
}

void layer_norm(Out out, In x, std::optional<Floats> weight, std::optional<Floats> bias, float eps) {
    norm(norm_args(out, x, weight, bias, eps), kernels().layer_norm);
}

void rope(Out out, Strided x, Floats2 cos, Floats2 sin, bool interleaved) {
    RopeArgs args{};
    args.x_stride = token_stride(x, "x");
    args.x_head_stride = dim(x, 2);
    args.num_tokens = dim(x, 0);
    args.num_heads = dim(x, 1);
    args.head_dim = dim(x, 2);
    args.rotary_dim = 2 * dim(cos, 1);
    want(out, "out", {args.num_tokens, args.num_heads, args.head_dim});
    want(cos, "cos", {args.num_tokens, -1});
    want(sin, "sin", {args.num_tokens, dim(cos, 1)});
    if (args.rotary_dim > args.head_dim)
        refuse("rotary_dim " + std::to_string(args.rotary_dim) + " exceeds head_dim " + std::to_string(args.head_dim));
    args.x = x.data();
    args.out = out.data();
    args.cos = cos.data();
    args.sin = sin.data();
    args.dtype = dtype_of(x, "x");
    want_same(out, "out", args.dtype);
    args.interleaved = interleaved;
    const Kernels &table = kernels();
    nb::gil_scoped_release release;
    parallel(0, [&](const Context &context) { table.rope(args, context); });
}

void activate(Out &out, const In &x, const std::string &activation, bool is_gated) {
    const auto [num_tokens, width] = rows_of(x, "x");
    if (is_gated && width % 2 != 0) refuse("x must hold gate and up, its last axis is odd: " + shape_text(x));
    const std::int64_t n = is_gated ? width / 2 : width;
    if (rows_of(out, "out") != std::pair(num_tokens, n))
        refuse("out must be [" + std::to_string(num_tokens) + ", " + std::to_string(n) + "], got " + shape_text(out));
    const ActArgs args{x.data(), out.data(), dtype_of(x, "x"), activation_named(activation), num_tokens, n, is_gated, 0, 0};
    want_same(out, "out", args.dtype);
    const Kernels &table = kernels();
    nb::gil_scoped_release release;
    parallel(0, [&](const Context &context) { table.act(args, context); });
}

void act(Out out, In x, const std::string &activation) { activate(out, x, activation, false); }
void act_mul(Out out, In x, const std::string &activation) { activate(out, x, activation, true); }

void gather(Out out, In x, Ints indices) {
    if (x.ndim() < 1 || out.ndim() != x.ndim() || out.dtype() != x.dtype() || out.shape(0) != indices.shape(0))
        refuse("out must have the dtype of x and one row for each index");
    std::size_t row_bytes = x.itemsize();
    for (std::size_t i = 1; i < x.ndim(); ++i) {
        if (out.shape(i) != x.shape(i)) refuse("the rows of out must have the shape of those of x");
        row_bytes *= x.shape(i);
    }
    for (std::size_t i = 0; i < indices.shape(0); ++i)
        if (indices.data()[i] < 0 || indices.data()[i] >= dim(x, 0))
            refuse("index " + std::to_string(indices.data()[i]) + " is not in [0, " + std::to_string(x.shape(0)) + ")");
    nb::gil_scoped_release release;
    for (std::size_t i = 0; i < indices.shape(0); ++i)
        std::memcpy(static_cast<char *>(out.data()) + i * row_bytes,
                    static_cast<const char *>(x.data()) + static_cast<std::size_t>(indices.data()[i]) * row_bytes,
                    row_bytes);
}

void write_kv(KVMemory &memory, Strided key, Strided value, Ints slot_mapping) {
    const KVCache &cache = memory.cache();
    WriteKVArgs args{};
    args.cache = cache;
    args.num_tokens = dim(slot_mapping, 0);
    want(key, "key", {args.num_tokens, cache.num_kv_heads, cache.head_dim});
    want(value, "value", {args.num_tokens, cache.num_kv_heads, cache.head_dim});
    args.key_stride = token_stride(key, "key");
    args.value_stride = token_stride(value, "value");
    args.key = key.data();
    args.value = value.data();
    args.dtype = dtype_of(key, "key");
    want_same(value, "value", args.dtype);
    args.slot_mapping = slot_mapping.data();
    const std::int64_t num_slots = cache.num_blocks * cache.block_size;
    for (std::int64_t i = 0; i < args.num_tokens; ++i)
        if (args.slot_mapping[i] < -1 || args.slot_mapping[i] >= num_slots)
            refuse("slot " + std::to_string(args.slot_mapping[i]) + " of token " + std::to_string(i) +
                   " is not in [-1, " + std::to_string(num_slots) + ")");
    const Kernels &table = kernels();
    nb::gil_scoped_release release;
    parallel(0, [&](const Context &context) { table.write_kv(args, context); });
}

void paged_attention(Out out, Strided query, const KVMemory &memory, Ints query_start_loc, Ints seq_lens,
                     Ints2 block_table, float scale, std::int64_t window, float softcap, std::optional<Floats> sinks,
                     std::optional<Floats> alibi_slopes) {
    const KVCache &cache = memory.cache();
    AttentionArgs args{};
    args.cache = cache;
    args.query_stride = token_stride(query, "query");
    args.num_heads = dim(query, 1);
    want(query, "query", {-1, -1, cache.head_dim});
    want(out, "out", {dim(query, 0), args.num_heads, cache.head_dim});
    const std::int64_t num_reqs = dim(seq_lens, 0);
    want(query_start_loc, "query_start_loc", {num_reqs + 1});
    want(block_table, "block_table", {num_reqs, -1});
    if (args.num_heads == 0 || args.num_heads % cache.num_kv_heads != 0)
        refuse("num_heads " + std::to_string(args.num_heads) + " is no multiple of num_kv_heads " +
               std::to_string(cache.num_kv_heads));
    if (window < 0) refuse("window must not be negative, got " + std::to_string(window));
    args.query = query.data();
    args.out = out.data();
    args.dtype = dtype_of(query, "query");
    want_same(out, "out", args.dtype);
    args.block_table = block_table.data();
    args.max_num_blocks = dim(block_table, 1);
    args.scale = scale;
    args.softcap = softcap;
    args.window = window;
    args.sinks = optional_floats(sinks, "sinks", args.num_heads);
    args.alibi_slopes = optional_floats(alibi_slopes, "alibi_slopes", args.num_heads);
    args.reach = 1;
    const Kernels &table = kernels();
    nb::gil_scoped_release release;
    thread_local AttentionPlan plan;
    plan.make(args, query_start_loc.data(), seq_lens.data(), num_reqs, dim(query, 0), num_threads());
    parallel(table.attention_scratch(args), [&](const Context &context) { table.attention(args, context); });
}

void sample_tokens(nb::ndarray<std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out, Floats2 logits,
                   Ints seeds, Ints positions, std::optional<Floats> temperature, std::optional<Ints> top_k,
                   std::optional<Floats> top_p, std::optional<Floats> min_p) {
    const std::int64_t rows = dim(logits, 0);
    want(out, "out", {rows});
    want(seeds, "seeds", {rows});
    want(positions, "positions", {rows});
    if (top_k) want(*top_k, "top_k", {rows});
    if (dim(logits, 1) == 0) refuse("logits must have at least one token");
    const SampleArgs args{logits.data(),
                          rows,
                          dim(logits, 1),
                          seeds.data(),
                          positions.data(),
                          optional_floats(temperature, "temperature", rows),
                          top_k ? top_k->data() : nullptr,
                          optional_floats(top_p, "top_p", rows),
                          optional_floats(min_p, "min_p", rows),
                          out.data()};
    nb::gil_scoped_release release;
    sample(args);
}

void quantize(Out codes, Out scales, std::optional<Out> offsets, Floats2 x, bool is_symmetric, int bits) {
    QuantizeArgs args{};
    args.x = x.data();
    args.num_rows = dim(x, 0);
    args.cols = dim(x, 1);
    want(codes, "codes", {args.num_rows, args.cols});
    want(scales, "scales", {args.num_rows, -1});
    const bool has_offsets = offsets.has_value();
    if (bits != 4 && bits != 5) refuse("codes with offsets have 4 or 5 bits, got " + std::to_string(bits));
    if (codes.dtype() != (has_offsets ? nb::dtype<std::uint8_t>() : nb::dtype<std::int8_t>()))
        refuse("codes must be uint8 with offsets and int8 without");
    want_same(scales, "scales", Dtype::f32);
    const std::int64_t num_groups = dim(scales, 1);
    if (num_groups == 0 || args.cols % num_groups != 0 || (has_offsets && args.cols / num_groups > kMaxQuantizedGroup))
        refuse("scales must cut the columns into equal groups, of at most 256 with offsets, got " + shape_text(scales));
    args.group = args.cols / num_groups;
    if (has_offsets) {
        want(*offsets, "offsets", {args.num_rows, num_groups});
        want_same(*offsets, "offsets", Dtype::f32);
        args.offsets = static_cast<float *>(offsets->data());
    }
    args.bits = bits;
    args.is_symmetric = is_symmetric;
    args.codes = codes.data();
    args.scales = static_cast<float *>(scales.data());
    if (args.num_rows == 0 || args.cols == 0) return;
    const Kernels &table = kernels();
    nb::gil_scoped_release release;
    parallel(0, [&](const Context &context) { table.quantize(args, context); });
}

// ---- packed weights --------------------------------------------------------------------------------------------------

void write_dense(PackedWeight &weight, std::int64_t start, In rows, bool any_value) {
    want(rows, "rows", {-1, weight.weight().cols});
    const Dtype dtype = dtype_of(rows, "rows");
    nb::gil_scoped_release release;
    weight.write_dense(start, dim(rows, 0), rows.data(), dtype, any_value);
}

void write_blocks(PackedWeight &weight, std::int64_t start,
                  nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> rows) {
    const Format format = weight.weight().format;
    if (!is_gguf(format)) refuse("the weight is not of a GGUF block format");
    const BlockShape shape = BlockShape::of(format);
    want(rows, "rows", {-1, weight.weight().cols / shape.group_columns * shape.file_bytes});
    nb::gil_scoped_release release;
    weight.write_blocks(start, dim(rows, 0), rows.data());
}

void write_int8(PackedWeight &weight, std::int64_t start,
                nb::ndarray<const std::int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> rows, Floats scales) {
    want(rows, "rows", {-1, weight.weight().cols});
    want(scales, "scales", {dim(rows, 0)});
    nb::gil_scoped_release release;
    weight.write_int8(start, dim(rows, 0), rows.data(), scales.data());
}

void write_int4(PackedWeight &weight, std::int64_t start,
                nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> rows, Floats2 scales,
                Floats2 offsets) {
    const Weight &packed = weight.weight();
    if (packed.format != Format::w4) refuse("the weight is not of format int4");
    want(rows, "rows", {-1, packed.cols});
    want(scales, "scales", {dim(rows, 0), packed.padded_cols / packed.group});
    want(offsets, "offsets", {dim(rows, 0), packed.padded_cols / packed.group});
    nb::gil_scoped_release release;
    weight.write_int4(start, dim(rows, 0), rows.data(), scales.data(), offsets.data());
}

void want_block(const KVMemory &memory, const Out &array) {
    const KVCache &cache = memory.cache();
    const bool is_int8 = cache.dtype == KVDtype::i8;
    want(array, "array", {2, cache.block_size, cache.num_kv_heads, cache.head_dim + (is_int8 ? 4 : 0)});
    if (is_int8 && array.dtype() != nb::dtype<std::uint8_t>()) refuse("array must be uint8: integers, then their scale");
    if (!is_int8) want_same(array, "array", static_cast<Dtype>(cache.dtype));
}

std::vector<std::string> tier_names(bool supported_only) {
    std::vector<std::string> names;
    for (const Tier &tier : compiled_tiers())
        if (!supported_only || tier.is_supported()) names.emplace_back(tier.name);
    return names;
}

}  // namespace
}  // namespace headrace

NB_MODULE(_ops, m) {
    using namespace headrace;

    m.def("compiled_tiers", [] { return tier_names(false); });
    m.def("supported_tiers", [] { return tier_names(true); });
    m.def("isa", [] { return std::string(active_tier().name); });
    m.def("set_isa", &set_active_tier, "tier"_a);
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", &set_num_threads, "num_threads"_a);
    m.def("num_regions", &num_regions);
    m.def("numa_nodes", &numa_nodes);
    m.def("set_numa_folder", &set_numa_folder, "folder"_a);
    m.def("allocated_bytes", &allocated_bytes);
    m.def("packed_bytes",
          [](const std::string &format, std::int64_t rows, std::int64_t cols, std::int64_t group) {
              return packed_bytes(format_named(format), rows, cols, group);
          },
          "format"_a, "rows"_a, "cols"_a, "group"_a = 0);
    m.def("kv_caches",
          [](std::int64_t blocks, std::int64_t size, const std::vector<std::pair<std::int64_t, std::int64_t>> &layers,
             const std::string &dtype) {
              std::vector<KVHeads> heads;
              for (const auto &[num_kv_heads, head_dim] : layers) heads.push_back({num_kv_heads, head_dim});
              return KVMemory::of_layers(blocks, size, heads, kv_dtype_named(dtype));
          },
          "num_blocks"_a, "block_size"_a, "layers"_a, "dtype"_a);
    m.def("kv_bytes",
          [](std::int64_t blocks, std::int64_t size, std::int64_t heads, std::int64_t head_dim,
             const std::string &dtype) { return kv_bytes(blocks, size, heads, head_dim, kv_dtype_named(dtype)); },
          "num_blocks"_a, "block_size"_a, "num_kv_heads"_a, "head_dim"_a, "dtype"_a);

    nb::class_<PackedWeight>(m, "PackedWeight")
        .def("__init__",
             [](PackedWeight *self, const std::string &format, std::int64_t rows, std::int64_t cols,
                std::int64_t group) { new (self) PackedWeight(format_named(format), rows, cols, group); },
             "format"_a, "rows"_a, "cols"_a, "group"_a = 0)
        .def_prop_ro("shape", [](const PackedWeight &w) { return std::pair(w.weight().rows, w.weight().cols); })
        .def_prop_ro("num_bytes", &PackedWeight::num_bytes)
        .def_prop_ro("huge_page_bytes",
                     [](const PackedWeight &w) {
                         return huge_page_bytes(w.data(), static_cast<std::size_t>(w.num_bytes()));
                     })
        .def("write_dense", &write_dense, "start"_a, nb::arg("rows").noconvert(), "any_value"_a = false)
        .def("write_blocks", &write_blocks, "start"_a, nb::arg("rows").noconvert())
        .def("write_int8", &write_int8, "start"_a, nb::arg("rows").noconvert(), nb::arg("scales").noconvert())
        .def("write_int4", &write_int4, "start"_a, nb::arg("rows").noconvert(), nb::arg("scales").noconvert(),
             nb::arg("offsets").noconvert());

    nb::class_<KVMemory>(m, "KVCache")
        .def("__init__",
             [](KVMemory *self, std::int64_t blocks, std::int64_t size, std::int64_t heads, std::int64_t head_dim,
                const std::string &dtype) { new (self) KVMemory(blocks, size, heads, head_dim, kv_dtype_named(dtype)); },
             "num_blocks"_a, "block_size"_a, "num_kv_heads"_a, "head_dim"_a, "dtype"_a)
        .def_prop_ro("num_bytes", &KVMemory::num_bytes)
        .def("extent", &KVMemory::extent, "num_blocks"_a)
        .def("read_block",
             [](const KVMemory &c, std::int64_t block, Out out) {
                 want_block(c, out);
                 c.read_block(block, out.data());
             },
             "block"_a, nb::arg("out").noconvert())
        .def("write_block",
             [](KVMemory &c, std::int64_t block, Out array) {
                 want_block(c, array);
                 c.write_block(block, array.data());
             },
             "block"_a, nb::arg("array").noconvert());

    nb::class_<Prefault>(m, "Prefault")
        .def("__init__",
             [](Prefault *self, const std::vector<KVMemory> &caches) {
                 std::vector<Allocation> regions;
                 for (const KVMemory &cache : caches) regions.push_back(cache.memory());
                 new (self) Prefault(std::move(regions));
             },
             "caches"_a)
        .def("want", &Prefault::want, "region"_a, "num_bytes"_a)
        .def("hold", &Prefault::hold)
        .def("rest", &Prefault::rest)
        .def("done", &Prefault::done, "region"_a);

    const auto array = [](const char *name) { return nb::arg(name).noconvert(); };
    const auto maybe = [](const char *name) { return nb::arg(name).noconvert().none(); };
    m.def("linear", &linear, array("out"), array("x"), "weight"_a, maybe("bias") = nb::none(),
          "quantize_x"_a = false);
    m.def("embedding", &embedding, array("out"), array("token_ids"), "weight"_a);
    m.def("rms_norm", &rms_norm, array("out"), array("x"), maybe("weight"), "eps"_a);
    m.def("add_rms_norm", &add_rms_norm, array("out"), array("total"), array("x"), array("residual"), maybe("weight"),
          "eps"_a);
    m.def("layer_norm", &layer_norm, array("out"), array("x"), maybe("weight"), maybe("bias"), "eps"_a);
    m.def("rope", &rope, array("out"), array("x"), array("cos"), array("sin"), "interleaved"_a = false);
    m.def("act", &act, array("out"), array("x"), "activation"_a);
    m.def("act_mul", &act_mul, array("out"), array("x"), "activation"_a);
    m.def("gather", &gather, array("out"), array("x"), array("indices"));
    m.def("write_kv", &write_kv, "kv_cache"_a, array("key"), array("value"), array("slot_mapping"));
    m.def("paged_attention", &paged_attention, array("out"), array("query"), "kv_cache"_a, array("query_start_loc"),
          array("seq_lens"), array("block_table"), "scale"_a, "window"_a = 0, "softcap"_a = 0.0f,
          maybe("sinks") = nb::none(), maybe("alibi_slopes") = nb::none());
    m.def("sample", &sample_tokens, array("out"), array("logits"), array("seeds"), array("positions"),
          maybe("temperature") = nb::none(), maybe("top_k") = nb::none(), maybe("top_p") = nb::none(),
          maybe("min_p") = nb::none());
    m.def("quantize", &quantize, array("codes"), array("scales"), maybe("offsets"), array("x"),
          "is_symmetric"_a = false, "bits"_a = 4);
    m.def("gumbel_noise",
          [](std::int32_t seed, std::int32_t position, std::int32_t token) {
              return gumbel_noise(static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(position),
                                  static_cast<std::uint32_t>(token));
          },
          "seed"_a, "position"_a, "token"_a);
    bind_program(m);
}
