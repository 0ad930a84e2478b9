// random_text: random text for the tests of tokenizers.
#pragma once

#include "../scratch.h"

static inline size_t put_code_point(char *out, uint32_t c) {
    unsigned char b[4];
    size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const unsigned char lead[5] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (size_t i = n; i-- > 1; c >>= 6) b[i] = (unsigned char)(0x80 | (c & 0x3F));
    b[0] = (unsigned char)(lead[n] | c);
    memcpy(out, b, n);
    return n;
}

// Writes a piece. Pieces cover GPT-2's classes of characters. All versions of Unicode agree on their classes.
static inline size_t put_piece(char *out) {
    static const char *const pieces[] = {" ",  " ",   "\n", "\t", "\r\n", "a",    "bc",   "The", " the", "1",    "23",
                                         "!",  "...", "'",  "'s", "'ll",  "'re",  "'x",   "'S",  "\"",   "\x1f", "\v",
                                         "_",  "()",  "é",  "ß",  "Ж",    "中文", "ñ",    "٣",   "½",    "²",    "🙂",
                                         "　", " ",   " ",  "᠎",  "́",     "​",  "\x7f", "ſ",   "Ⅷ",    "〇",   "l"};
    const char *piece = pieces[draw(sizeof pieces / sizeof *pieces)];
    memcpy(out, piece, strlen(piece));
    return strlen(piece);
}

// Writes `count` pieces of at most six bytes. Returns the bytes written.
static inline size_t random_pieces(char *out, int count) {
    size_t at = 0;
    for (int i = 0; i < count; i++) at += put_piece(out + at);
    return at;
}

// Like random_pieces, but a tenth of the pieces are arbitrary code points.
static inline size_t random_text(char *out, int count) {
    size_t at = 0;
    for (int i = 0; i < count; i++) {
        uint32_t c = draw(0x110000);
        at += draw(10) == 0 && (c < 0xD800 || c > 0xDFFF) ? put_code_point(out + at, c) : put_piece(out + at);
    }
    return at;
}
