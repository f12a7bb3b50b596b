// x @ weight.T + bias over packed weights: many tokens, in tiles that are held in registers.
//
// Work is cut into blocks of rows of x (which stay in L2) times tiles of panels; a thread takes a run of them. A tile
// goes over the columns in pieces, so that its rows of x stay in L1, and over each piece once per chain. Formats whose
// words are not what the arithmetic takes are unpacked once for all rows of a block, or, if that is one instruction and
// there are registers for it, by each tile for itself.
#include "linear_common.h"
#include "unroll.h"

namespace headrace::HEADRACE_TIER {
namespace {

// A tile is kTileRows tokens by kTilePanels panels of accumulators in registers.
constexpr int kTilePanels = kLanes == 16 ? 2 : 1;
constexpr int kTileVecs = kTilePanels * kVecs;
constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 2;
constexpr int64_t kTileBytes = kTilePanels * kPanel * 4;
constexpr int64_t kBlockRows = kLanes == 4 ? 64 : 120;  // tokens that share one pass over the weights
constexpr int64_t kPieceWords = kLanes == 8 ? 320 : 512;  // of a row, at a time

// Scratch: words of x [block rows][words + kPad], a piece of a tile of panels [panel][piece words][kPanel], sums
// [block rows][chain][tile], scales of x [block rows].
struct Layout {
    size_t panels, sums, scales, end;
};

Layout layout_of(int64_t num_rows, int64_t num_words) {
    Layout layout;
    layout.panels = (static_cast<size_t>(num_rows * (num_words + kPad)) * 4 + 63) / 64 * 64;
    layout.sums = layout.panels + static_cast<size_t>(kPieceWords * kTileBytes);
    layout.scales = layout.sums + static_cast<size_t>(num_rows * kChains * kTileBytes);
    layout.end = layout.scales + static_cast<size_t>(num_rows) * 4;
    return layout;
}

// A piece of the columns for a tile of panels.
struct Piece {
    const char *panels[kTilePanels];  // words [count][kPanel]
    const char *next[kTilePanels];    // the piece after this one, which all tiles of rows fetch together meanwhile
    int64_t count;                    // a multiple of kChains
    bool is_first, is_last;

