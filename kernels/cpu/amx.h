// AMX: eight registers, each a tile of 16 rows of 64 bytes, and products of two tiles that are added to a third.
//
// With HEADRACE_EMULATE the same in plain C++, so that code of tiles can be tested on any CPU.
#pragma once

#include "simd.h"

namespace headrace::HEADRACE_TIER {
namespace {

constexpr int kTileRows = 16;
constexpr int64_t kTileBytes = 64;  // of a row

// How many rows each register has, as the CPU reads it; all rows are 64 bytes.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {kTileBytes, kTileBytes, kTileBytes, kTileBytes,
                              kTileBytes, kTileBytes, kTileBytes, kTileBytes};
    uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows};
};
static_assert(sizeof(TileShapes) == 64);

#ifdef HEADRACE_EMULATE

struct Tiles {
    uint8_t rows[8];
    alignas(64) char data[8][kTileRows][kTileBytes];
};
thread_local Tiles tiles;

INLINE void set_tiles(const TileShapes &shapes) {
    memset(&tiles, 0, sizeof tiles);
    memcpy(tiles.rows, shapes.rows, sizeof tiles.rows);
}
INLINE void release_tiles() { memset(&tiles, 0, sizeof tiles); }

template <int kTile>
INLINE void zero_tile() {
    memset(tiles.data[kTile], 0, sizeof tiles.data[kTile]);
}
template <int kTile>
INLINE void load_tile(const char *data, int64_t stride) {
    zero_tile<kTile>();
    for (int r = 0; r < tiles.rows[kTile]; ++r) memcpy(tiles.data[kTile][r], data + r * stride, kTileBytes);
}
template <int kTile>
INLINE void store_tile(char *data, int64_t stride) {
    for (int r = 0; r < tiles.rows[kTile]; ++r) memcpy(data + r * stride, tiles.data[kTile][r], kTileBytes);
}

// sums[r] += each word k of x[r] times row k of w, word by word.
template <int kSums, int kX, int kW>
INLINE void add_products(V) {
    for (int r = 0; r < tiles.rows[kSums]; ++r) {
        V added = {};
        for (int k = 0; k < kTileRows; ++k)
            added = dot_bf16(added, load<I>(tiles.data[kW][k]), splat_word(load<uint32_t>(tiles.data[kX][r] + 4 * k)));
        store(tiles.data[kSums][r], load<V>(tiles.data[kSums][r]) + added);
    }
}
template <int kSums, int kX, int kW>
INLINE void add_products(I) {
    for (int r = 0; r < tiles.rows[kSums]; ++r) {
        I sum = load<I>(tiles.data[kSums][r]);
        for (int k = 0; k < kTileRows; ++k)
            sum = dot_u8_i8(sum, splat_word(load<uint32_t>(tiles.data[kX][r] + 4 * k)), load<I>(tiles.data[kW][k]));
        store(tiles.data[kSums][r], sum);
    }
}

#else

// Compilers' own intrinsics for tiles do not say which memory they read, and take no template parameters.
INLINE void set_tiles(const TileShapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
INLINE void release_tiles() { asm volatile("tilerelease"); }

template <int kTile>
INLINE void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
INLINE void load_tile(const char *data, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(data), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
INLINE void store_tile(char *data, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(data), "r"(stride), "i"(kTile) : "memory");
}

// sums[r] += x[r] times w: pairs of bf16 in each word, or four uint8 of x and four int8 of w.
template <int kSums, int kX, int kW>
INLINE void add_products(V) {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kX), "i"(kW));
}
template <int kSums, int kX, int kW>
INLINE void add_products(I) {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kX), "i"(kW));
}

#endif

}  // namespace
}  // namespace headrace::HEADRACE_TIER
