// Compares the UTF-8 check with RFC 3629's encoding, and words with PCRE2's matches of GPT-2's pattern.
#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/tokenizer.h"
#include "random_text.h"

#include <pcre2.h>

static Error e;

// ---- UTF-8, against an encoder --------------------------------------------------------------------------------------

static bool rfc_valid(const unsigned char *s, size_t n) { // true if some code point is encoded as these n bytes
    static const unsigned char mask[] = {0, 0x7F, 0x1F, 0x0F, 0x07};
    uint32_t c = s[0] & mask[n];
    char again[4];
    for (size_t i = 1; i < n; i++) c = c << 6 | (s[i] & 0x3F);
    return c < 0x110000 && (c < 0xD800 || c > 0xDFFF) && put_code_point(again, c) == n && memcmp(again, s, n) == 0;
}

static size_t rfc_invalid_at(const unsigned char *s, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
        size_t n = 1;
        while (n <= 4 && (at + n > bytes || !rfc_valid(s + at, n))) n++;
        if (n > 4) return at;
        at += n;
    }
    return bytes;
}

static void test_utf8(void) {
    static const unsigned char edge[] = {0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF,
                                         0xE0, 0xE1, 0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xF8, 0xFF};
    unsigned char s[20] = "abcdefghijklmnopqrs";
    for (uint32_t i = 0; i < 1 << 16; i++) { // every pair of bytes
        s[0] = (unsigned char)i, s[1] = (unsigned char)(i >> 8);
        CHECK(utf8_invalid_at((char *)s, 2) == rfc_invalid_at(s, 2), "%02x %02x", s[0], s[1]);
    }
    for (int i = 0; i < 300000; i++) { // four edge bytes, anywhere inside or across the scanner's steps of eight bytes
        unsigned char t[20];
        memcpy(t, s + 2, 17);
        size_t at = draw(13), n = at + 4 + draw(3);
        for (size_t k = 0; k < 4; k++) t[at + k] = edge[draw(sizeof edge)];
        size_t got = utf8_invalid_at((char *)t, n), want = rfc_invalid_at(t, n);
        CHECK(got == want, "%02x %02x %02x %02x at %zu: %zu, want %zu", t[at], t[at + 1], t[at + 2], t[at + 3], at, got,
              want);
    }
    const char *text = "a\xC3\xA4\xE4\xB8\xAD\xF0\x9F\x99\x82z"; // characters of 1, 2, 3, 4 and 1 bytes
    static const size_t want[] = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 11};
    for (size_t n = 0; n < sizeof want / sizeof *want; n++)
        CHECK(utf8_boundary(text, n) == want[n], "boundary of %zu is %zu", n, utf8_boundary(text, n));
}

// ---- Words, against PCRE2 -------------------------------------------------------------------------------------------

// GPT-2's published pattern with \s spelt out: PCRE2's \s includes U+180E, which is no space since Unicode 6.3.
#define SPACES                                                                                                         \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
static const char PATTERN[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" SPACES "\\p{L}\\p{N}]+|[" SPACES
                              "]+(?![^" SPACES "])|[" SPACES "]+";

typedef struct {
    pcre2_code *code;
    pcre2_match_data *match;
    Tokenizer *t;
    char unicode[64];  // the version in PCRE2
    bool same_unicode; // PCRE2 and the tokenizer's tables agree
} Words;

static Words words_open(void) {
    Words w = {.unicode = ""};
    int error;
    PCRE2_SIZE offset;
    w.code = pcre2_compile((PCRE2_SPTR)PATTERN, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &error, &offset, NULL);
    w.match = w.code ? pcre2_match_data_create_from_pattern(w.code, NULL) : NULL;
    if (w.code) pcre2_jit_compile(w.code, PCRE2_JIT_COMPLETE);
    CHECK(w.code && w.match, "the pattern does not compile: %d at %zu", error, offset);
    CHECK_OK(tokenizer_new(&w.t, 0, &e), &e);
    int length = pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, NULL);
    if (length > 0 && (size_t)length <= sizeof w.unicode) pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, w.unicode);
    w.same_unicode = strncmp(w.unicode, "14.", 3) == 0;
    return w;
}

static void words_close(Words *w) {
    pcre2_match_data_free(w->match);
    pcre2_code_free(w->code);
    memory_free(w->t);
}

static bool same_words(Words *w, const char *text, size_t bytes) {
    const uint8_t *s = (const uint8_t *)text;
    for (size_t at = 0; at < bytes;) {
        int found = pcre2_match(w->code, (PCRE2_SPTR)text, bytes, at, PCRE2_NO_UTF_CHECK, w->match, NULL);
        PCRE2_SIZE *span = pcre2_get_ovector_pointer(w->match);
        if (found < 1 || span[0] != at || tokenizer_word(w->t, s + at, s + bytes) != s + span[1]) return false;
        at = span[1];
    }
    return true;
}

static void test_words_of_every_code_point(void) {
    Words w = words_open();
    char text[128];
    int wrong = 0;
    for (uint32_t c = 0; c < 0x110000; c++) {
        if (c >= 0xD800 && c < 0xE000) continue;
        char u[4];
        size_t n = put_code_point(u, c), at = 0;
        const char *around = "a*1* *  *!**'s*"; // the code point replaces *, before and after every class
        for (const char *s = around; *s; s++) {
            if (*s != '*') text[at++] = *s;
            else memcpy(text + at, u, n), at += n;
        }
        if (!same_words(&w, text, at) && wrong++ < 10 && w.same_unicode) printf("  U+%04X\n", c);
    }
    if (!w.same_unicode) printf("  PCRE2 has Unicode %s, the tables 14.0: %d code points differ\n", w.unicode, wrong);
    // Other versions of Unicode assign thousands more or fewer code points than 14.0.
    CHECK(w.same_unicode ? wrong == 0 : wrong < 20000, "%d code points differ", wrong);
    words_close(&w);
}

// If PCRE2 has another version of Unicode, the texts hold only characters of both versions.
static void test_words_of_random_texts(void) {
    Words w = words_open();
    char text[1024];
    bool comparable = true;
    for (int i = 0; i < 100000 && comparable; i++) {
        int count = 1 + (int)draw(40);
        size_t bytes = w.same_unicode ? random_text(text, count) : random_pieces(text, count);
        bool same = same_words(&w, text, bytes);
        CHECK(same, "'%.*s'", (int)bytes, text);
        comparable = same;
    }
    words_close(&w);
}

int main(void) {
    random_begin();
    RUN(test_utf8, test_words_of_every_code_point, test_words_of_random_texts);
    return test_summary();
}
