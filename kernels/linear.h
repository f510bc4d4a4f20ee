// The product of rounded rows and packed weights, written once over the lanes and the products of a path.

inline size_t lesser(size_t a, size_t b) { return a < b ? a : b; }

constexpr float smallest_normal = 1.17549435e-38f, largest_finite = 3.40282347e+38f;

// The first lanes, all 16 if count is more; the others are 0.
inline Floats load(const float* from, size_t count) {
    if (count >= lane_count)
        return load(from);
    float first[lane_count] = {};
    memcpy(first, from, count * sizeof(float));
    return load(first);
}

// Store the first lanes, all 16 if count is more.
inline void store(float* to, Floats a, size_t count) {
    if (count >= lane_count)
        return store(to, a);
    float lanes[lane_count];
    store(lanes, a);
    memcpy(to, lanes, count * sizeof(float));
}

#include "activations.h"
#include "prologue.h"

// What the tiles of one call share.
struct Call {
    const Layer& layer;
    const RoundedRows& rows;
    const float* residual;
    float* out;
};

// Add what is beside a product of a row and 16 columns, and store it.
inline void finish(const Call& call, size_t m, size_t column, Floats value) {
    const Layer& layer = call.layer;
    if (column >= layer.outputs)
        return;
    if (layer.bias)
        value = value + load(layer.bias + column);
    const size_t at = m * layer.outputs + column, count = layer.outputs - column;
    if (call.residual)
        value = value + load(call.residual + at, count);
    store(call.out + at, value, count);
}

// What a row has so far of 16 columns, and a block's sums of products.
template <class P>
inline Floats with_block(const Call& call, size_t m, size_t panel, size_t block, Ints whole, Floats value) {
    const Layer& layer = call.layer;
    const size_t at = m * layer.blocks + block;
    Floats scale = all(call.rows.scales[at]);
    if (P::scales_blocks)
        scale = scale * load(layer.scales + (panel * layer.blocks + block) * lane_count);
    return fma(to_floats(whole - all(call.rows.excess[at])), scale, value);
}

// Finish 16 columns of which all blocks are added.
template <class P>
inline void finish_blocks(const Call& call, size_t m, size_t panel, Floats value) {
    const size_t column = panel * lane_count;
    if (!P::scales_blocks)
        value = value * load(call.layer.scales + column);
    finish(call, m, column, value);
}

// Compute R rows from m and P panels of 16 columns from a panel.
template <class P, int R>
void multiply_tile(const Call& call, size_t m, size_t panel) {
    const Layer& layer = call.layer;
    const size_t panel_bytes = layer.padded_inputs * lane_count / P::weights_in_a_byte;
    const auto* q = static_cast<const typename P::Input*>(call.rows.values) + m * layer.padded_inputs;
    Floats value[R][P::panels];
    for (auto& row : value)
        for (Floats& one : row)
            one = all(0.0f);
    for (size_t b = 0; b < layer.blocks; ++b) {
        const size_t start = b * layer.block;
        Ints whole[R][P::panels];
        const uint8_t* const at = layer.weights + panel * panel_bytes + start * lane_count / P::weights_in_a_byte;
        const Panels weights{at, at + P::panels * panel_bytes, panel_bytes};
        P::multiply(q + start, layer.padded_inputs, weights, lesser(layer.block, layer.padded_inputs - start), whole);
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P::panels; ++p)
                value[r][p] = with_block<P>(call, m + r, panel + p, b, whole[r][p], value[r][p]);
    }
    for (int p = 0; p < P::panels; ++p)
        for (int r = 0; r < R; ++r)
            finish_blocks<P>(call, m + r, panel + p, value[r][p]);
}

// Compute rows [m, last), R at a time; what is left, R - 1 at a time.
template <class P, int R>
void multiply_rows(const Call& call, size_t m, size_t last, size_t panel) {
    for (; m + R <= last; m += R)
        multiply_tile<P, R>(call, m, panel);
    if constexpr (R > 1)
        multiply_rows<P, R - 1>(call, m, last, panel);
}

