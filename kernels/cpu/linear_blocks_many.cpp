// Linear products of quantized x with weights in blocks: many tokens.
//
// Work is cut into blocks of rows of x times tiles of panels; a thread takes a run of them. A tile of panels is unpacked
// once for all rows of a block, to bytes and float scales, which is the same for all formats.
#include "linear_blocks_common.h"

namespace headrace::HEADRACE_TIER {
namespace {

constexpr int kTilePanels = kLanes == 16 ? 2 : 1;
constexpr int kTileVecs = kTilePanels * kVecs;
constexpr int kTileRows = kLanes == 16 ? 6 : kLanes == 8 ? 3 : 1;
constexpr int64_t kMostRows = 120;              // of a block
constexpr int64_t kBlockBytes = 512 * 1024;     // of its rows of x: they stay in L2

// 32 columns of a tile of panels.
struct Unpacked {
    I words[kQuads * kWordsPerQuad][kTileVecs];
    V scale[2][kTileVecs], offset[kTileVecs];
};

int64_t block_rows_of(int64_t num_tokens, int64_t num_groups) {
    const int64_t fit = kBlockBytes / (num_groups * static_cast<int64_t>(sizeof(Group))) / kTileRows * kTileRows;
    const int64_t most = fit < 2 * kTileRows ? 2 * kTileRows : fit < kMostRows ? fit : kMostRows;
    const int64_t num_blocks = (num_tokens + most - 1) / most, rows = (num_tokens + num_blocks - 1) / num_blocks;
    return (rows + kTileRows - 1) / kTileRows * kTileRows;
}

template <Format format>
void unpack(const Weight &weight, int64_t panel, int64_t num_panels, Unpacked *pieces) {
    constexpr BlockShape kShape = BlockShape::of(format);
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
                    read_quad<format>(blocks, u, v, words);
                    for (int i = 0; i < kWordsPerQuad; ++i) pieces[g].words[u * kWordsPerQuad + i][at] = words[i];
                }
                for (int s = 0; s < kShape.num_scales; ++s) pieces[g].scale[s][at] = blocks.scale[s][v];
                if constexpr (kShape.has_offset) pieces[g].offset[at] = blocks.offset[v];
            }
            blocks.end_piece();
        }
    }
}

// kBits: 8 if integers may be signed. kTogether: words of a part.
template <int kSums, int kBits, int kTogether, bool kHasOffset, class T, int kRows>
INLINE void tile(const Group *x, int64_t num_groups, const Unpacked *pieces, const Target<T> &target) {
    constexpr int kWords = kQuads * kWordsPerQuad / kSums;  // of a sum
    V acc[kRows][kTileVecs] = {};
    for (int64_t g = 0; g < num_groups; ++g) {
        const Unpacked &piece = pieces[g];
        for (int s = 0; s < kSums; ++s) {
            I sums[kRows][kTileVecs];
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kTileVecs; ++v) sums[r][v] = splat_word(x[r * num_groups + g].start[s]);
            for (int first = s * kWords; first < (s + 1) * kWords; first += kTogether) {
                Part parts[kRows][kTileVecs];
                for (int r = 0; r < kRows; ++r)
                    for (int v = 0; v < kTileVecs; ++v) parts[r][v] = begin_part(sums[r][v]);
                for (int j = first; j < first + kTogether; ++j) {
                    I words[kTileVecs];
                    for (int v = 0; v < kTileVecs; ++v) words[v] = piece.words[j][v];
                    for (int r = 0; r < kRows; ++r)
                        for (int v = 0; v < kTileVecs; ++v)
                            parts[r][v] = mac<kBits>(parts[r][v], words[v], x[r * num_groups + g].words[j]);
                }
                for (int r = 0; r < kRows; ++r)
                    for (int v = 0; v < kTileVecs; ++v) sums[r][v] = end_part(sums[r][v], parts[r][v]);
            }
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kTileVecs; ++v)
                    acc[r][v] = fma(to_float(sums[r][v]), piece.scale[s][v] * splat(x[r * num_groups + g].scale),
                                    acc[r][v]);
        }
        if constexpr (kHasOffset)
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kTileVecs; ++v)
                    acc[r][v] = fma(piece.offset[v], splat(x[r * num_groups + g].total), acc[r][v]);
    }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kTileVecs; ++v) target.put(r, v, acc[r][v]);
}

template <int kSums, int kBits, int kTogether, bool kHasOffset, class T>
void tiles(const Group *x, int64_t num_groups, int64_t rows, const Unpacked *pieces, Target<T> target) {
    for (int64_t r = 0; r < rows;) {
        int64_t count = 1;
        if (rows - r >= kTileRows) {
            count = kTileRows;
            tile<kSums, kBits, kTogether, kHasOffset, T, kTileRows>(x, num_groups, pieces, target);
        } else if (rows - r >= 2 && kTileRows > 2) {
            count = 2;
            tile<kSums, kBits, kTogether, kHasOffset, T, 2>(x, num_groups, pieces, target);
        } else {
            tile<kSums, kBits, kTogether, kHasOffset, T, 1>(x, num_groups, pieces, target);
        }
        r += count;
        x += count * num_groups;
        target.out += count * target.stride;
    }
}

struct Path {
    template <Format format, class T>
    static void run(const LinearArgs &args, const Context &context) {
        constexpr BlockShape kShape = BlockShape::of(format);
        const Weight &weight = args.weight;
        const int64_t num_groups = weight.padded_cols / kGroup;
        const int64_t block_rows = block_rows_of(args.num_tokens, num_groups);
        const int64_t num_blocks = (args.num_tokens + block_rows - 1) / block_rows;
        const int64_t num_panels = (weight.rows + kPanel - 1) / kPanel;
        const int64_t num_tiles = (num_panels + kTilePanels - 1) / kTilePanels;
        auto *pieces = reinterpret_cast<Unpacked *>(context.scratch);
        auto *x = reinterpret_cast<Group *>(pieces + num_groups);
        int64_t begin, end, block = -1, rows = 0;
        share(num_blocks * num_tiles, context, &begin, &end);
        for (int64_t item = begin; item < end; ++item) {
            const int64_t first = item / num_tiles * block_rows, panel = item % num_tiles * kTilePanels;
            if (item / num_tiles != block) {
                block = item / num_tiles;
                rows = args.num_tokens - first < block_rows ? args.num_tokens - first : block_rows;
                quantize_rows<format, T>(args, first, rows, x);
            }
            unpack<format>(weight, panel, num_panels, pieces);
            constexpr int kTogether = quads_of_part(kShape) * kWordsPerQuad;
            tiles<kShape.num_scales, kShape.bits == 8 ? 8 : 0, kTogether, kShape.has_offset>(
                x, num_groups, rows, pieces, target_of<T>(args, first, panel * kPanel));
        }
    }
};

}  // namespace

size_t linear_blocks_many_scratch(const LinearArgs &args) {
    const int64_t num_groups = args.weight.padded_cols / kGroup;
    // Of any number of tokens up to this one: blocks are not the largest for the most tokens.
    const int64_t rows = args.num_tokens < kMostRows ? args.num_tokens + kTileRows : kMostRows;
    return static_cast<size_t>(num_groups) * (sizeof(Unpacked) + static_cast<size_t>(rows) * sizeof(Group));
}

void linear_blocks_many(const LinearArgs &args, const Context &context) { run_path<Path>(args, context); }

}  // namespace headrace::HEADRACE_TIER