    // Then sums of rows need not outlast their tile, and all tiles have the same place for them, in L1.
    bool is_whole() const { return is_first && is_last; }
};

// Sums of integers are the same in any order: those need no chains.
template <class Reader>
constexpr int num_chains() {
    return __is_same(typename Reader::Acc, I) ? 1 : kChains;
}

// Where the words of a chain begin in a piece of a panel.
template <class Reader>
int64_t chain_at(int chain, int64_t count) {
    return Reader::kIsRaw ? Reader::chain_at(chain) : chain * (count / num_chains<Reader>()) * Reader::kWordBytes;
}

// Whether chains 0 and 1 are halves of the same words, and so are 2 and 3.
template <class Reader>
constexpr bool has_halves() {
    return Reader::kIsRaw && Reader::chain_at(1) == 0;
}

// Add the products of a piece to the sums of kRows rows, chain by chain. After the last piece put(row, vector, total)
// takes the results. With each step over the columns ahead_step bytes of the next piece are fetched, from `ahead` on.
template <class Reader, int kRows, class Put>
INLINE void tile(const uint32_t *x, int64_t x_stride, const Piece &piece, int64_t ahead, int64_t ahead_step, char *sums,
                 const Put &put) {
    using Acc = typename Reader::Acc;
    using Word = typename Reader::Word;
    constexpr int kNum = num_chains<Reader>();
    constexpr int64_t kStepBytes = (Reader::kIsRaw ? kNum : 1) * Reader::kWordBytes;
    const auto sum_at = [=](int r, int c, int v) { return sums + (r * kChains + c) * kTileBytes + v * kLanes * 4; };
    const auto each = [](const auto &body) INLINE_LAMBDA { unroll_tile<kRows, kTileVecs>(body); };
    const auto add = [&](int c, auto half) INLINE_LAMBDA {
        Acc acc[kRows][kTileVecs];
        if (piece.is_first)
            each([&](auto r, auto v) INLINE_LAMBDA { acc[r][v] = Acc{}; });
        else
            each([&](auto r, auto v) INLINE_LAMBDA { acc[r][v] = load<Acc>(sum_at(r, c, v)); });
        RowPointers<kRows> rows(x + c, x_stride * 4);
        const char *panels[kTilePanels];
        for (int p = 0; p < kTilePanels; ++p) panels[p] = piece.panels[p] + chain_at<Reader>(c, piece.count);
        for (int64_t j = 0; j < piece.count; j += kNum) {
            Word w[kTileVecs];
            if constexpr (Reader::kIsRaw) {
                for (int p = 0; p < kTilePanels; ++p) __builtin_prefetch(piece.next[p] + ahead, 0, 2);
                ahead += ahead_step;
            }
            unroll<kTileVecs>([&](auto v) INLINE_LAMBDA {
                w[v] = Reader::template word<decltype(half)::value>(panels[v / kVecs] + v % kVecs * kLanes * 4);
            });
            for (int p = 0; p < kTilePanels; ++p) panels[p] += kStepBytes;
            each([&](auto r, auto v) INLINE_LAMBDA {
                acc[r][v] = Reader::mac(acc[r][v], w[v], load<uint32_t>(rows[r]));
            });
            rows.advance(kNum * 4);
        }
        const auto end = [&](const auto &body) INLINE_LAMBDA {
            each([&](auto r, auto v) INLINE_LAMBDA { body(r, v, acc[r][v]); });
        };
        if (!piece.is_last || (kNum > 1 && c % 2 == 0))
            end([&](int r, int v, Acc sum) INLINE_LAMBDA { store(sum_at(r, c, v), sum); });
        else if (kNum == 1)
            end(put);
        else if (c == 1)
            end([&](int r, int v, Acc sum) INLINE_LAMBDA { store(sum_at(r, 0, v), load<Acc>(sum_at(r, 0, v)) + sum); });
        else
            end([&](int r, int v, Acc sum) INLINE_LAMBDA {
                put(r, v, load<Acc>(sum_at(r, 0, v)) + (load<Acc>(sum_at(r, 2, v)) + sum));
            });
    };
    for (int c = 0; c < kNum; ++c) {
        if constexpr (has_halves<Reader>())
            if (c % 2 != 0) {
                add(c, Int<1>{});
                continue;
            }
        add(c, Int<0>{});
    }
}

// All rows of a block. The last two tiles are of even size where the format has come here with more than a few tokens (see
// linear.cpp): of 13 rows 7 and 6, not 12 and one that waits for each of its products.
template <class Reader, class T>
void tiles(const uint32_t *x, int64_t x_stride, int64_t rows, const Piece &piece, char *sums,
           const ScaledTarget<T> &target) {
    constexpr int64_t kWordBytes = Reader::kWordBytes;
    for (int64_t r = 0; r < rows;) {
        const auto of = [&](auto size) INLINE_LAMBDA {
            constexpr int kRows = decltype(size)::value;
            const ScaledTarget<T> here = target;  // stores could change what `target` refers to, not this
            tile<Reader, kRows>(x + r * x_stride, x_stride, piece, r * piece.count * kWordBytes / rows,
                                kWordBytes * kRows / rows + 1, piece.is_whole() ? sums : sums + r * kChains * kTileBytes,
                                [=](int i, int v, typename Reader::Acc total) INLINE_LAMBDA {
                                    here.put(r + i, v, total);
                                });
            r += kRows;
        };
        const int64_t left = rows - r;
        if constexpr (Reader::kIsCheap) {
            const bool is_pair = left > kTileRows && left < 2 * kTileRows;
            with_count<(kTileRows + 1) / 2, kTileRows>(is_pair ? (left + 1) / 2 : left, of);
        } else if (left >= kTileRows) {
            of(Int<kTileRows>{});
        } else if (left >= 4 && kTileRows > 4) {
            of(Int<4>{});
        } else if (left >= 2) {
            of(Int<2>{});
        } else {
            of(Int<1>{});
        }
    }
}

// Hands out a tile of panels piece by piece, as words: where they lie, or unpacked.
template <class Reader>
class Panels {
  public:
    Panels(const Weight &weight, int64_t panel, int64_t num_panels)
        : readers_{at(weight, panel), at(weight, panel + (kTilePanels > 1 && panel + 1 < num_panels))},
          to_next_tile_((kTilePanels - 1) * weight.panel_bytes) {}

