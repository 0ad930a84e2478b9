// The order of the data: known values of many keys, and a bijection for every size.
#include "../test.h"

#include "math/mixture.h"
#include "math/permutation.h"

// Pins the order: with another one a resumed run would read other text. The values are from permutation_example in
// dev/bench/torch_twin.py, written from the definition.
static void test_known_order(void) {
    static const struct {
        uint64_t n, seed, epoch, x[3]; // x: images of 0, 1 and n - 1
    } known[] = {
        {10, 1337, 0, {1, 6, 2}},
        {10, 1337, 1, {5, 8, 4}},
        {10, 9223372036854775807u, 0, {9, 3, 8}},
        {10, 9223372036854775807u, 1, {1, 3, 0}},
        {100003, 1337, 0, {8612, 37016, 53539}},
        {100003, 1337, 1, {79901, 50967, 96303}},
        {100003, 9223372036854775807u, 0, {4545, 79259, 28622}},
        {100003, 9223372036854775807u, 1, {87951, 64354, 63424}},
        {281474976710597, 1337, 0, {41919502995848, 148180336134638, 207064407634165}},
        {281474976710597, 1337, 1, {141561302266533, 161278099827159, 97047144635599}},
        {281474976710597, 9223372036854775807u, 0, {132846941347862, 254973275896718, 222461268083483}},
        {281474976710597, 9223372036854775807u, 1, {77239103324354, 41411049620905, 163065322016862}},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        for (int j = 0; j < 3; j++) {
            uint64_t n = known[i].n, k = j < 2 ? (uint64_t)j : n - 1;
            uint64_t x = permutation_at(n, permutation_key(known[i].seed, known[i].epoch), k);
            CHECK(x == known[i].x[j], "row %zu: %llu -> %llu", i, (unsigned long long)k, (unsigned long long)x);
        }
}

// Known choices of a source, from Order.place in the same file.
static void test_known_draws(void) {
    static const struct {
        uint64_t seed, example;
        double draw;
    } known[] = {
        {1337, 0, 0.80990529952940438},
        {1337, 1, 0.42861572510556445},
        {1337, 999, 0.051668610828372152},
        {1337, 281474976710656, 0.61477574473602292},
        {9223372036854775807u, 0, 0.40495214424574144},
        {9223372036854775807u, 2, 0.019873291841947527},
        {9223372036854775807u, 281474976710656, 0.6826772247110604},
    };
    const double end[3] = {0.25, 0.5, 1};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        double u = mixture_draw(known[i].seed, known[i].example);
        CHECK(u == known[i].draw, "row %zu: %.17g", i, u);
        int source = mixture_source(end, known[i].seed, known[i].example);
        CHECK(source == (u < 0.25 ? 0 : u < 0.5 ? 1 : 2), "row %zu: source %d", i, source);
    }
}

// True if k -> permutation_at(n, key, k) is onto [0, n). seen: n bytes of scratch.
static bool is_bijection(uint64_t n, uint64_t key, unsigned char *seen) {
    memset(seen, 0, n);
    for (uint64_t k = 0; k < n; k++) {
        uint64_t x = permutation_at(n, key, k);
        if (x >= n || seen[x]) return false;
        seen[x] = 1;
    }
    return true; // n different values in [0, n)
}

static void test_bijection(void) {
    static const uint64_t large[] = {65535, 65536, 65537, 131071, 999983, 1 << 20};
    unsigned char *seen = malloc(1 << 20);
    for (uint64_t n = 1; n <= 5000; n++)
        CHECK(is_bijection(n, permutation_key(n, 0), seen), "n = %llu", (unsigned long long)n);
    for (size_t i = 0; i < sizeof large / sizeof *large; i++)
        CHECK(is_bijection(large[i], permutation_key(1, i), seen), "n = %llu", (unsigned long long)large[i]);
    free(seen);
}

int main(void) {
    RUN(test_known_order, test_known_draws, test_bijection);
    return test_summary();
}
