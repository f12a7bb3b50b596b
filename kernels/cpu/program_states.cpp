// The records of recurrences over positions. A state group's slots are its block table's first column (before a row)
// and its slot mapping (after each token).
#include <algorithm>
#include <string>
#include <utility>

#include "convert.h"
#include "isa.h"
#include "program_checks.h"

namespace headrace {

StateRows Program::state_rows(const Step &step, std::int64_t group) {
    const auto index = static_cast<std::size_t>(group);
    return {step.query_start_loc, step.block_tables[index], step.slot_mappings[index], step.num_reqs,
            step.max_num_blocks[index]};
}

// What a record does to a cache of states, and checks that slots of the group lie in it.
Program::Access Program::use_states(const States &states, std::int64_t numbers) {
    if (states.group < 0 || states.num_slots < 1) refuse("a state needs a group and a slot");
    if (states.numbers != numbers)
        refuse("a state must have " + std::to_string(numbers) + " numbers, got " + std::to_string(states.numbers));
    use_group(states.group);
    const auto index = static_cast<std::size_t>(states.group);
    num_slots_.resize(std::max(num_slots_.size(), index + 1), INT64_MAX);
    num_slots_[index] = std::min(num_slots_[index], states.num_slots);
    state_groups_.push_back(states.group);
    const auto *begin = static_cast<const char *>(states.data);
    return {begin, begin + states.num_slots * numbers * bytes_of(states.dtype), Rows::tokens, 0, 0, 0, true};
}

void Program::causal_conv(const View &out, const View &x, const States &states, std::vector<float> weight,
                          std::vector<float> bias, std::int64_t width, bool is_silu) {
    check(x, x.cols);
    check(out, x.cols);
    want_same(out, x, "out and x");
    want_dense(out, "out");
    want_length(weight, x.cols * width, "weight");
    want_length(bias, x.cols, "bias");
    if (width < 1 || width > 8 || weight.empty()) refuse("a short convolution is of 1 to 8 positions");
    if (states.dtype != x.dtype) refuse("the inputs that are kept must have the dtype of x");
    std::vector<float> by_position(weight.size());
    for (std::int64_t i = 0; i < x.cols; ++i)
        for (std::int64_t w = 0; w < width; ++w)
            by_position[static_cast<std::size_t>(w * x.cols + i)] = weight[static_cast<std::size_t>(i * width + w)];
    ConvArgs args{};
    args.x = at(x);
    args.out = at(out);
    args.state = states.data;
    args.dtype = x.dtype;
    args.n = x.cols;
    args.width = width;
    args.x_stride = x.stride;
    args.is_silu = is_silu;
    const Access access = use_states(states, (width - 1) * x.cols);
    const Kernels &table = kernels();
    add_record(
        [=, &table, group = states.group, weight = std::move(by_position), bias = std::move(bias)](
            const Step &step, const Context &context) {
            ConvArgs now = args;
            now.rows = state_rows(step, group);
            now.weight = weight.data();
            now.bias = or_null(bias);
            table.conv(now, context);
        },
        {reads(x), writes(out), access});
}

void Program::selective_scan(const View &out, const ScanViews &in, const States &states, std::int64_t num_heads,
                             std::int64_t num_groups, std::vector<float> rates, std::vector<float> d,
                             std::vector<float> dt_bias, float dt_min, float dt_max) {
    const std::int64_t dim = in.x.cols / num_heads, size = in.b.cols / num_groups;
    check(out, num_heads * dim);
    check(in.x, num_heads * dim);
    check(in.dt, num_heads);
    check(in.b, num_groups * size);
    check(in.c, num_groups * size);
    want_dense(out, "out");
    for (const View *view : {&in.x, &in.dt, &in.b, &in.c}) want_same(*view, out, "out and each input");
    const bool has_matrix = static_cast<std::int64_t>(rates.size()) != num_heads;
    want_length(rates, num_heads * (has_matrix ? size : 1), "rates");
    want_length(d, num_heads, "d");
    want_length(dt_bias, num_heads, "dt_bias");
    if (num_heads % num_groups != 0 || rates.empty() || d.empty() || dt_bias.empty() || states.dtype != Dtype::f32)
        refuse("a selective scan needs groups that divide its heads, rates, d, dt_bias and states in float32");
    ScanArgs args{};
    args.x = at(in.x);
    args.dt = at(in.dt);
    args.b = at(in.b);
    args.c = at(in.c);
    args.out = at(out);
    args.state = static_cast<float *>(states.data);
    args.dtype = out.dtype;
    args.num_heads = num_heads;
    args.head_dim = dim;
    args.num_groups = num_groups;
    args.state_size = size;
    args.x_stride = in.x.stride;
    args.dt_stride = in.dt.stride;
    args.b_stride = in.b.stride;
    args.c_stride = in.c.stride;
    args.has_matrix = has_matrix;
    args.dt_min = dt_min;
    args.dt_max = dt_max;
    const Access access = use_states(states, num_heads * dim * size);
    const Kernels &table = kernels();
    add_record(
        [=, &table, group = states.group, rates = std::move(rates), d = std::move(d), dt_bias = std::move(dt_bias)](
            const Step &step, const Context &context) {
            ScanArgs now = args;
            now.rows = state_rows(step, group);
            now.rates = rates.data();
            now.d = d.data();
            now.dt_bias = dt_bias.data();
            table.scan(now, context);
        },
        {reads(in.x), reads(in.dt), reads(in.b), reads(in.c), writes(out), access}, table.scan_scratch(args));
}

void Program::gated_delta(const View &out, const DeltaViews &in, const States &states, std::int64_t num_heads,
                          std::int64_t num_key_heads, std::vector<float> rates, std::vector<float> dt_bias,
                          float beta_scale) {
    const std::int64_t dim = in.value.cols / num_heads, keys = in.key.cols / num_key_heads;
    check(out, num_heads * dim);
    check(in.value, num_heads * dim);
    check(in.query, num_key_heads * keys);
    check(in.key, num_key_heads * keys);
    const bool has_key_decays = in.dt.cols != num_heads;
    check(in.dt, num_heads * (has_key_decays ? keys : 1));
    check(in.beta, num_heads);
    want_dense(out, "out");
    for (const View *view : {&in.value, &in.query, &in.key, &in.dt, &in.beta})
        want_same(*view, out, "out and each input");
    want_length(rates, num_heads, "rates");
    want_length(dt_bias, in.dt.cols, "dt_bias");
    if (num_heads % num_key_heads != 0 || rates.empty() || dt_bias.empty() || states.dtype != Dtype::f32)
        refuse("the delta rule needs key heads that divide its heads, rates, dt_bias and states in float32");
    DeltaArgs args{};
    args.query = at(in.query);
    args.key = at(in.key);
    args.value = at(in.value);
    args.dt = at(in.dt);
    args.beta = at(in.beta);
    args.out = at(out);
    args.state = static_cast<float *>(states.data);
    args.dtype = out.dtype;
    args.num_heads = num_heads;
    args.head_dim = dim;
    args.num_key_heads = num_key_heads;
    args.key_dim = keys;
    args.query_stride = in.query.stride;
    args.key_stride = in.key.stride;
    args.value_stride = in.value.stride;
    args.dt_stride = in.dt.stride;
    args.beta_stride = in.beta.stride;
    args.has_key_decays = has_key_decays;
    args.beta_scale = beta_scale;
    const Access access = use_states(states, num_heads * keys * dim);
    const Kernels &table = kernels();
    add_record(
        [=, &table, group = states.group, rates = std::move(rates), dt_bias = std::move(dt_bias)](
            const Step &step, const Context &context) {
            DeltaArgs now = args;
            now.rows = state_rows(step, group);
            now.rates = rates.data();
            now.dt_bias = dt_bias.data();
            table.delta(now, context);
        },
        {reads(in.query), reads(in.key), reads(in.value), reads(in.dt), reads(in.beta), writes(out), access},
        table.delta_scratch(args));
}

void Program::lru_inputs(const View &taken, const View &dt, const View &one, const View &x, const View &input_gates,
                         const View &decay_gates, std::vector<float> input_bias, std::vector<float> decay_bias,
                         std::vector<float> log_rate) {
    for (const View *view : {&taken, &dt, &input_gates, &decay_gates}) {
        check(*view, x.cols);
        want_same(*view, x, "x, each result and each gate");
    }
    check(one, 1);
    want_same(one, x, "one and x");
    for (const View *view : {&taken, &dt, &one}) want_dense(*view, "each result");
    for (const std::vector<float> *vector : {&input_bias, &decay_bias, &log_rate})
        if (static_cast<std::int64_t>(vector->size()) != x.cols) refuse("biases and rates need a number for each channel");
    if (x.rows != Rows::tokens) refuse("a recurrent unit reads rows of tokens");
    LruArgs args{};
    args.x = at(x);
    args.input_gates = at(input_gates);
    args.decay_gates = at(decay_gates);
    args.taken = at(taken);
    args.dt = at(dt);
    args.one = at(one);
    args.dtype = x.dtype;
    args.n = x.cols;
    args.x_stride = x.stride;
    args.input_stride = input_gates.stride;
    args.decay_stride = decay_gates.stride;
    const Kernels &table = kernels();
    add_record(
        [=, &table, input_bias = std::move(input_bias), decay_bias = std::move(decay_bias),
         log_rate = std::move(log_rate)](const Step &step, const Context &context) {
            LruArgs now = args;
            now.num_tokens = step.num_tokens;
            now.positions = step.positions;
            now.input_bias = input_bias.data();
            now.decay_bias = decay_bias.data();
            now.log_rate = log_rate.data();
            table.lru(now, context);
        },
        {reads(x), reads(input_gates), reads(decay_gates), writes(taken), writes(dt), writes(one)});
}

void Program::wkv(const View &out, const View &key, const View &value, const States &states, std::vector<float> rates,
                  std::vector<float> bonus) {
    for (const View *view : {&out, &key, &value}) check(*view, value.cols);
    for (const View *view : {&key, &value}) want_same(*view, out, "out and each input");
    want_dense(out, "out");
    want_length(rates, value.cols, "rates");
    want_length(bonus, value.cols, "bonus");
    if (rates.empty() || bonus.empty() || states.dtype != Dtype::f32)
        refuse("a weighted mean needs rates, a bonus and states in float32");
    WkvArgs args{};
    args.key = at(key);
    args.value = at(value);
    args.out = at(out);
    args.state = static_cast<float *>(states.data);
    args.dtype = out.dtype;
    args.n = value.cols;
    args.key_stride = key.stride;
    args.value_stride = value.stride;
    const Access access = use_states(states, 3 * value.cols);
    const Kernels &table = kernels();
    add_record(
        [=, &table, group = states.group, rates = std::move(rates), bonus = std::move(bonus)](
            const Step &step, const Context &context) {
            WkvArgs now = args;
            now.rows = state_rows(step, group);
            now.rates = rates.data();
            now.bonus = bonus.data();
            table.wkv(now, context);
        },
        {reads(key), reads(value), writes(out), access});
}

}  // namespace headrace
