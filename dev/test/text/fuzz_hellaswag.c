// Mutates HellaSwag's questions in both formats. hellaswag_open must refuse a file with a message, or the file must
// give rows of tokens of the vocabulary. The sanitizers catch the rest.
//
//     fuzz_hellaswag [SECONDS [SEED]]      default 4 seconds, seed 1: the same files every time
#include "text/hellaswag.h"
#include "../test.h"

#include <unistd.h>

enum { MAX_BYTES = 8192, V = 256 };
static struct {
    double seconds;
    uint64_t random;
    char path[512];
    Tokenizer *tokenizer;
    long tried, accepted;
} fuzz = {4, 1, "", NULL, 0, 0};

static uint32_t draw(uint32_t below) { // xorshift64*
    fuzz.random ^= fuzz.random >> 12;
    fuzz.random ^= fuzz.random << 25;
    fuzz.random ^= fuzz.random >> 27;
    return (uint32_t)((fuzz.random * 0x2545f4914f6cdd1du) >> 33) % below;
}

static size_t make_bin(unsigned char *file) {
    int32_t header[256] = {20240522, 1, 1 + (int32_t)draw(4)};
    uint16_t stream[MAX_BYTES / 4];
    size_t n = 0;
    for (int k = 0; k < header[2]; k++) {
        size_t start = n, endings = 2 + draw(4);
        const uint16_t head[] = {65535, 0, (uint16_t)k, (uint16_t)draw((uint32_t)endings), (uint16_t)endings};
        memcpy(stream + n, head, sizeof head);
        n += 5;
        for (size_t i = 0; i <= endings; i++) {
            uint16_t count = (uint16_t)(1 + draw(40));
            stream[n++] = count;
            for (int t = 0; t < count; t++) stream[n++] = (uint16_t)draw(V);
        }
        stream[start + 1] = (uint16_t)(2 * (n - start));
    }
    memcpy(file, header, sizeof header);
    memcpy(file + sizeof header, stream, 2 * n);
    return sizeof header + 2 * n;
}

static size_t make_jsonl(unsigned char *file) {
    static const char *const lines[] = {
        "{\"ctx\": \"A man \\u00e9\", \"endings\": [\"is\", \"was \\\"x\\\"\", \"\"], \"label\": 1}\n",
        "{\"ind\": 1, \"ctx\": \"b\", \"endings\": [\"c d e f g h i j k l m n o p q r s t u v w x y z and so on, as a "
        "text "
        "does that is most of its line\", \"l\"], \"label\": \"0\", \"split\": []}\n",
        "\n"};
    size_t n = 0;
    for (uint32_t count = 1 + draw(4); count > 0; count--) {
        const char *line = lines[draw(3)];
        memcpy(file + n, line, strlen(line));
        n += strlen(line);
    }
    return n;
}

static size_t mutate(unsigned char *file, size_t bytes) {
    static const char marks[] = "{}[]\",:\\u0123456789-.\n";
    size_t at = draw((uint32_t)bytes);
    const uint32_t values[] = {draw(70), V - 1 + draw(3), 65535 - draw(4)};
    uint16_t value = (uint16_t)values[draw(3)];
    switch (draw(6)) {
    case 0: file[at] ^= (unsigned char)(1u << draw(8)); break;
    case 1: file[at] = (unsigned char)marks[draw(sizeof marks - 1)]; break;
    case 2: return draw((uint32_t)bytes + 1);                      // cut
    case 3: return size_min(MAX_BYTES, bytes + draw(64));          // lengthen
    case 4: file[draw((uint32_t)size_min(bytes, 16))] ^= 1; break; // the header's start
    case 5:                                                        // a count, label or token
        if (bytes > 1026) memcpy(file + 1024 + at % (bytes - 1026) / 2 * 2, &value, 2);
    }
    return bytes;
}

static void read_all(const HellaSwag *h, int T) {
    HellaSwagInfo info = hellaswag_describe(h);
    size_t width = (size_t)info.width, n = (size_t)info.rows;
    CHECK(info.questions > 0 && info.rows >= 2 * info.questions && info.width > 0 && info.width <= T, "%d questions",
          info.questions);
    uint16_t *rows = malloc(n * (width + 1) * sizeof *rows);
    float *loss = calloc(n * width, sizeof *loss);
    double *sum = malloc(n * sizeof *sum);
    hellaswag_rows(h, 0, info.rows, rows);
    for (size_t i = 0; i < n * (width + 1); i++) CHECK(rows[i] < V, "token %d", rows[i]);
    hellaswag_sums(h, 0, info.rows, loss, sum);
    HellaSwagScore score = hellaswag_score(h, sum);
    CHECK(score.questions == info.questions && score.correct <= score.questions, "%d", score.correct);
    free(rows);
    free(loss);
    free(sum);
}

static void try_open(int T) {
    HellaSwag *h;
    Error e;
    int code = hellaswag_open(&h, fuzz.path, fuzz.tokenizer, V, T, &e);
    fuzz.tried++;
    if (code) {
        CHECK(code == ERR_INPUT && strstr(e.what, fuzz.path) && e.hint[0], "code %d: %s", code, e.what);
        return;
    }
    fuzz.accepted++;
    read_all(h, T);
    hellaswag_close(h);
}

static void fuzz_hellaswag(void) {
    double end = clock_seconds() + fuzz.seconds;
    unsigned char *file = malloc(MAX_BYTES);
    while (clock_seconds() < end) {
        memset(file, 0, MAX_BYTES);
        size_t bytes = draw(2) ? make_bin(file) : make_jsonl(file);
        for (uint32_t rounds = draw(4); rounds > 0 && bytes > 0; rounds--) bytes = mutate(file, bytes);
        FILE *f = fopen(fuzz.path, "wb");
        CHECK(f && fwrite(file, 1, bytes, f) == bytes, "cannot write %s", fuzz.path);
        if (f) fclose(f);
        try_open(1 + (int)draw(90));
    }
    free(file);
    CHECK(fuzz.accepted > fuzz.tried / 20 && fuzz.accepted < fuzz.tried, "%ld of %ld", fuzz.accepted, fuzz.tried);
    printf("  %ld files, %ld of them accepted\n", fuzz.tried, fuzz.accepted);
}

int main(int argc, char **argv) {
    Error e;
    if (argc > 1) fuzz.seconds = atof(argv[1]);
    if (argc > 2) fuzz.random = strtoull(argv[2], NULL, 10) | 1;
    const char *base = getenv("TMPDIR");
    char directory[480];
    snprintf(directory, sizeof directory, "%s/fuzz_hellaswag_XXXXXX", base ? base : "/tmp");
    if (!mkdtemp(directory) || tokenizer_create_bytes(&fuzz.tokenizer, &e)) return ERR_INTERNAL;
    snprintf(fuzz.path, sizeof fuzz.path, "%s/questions", directory);
    RUN(fuzz_hellaswag);
    unlink(fuzz.path);
    rmdir(directory);
    tokenizer_destroy(fuzz.tokenizer);
    return test_summary();
}