    INLINE void next(Piece &piece, char *unpacked) {
        for (int p = 0; p < kTilePanels; ++p) {
            if constexpr (Reader::kIsRaw) {
                piece.panels[p] = readers_[p].data;
                readers_[p].data += piece.count * Reader::kWordBytes;
                piece.next[p] = readers_[p].data + (piece.is_last ? to_next_tile_ : 0);
            } else {
                char *to = unpacked + p * kPieceWords * kPanel * 4;
                piece.panels[p] = piece.next[p] = to;
                // Each chain's words side by side.
                constexpr bool kIsOneChain = num_chains<Reader>() == 1;
                for (int64_t j = 0; j < piece.count; j += kChains) {
                    typename Reader::Word w[kChains][kVecs];
                    readers_[p].next(w);
                    for (int c = 0; c < kChains; ++c) {
                        const int64_t word = kIsOneChain ? j + c : (c * piece.count + j) / kChains;
                        for (int v = 0; v < kVecs; ++v) store(to + (word * kPanel + v * kLanes) * 4, w[c][v]);
                    }
                }
            }
        }
    }

  private:
    static Reader at(const Weight &weight, int64_t panel) {
        return Reader(weight, weight.data + panel * weight.panel_bytes);
    }

    Reader readers_[2];
    int64_t to_next_tile_;
};

template <class Reader, class T>
void many_tokens(const LinearArgs &args, const Context &context) {
    const Weight &weight = args.weight;
    const int64_t num_words = weight.padded_cols / Reader::kColumns;
    const Blocks blocks(args.num_tokens, kTileRows, kBlockRows);
    const int64_t num_panels = (weight.rows + kPanel - 1) / kPanel;
    const int64_t num_tiles = (num_panels + kTilePanels - 1) / kTilePanels;
    const Layout layout = layout_of(blocks.most_rows(), num_words);
    auto *copy = reinterpret_cast<uint32_t *>(context.scratch);
    char *unpacked = context.scratch + layout.panels, *sums = context.scratch + layout.sums;
    auto *scales = reinterpret_cast<float *>(context.scratch + layout.scales);
    // Pieces of even size.
    const int64_t num_pieces = (num_words + kPieceWords - 1) / kPieceWords;
    const int64_t piece_words = (num_words / kChains + num_pieces - 1) / num_pieces * kChains;

    int64_t block = -1, rows = 0;
    Items items(blocks.count * num_tiles, context);
    const uint32_t *x = copy;
    // Rows of x that already are runs of words need no copy.
    const bool is_copied = __is_same(typename Reader::Acc, I) || sizeof(T) * Reader::kColumns != 4 ||
                           weight.cols != weight.padded_cols || num_words % kBadStride == 0 || args.x_rows ||
                           args.x_stride != weight.cols;
    const int64_t x_stride = is_copied ? num_words + kPad : num_words;
    for (int64_t item; items.next(&item);) {
        const int64_t first = blocks.first_of(item / num_tiles), panel = item % num_tiles * kTilePanels;
        if (item / num_tiles != block) {
            block = item / num_tiles;
            rows = blocks.first_of(block + 1) - first;
            if (is_copied)
                for (int64_t r = 0; r < rows; ++r)
                    read_x<Reader>(row_of_x<T>(args, first + r), weight.cols, num_words, copy + r * x_stride, scales + r);
            else
                x = reinterpret_cast<const uint32_t *>(row_of_x<T>(args, first));
        }
        const int64_t row = panel * kPanel;
        const ScaledTarget<T> target{target_of<T>(args, first, row), scales,
                                     weight.scales ? weight.scales + row : nullptr,
                                     weight.sums ? weight.sums + row : nullptr};
        // A tile that sticks out repeats its last panel; `put` drops what it computes.
        Panels<Reader> panels(weight, panel, num_panels);
        for (int64_t j = 0; j < num_words; j += piece_words) {
            Piece piece;
            piece.count = num_words - j < piece_words ? num_words - j : piece_words;
            piece.is_first = j == 0;
            piece.is_last = j + piece.count == num_words;
            panels.next(piece, unpacked);
            tiles<Reader>(x + j, x_stride, rows, piece, sums, target);
        }
    }
}

struct Path {
    template <class Reader, class T>
    static void run(const LinearArgs &args, const Context &context) {
        many_tokens<Reader, T>(args, context);
    }
};

}  // namespace

size_t linear_many_scratch(const LinearArgs &args) {
    // Of any number of tokens up to this one: blocks are not the largest for the most tokens.
    const int64_t rows = args.num_tokens < kBlockRows ? Blocks(args.num_tokens, kTileRows, kBlockRows).most_rows() : kBlockRows;
    return layout_of(rows, args.weight.padded_cols).end;
}

void linear_many(const LinearArgs &args, const Context &context) { run_path<Path>(args, context); }

}  // namespace headrace::HEADRACE_TIER
