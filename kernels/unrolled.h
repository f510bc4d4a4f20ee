// What products share: loops over constants, and prefetching.

template <int value>
struct Constant {
    static constexpr int number = value;
    constexpr operator int() const { return value; }
};

// Call body(0) to body(count - 1). An array that is indexed by these constants lives in registers; of one that a loop
// indexes, which it unrolls too late, gcc 12 writes every element to the stack. It does so too where the product is
// inlined. So products are [[gnu::flatten]], and those with long loops [[gnu::noinline]].
template <int count, class Body>
inline void unrolled(const Body& body) {
    if constexpr (count > 0) {
        unrolled<count - 1>(body);
        body(Constant<count - 1>());
    }
}

// Ask for a cache line into the second cache; addresses past the end do no harm. Products ask for the panels that come
// next, which took a third off the time of one row on Zen 4.
inline void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// Where the weights of a product lie: panels of columns, one behind the other. at() is the address of four inputs from k
// on, times 16 columns, of panel p; next() that of what to ask for then, here the panels that follow.
struct Panels {
    static constexpr bool adds_128 = false;  // more than the path's zero point
    const uint8_t* data;
    const uint8_t* following;
    size_t panel_bytes;

    const uint8_t* at(int p, size_t k) const { return data + p * panel_bytes + k * lane_count; }
    const uint8_t* next(int p, size_t k) const { return following + p * panel_bytes + k * lane_count; }
};
