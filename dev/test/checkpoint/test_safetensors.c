// safetensors: all values of the 16-bit types, files written and read back, malformed files. dev/oracle exchanges files
// with Python's package.
#include "base/float16.h"
#include "../safetensors_writer.h"
#include "half.h"
#include "../scratch.h"

#include <sys/stat.h>

// ---- Conversions ----------------------------------------------------------------------------------------------------

// Returns the value of a 16-bit float from its definition, in double.
static double half_value(unsigned bits, int fraction_bits, int bias) {
    int exponent_bits = 15 - fraction_bits, exponent = (int)(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
    double fraction = bits & ((1u << fraction_bits) - 1), sign = bits & 0x8000 ? -1 : 1;
    if (exponent == (1 << exponent_bits) - 1) return fraction != 0 ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0) return sign * ldexp(fraction, 1 - bias - fraction_bits);
    return sign * ldexp(1 + ldexp(fraction, -fraction_bits), exponent - bias);
}

// All 65,536 codes of both types convert to the defined value.
static void test_half_every_value(void) {
    for (unsigned bits = 0; bits < 65536; bits++) {
        const struct {
            float got;
            double want;
        } values[] = {{bf16_to_f32((uint16_t)bits), half_value(bits, 7, 127)},
                      {f16_to_f32((uint16_t)bits), half_value(bits, 10, 15)}};
        for (int k = 0; k < 2; k++) {
            float got = values[k].got;
            double want = values[k].want;
            bool same = isnan(want) ? isnan(got) : got == want && !signbit(got) == !signbit(want);
            CHECK(same, "%s %04x is %g, want %g", k ? "f16" : "bf16", bits, got, want);
        }
    }
}

// A bf16 value rounds to itself, and a NaN to a NaN. The middle between two neighbours rounds to the even neighbour;
// one fp32 step off the middle rounds to the nearer neighbour. Values round to infinity if they exceed the largest
// finite value by half a step or more (IEEE 754-2019, section 4.3.1).
static void test_half_rounding(void) {
    unsigned infinity = f32_to_bf16(INFINITY);
    CHECK(isinf(half_value(infinity, 7, 127)), "infinity is %04x", infinity);
    for (unsigned low = 0; low < infinity; low++) {
        double a = half_value(low, 7, 127), below = half_value(low ? low - 1 : 1, 7, 127);
        double b = low + 1 < infinity ? half_value(low + 1, 7, 127) : a + (a - below);
        float middle = (float)((a + b) / 2);
        CHECK(middle == (a + b) / 2, "the middle %g is not exact, though fp32 has more fraction bits", (a + b) / 2);
        for (unsigned sign = 0; sign <= 0x8000; sign += 0x8000) {
            float m = sign ? -middle : middle, itself = (float)(sign ? -a : a);
            unsigned even = (low & 1 ? low + 1 : low) | sign;
            unsigned under = f32_to_bf16(nextafterf(m, 0)), at = f32_to_bf16(m);
            unsigned over = f32_to_bf16(nextafterf(m, sign ? -INFINITY : INFINITY));
            CHECK(f32_to_bf16(itself) == (low | sign), "%g gives %04x", itself, f32_to_bf16(itself));
            CHECK(at == even, "tie %g gives %04x, want %04x", m, at, even);
            CHECK(under == (low | sign), "under %g gives %04x, want %04x", m, under, low | sign);
            CHECK(over == ((low + 1) | sign), "over %g gives %04x", m, over);
        }
    }
    for (unsigned bits = infinity + 1; bits < 0x8000; bits++)
        CHECK(isnan(half_value(f32_to_bf16(bf16_to_f32((uint16_t)bits)), 7, 127)), "the NaN %04x is lost", bits);
    CHECK(f32_to_bf16(f32_from_bits(0x7f800001)) > infinity, "a NaN became infinity"); // bf16 cuts off its only bit
    CHECK(f32_to_bf16(1e-45f) == 0 && f32_to_bf16(-1e-45f) == 0x8000, "tiny values");
    CHECK(f32_to_bf16(3.4028235e38f) == infinity, "huge values");
}

static Error e;

// ---- Files ----------------------------------------------------------------------------------------------------------