// Product::multiply.
template <class P>
void multiply(const Layer& layer, const RoundedRows& rows, size_t first, size_t last, size_t column, const float* residual,
              float* out) {
    const Call call{layer, rows, residual, out};
    for (size_t panel = column / lane_count; panel < (column + tile_columns) / lane_count; panel += P::panels)
        multiply_rows<P, P::rows>(call, first, last, panel);
}

// A product whose weights have scales in blocks.
template <class P>
struct InBlocks : P {
    static constexpr bool scales_blocks = true;
};

template <class P>
constexpr Product product() {
    return {sizeof(typename P::Input), P::zero_point, prepare<P>, multiply<P>};
}

// Compute R rows from m and N panels of 16 columns from a panel: each output is a sum over the inputs in order.
template <int R, int N>
void multiply_float_tile(const Call& call, size_t m, size_t panel) {
    const Layer& layer = call.layer;
    const float* const weights = reinterpret_cast<const float*>(layer.weights) + panel * layer.inputs * lane_count;
    const float* const x = static_cast<const float*>(call.rows.values) + m * layer.padded_inputs;
    Floats sums[R][N];
    unrolled<R>([&](auto r) { unrolled<N>([&](auto p) { sums[r][p] = all(0.0f); }); });
    for (size_t k = 0; k < layer.inputs; ++k) {
        Floats weight[N];
        unrolled<N>([&](auto p) { weight[p] = load(weights + (p * layer.inputs + k) * lane_count); });
        unrolled<R>([&](auto r) {
            const Floats input = all(x[r * layer.padded_inputs + k]);
            unrolled<N>([&](auto p) { sums[r][p] = fma(input, weight[p], sums[r][p]); });
        });
    }
    unrolled<R>([&](auto r) {
        unrolled<N>([&](auto p) { finish(call, m + r, (panel + p) * lane_count, sums[r][p]); });
    });
}

// Compute `count` rows from m, which are at most R.
template <int R, int N>
void multiply_float_rows(const Call& call, size_t m, size_t count, size_t panel) {
    if (count == R)
        return multiply_float_tile<R, N>(call, m, panel);
    if constexpr (R > 1)
        multiply_float_rows<R - 1, N>(call, m, count, panel);
}

// Product::multiply of floats, N panels and at most R rows at a time, nearly as many each time.
template <int R, int N>
void multiply_packed_floats(const Layer& layer, const RoundedRows& rows, size_t first, size_t last, size_t column,
                            const float* residual, float* out) {
    const Call call{layer, rows, residual, out};
    const size_t count = last - first, tiles = (count + R - 1) / R;
    for (size_t panel = column / lane_count; panel < (column + tile_columns) / lane_count; panel += N)
        for (size_t i = 0; i < tiles; ++i) {
            const size_t m = first + i * count / tiles;
            multiply_float_rows<R, N>(call, m, first + (i + 1) * count / tiles - m, panel);
        }
}

template <int R, int N>
constexpr Product float_product() {
    return {sizeof(float), 0, prepare_floats, multiply_packed_floats<R, N>};
}

// Path::multiply_floats, R rows at a time. Each is a sum over k in order, whatever rows are beside it.
template <int R>
void multiply_floats(const FloatRows& from, size_t m, size_t last, const float* weights, size_t outputs, float* out,
                     size_t stride) {
    constexpr size_t panels = 2;
    for (; m + R <= last; m += R)
        for (size_t column = 0; column < outputs; column += panels * lane_count) {
            Floats sums[R * panels] = {};
            for (size_t k = 0; k < from.inputs; ++k)
                unrolled<panels>([&](auto p) {
                    const size_t at = lesser(column + p * lane_count, outputs - 1);
                    const Floats weight = load(weights + k * outputs + at, outputs - at);
                    unrolled<R>([&](auto r) {
                        Floats& sum = sums[r * panels + p];
                        sum = fma(all(from.x[(m + r) * from.stride + k]), weight, sum);
                    });
                });
            for (size_t i = 0; i < R * panels; ++i)
                if (const size_t at = column + i % panels * lane_count; at < outputs)
                    store(out + (m + i / panels) * stride + at, sums[i], outputs - at);
        }
    if constexpr (R > 1)
        multiply_floats<R / 2>(from, m, last, weights, outputs, out, stride);
}
