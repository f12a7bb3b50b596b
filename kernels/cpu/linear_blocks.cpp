// Linear products of quantized x with weights in blocks, GGUF's and w4: few tokens. linear_blocks_many.cpp does many.
#include "linear_blocks_common.h"
#include "unroll.h"

namespace headrace::HEADRACE_TIER {

size_t linear_blocks_many_scratch(const LinearArgs &);
void linear_blocks_many(const LinearArgs &, const Context &);

namespace {

constexpr int64_t kFewTokens = kLanes == 16 ? 16 : 3;  // at most so many take panels as they lie, without unpacking them
constexpr int kMostRows = kLanes == 16 ? 8 : 3;        // that share a pass over a panel
constexpr int64_t kPrefetch = 4096;

using Multiply = ByPairs;
constexpr int kWordsPerQuad = Multiply::kWordsPerQuad;

// One panel with kRows rows of x.
template <Format format, class T, int kRows>
INLINE void tile(const LinearArgs &args, const Group<Multiply> *x, int64_t num_groups, int64_t panel, int64_t token) {
    constexpr BlockShape kShape = BlockShape::of(format);
    constexpr int kSums = kShape.num_scales, kQuadsPerSum = kQuads / kSums, kTogether = Multiply::quads_of_part(kShape);
    const Weight &weight = args.weight;
    BlockReader<format> blocks(weight, weight.data + panel * weight.panel_bytes);
    const Target<T> target = target_of<T>(args, token, panel * kPanel);
    RowPointers<kRows> rows(x + token * num_groups, num_groups * static_cast<int64_t>(sizeof(Group<Multiply>)));
    const auto group = [&](int r) INLINE_LAMBDA -> const Group<Multiply> & {
        return *reinterpret_cast<const Group<Multiply> *>(rows[r]);
    };
    V acc[kRows][kVecs] = {};
    for (int64_t g = 0; g < num_groups; ++g) {
        blocks.next_piece();
        I sums[kRows][kSums][kVecs];
        for (int r = 0; r < kRows; ++r)
            for (int s = 0; s < kSums; ++s)
                for (int v = 0; v < kVecs; ++v) sums[r][s][v] = I{} + group(r).start[s];
        for (int first = 0; first < kQuads; first += kTogether) {
            const int s = first / kQuadsPerSum;
            Multiply::Part parts[kRows][kVecs];
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kVecs; ++v) parts[r][v] = Multiply::begin(sums[r][s][v]);
            for (int u = first; u < first + kTogether; ++u) {
                if (kRows == 1) __builtin_prefetch(blocks.data + u * kPanel * 4 + kPrefetch);
                for (int v = 0; v < kVecs; ++v) {
                    I words[kWordsPerQuad];
                    read_quad<format, Multiply>(blocks, u, v, words);
                    for (int r = 0; r < kRows; ++r)
                        for (int i = 0; i < kWordsPerQuad; ++i)
                            parts[r][v] = Multiply::mac<kShape.bits>(
                                parts[r][v], words[i], group(r).words[u * kWordsPerQuad + i]);
                }
            }
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kVecs; ++v) sums[r][s][v] = Multiply::end(sums[r][s][v], parts[r][v]);
        }
        for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < kVecs; ++v) {
                for (int s = 0; s < kSums; ++s)
                    acc[r][v] = fma(to_float(sums[r][s][v]), blocks.scale[s][v] * splat(group(r).scale), acc[r][v]);
                if constexpr (kShape.has_offset) acc[r][v] = fma(blocks.offset[v], splat(group(r).total), acc[r][v]);
            }
        blocks.end_piece();
        rows.advance(sizeof(Group<Multiply>));
    }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVecs; ++v) target.put(r, v, acc[r][v]);
}

struct Path {
    template <Format format, class T>
    static void run(const LinearArgs &args, const Context &context) {
        if (args.num_tokens > kFewTokens) return linear_blocks_many(args, context);
        const int64_t num_groups = args.weight.padded_cols / kGroup;
        auto *x = reinterpret_cast<Group<Multiply> *>(context.scratch);
        Items items((args.weight.rows + kPanel - 1) / kPanel, context);
        int64_t panel;
        if (!items.next(&panel)) return;
        quantize_rows<format, T>(args, 0, args.num_tokens, x);
        do {
            for (int64_t token = 0; token < args.num_tokens;) {
                const int64_t left = args.num_tokens - token;
                const int64_t rows = left > kMostRows ? (left + 1) / 2 : left;
                with_count<1, kMostRows>(rows, [&](auto count) INLINE_LAMBDA {
                    tile<format, T, decltype(count)::value>(args, x, num_groups, panel, token);
                });
                token += rows;
            }
        } while (items.next(&panel));
    }
};

}  // namespace

size_t linear_blocks_scratch(const LinearArgs &args) {
    const size_t few = static_cast<size_t>(kFewTokens * (args.weight.padded_cols / kGroup)) * sizeof(Group<Multiply>);
    const size_t many = linear_blocks_many_scratch(args);
    return few > many ? few : many;
}

void linear_blocks(const LinearArgs &args, const Context &context) { run_path<Path>(args, context); }

}  // namespace headrace::HEADRACE_TIER