// The reader converts three types to floats; for other types it returns only names and sizes. The file has metadata, a
// scalar and an empty tensor. Element i is i.
static void test_types(void) {
    enum { ROWS = 3, COLUMNS = 37, COUNT = ROWS * COLUMNS, TYPES = 5 };
    static const char *const types[TYPES] = {"F32", "F16", "BF16", "I64", "U8"};
    const uint64_t shape[2] = {ROWS, COLUMNS}, empty = 0;
    const float half = 0.5f;
    SafetensorsWriter *writer;
    SafetensorsReader reader;
    CHECK_OK(writer_create(&writer, "sample.safetensors", &e), &e);
    safetensors_add_metadata(&writer->header, "quo\"ted\\\n", "\x01\t\xc3\xa9 \xe2\x82\xac \xf0\x9f\x99\x82");
    for (int k = 0; k < TYPES; k++) safetensors_add(&writer->header, types[k], types[k], 2, shape);
    safetensors_add(&writer->header, "scalar", "F32", 0, NULL);
    safetensors_add(&writer->header, "empty", "F32", 1, &empty);
    for (int k = 0; k < TYPES; k++)
        for (int i = 0; i < COUNT; i++) {
            const float x = (float)i;
            const uint64_t bits = k == 1 ? f16_of(x) : k == 2 ? f32_to_bf16(x) : (uint64_t)i;
            CHECK_OK(writer_write(writer, k ? (const void *)&bits : &x, safetensors_type_bytes(types[k]), &e), &e);
        }
    CHECK_OK(writer_write(writer, &half, sizeof half, &e), &e);
    CHECK_OK(writer_finish(writer, &e), &e);

    CHECK_OK(safetensors_open(&reader, "sample.safetensors", &e), &e);
    CHECK(reader.count == TYPES + 2, "%d tensors", reader.count);
    for (int k = 0; k < TYPES; k++) {
        const SafetensorsEntry *entry = &reader.entries[k];
        float values[COUNT + 1];
        CHECK(strcmp(entry->name, types[k]) == 0 && strcmp(entry->dtype, types[k]) == 0 && entry->dimensions == 2 && entry->shape[0] == ROWS &&
                  entry->shape[1] == COLUMNS && entry->count == COUNT,
              "%s is not right", types[k]);
        if (k > 2) CHECK_ERROR(safetensors_read(entry, 0, 1, values, &e), &e, ERR_INPUT, entry->name);
        for (uint64_t first = 0, n; first < COUNT && k <= 2; first += n) { // the last range is shorter
            n = size_min(13, COUNT - first);
            values[n] = -1;
            CHECK_OK(safetensors_read(entry, first, n, values, &e), &e);
            for (uint64_t i = 0; i < n; i++) CHECK(values[i] == (float)(first + i), "%s: %g", entry->name, values[i]);
            CHECK(values[n] == -1, "wrote beyond the range");
        }
    }
    const SafetensorsEntry *scalar = &reader.entries[TYPES], *none = &reader.entries[TYPES + 1];
    float got = 0;
    CHECK(scalar->dimensions == 0 && scalar->count == 1, "the scalar");
    CHECK_OK(safetensors_read(scalar, 0, 1, &got, &e), &e);
    CHECK(got == half, "the scalar is %g", got);
    CHECK(none->dimensions == 1 && none->shape[0] == 0 && none->count == 0, "the empty tensor");
    safetensors_close(&reader);
}

// ---- Bad files ------------------------------------------------------------------------------------------------------

// Writes a file: the header's length, the header, and `data` bytes of data.
static void file_of(const char *path, uint64_t length, const char *header, size_t bytes, size_t data) {
    FILE *f = fopen(path, "wb");
    fwrite(&length, 8, 1, f);
    fwrite(header, 1, bytes, f);
    for (size_t i = 0; i < data; i++) fputc((int)i & 0xff, f);
    fclose(f);
}

#define TENSOR(name, type, shape, offsets)                                                                             \
    "\"" name "\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

#define A(type, shape, offsets) "{" TENSOR("a", type, shape, offsets) "}"
#define SHAPE                   "a: its shape is not a list of"

