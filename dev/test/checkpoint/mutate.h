// mutate: random changes of JSON texts and the files around them, for fuzzers. They depend on the state of draw alone.
#pragma once

#include "base/common.h"
#include "base/hash.h"

#include <string.h>

enum { MAX_BYTES = 1 << 16 };

typedef struct {
    char bytes[MAX_BYTES];
    size_t count;
} Sample;

// A random number below n (splitmix64: Steele et al. 2014); 0 for n 0.
static inline size_t draw(uint64_t *state, size_t n) {
    uint64_t random = hash_finish(*state += HASH_GOLDEN);
    return n ? random % n : 0;
}

// Replaces [at, at + remove) by at most 256 given bytes, if there is room for them.
static inline void splice(Sample *s, size_t at, size_t remove, const char *insert, size_t bytes) {
    char copy[256];
    bytes = size_min(bytes, sizeof copy);
    if (at > s->count) return;
    remove = size_min(remove, s->count - at);
    if (s->count - remove + bytes > MAX_BYTES) return;
    memcpy(copy, insert, bytes); // it may be in s
    memmove(s->bytes + at + bytes, s->bytes + at + remove, s->count - at - remove);
    memcpy(s->bytes + at, copy, bytes);
    s->count += bytes - remove;
}

// One change that begins in [begin, end).
static inline void mutate(Sample *s, size_t begin, size_t end, uint64_t *state) {
    // clang-format off
    static const char *const words[] = { // of JSON and the formats, and numbers at the edges
        "{", "}", "[", "]", ":", ",", "\"", "\\", "\\u00", "\\u0000", "\\ud800", "null", "true", "nan", "-0", "-1", "0", "1",
        "4", "8", "1.5", "1e400", "-1e999", "1e-400", "4294967296", "2147483648", "9007199254740993",
        "18446744073709551615", "18446744073709551616", "[]", "[[[[[[[[", "{}", "\"a\"", "\"dtype\"", "\"shape\"",
        "\"data_offsets\"", "\"__metadata__\"", "\"F32\"", "\"BF16\"", "\"U8\"", "[0,0]", "[4,8]", " ", "\n", "\xff", "\xc3\xa9"};
    // clang-format on
    size_t at = begin + draw(state, end - begin), from = draw(state, s->count), digits = 0;
    const char *word = words[draw(state, sizeof words / sizeof *words)];
    char byte = (char)draw(state, 256);
    switch (draw(state, 8)) {
    case 0: splice(s, at, 1, &byte, 1); break;
    case 1: splice(s, at, 0, word, strlen(word)); break;
    case 2: splice(s, at, strlen(word), word, strlen(word)); break;
    case 3: splice(s, at, 1 + draw(state, 40), "", 0); break;
    case 4: splice(s, at, 0, s->bytes + from, draw(state, size_min(200, s->count - from))); break;
    case 5: s->count = size_min(at, s->count); break;
    case 6: // another number in a number's place
        while (at < s->count && (s->bytes[at] < '0' || s->bytes[at] > '9')) at++;
        while (at + digits < s->count && s->bytes[at + digits] >= '0' && s->bytes[at + digits] <= '9') digits++;
        splice(s, at, digits, word, strlen(word));
        break;
    default:
        if (at < s->count) s->bytes[at] ^= (char)(1 << draw(state, 8));
    }
}
