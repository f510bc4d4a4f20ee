#include "pack.h"

#include <cstring>

#include "heads.h"

namespace kvasir {

static size_t padded_outputs(const Layer& layer) { return round_up(layer.outputs, tile_columns); }

Lines pack_bytes(const Layer& layer, const int8_t* weights, bool transposed, int zero_point) {
    Lines packed = lines_of(layer.padded_inputs * padded_outputs(layer));
    auto* const to = reinterpret_cast<uint8_t*>(packed.data());
    memset(to, zero_point, packed.size() * sizeof(CacheLine));
    const size_t step = transposed ? 1 : layer.outputs, column_step = transposed ? layer.inputs : 1;
    for (size_t n0 = 0; n0 < layer.outputs; n0 += lane_count) {
        uint8_t* const panel = to + n0 * layer.padded_inputs;
        const size_t columns = layer.outputs - n0 < lane_count ? layer.outputs - n0 : lane_count;
        for (size_t k0 = 0; k0 < layer.inputs; k0 += 4)
            for (size_t n = 0; n < columns; ++n)
                for (size_t k = k0; k < k0 + 4 && k < layer.inputs; ++k)
                    panel[k0 * lane_count + n * 4 + k % 4] =
                        uint8_t(weights[k * step + (n0 + n) * column_step] + zero_point);
    }
    return packed;
}

Lines pack_floats(const Layer& layer, const float* weights, bool transposed) {
    Lines packed = lines_of(layer.inputs * padded_outputs(layer) * sizeof(float));
    auto* const to = reinterpret_cast<float*>(packed.data());
    const size_t step = transposed ? 1 : layer.outputs, column_step = transposed ? layer.inputs : 1;
    for (size_t n0 = 0; n0 < layer.outputs; n0 += lane_count) {
        const size_t columns = layer.outputs - n0 < lane_count ? layer.outputs - n0 : lane_count;
        for (size_t k = 0; k < layer.inputs; ++k)
            for (size_t n = 0; n < columns; ++n)
                to[n0 * layer.inputs + k * lane_count + n] = weights[k * step + (n0 + n) * column_step];
    }
    return packed;
}

Lines pack_nibbles(const Layer& layer, const uint8_t* weights) {
    constexpr size_t block_bytes = nibble_block / 2;
    Lines packed = lines_of(layer.blocks * block_bytes * padded_outputs(layer));
    auto* const to = reinterpret_cast<uint8_t*>(packed.data());
    for (size_t n = 0; n < layer.outputs; ++n)
        for (size_t b = 0; b < layer.blocks; ++b) {
            const uint8_t* const from = weights + (n * layer.blocks + b) * block_bytes;
            uint8_t* const block = to + (n / lane_count * layer.blocks + b) * block_bytes * lane_count;
            for (size_t k = 0; k < nibble_block; ++k) {
                const int nibble = k % 2 ? from[k / 2] >> 4 : from[k / 2] & 15;
                block[k % 16 / 4 * 64 + n % lane_count * 4 + k % 4] |= uint8_t(k < 16 ? nibble : nibble << 4);
            }
        }
    return packed;
}

static float to_float(float value) { return value; }

// The value of a finite float16: a float has 13 bits more after it, and an exponent that is 112 more.
static float to_float(uint16_t half) {
    const uint32_t bits = (half & 0x7fffu) << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value * (half & 0x8000u ? -0x1p112f : 0x1p112f);
}

template <class Value>
static Lines pack_scales(const Layer& layer, const Value* scales) {
    Lines packed = lines_of(layer.blocks * padded_outputs(layer) * sizeof(float));
    auto* const to = reinterpret_cast<float*>(packed.data());
    for (size_t n = 0; n < layer.outputs; ++n)
        for (size_t b = 0; b < layer.blocks; ++b)
            to[(n / lane_count * layer.blocks + b) * lane_count + n % lane_count] = to_float(scales[n * layer.blocks + b]);
    return packed;
}

Lines pack_block_scales(const Layer& layer, const float* scales) { return pack_scales(layer, scales); }
Lines pack_block_scales(const Layer& layer, const uint16_t* scales) { return pack_scales(layer, scales); }

Lines pad(const float* values, size_t count) {
    Lines padded = lines_of(round_up(count, tile_columns) * sizeof(float));
    if (count)  // else there may be no pointer
        memcpy(padded.data(), values, count * sizeof(float));
    return padded;
}

uint8_t* section_room(size_t position_bytes) {
    thread_local Lines room;
    const size_t bytes = section_tokens * position_bytes;
    if (room.size() * sizeof(CacheLine) < bytes)
        room = lines_of(bytes);
    return room.data()->bytes;
}

}  // namespace kvasir