static void test_bad_headers(void) {
    static const struct {
        const char *header, *mention;
        size_t data;
    } cases[] = {
        {"", "malformed JSON", 0},
        {"[]", "is no object", 0},
        {"{}x", "malformed JSON", 0},
        {"{\"a\":1}", "a: its dtype", 0},
        {"{\"a\":{\"dtype\":32,\"shape\":[1],\"data_offsets\":[0,4]}}", "a: its dtype", 4},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", SHAPE, 4},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", "a: its data_offsets", 4},
        {A("F32", "1", "[0,4]"), SHAPE, 4},
        {A("F32", "[-1]", "[0,4]"), SHAPE, 4},
        {A("F32", "[1,1.5]", "[0,4]"), SHAPE, 4},
        {A("F32", "[1e16]", "[0,4]"), SHAPE, 4},
        {A("F32", "[2147483648,2147483648]", "[0,0]"), SHAPE, 0},
        {A("F32", "[1]", "4"), "a: its data_offsets", 4},
        {A("F32", "[1]", "[0]"), "a: its data_offsets", 4},
        {A("F32", "[1]", "[4,0]"), "a: its data_offsets", 4},
        {A("F32", "[1]", "[0,null]"), "a: its data_offsets", 4},
        {A("F32", "[2]", "[0,4]"), "a: its data_offsets, 0 to 4, are 4 bytes, but its shape and dtype make 8", 4},
        {A("F32", "[2]", "[0,8]"), "the tensors end at byte 8 of the data, the file holds 7", 7},
        {A("U8", "[9,1,1]", "[0,9]"), "the tensors end at byte 9 of the data, the file holds 7", 7},
        {A("F32", "[2]", "[0,8]"), "the tensors end at byte 8 of the data, the file holds 9", 9},
    };
    SafetensorsReader reader;
    const char *path = "bad.safetensors";
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t bytes = strlen(cases[i].header);
        file_of(path, bytes, cases[i].header, bytes, cases[i].data);
        CHECK_ERROR(safetensors_open(&reader, path, &e), &e, ERR_INPUT, cases[i].mention);
        CHECK(strstr(e.what, path) && e.hint[0], "case %d names no file or remedy: %s", (int)i, e.what);
        CHECK(reader.fd == -1 && !reader.entries && !reader.header, "case %d left something open", (int)i);
    }
}

static void test_bad_files(void) {
    SafetensorsReader reader;
    CHECK_ERROR(safetensors_open(&reader, "absent", &e), &e, ERR_INPUT, "cannot open");
    CHECK_ERROR(safetensors_open(&reader, ".", &e), &e, ERR_INPUT, "not a regular file");
    const char *path = "fifo";
    CHECK(mkfifo(path, 0600) == 0, "mkfifo");
    CHECK_ERROR(safetensors_open(&reader, path, &e), &e, ERR_INPUT, "not a regular file");
    path = "bad.safetensors";
    fclose(fopen(path, "wb"));
    CHECK_ERROR(safetensors_open(&reader, path, &e), &e, ERR_INPUT, "read failed at byte 0: the file ends there");
    file_of(path, 3, "{}", 2, 0);
    CHECK_ERROR(safetensors_open(&reader, path, &e), &e, ERR_INPUT,
                "bytes 0 to 8 give the header 3 bytes; the file has 10");
    file_of(path, UINT64_MAX, "{}", 2, 0);
    CHECK_ERROR(safetensors_open(&reader, path, &e), &e, ERR_INPUT, "the format allows 100000000");
    file_of(path, 4, "{}\0 ", 4, 0);
    CHECK_ERROR(safetensors_open(&reader, path, &e), &e, ERR_INPUT, "malformed JSON");
}

// The header may list tensors in another order than the data, have more dimensions, and end in spaces.
static void test_unusual_but_right(void) {
    static const char header[] =
        "{" TENSOR("late", "F32", "[1]", "[4,8]") "," TENSOR("early", "F32", "[1,1,1]", "[0,4]") "} \n\t ";
    SafetensorsReader reader;
    const char *path = "unusual.safetensors";
    file_of(path, strlen(header), header, strlen(header), 8);
    CHECK_OK(safetensors_open(&reader, path, &e), &e);
    const SafetensorsEntry *late = &reader.entries[0];
    unsigned char bytes[4] = {0};
    float value;
    CHECK_OK(safetensors_read(late, 0, 1, &value, &e), &e);
    memcpy(bytes, &value, sizeof value);
    CHECK(bytes[0] == 4 && bytes[3] == 7, "read from the wrong place");
    CHECK(truncate(path, (off_t)(8 + strlen(header) + 6)) == 0, "truncate");
    CHECK_ERROR(safetensors_read(late, 0, 1, &value, &e), &e, ERR_INPUT, "the file ends there");
    safetensors_close(&reader);
}

int main(void) {
    scratch_begin();
    RUN(test_half_every_value, test_half_rounding, test_types, test_bad_headers, test_bad_files,
        test_unusual_but_right);
    return scratch_end();
}
