// Linear products of quantized x with weights in blocks: many tokens.
//
// Work is cut into blocks of rows of x times tiles of panels; a thread takes a run of them. A tile of panels is unpacked
// once for all rows of a block, to bytes and float scales, which is the same for all formats.
#include "linear_blocks_common.h"
#include "unroll.h"

namespace headrace::HEADRACE_TIER {
namespace {

constexpr int kTilePanels = kLanes == 16 ? 2 : 1;
constexpr int kTileVecs = kTilePanels * kVecs;
constexpr int kTileRows = kLanes == 16 ? 6 : kLanes == 8 ? 6 : 1;
constexpr int kUnrolled = kLanes == 8 ? 1 : kQuads;  // words: else GCC makes all products first, for which it has no registers
constexpr int64_t kMostRows = 120;                   // of a block
constexpr int64_t kBlockBytes = 512 * 1024;          // of its rows of x: they stay in L2

template <Format format>
struct MultiplyOf {
    using Type = ByPairs;
};
// Pairs of signed bytes would have to join the sum after each word.
template <>
struct MultiplyOf<Format::q8_0> {
    using Type = ByWords;
};

// 32 columns of a tile of panels.
template <class Multiply>
struct Unpacked {
    I words[kQuads * Multiply::kWordsPerQuad][kTileVecs];
    V scale[2][kTileVecs], offset[kTileVecs];
};

// Sums of a tile: in registers, or, where they are few, in memory, so that the integers of more rows have room.
struct Sums {
    V in_memory[kLanes == 8 ? kTileRows : 1][kTileVecs];
};

template <class Multiply>
Blocks blocks_of(int64_t num_tokens, int64_t num_groups) {
    constexpr int64_t kGroupBytes = sizeof(Group<Multiply>);
    const int64_t fit = kBlockBytes / (num_groups * kGroupBytes) / kTileRows * kTileRows;
    return Blocks(num_tokens, kTileRows, fit < 2 * kTileRows ? 2 * kTileRows : fit < kMostRows ? fit : kMostRows);
}

template <Format format, class Multiply>
void unpack(const Weight &weight, int64_t panel, int64_t num_panels, Unpacked<Multiply> *pieces) {
    constexpr BlockShape kShape = BlockShape::of(format);
    constexpr int kWordsPerQuad = Multiply::kWordsPerQuad;
    for (int p = 0; p < kTilePanels; ++p) {
        // A tile that sticks out repeats its last panel; what comes of it is dropped.
        const int64_t index = panel + p < num_panels ? panel + p : panel;
        BlockReader<format> blocks(weight, weight.data + index * weight.panel_bytes);
        for (int64_t g = 0; g < weight.padded_cols / kGroup; ++g) {
            blocks.next_piece();
            for (int v = 0; v < kVecs; ++v) {
                const int at = p * kVecs + v;
                for (int u = 0; u < kQuads; ++u) {
                    I words[kWordsPerQuad];
                    read_quad<format, Multiply>(blocks, u, v, words);
                    for (int i = 0; i < kWordsPerQuad; ++i) pieces[g].words[u * kWordsPerQuad + i][at] = words[i];
                }
                for (int s = 0; s < kShape.num_scales; ++s) pieces[g].scale[s][at] = blocks.scale[s][v];
                if constexpr (kShape.has_offset) pieces[g].offset[at] = blocks.offset[v];
            }
            blocks.end_piece();
        }
    }
}

template <Format format, class Multiply, int kRows, class T>
INLINE void tile(const Group<Multiply> *x, int64_t num_groups, const Unpacked<Multiply> *pieces, Sums *sums,
                 const Target<T> &target) {
    constexpr BlockShape kShape = BlockShape::of(format);
    constexpr int kNumSums = kShape.num_scales, kWords = kQuads * Multiply::kWordsPerQuad / kNumSums;  // of a sum
    constexpr int kTogether = Multiply::quads_of_part(kShape) * Multiply::kWordsPerQuad;               // words of a part
    const auto each = [](const auto &body) INLINE_LAMBDA { unroll_tile<kRows, kTileVecs>(body); };
    V in_registers[kRows][kTileVecs];
    const auto acc = [&](auto r, auto v) INLINE_LAMBDA -> V & {
        if constexpr (kLanes == 8)
            return sums->in_memory[r][v];
        else
            return in_registers[r][v];
    };
    each([&](auto r, auto v) INLINE_LAMBDA { acc(r, v) = V{}; });
    for (int64_t g = 0; g < num_groups; ++g) {
        const Unpacked<Multiply> &piece = pieces[g];
        const auto row = [&](auto r) INLINE_LAMBDA -> const Group<Multiply> & { return x[r * num_groups + g]; };
        for (int s = 0; s < kNumSums; ++s) {
            I sum[kRows][kTileVecs] = {};
            for (int first = s * kWords; first < (s + 1) * kWords; first += kTogether) {
                const auto before = [&](auto r, auto v) INLINE_LAMBDA {
                    return first == s * kWords ? splat_word(row(r).start[s]) : sum[r][v];
                };
                typename Multiply::Part parts[kRows][kTileVecs];
                each([&](auto r, auto v) INLINE_LAMBDA { parts[r][v] = Multiply::begin(before(r, v)); });
#pragma GCC unroll kUnrolled
                for (int j = first; j < first + kTogether; ++j) {
                    I words[kTileVecs];
                    unroll<kTileVecs>([&](auto v) INLINE_LAMBDA { words[v] = piece.words[j][v]; });
                    each([&](auto r, auto v) INLINE_LAMBDA {
                        auto &part = parts[r][v];
                        part = Multiply::template mac<kShape.bits>(part, words[v], row(r).words[j]);
                    });
                }
                each([&](auto r, auto v) INLINE_LAMBDA {
                    sum[r][v] = Multiply::end(before(r, v), parts[r][v]);
                });
            }
            each([&](auto r, auto v) INLINE_LAMBDA {
                const V scale = piece.scale[s][v] * splat(row(r).scale);
                acc(r, v) = fma(to_float(sum[r][v]), scale, acc(r, v));
            });
        }
        if constexpr (kShape.has_offset)
            each([&](auto r, auto v) INLINE_LAMBDA {
                acc(r, v) = fma(piece.offset[v], splat(row(r).total), acc(r, v));
            });
    }
    each([&](auto r, auto v) INLINE_LAMBDA { target.put(r, v, acc(r, v)); });
}

template <Format format, class Multiply, class T>
void tiles(const Group<Multiply> *x, int64_t num_groups, int64_t rows, const Unpacked<Multiply> *pieces, Sums *sums,
           Target<T> target) {
    // The last two tiles are of even size; fewer tokens than half a tile do not come here.
    constexpr int kLeastRows = (kTileRows + 1) / 2;
    for (int64_t left = rows; left > 0;) {
        const bool is_pair = left > kTileRows && left < 2 * kTileRows;
        with_count<kLeastRows, kTileRows>(is_pair ? (left + 1) / 2 : left, [&](auto size) INLINE_LAMBDA {
            constexpr int kRows = decltype(size)::value;
            tile<format, Multiply, kRows>(x, num_groups, pieces, sums, target);
            left -= kRows;
            x += kRows * num_groups;
            target.out += kRows * target.stride;
        });
    }
}

struct Path {
    template <Format format, class T>
    static void run(const LinearArgs &args, const Context &context) {
        using Multiply = typename MultiplyOf<format>::Type;
        const Weight &weight = args.weight;
        const int64_t num_groups = weight.padded_cols / kGroup;
        const Blocks blocks = blocks_of<Multiply>(args.num_tokens, num_groups);
        const int64_t num_panels = (weight.rows + kPanel - 1) / kPanel;
        const int64_t num_tiles = (num_panels + kTilePanels - 1) / kTilePanels;
        auto *sums = reinterpret_cast<Sums *>(context.scratch);
        auto *pieces = reinterpret_cast<Unpacked<Multiply> *>(sums + 1);
        auto *x = reinterpret_cast<Group<Multiply> *>(pieces + num_groups);
        int64_t block = -1, rows = 0;
        Items items(blocks.count * num_tiles, context);
        for (int64_t item; items.next(&item);) {
            const int64_t first = blocks.first_of(item / num_tiles), panel = item % num_tiles * kTilePanels;
            if (item / num_tiles != block) {
                block = item / num_tiles;
                rows = blocks.first_of(block + 1) - first;
                quantize_rows<format, T>(args, first, rows, x);
            }
            unpack<format>(weight, panel, num_panels, pieces);
            tiles<format>(x, num_groups, rows, pieces, sums, target_of<T>(args, first, panel * kPanel));
        }
    }
};

}  // namespace

size_t linear_blocks_many_scratch(const LinearArgs &args) {
    const int64_t num_groups = args.weight.padded_cols / kGroup;
    // Of any number of tokens up to this one: blocks are not the largest for the most tokens.
    const int64_t rows = args.num_tokens < kMostRows ? args.num_tokens + kTileRows : kMostRows;
    const size_t group_bytes = sizeof(Unpacked<ByWords>) + static_cast<size_t>(rows) * sizeof(Group<ByWords>);
    return sizeof(Sums) + static_cast<size_t>(num_groups) * group_bytes;
}

void linear_blocks_many(const LinearArgs &args, const Context &context) { run_path<Path>(args, context); }

}  // namespace headrace::HEADRACE_TIER
