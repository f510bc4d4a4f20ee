// Sums of products of rounded inputs and packed weights, by AMX: an instruction multiplies 16 rows of 64 inputs by 16
// columns.

constexpr size_t tile_rows = 16, tile_inputs = 64;

// The shapes of a thread's tiles, as ldtilecfg reads them (in Intel's manual, volume 2): all are 16 rows of 64 bytes.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The compiler does not know what tile instructions read and write.
inline void settle_memory() { asm volatile("" ::: "memory"); }

// Gives this thread's tiles our shapes. ONNX Runtime's kernels give them theirs once and count on them ever after: so other
// shapes come back at the end, and where there were none ours stay.
class Tiles {
public:
    Tiles() {
        _tile_storeconfig(&former);
        settle_memory();
        if (memcmp(&former, &ours, sizeof ours))
            _tile_loadconfig(&ours);
    }
    ~Tiles() {
        if (former.palette && memcmp(&former, &ours, sizeof ours))
            _tile_loadconfig(&former);
    }
    Tiles(const Tiles&) = delete;

private:
    static constexpr TileShapes ours{};
    TileShapes former;
};

// Compute `count` rows from m, at most 16 times row_tiles, and two panels of 16 columns.
template <class Few, int row_tiles>
void multiply_row_tiles(const Call& call, size_t m, size_t count, size_t panel) {
    const Layer& layer = call.layer;
    const size_t panel_bytes = layer.padded_inputs * lane_count, stride = layer.padded_inputs;
    Floats value[row_tiles * tile_rows][2];
    for (auto& row : value)
        row[0] = row[1] = all(0.0f);
    for (size_t b = 0; b < layer.blocks; ++b) {
        const size_t start = b * layer.block, end = lesser(start + layer.block, layer.padded_inputs);
        const auto* const q = static_cast<const int8_t*>(call.rows.values) + m * stride;
        const uint8_t* const weights = layer.weights + panel * panel_bytes;
        alignas(64) Ints whole[2][row_tiles * tile_rows];
        settle_memory();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (size_t k = start; k < end; k += tile_inputs) {
            const uint8_t* const at = weights + k * lane_count;
            for (size_t line = 0; line < 2 * tile_rows; ++line)
                prefetch(at + (2 + line % 2) * panel_bytes + line / 2 * 64);
            _tile_loadd(4, q + k, stride);
            _tile_loadd(6, at, 64);
            _tile_dpbsud(0, 4, 6);
            _tile_loadd(7, at + panel_bytes, 64);
            _tile_dpbsud(1, 4, 7);
            if (row_tiles == 2) {
                _tile_loadd(5, q + tile_rows * stride + k, stride);
                _tile_dpbsud(2, 5, 6);
                _tile_dpbsud(3, 5, 7);
            }
        }
        _tile_stored(0, &whole[0][0], 64);
        _tile_stored(1, &whole[1][0], 64);
        if (row_tiles == 2) {
            _tile_stored(2, &whole[0][tile_rows], 64);
            _tile_stored(3, &whole[1][tile_rows], 64);
        }
        settle_memory();
        for (size_t r = 0; r < count; ++r)
            for (size_t p = 0; p < 2; ++p)
                value[r][p] = with_block<Few>(call, m + r, panel + p, b, whole[p][r], value[r][p]);
    }
    for (size_t r = 0; r < count; ++r)
        for (size_t p = 0; p < 2; ++p)
            finish_blocks<Few>(call, m + r, panel + p, value[r][p]);
}

// Product::multiply. The last rows, if they are at most half a tile, are left to Few; the bits are the same.
template <class Few>
void multiply_tiles(const Layer& layer, const RoundedRows& rows, size_t first, size_t last, size_t column,
                    const float* residual, float* out) {
    const Call call{layer, rows, residual, out};
    const size_t beside = (last - first) % tile_rows, end = beside <= tile_rows / 2 ? last - beside : last;
    const size_t panel = column / lane_count, panels = tile_columns / lane_count;
    if (first < end) {
        const Tiles tiles;
        for (size_t p = panel; p < panel + panels; p += 2)
            for (size_t m = first; m < end; m += 2 * tile_rows) {
                const size_t count = lesser(2 * tile_rows, end - m);
                (count > tile_rows ? multiply_row_tiles<Few, 2> : multiply_row_tiles<Few, 1>)(call, m, count, p);
            }
    }
    for (size_t p = panel; p < panel + panels; p += Few::panels)
        multiply_rows<Few, Few::rows>(call, end, last, p);
}

template <class Few>
constexpr Product tiles_product() {
    return {sizeof(int8_t), Few::zero_point, prepare<Few>, multiply_tiles<Few>};
}
