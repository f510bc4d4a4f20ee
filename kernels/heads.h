// Heads of attention over keys and values of 8 bits or of floats, and the table of functions that compute them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layer.h"

namespace kvasir {

// A softmax is taken in sections of this many positions, from 0, each with its own largest score. A section's sum of
// probabilities of 15 bits times values below 256 just fits int32.
constexpr size_t section_tokens = 256;
constexpr size_t most_head_size = 640;
constexpr int64_t most_heads = 1 << 16;  // so that no size overflows
constexpr float log2_e = 1.44269504f;
// Positions are counted in floats as well, exactly up to here.
constexpr size_t most_tokens = 1 << 24;

struct Heads {
    size_t count;     // H
    size_t kv_count;  // G
    size_t size;      // D, a multiple of 16
    float scale;      // of scores; times log2(e), but where there is a softcap
    float softcap;    // or 0
    size_t window;    // positions that a token attends to on a side, its own among them
    bool shared;       // whether values are the keys
    bool looks_ahead;  // whether it attends to later ones as well
    bool reads_only;   // whether x has queries alone, of keys and values that are there
    bool interleaved;  // whether a rotary pair is (2i, 2i + 1), not (i, i + rotated / 2)
    size_t rotated;    // elements of a head that are rotated
    const float* cos;  // [P][rotated / 2]
    const float* sin;
    const float* slopes;  // [H], or null
    const float* sinks;   // [H], or null
    size_t bias_rows, bias_width;  // of Stretch::biases

    // The positions that the token at a position of a sequence attends to: the first, and the one after the last.
    size_t first_seen(size_t position) const { return position < window ? 0 : position + 1 - window; }
    size_t end_seen(size_t position, size_t length) const {
        const size_t end = looks_ahead ? position + window : position + 1;
        return end < length ? end : length;
    }
    size_t row_width() const { return (count + (reads_only ? 0 : shared ? 1 : 2) * kv_count) * size; }
    size_t group() const { return count / kv_count; }  // query heads that share a key and value
};

// A byte is the integer + 128; kernels/README.md draws the order within a block. Of floats keys are
// [N][G][B / 16][D][16] and values [N][G][B][D], without scales; of plain ones keys are as values, and B may be any. Plain
// ones may also be int8, which are those numbers.
struct Caches {
    size_t block_tokens;  // B, a multiple of 16
    bool plain;
    uint8_t* keys;        // [N][G][B / 16][D / 4][16][4]
    float* key_scales;    // [N][G][B]
    uint8_t* values;      // [N][G][B / 4][D][4]; null where they are the keys
    float* value_scales;  // [N][G][B]
    bool narrow = false;  // int8 in the place of floats
};

// Tokens of one sequence at consecutive positions, of a run of T tokens.
struct Stretch {
    const int32_t* blocks;  // of the sequence
    size_t length;          // of the sequence, after the run
    size_t position;        // of the first
    size_t token;           // its place in the run
    size_t count;
    const float* biases;  // of the sequence, [H][bias_rows][bias_width], or null
    size_t bias_row;      // of the first token

    // The place of a position among the tokens of caches.
    size_t place(const Heads& heads, const Caches& caches, size_t kv_head, size_t at) const {
        const size_t block = size_t(blocks[at / caches.block_tokens]);
        return (block * heads.kv_count + kv_head) * caches.block_tokens + at % caches.block_tokens;
    }
};

// A softmax under way, of scores in bits: the sums are those of 2^(score - most).
struct Softmax {
    float* most;         // [T][H]
    float* denominator;  // [T][H]
    float* values;       // [T][H][D]
};

struct Attention {
    size_t input_bytes;  // of a prepared query: 4 of floats, 1 of integers, or 2 where products need 16 bits

    // Round, if they are integers, the queries of a token from x [row_width], and append its keys and values. RoundedRows
    // are [G][T][H / G].
    void (*append)(const Heads&, const Caches&, const float* x, const Stretch&, size_t token, size_t tokens,
                   const RoundedRows& queries);

    // Add a section to the softmax of a stretch's queries that share a key/value head; queries are theirs, [count][H / G].
    void (*attend)(const Heads&, const Caches&, const Stretch&, size_t kv_head, size_t section, const RoundedRows& queries,
                   const Softmax&);

    // Add what attend left of one section alone.
    void (*join)(const Heads&, const Stretch&, size_t kv_head, const Softmax& section, const Softmax&);
};

// A thread's room for a section, of so many bytes a position. It is in pack.cc, which is compiled for every CPU: a path
// allocates nothing.
uint8_t* section_room(size_t position_bytes);

}  // namespace kvasir
