#define _DEFAULT_SOURCE // gethostname
#include "run/tensorboard.h"

#include "base/files.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// ---------------------------------------------------------------------------------------------------------------------
// Messages: fields one after the other, each with its number and wire type in front (the encoding guide of protocol
// buffers). A message inside a message is a field that has its length in front, which is put there when it is closed.

enum { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };

// The fields that are used here, by message.
enum {
    EVENT_WALL_TIME = 1,    // double: seconds since 1970
    EVENT_STEP = 2,         // int64
    EVENT_FILE_VERSION = 3, // string
    EVENT_SUMMARY = 5,
    EVENT_SESSION_LOG = 7,
    SESSION_STATUS = 1, // enum
    SESSION_START = 1,  // its value that makes TensorBoard forget what it has of this step and later ones
    SUMMARY_VALUE = 1,  // repeated
    VALUE_TAG = 1,
    VALUE_SIMPLE = 2, // float
    VALUE_TENSOR = 8,
    VALUE_METADATA = 9,
    METADATA_PLUGIN = 1,
    PLUGIN_NAME = 1,
    METADATA_CLASS = 4, // enum
    CLASS_TENSOR = 2,
    TENSOR_TYPE = 1, // enum
    TYPE_STRING = 7,
    TENSOR_SHAPE = 2, // empty: a scalar
    TENSOR_STRING = 8
};

typedef struct {
    unsigned char *data;
    size_t count, room;
    bool failed; // out of memory
} Message;

// Makes room for so many bytes more.
static void message_reserve(Message *m, size_t bytes) {
    if (m->failed || m->count + bytes <= m->room) return;
    size_t room = 2 * m->room + bytes + 64;
    unsigned char *wider = realloc(m->data, room);
    m->failed = !wider;
    if (!wider) return;
    m->data = wider;
    m->room = room;
}

static void put_raw(Message *m, const void *data, size_t bytes) {
    message_reserve(m, bytes);
    if (m->failed) return;
    if (bytes) memcpy(m->data + m->count, data, bytes);
    m->count += bytes;
}

// Seven bits a byte, the lowest first; the eighth says that more follow.
static size_t varint_encode(unsigned char out[10], uint64_t x) {
    size_t n = 0;
    for (; x >= 0x80; x >>= 7) out[n++] = (unsigned char)(x | 0x80);
    out[n++] = (unsigned char)x;
    return n;
}

static void put_varint(Message *m, uint64_t x) {
    unsigned char bytes[10];
    put_raw(m, bytes, varint_encode(bytes, x));
}

static void put_key(Message *m, int field, int wire) { put_varint(m, (uint64_t)(field << 3 | wire)); }

static void put_int(Message *m, int field, int64_t x) {
    put_key(m, field, WIRE_VARINT);
    put_varint(m, (uint64_t)x);
}

static void put_little_endian(unsigned char *out, uint64_t x, int bytes) {
    for (int i = 0; i < bytes; i++) out[i] = (unsigned char)(x >> (8 * i));
}

static void put_double(Message *m, int field, double x) {
    unsigned char bytes[8];
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    put_little_endian(bytes, bits, 8);
    put_key(m, field, WIRE_64);
    put_raw(m, bytes, 8);
}

static void put_float(Message *m, int field, float x) {
    unsigned char bytes[4];
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    put_little_endian(bytes, bits, 4);
    put_key(m, field, WIRE_32);
    put_raw(m, bytes, 4);
}

static void put_string(Message *m, int field, const char *text) {
    put_key(m, field, WIRE_BYTES);
    put_varint(m, strlen(text));
    put_raw(m, text, strlen(text));
}

// Returns where the inner message begins, which message_close wants to know.
static size_t message_open(Message *m, int field) {
    put_key(m, field, WIRE_BYTES);
    return m->count;
}

static void message_close(Message *m, size_t begin) {
    unsigned char length[10];
    size_t bytes = m->count - begin, n = varint_encode(length, bytes);
    put_raw(m, length, n); // makes room
    if (m->failed) return;
    memmove(m->data + begin + n, m->data + begin, bytes);
    memcpy(m->data + begin, length, n);
}

// ---------------------------------------------------------------------------------------------------------------------
// Records

enum { HEADER_BYTES = 12, FOOTER_BYTES = 4, RECORD_MAX_BYTES = 1 << 26 };

// CRC-32C (Castagnoli), the polynomial reflected; bit by bit: a step has a kilobyte.
static uint32_t crc32c(const unsigned char *data, size_t bytes) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

