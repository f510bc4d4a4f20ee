// The product for AMX without its instructions: tiles in plain C++, as Intel's manual describes them, and the lanes of the
// scalar path.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "path.h"

namespace kvasir::emulated {
#include "lanes_scalar.h"
#include "unrolled.h"
//
#include "product_scalar.h"
//
#include "linear.h"

struct Registers {
    uint8_t shapes[64];  // all 0: tiles cannot be used
    uint8_t tiles[8][16][64];
};

static Registers registers;

// As where nobody else sets shapes, where ONNX Runtime has, and where somebody has others.
void set_shapes(int who) {
    memset(&registers, 0, sizeof registers);
    registers.shapes[0] = who > 0;
    for (int tile = 0; tile < 8 && who > 0; ++tile) {
        registers.shapes[16 + 2 * tile] = 64;
        registers.shapes[48 + tile] = uint8_t(who == 1 ? 16 : 3);
    }
}

int shapes() { return registers.shapes[0] ? registers.shapes[48] == 16 ? 1 : 2 : 0; }

static size_t rows_of(int tile) {
    if (!registers.shapes[0])
        abort();
    return registers.shapes[48 + tile];
}

static void _tile_storeconfig(void* to) { memcpy(to, registers.shapes, sizeof registers.shapes); }
static void _tile_loadconfig(const void* from) {
    memcpy(registers.shapes, from, sizeof registers.shapes);
    memset(registers.tiles, 0, sizeof registers.tiles);
}
static void _tile_zero(int tile) { memset(registers.tiles[tile], 0, sizeof registers.tiles[tile]); }
static void _tile_loadd(int tile, const void* from, size_t stride) {
    _tile_zero(tile);
    for (size_t row = 0; row < rows_of(tile); ++row)
        memcpy(registers.tiles[tile][row], static_cast<const char*>(from) + row * stride, 64);
}
static void _tile_stored(int tile, void* to, size_t stride) {
    for (size_t row = 0; row < rows_of(tile); ++row)
        memcpy(static_cast<char*>(to) + row * stride, registers.tiles[tile][row], 64);
}
// Add products of signed bytes of a and unsigned ones of b, four to a sum.
static void _tile_dpbsud(int sums, int a, int b) {
    for (size_t row = 0; row < rows_of(sums); ++row)
        for (size_t column = 0; column < 16; ++column) {
            int32_t sum;
            memcpy(&sum, registers.tiles[sums][row] + column * 4, 4);
            for (size_t k = 0; k < 64; ++k)
                sum += int8_t(registers.tiles[a][row][k]) * registers.tiles[b][k / 4][column * 4 + k % 4];
            memcpy(registers.tiles[sums][row] + column * 4, &sum, 4);
        }
}

#include "product_amx.h"

Path path() {
    Path path = scalar_path;
    path.name = "amx, emulated";
    path.bytes = tiles_product<BytesProduct>();
    return path;
}

}  // namespace kvasir::emulated
