// What this machine can do at most: read weights from memory, and multiply weights that lie in the first cache.
//
// limits [THREADS]: the products are those of the library, so a whole step can be compared with them.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "memory.h"
#include "pack.h"
#include "paths.h"

using namespace kvasir;

// The least seconds of several runs on all threads at once.
static double seconds(int threads, const std::function<void(int)>& task) {
    double least = 1e9;
    for (int trial = 0; trial < 9; ++trial) {
        const auto start = std::chrono::steady_clock::now();
        std::vector<std::thread> others;
        for (int thread = 1; thread < threads; ++thread)
            others.emplace_back(task, thread);
        task(0);
        for (std::thread& other : others)
            other.join();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        least = took.count() < least ? took.count() : least;
    }
    return least;
}

static void read_memory(int threads) {
    constexpr size_t count = size_t(1) << 24;  // of each thread: 128 MiB, more than caches have
    std::vector<std::vector<uint64_t>> numbers(size_t(threads), std::vector<uint64_t>(count, 1));
    std::vector<uint64_t> sums(size_t(threads) * 8);
    const double time = seconds(threads, [&](int thread) {
        const std::vector<uint64_t>& own = numbers[size_t(thread)];
        sums[size_t(thread) * 8] = std::accumulate(own.begin(), own.end(), uint64_t(0));
    });
    if (sums[0] != count)
        abort();
    printf("memory: %.1f GB/s\n", double(threads) * count * 8 / time / 1e9);
}

enum class Kind { bytes, nibbles, floats };

// Rows by 64 columns of a layer of 384 inputs, again and again.
static void multiply(const Path& path, Kind kind, size_t rows, int threads) {
    const Product& product = kind == Kind::bytes ? path.bytes : kind == Kind::nibbles ? path.nibbles : path.floats;
    constexpr size_t inputs = 384, outputs = tile_columns, again = 400;
    Layer layer{};
    layer.inputs = layer.padded_inputs = inputs;
    layer.outputs = outputs;
    layer.block = kind == Kind::nibbles ? nibble_block : inputs;
    layer.blocks = inputs / layer.block;
    const std::vector<int8_t> weights(inputs * outputs, 3);
    const std::vector<float> numbers(inputs * outputs, 0.5f);
    const Lines packed = kind == Kind::bytes ? pack_bytes(layer, weights.data(), false, product.zero_point)
                         : kind == Kind::nibbles
                             ? pack_nibbles(layer, reinterpret_cast<const uint8_t*>(weights.data()))
                             : pack_floats(layer, numbers.data(), false);
    const Lines scales =
        kind == Kind::nibbles ? pack_block_scales(layer, numbers.data()) : pad(numbers.data(), outputs);
    layer.weights = packed.data()->bytes;
    layer.scales = reinterpret_cast<const float*>(scales.data());
    Lines values = lines_of(round_up(rows, row_padding) * inputs * product.input_bytes);
    std::vector<float> steps(rows * layer.blocks), y(inputs);
    std::vector<int32_t> excess(rows * layer.blocks);
    const RoundedRows rounded{values.data(), steps.data(), excess.data()};
    for (size_t m = 0; m < rows; ++m)
        product.prepare(layer, numbers.data() + m, y.data(), rounded, m);
    std::vector<std::vector<float>> out(size_t(threads), std::vector<float>(rows * outputs));
    const double time = seconds(threads, [&](int thread) {
        for (size_t i = 0; i < again; ++i)
            product.multiply(layer, rounded, 0, rows, 0, nullptr, out[size_t(thread)].data());
    });
    printf(" %6.0f", double(threads) * double(again * rows * inputs * outputs) / time / 1e9);
}

int main(int count, char** arguments) {
    const int threads = count > 1 ? atoi(arguments[1]) : int(std::thread::hardware_concurrency());
    printf("%d threads\n", threads);
    read_memory(threads);
    printf("10^9 products a second, of 1, 16 and 48 rows\n");
    for (const Candidate& candidate : candidates())
        if (candidate.is_usable)
            for (Kind kind : {Kind::bytes, Kind::nibbles, Kind::floats}) {
                printf("%-8s %-6s", candidate.path.name,
                       kind == Kind::bytes ? "int8" : kind == Kind::nibbles ? "int4" : "float");
                for (size_t rows : {1, 16, 48})
                    multiply(candidate.path, kind, rows, threads);
                printf("\n");
            }
}