// Rotated and shifted, so that the CRC of data that hold CRCs is not degenerate.
static uint32_t crc32c_masked(const unsigned char *data, size_t bytes) {
    uint32_t crc = crc32c(data, bytes);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static uint64_t get_little_endian(const unsigned char *in, int bytes) {
    uint64_t x = 0;
    for (int i = 0; i < bytes; i++) x |= (uint64_t)in[i] << (8 * i);
    return x;
}

// Room for the header, then the fields that every event has.
static Message event_begin(int64_t step) {
    static const unsigned char header[HEADER_BYTES] = {0};
    Message m = {0};
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    put_raw(&m, header, HEADER_BYTES);
    put_double(&m, EVENT_WALL_TIME, (double)now.tv_sec + 1e-9 * (double)now.tv_nsec);
    put_int(&m, EVENT_STEP, step);
    return m;
}

struct TensorBoard {
    int fd;
    Message values; // of the step under way: a Summary
    char path[PATH_MAX];
};

// Frames the event, writes it in one piece and frees it.
static int event_write(TensorBoard *tb, Message *m, Error *e) {
    unsigned char footer[FOOTER_BYTES];
    int code = 0;
    if (!m->failed) {
        size_t bytes = m->count - HEADER_BYTES;
        put_little_endian(m->data, bytes, 8);
        put_little_endian(m->data + 8, crc32c_masked(m->data, 8), 4);
        put_little_endian(footer, crc32c_masked(m->data + HEADER_BYTES, bytes), 4);
        put_raw(m, footer, FOOTER_BYTES);
    }
    if (m->failed) code = FAIL(e, ERR_MEMORY, "free some memory", "%s: no memory for an event", tb->path);
    else code = write_all(tb->fd, m->data, m->count, tb->path, e);
    free(m->data);
    *m = (Message){0};
    return code;
}

// ---------------------------------------------------------------------------------------------------------------------
// Events

static const char event_prefix[] = "events.out.tfevents.";

static bool is_event_file(const char *name) { return strncmp(name, event_prefix, strlen(event_prefix)) == 0; }

// TensorBoard reads the files of a directory in the order of their names, so the seconds in a new one's are later than
// in all that are there.
static int next_seconds(const char *directory, long long *seconds, Error *e) {
    Names names;
    *seconds = (long long)time(NULL);
    TRY(directory_list(directory, &names, e));
    for (int i = 0; i < names.count; i++) {
        if (!is_event_file(names.name[i])) continue;
        long long other = strtoll(names.name[i] + strlen(event_prefix), NULL, 10);
        if (other >= *seconds && other < 9999999999) *seconds = other + 1;
    }
    names_free(&names);
    return 0;
}

static int create_file(TensorBoard *tb, const char *directory, Error *e) {
    char name[512], host[256] = "";
    long long seconds;
    TRY(next_seconds(directory, &seconds, e));
    if (gethostname(host, sizeof host - 1) != 0 || !*host) strcpy(host, "localhost");
    snprintf(name, sizeof name, "%s%010lld.%s.%ld", event_prefix, seconds, host, (long)getpid());
    TRY(path_join(tb->path, sizeof tb->path, directory, name, e));
    tb->fd = open(tb->path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
    if (tb->fd < 0) return FAIL(e, ERR_WRITE, "check --out", "%s: cannot create: %s", tb->path, strerror(errno));
    return 0;
}

static int write_beginning(TensorBoard *tb, int64_t first_step, Error *e) {
    Message version = event_begin(0);
    put_string(&version, EVENT_FILE_VERSION, "brain.Event:2");
    TRY(event_write(tb, &version, e));
    // For a TensorBoard that is looking on and has seen the steps that tensorboard_cut took back.
    Message start = event_begin(first_step);
    size_t session = message_open(&start, EVENT_SESSION_LOG);
    put_int(&start, SESSION_STATUS, SESSION_START);
    message_close(&start, session);
    return event_write(tb, &start, e);
}

int tensorboard_create(TensorBoard **out, const char *directory, int64_t first_step, Error *e) {
    TensorBoard *tb;
    *out = NULL;
    TRY(memory_alloc_zero((void **)&tb, sizeof *tb, "TensorBoard events", e));
    tb->fd = -1;
    int code = create_file(tb, directory, e);
    if (!code) code = write_beginning(tb, first_step, e);
    if (code) tensorboard_close(tb, &(Error){0});
    else *out = tb;
    return code;
}

void tensorboard_scalar(TensorBoard *tb, const char *tag, double value) {
    if (isnan(value)) return;
    size_t inner = message_open(&tb->values, SUMMARY_VALUE);
    put_string(&tb->values, VALUE_TAG, tag);
    put_float(&tb->values, VALUE_SIMPLE, (float)value);
    message_close(&tb->values, inner);
}

int tensorboard_write(TensorBoard *tb, int64_t step, Error *e) {
    Message m = event_begin(step);
    size_t summary = message_open(&m, EVENT_SUMMARY);
    put_raw(&m, tb->values.data, tb->values.count);
    message_close(&m, summary);
    m.failed = m.failed || tb->values.failed;
    tb->values.count = 0;
    return event_write(tb, &m, e);
}

// TensorBoard takes texts for Markdown, where four blanks in front of a line mean: as it is.
static void put_verbatim(Message *m, int field, const char *text) {
    size_t inner = message_open(m, field);
    for (const char *line = text; *line;) {
        size_t bytes = strcspn(line, "\n");
        put_raw(m, "    ", 4);
        put_raw(m, line, bytes);
        put_raw(m, "\n", 1);
        line += bytes + (line[bytes] == '\n');
    }
    message_close(m, inner);
}

int tensorboard_text(TensorBoard *tb, int64_t step, const char *tag, const char *text, Error *e) {
    Message m = event_begin(step);
    size_t summary = message_open(&m, EVENT_SUMMARY), value = message_open(&m, SUMMARY_VALUE);
    put_string(&m, VALUE_TAG, tag);
    size_t tensor = message_open(&m, VALUE_TENSOR);
    put_int(&m, TENSOR_TYPE, TYPE_STRING);
    message_close(&m, message_open(&m, TENSOR_SHAPE));
    put_verbatim(&m, TENSOR_STRING, text);
    message_close(&m, tensor);
    size_t metadata = message_open(&m, VALUE_METADATA), plugin = message_open(&m, METADATA_PLUGIN);
    put_string(&m, PLUGIN_NAME, "text");
    message_close(&m, plugin);
    put_int(&m, METADATA_CLASS, CLASS_TENSOR);
    message_close(&m, metadata);
    message_close(&m, value);
    message_close(&m, summary);
    return event_write(tb, &m, e);
}

int tensorboard_close(TensorBoard *tb, Error *e) {
    if (!tb) return 0;
    int code = 0;
    if (tb->fd >= 0 && close(tb->fd) != 0 && errno != EINTR)
        code = FAIL(e, ERR_WRITE, "check --out", "%s: cannot write: %s", tb->path, strerror(errno));
    free(tb->values.data);
    memory_free(tb);
    return code;
}

// ---------------------------------------------------------------------------------------------------------------------
// Cutting back

// Reads a varint at *at; false at the end of the data.
static bool get_varint(const unsigned char *data, size_t bytes, size_t *at, uint64_t *x) {
    *x = 0;
    for (int shift = 0; *at < bytes && shift < 64; shift += 7) {
        unsigned char byte = data[(*at)++];
        *x |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) return true;
    }
    return false;
}

// The step of an event, 0 where it names none (proto3).
static int64_t event_step(const unsigned char *data, size_t bytes) {
    uint64_t key, x;
    for (size_t at = 0; at < bytes;) {
        if (!get_varint(data, bytes, &at, &key)) return 0;
        uint64_t wire = key & 7, skip = wire == WIRE_64 ? 8 : wire == WIRE_32 ? 4 : 0;
        if (wire == WIRE_VARINT || wire == WIRE_BYTES) {
            if (!get_varint(data, bytes, &at, &x)) return 0;
            if (key == (EVENT_STEP << 3 | WIRE_VARINT)) return (int64_t)x;
            if (wire == WIRE_BYTES) skip = x;
        }
        if (skip > bytes - at) return 0;
        at += skip;
    }
    return 0;
}

// Reads the record at the file's position. *whole: false at the end of what is whole.
static int read_record(FILE *f, Message *m, bool *whole, Error *e) {
    unsigned char header[HEADER_BYTES], footer[FOOTER_BYTES];
    *whole = false;
    m->count = 0;
    if (fread(header, 1, HEADER_BYTES, f) != HEADER_BYTES) return 0;
    uint64_t bytes = get_little_endian(header, 8);
    if (get_little_endian(header + 8, 4) != crc32c_masked(header, 8) || bytes > RECORD_MAX_BYTES) return 0;
    message_reserve(m, bytes);
    if (m->failed) return FAIL(e, ERR_MEMORY, "free some memory", "no memory for an event");
    if (fread(m->data, 1, bytes, f) != bytes || fread(footer, 1, FOOTER_BYTES, f) != FOOTER_BYTES) return 0;
    m->count = bytes;
    *whole = get_little_endian(footer, 4) == crc32c_masked(m->data, bytes);
    return 0;
}

// How many bytes of the file tell of the first `step` steps, and how many records that are.
static int measure(const char *path, int64_t step, off_t *keep, int64_t *records, Error *e) {
    Message m = {0};
    bool whole;
    int code;
    *keep = *records = 0;
    FILE *f = fopen(path, "rbe");
    if (!f) return FAIL(e, ERR_INPUT, "check its permissions", "%s: cannot open: %s", path, strerror(errno));
    while ((code = read_record(f, &m, &whole, e)) == 0 && whole && event_step(m.data, m.count) <= step) {
        *keep = ftello(f);
        ++*records;
    }
    free(m.data);
    fclose(f);
    return code;
}

static int cut_file(const char *path, int64_t step, Error *e) {
    off_t keep;
    int64_t records;
    TRY(measure(path, step, &keep, &records, e));
    bool only_its_version = records <= 1;
    if (!only_its_version) return file_cut(path, keep, e);
    if (unlink(path) == 0) return 0;
    return FAIL(e, ERR_WRITE, "check its permissions", "%s: cannot cut it back: %s", path, strerror(errno));
}

int tensorboard_cut(const char *directory, int64_t step, Error *e) {
    char path[PATH_MAX];
    Names names;
    int code = 0;
    TRY(directory_list(directory, &names, e));
    for (int i = 0; i < names.count && !code; i++) {
        if (!is_event_file(names.name[i])) continue;
        code = path_join(path, sizeof path, directory, names.name[i], e);
        if (!code) code = cut_file(path, step, e);
    }
    names_free(&names);
    return code;
}
