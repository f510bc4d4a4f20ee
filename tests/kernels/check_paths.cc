// Compare the paths of this machine to the last bit, with pages around every buffer that cannot be touched.
//
// Prints a hash of all results, which is the same on every machine, or what differs.
#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "memory.h"
#include "pack.h"
#include "paths.h"

using namespace kvasir;

static uint64_t state;

static uint32_t draw(uint32_t count) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(state >> 33) % count;
}

// A float of many sizes, sometimes 0.
static float draw_float() {
    const int size = int(draw(12)) - 14, digits = int(draw(2001)) - 1000;
    return draw(10) ? std::ldexp(float(digits), size) : 0.0f;
}

// Bytes that end where a forbidden page begins, or begin where one ends.
class Guarded {
public:
    Guarded(const void* from, size_t bytes, bool at_end) : mapped(round_up(bytes + 1, page) + 2 * page) {
        base = static_cast<char*>(mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (base == MAP_FAILED || mprotect(base + page, mapped - 2 * page, PROT_READ | PROT_WRITE))
            abort();
        data = base + page + (at_end ? mapped - 2 * page - bytes : 0);
        from ? memcpy(data, from, bytes) : memset(data, 0xff, bytes);
    }
    ~Guarded() { munmap(base, mapped); }
    Guarded(const Guarded&) = delete;

    float* floats() const { return reinterpret_cast<float*>(data); }

    char* data;

private:
    static constexpr size_t page = 65536;  // the largest of those in use
    size_t mapped;
    char* base;
};

static std::vector<float> draw_floats(size_t count) {
    std::vector<float> values(count);
    for (float& value : values)
        value = draw_float();
    return values;
}

// A random layer, and its results on one path.
class Trial {
public:
    explicit Trial(bool has_nibbles) : has_nibbles(has_nibbles) {
        layer.inputs = has_nibbles ? 32 * (1 + draw(9)) : 1 + draw(300);
        layer.outputs = 1 + draw(140);
        layer.padded_inputs = has_nibbles ? layer.inputs : round_up(layer.inputs, input_padding);
        layer.block = has_nibbles ? nibble_block : draw(2) ? layer.padded_inputs : 64 * (1 + draw(3));
        layer.blocks = (layer.inputs + layer.block - 1) / layer.block;
        layer.activation = Activation(draw(8));
        layer.gated = draw(2);
        layer.norm = Norm(draw(3));
        layer.epsilon = 1e-5f;
        rows = 1 + draw(30);
        weights.resize(has_nibbles ? layer.outputs * layer.inputs / 2 : layer.outputs * layer.inputs);
        for (uint8_t& byte : weights)
            byte = uint8_t(draw(256));
        scales = draw_floats(layer.outputs * (has_nibbles ? layer.blocks : 1));
        bias = draw_floats(draw(2) ? layer.outputs : 0);
        norm_weight = draw_floats(draw(2) ? layer.inputs : 0);
        norm_bias = draw_floats(draw(2) ? layer.inputs : 0);
        x = draw_floats(rows * layer.row_width());
        residual = draw_floats(draw(2) ? rows * layer.outputs : 0);
    }

    std::vector<float> run(const Path& path, bool at_end) const {
        const Product& product = has_nibbles ? path.nibbles : path.bytes;
        const auto* const bytes = reinterpret_cast<const int8_t*>(weights.data());
        const Lines packed = has_nibbles ? pack_nibbles(layer, weights.data())
                                         : pack_bytes(layer, bytes, false, product.zero_point);
        const Lines packed_scales =
            has_nibbles ? pack_block_scales(layer, scales.data()) : pad(scales.data(), scales.size());
        const Lines padded_bias = pad(bias.data(), bias.size());
        const Guarded weight_page(packed.data(), packed.size() * 64, at_end);
        const Guarded scale_page(packed_scales.data(), packed_scales.size() * 64, at_end);
        const Guarded bias_page(padded_bias.data(), padded_bias.size() * 64, at_end);
        const Guarded norm_page(norm_weight.data(), norm_weight.size() * 4, at_end);
        const Guarded norm_bias_page(norm_bias.data(), norm_bias.size() * 4, at_end);
        const Guarded x_page(x.data(), x.size() * 4, at_end);
        const Guarded residual_page(residual.data(), residual.size() * 4, at_end);
        const Guarded y(nullptr, layer.padded_inputs * 4, at_end);
        const Guarded values(nullptr, rows * layer.padded_inputs * product.input_bytes, at_end);
        const Guarded row_scales(nullptr, rows * layer.blocks * 4, at_end);
        const Guarded row_sums(nullptr, rows * layer.blocks * 4, at_end);
        const Guarded out(nullptr, rows * layer.outputs * 4, at_end);

        Layer placed = layer;
        placed.weights = reinterpret_cast<const uint8_t*>(weight_page.data);
        placed.scales = scale_page.floats();
        placed.bias = bias.empty() ? nullptr : bias_page.floats();
        placed.norm_weight = norm_weight.empty() ? nullptr : norm_page.floats();
        placed.norm_bias = norm_bias.empty() ? nullptr : norm_bias_page.floats();
        const RoundedRows rounded{values.data, row_scales.floats(), reinterpret_cast<int32_t*>(row_sums.data)};
        for (size_t m = 0; m < rows; ++m)
            product.prepare(placed, x_page.floats() + m * layer.row_width(), y.floats(), rounded, m);
        for (size_t column = 0; column < layer.outputs; column += tile_columns)
            product.multiply(placed, rounded, 0, rows, column, residual.empty() ? nullptr : residual_page.floats(),
                             out.floats());
        return std::vector<float>(out.floats(), out.floats() + rows * layer.outputs);
    }

private:
    const bool has_nibbles;
    Layer layer{};
    size_t rows;
    std::vector<uint8_t> weights;
    std::vector<float> scales, bias, norm_weight, norm_bias, x, residual;
};

int main() {
    uint64_t hash = 14695981039346656037u;  // FNV-1a
    std::string names;
    for (const Candidate& candidate : candidates())
        if (candidate.is_usable)
            names += std::string(" ") + candidate.path.name;
    for (uint64_t seed = 0; seed < 300; ++seed) {
        state = seed;
        const Trial trial(seed % 2);
        const std::vector<float> expected = trial.run(scalar_path, true);
        const size_t bytes = expected.size() * sizeof(float);
        for (const Candidate& candidate : candidates())
            for (bool at_end : {false, true})
                if (candidate.is_usable && memcmp(trial.run(candidate.path, at_end).data(), expected.data(), bytes)) {
                    printf("layer %d differs on the path %s\n", int(seed), candidate.path.name);
                    return 1;
                }
        for (size_t i = 0; i < bytes; ++i)
            hash = (hash ^ reinterpret_cast<const uint8_t*>(expected.data())[i]) * 1099511628211u;
    }
    printf("%016llx%s\n", static_cast<unsigned long long>(hash), names.c_str());
}
