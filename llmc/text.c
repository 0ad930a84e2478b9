#include "text.h"

#include <stdbool.h>
#include <stddef.h>

// Bytes of the UTF-8 character at s (RFC 3629), 0 where there is none.
static int utf8_length(const unsigned char *s) {
    int length = s[0] < 0x80 ? 1 : s[0] >= 0xc2 && s[0] < 0xe0 ? 2 : s[0] >= 0xe0 && s[0] < 0xf0 ? 3 : 4;
    if (length == 4 && (s[0] < 0xf0 || s[0] > 0xf4)) return 0;
    for (int i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    bool overlong = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90);
    bool surrogate = s[0] == 0xed && s[1] > 0x9f, beyond = s[0] == 0xf4 && s[1] > 0x8f;
    return overlong || surrogate || beyond ? 0 : length;
}

void text_write_json(FILE *f, const char *text) {
    fputc('"', f);
    for (const unsigned char *s = (const unsigned char *)text; *s;) {
        int length = utf8_length(s);
        if (!length) fputs("\\ufffd", f);
        else if (*s == '"' || *s == '\\') fprintf(f, "\\%c", *s);
        else if (*s < 0x20) fprintf(f, "\\u%04x", *s);
        else fwrite(s, 1, (size_t)length, f);
        s += length ? length : 1;
    }
    fputc('"', f);
}
