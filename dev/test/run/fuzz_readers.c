// Fuzzes all readers of outside bytes: checkpoints, models, tokenizers, shards, questions.
//
//     fuzz_readers [SECONDS [SEED]]     default: 10 seconds for all readers together, seed 1
//
// A sample is a well-formed file with up to 11 changes. Equal seeds give equal samples. A reader that accepts a sample
// must return values in range; a reader that refuses it must name the file and a remedy in one error. Sanitizers find
// other faults. GNS_LONG=1: at least ten thousand samples per reader.
#include "base/hash.h"
#include "checkpoint/archive.h"
#include "checkpoint/checkpoint.h"
#include "run/run.h"
#include "text/hellaswag.h"
#include "text/tokenizer.h"
#include "../safetensors_writer.h"
#include "../trainer.h"

enum { LAYERS = 2, MAX_BYTES = 1 << 16, VOCAB = 256 };

typedef struct {
    char bytes[MAX_BYTES];
    size_t count;
} Sample;

static Sample sample; // the current sample
static Model model;
static Run run; // receives state.json
static Tokenizer *byte_tokenizer;
static Error e; // set by the last call that failed
static uint64_t random_state;

// Returns a random number below n (splitmix64: Steele et al. 2014); 0 for n 0.
static size_t draw(size_t n) { return n ? hash_finish(random_state += HASH_GOLDEN) % n : 0; }

// ---- Readers --------------------------------------------------------------------------------------------------------

static int ignore_values(void *context, StateKind kind, Range range, const float *values, Error *e) {
    CHECK(range.begin < range.end && range.end <= model.flat_count, "%zu to %zu", range.begin, range.end);
    return 0;
}

static int read_state(const char *directory, Error *e) {
    RunSummary summary;
    FILE *changes = fopen("/dev/null", "w");
    TRY(noise_create(&run.position.noise, &model, 60, 0, 0, e));
    run.model = model;
    run.shape.seq_len = 8;
    run.comm = &(Comm){.ranks = 1};
    int code = run_state_summary(&summary, directory, e);
    if (!code) code = run_state_read(&run, directory, changes, e);
    if (!code) {
        outliers_z(&run.at.loss_window, 1, INFINITY);
        gns_estimate(&run.position.noise.ln);
    }
    fclose(changes);
    noise_destroy(&run.position.noise);
    for (int k = 0; k < ROW_KINDS; k++) cJSON_Delete(run.position.outliers.list[k]);
    run.position.outliers = (RowOutliers){0};
    return code;
}

static int read_config(const char *path, Error *e) {
    ModelConfig config;
    Model made;
    TRY(checkpoint_read_config(path, &config, e));
    Error shape;
    if (model_create(&made, &config, &shape) == 0) model_destroy(&made);
    return 0;
}

static float buffer[RECEIVER_VALUES];
static const Receiver to = {.model = &model, .buffer = buffer, .load = ignore_values};

static int read_weights(const char *directory, Error *e) { return checkpoint_load_model(directory, &to, e); }

static int read_optimizer(const char *directory, Error *e) {
    TRY(checkpoint_load_moment(directory, STATE_MOMENT1, &model, &to, e));
    return checkpoint_load_moment(directory, STATE_MOMENT2, &model, &to, e);
}

static int read_tokenizer(const char *directory, Error *e) {
    static const char text[] = "the hen \xff there";
    uint16_t tokens[sizeof text];
    size_t count, bytes;
    Tokenizer *t;
    TRY(tokenizer_load(&t, directory, e));
    int code = tokenizer_encode(t, NULL, text, sizeof text, tokens, &count, e);
    for (size_t i = 0; !code && i < count; i++) tokenizer_decode(t, tokens[i], &bytes);
    memory_free(t);
    return code;
}

static int read_bin(const char *path, Error *e) {
    ModelConfig config;
    if (!checkpoint_is_model(path)) return FAIL(e, ERR_INPUT, "none", "%s: no magic at byte 0", path);
    TRY(checkpoint_read_config(path, &config, e));
    return memcmp(&config, &model.config, sizeof config) == 0 ? read_weights(path, e) : 0;
}

// Checks that an accepted file holds everything that it declares.
static int read_safetensors(const char *path, Error *e) {
    static float values[MAX_BYTES];
    SafetensorsReader reader;
    TRY(safetensors_open(&reader, path, e));
    for (int i = 0; i < reader.count; i++) {
        const SafetensorsEntry *entry = &reader.entries[i];
        CHECK(reader.data_offset + entry->end <= sample.count, "%s ends beyond the file", entry->name);
        int code = safetensors_read(entry, 0, entry->value_bytes ? entry->count : 0, values, e);
        CHECK(code == (entry->value_bytes ? 0 : ERR_INPUT), "code %d: %s", code, e->what);
    }
    safetensors_close(&reader);
    return 0;
}

// Checks that an accepted shard's tokens are in the vocabulary. (The reader checks all tokens of a small shard.)
static int read_shard(const char *path, Error *e) {
    int T = 1 + (int)draw(300), V = draw(2) ? 250 + (int)draw(7) : 65536;
    Dataset *data;
    TRY(dataset_open(&data, path, T, V, 7, e));
    uint16_t *rows = malloc(2 * 4 * ((size_t)T + 1));
    CHECK_OK(dataset_check(data, e), e);
    for (uint64_t k = 0, N = data->info.windows; k < 2 * N && k < 40; k += 4) {
        CHECK_OK(dataset_rows(data, k, 4, rows, e), e);
        for (int i = 0; i < 4 * (T + 1); i++) CHECK(rows[i] < V, "token %d", rows[i]);
    }
    free(rows);
    dataset_close(data);
    return 0;
}

// Checks that accepted questions give a score, and rows of tokens in the vocabulary.
static int read_questions(const char *path, Error *e) {
    HellaSwag *h;
    TRY(hellaswag_open(&h, path, byte_tokenizer, 1 + (int)draw(90), e));
    HellaSwagInfo info = h->info;
    size_t width = (size_t)info.width, n = (size_t)info.rows;
    uint16_t *rows = malloc(n * (width + 1) * sizeof *rows);
    float *loss = calloc(n * width, sizeof *loss);
    double *sum = malloc(n * sizeof *sum);
    hellaswag_rows(h, 0, info.rows, rows);
    for (size_t i = 0; i < n * (width + 1); i++) CHECK(rows[i] < VOCAB, "token %d", rows[i]);
    hellaswag_sums(h, 0, info.rows, loss, sum);
    HellaSwagScore score = hellaswag_score(h, sum);
    CHECK(score.questions > 0 && score.correct <= score.questions, "%d of %d", score.correct, score.questions);
    free(rows);
    free(loss);
    free(sum);
    memory_free(h);
    return 0;
}

// ---- Well-formed samples that are not files of a run ----------------------------------------------------------------

static void put(const void *bytes, size_t count) {
    memcpy(sample.bytes + sample.count, bytes, count);
    sample.count += count;
}
static void put_u16(size_t value) { put(&(uint16_t){(uint16_t)value}, 2); }

static void make_shard(void) {
    int32_t n = (int32_t)draw(2000) + 1, header[SHARD_HEADER_INTS] = {SHARD_MAGIC, SHARD_VERSION, n};
    size_t largest = 250 + draw(7);
    put(header, sizeof header);
    for (int i = 0; i < n; i++) put_u16(draw(largest));
}

static void make_questions_jsonl(void) {
    static const char *const lines[] = {
        "{\"ctx\": \"A man \\u00e9\", \"endings\": [\"is\", \"was \\\"x\\\"\", \"\"], \"label\": 1}\n",
        "{\"ind\": 1, \"ctx\": \"b\", \"endings\": [\"an ending that is most of its line\", \"l\"], \"label\": "
        "\"0\"}\n",
        "\n"};
    for (size_t count = 1 + draw(4); count > 0; count--) {
        const char *line = lines[draw(3)];
        put(line, strlen(line));
    }
}

static size_t data_bytes; // set by make_safetensors

static void make_safetensors(void) {
    static const char *const names[] = {"a", "wte.weight", "h.0.attn.c_attn.bias", "\xc3\xa9\"\\"};
    static const unsigned char zeros[1024];
    SafetensorsHeader header;
    CHECK_OK(safetensors_begin(&header, &e), &e);
    if (draw(2)) safetensors_add_metadata(&header, "format", "pt");
    data_bytes = 0;
    for (size_t i = 0, tensors = draw(5); i < tensors; i++) {
        static const char *const types[] = {"F32", "F16", "BF16", "I64", "U8"};
        const char *type = types[draw(5)];
        const uint64_t shape[3] = {draw(4), 1 + draw(3), 2};
        int dimensions = (int)draw(4);
        uint64_t count = 1;
        for (int d = 0; d < dimensions; d++) count *= shape[d];
        safetensors_add(&header, names[i % 4], type, dimensions, shape);
        data_bytes += count * safetensors_type_bytes(type);
    }
    CHECK_OK(safetensors_end(&header, &e), &e);
    put(header.text.text, header.text.bytes);
    put(zeros, data_bytes);
    text_free(&header.text);
}

// ---- Changes --------------------------------------------------------------------------------------------------------

// Replaces [at, at + remove) by at most 256 given bytes, if there is room.
static void splice(size_t at, size_t remove, const char *insert, size_t bytes) {
    char copy[256];
    bytes = size_min(bytes, sizeof copy);
    if (at > sample.count) return;
    remove = size_min(remove, sample.count - at);
    if (sample.count - remove + bytes >= MAX_BYTES) return;
    memcpy(copy, insert, bytes); // `insert` may lie in the sample
    memmove(sample.bytes + at + bytes, sample.bytes + at + remove, sample.count - at - remove);
    memcpy(sample.bytes + at, copy, bytes);
    sample.count += bytes - remove;
}

// Makes one change that begins in [begin, end).
static void mutate(size_t begin, size_t end) {
    // clang-format off
    static const char *const words[] = { // words of JSON and of the formats, extreme numbers
        "{", "}", "[", "]", ":", ",", "\"", "\\", "\\u00", "\\u0000", "\\ud800", "null", "true", "nan", "-0", "-1", "0", "1",
        "4", "8", "1.5", "1e308", "1e400", "-1e999", "1e-400", "4294967296", "2147483648", "9007199254740993",
        "18446744073709551615", "18446744073709551616", "[]", "[[[[[[[[", "{}", "\"a\"", "\"dtype\"", "\"shape\"",
        "\"data_offsets\"", "\"__metadata__\"", "\"F32\"", "\"BF16\"", "\"U8\"", "[0,0]", "[4,8]", " ", "\n", "\xff", "\xc3\xa9",
        "#", "%s%n"};
    // clang-format on
    static const int32_t edges[] = {0,         1,     2,     -1, INT32_MAX, INT32_MIN, SHARD_MAGIC, SHARD_VERSION,
                                    VOCAB - 1, VOCAB, 65535, 64, 1 << 30,   65536};
    size_t at = begin + draw(end - begin), from = draw(sample.count), digits = 0;
    const char *word = words[draw(sizeof words / sizeof *words)];
    switch (draw(7)) {
    case 0: splice(at, draw(2) * strlen(word), word, strlen(word)); break;
    case 1: splice(at, 1 + draw(40), "", 0); break;
    case 2: splice(at, 0, sample.bytes + from, draw(size_min(200, sample.count - from))); break;
    case 3: sample.count = size_min(at, sample.count); break;
    case 4: // replace a number by another
        while (at < sample.count && (sample.bytes[at] < '0' || sample.bytes[at] > '9')) at++;
        while (at + digits < sample.count && sample.bytes[at + digits] >= '0' && sample.bytes[at + digits] <= '9')
            digits++;
        splice(at, digits, word, strlen(word));
        break;
    case 5: // write an integer of 16 or 32 bits
        splice(at / 4 * 4, 2 + at % 2 * 2, (const char *)&edges[draw(sizeof edges / sizeof *edges)], 2 + at % 2 * 2);
        break;
    default:
        if (at < sample.count) sample.bytes[at] ^= (char)(1 << draw(8));
    }
}

// Corrects the hash of half of a manifest's mutants: a reader refuses a wrong hash at once.
static void settle_manifest(void) {
    const size_t last = strlen("  \"xxh3_128_above\": \"\"\n}\n") + HASH_TEXT - 1;
    if (draw(2) || sample.count <= last || sample.count + 1 >= MAX_BYTES) return;
    snprintf(sample.bytes + sample.count - last, last + 1, "  \"xxh3_128_above\": \"%s\"\n}\n",
             digest_of(sample.bytes, sample.count - last).hash);
}

// Usually corrects the header's length, so that the data keep their place: the target is the header's parser.
static void settle_safetensors(void) {
    uint64_t header = sample.count >= 8 + data_bytes ? sample.count - 8 - data_bytes : 0;
    size_t fate = draw(16);
    if (fate == 0) header = draw(SIZE_MAX) >> draw(64);
    if (fate == 1) sample.count = draw(sample.count + 1);
    memcpy(sample.bytes, &header, size_min(8, sample.count));
}

// In a third of the samples, sets the token count to fit the file's size, or to one more or less.
static void settle_shard(void) {
    int32_t count = (int32_t)((sample.count - size_min(sample.count, SHARD_HEADER_BYTES)) / 2) + (int32_t)draw(3) - 1;
    if (!draw(3) && sample.count >= 12) memcpy(sample.bytes + 8, &count, 4);
}

// ---- One reader after the other -------------------------------------------------------------------------------------

typedef struct {
    const char *file;  // the file to change
    const char *named; // text that errors must mention; a manifest also names other files
    const char *path;  // the reader's argument
    int (*reader)(const char *path, Error *e);
    void (*make)(void);   // NULL: the file of test_files_are_made
    void (*settle)(void); // or NULL
    double weight;        // relative share of the time
    size_t first, end;    // changes begin in bytes [first, end); end 0: anywhere
} Target;

// clang-format off
static const Target targets[] = {
    {"step/MANIFEST.json", "step/", "step", verify, NULL, settle_manifest, 1, 0, 0},
    {"step/training/state.json", "step/training/state.json", "step", read_state, NULL, NULL, 1, 0, 0},
    {"step/config.json", "step/config.json", "step", read_config, NULL, NULL, 1, 0, 0},
    {"step/model.safetensors", "step/model.safetensors", "step", read_weights, NULL, NULL, 1, 0, 0},
    {"step/training/optimizer.safetensors", "step", "step", read_optimizer, NULL, NULL, 1, 0, 400}, // the rest is values
    {"any.safetensors", "any.safetensors", "any.safetensors", read_safetensors, make_safetensors, settle_safetensors, 6, 8, 0},
    {"words/vocab.json", "words", "words", read_tokenizer, NULL, NULL, 1, 0, 0},
    {"words/merges.txt", "words", "words", read_tokenizer, NULL, NULL, 1, 0, 0},
    {"word/tokenizer.json", "word", "word", read_tokenizer, NULL, NULL, 1, 0, 0},
    {"added/tokenizer_config.json", "added", "added", read_tokenizer, NULL, NULL, 1, 0, 0},
    {"model.bin", "model.bin", "model.bin", read_bin, NULL, NULL, 1, 0, 40}, // any values are valid
    {"shard.bin", "shard.bin", "shard.bin", read_shard, make_shard, settle_shard, 6, 0, 1100},
    {"questions.jsonl", "questions.jsonl", "questions.jsonl", read_questions, make_questions_jsonl, NULL, 3, 0, 0},
};
// clang-format on
enum { TARGETS = sizeof targets / sizeof *targets };
static const Target *target = targets;
static double seconds = 10;
static uint64_t seed = 1;

static void save_sample(const char *path) {
    unlink(path); // on some file systems overwriting waits for the disk
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(sample.bytes, 1, sample.count, f) == sample.count, "%s", path);
    if (f) fclose(f);
}

// Runs the reader on the sample and checks its error. Returns the reader's code.
static int try_sample(void) {
    const Target *t = target;
    save_sample(t->file);
    int code = t->reader(t->path, &e);
    const bool of_options = strstr(e.what, "this run has "); // the state's options and the command's differ
    CHECK(code == 0 || code == ERR_INPUT || (code == ERR_USAGE && of_options), "code %d: %s", code, e.what);
    CHECK(code == 0 || (e.what[0] && e.hint[0] && strstr(e.what, t->named)), "'%s' (%s) does not name %s, or no hint",
          e.what, e.hint, t->named);
    return code;
}

static void fuzz(void) {
    static Sample original;
    size_t accepted = 0, rejected = 0, wanted = trainer.thorough ? 10000 : 20;
    double weights = 0, begun = clock_seconds();
    for (int i = 0; i < TARGETS; i++) weights += targets[i].weight;
    if (!target->make) {
        char *text = read_text(target->file, &original.count);
        CHECK(text && original.count < MAX_BYTES, "%s: %zu bytes", target->file, original.count);
        if (!text) return;
        memcpy(original.bytes, text, original.count);
        memory_free(text);
    }
    while ((clock_seconds() < begun + seconds * target->weight / weights || accepted + rejected < wanted) &&
           !test_state.failures) {
        random_state = seed << 32 | (accepted + rejected);
        sample.count = 0;
        if (target->make) target->make();
        else sample = original;
        for (size_t changes = draw(draw(2) ? 4 : 12); changes > 0; changes--)
            mutate(target->first, size_min(sample.count + 1, target->end ? target->end : MAX_BYTES));
        if (target->settle) target->settle();
        int code = try_sample();
        accepted += code == 0;
        rejected += code != 0;
    }
    printf("  %zu accepted, %zu rejected\n", accepted, rejected);
    CHECK(accepted > 0 && rejected > 0, "one of the two never happened");
    if (test_state.failures) save_sample(path_of("/tmp/fuzz_readers.%d", (int)getpid()));
    sample = original;
    if (!target->make && !test_state.failures) try_sample(); // later readers need the unchanged file
}

// ---- The files ------------------------------------------------------------------------------------------------------

static void save_text(const char *path, const char *text) {
    CHECK_OK(file_replace(IN_PATH, path, text, strlen(text), &e), &e);
}

static void make_models(void) {
    int32_t header[256] = {20240326, 3, 8, 64, LAYERS, 1, 8, 64};
    float zero = 0;
    FILE *f = fopen("model.bin", "wb");
    fwrite(header, sizeof header, 1, f);
    for (size_t i = 0; i < model.parameters; i++) fwrite(&zero, 4, 1, f);
    fclose(f);
    CHECK_OK(read_bin("model.bin", &e), &e);
}

// Writes tokenizer files like GPT-2's, with all bytes, "he" and "the".
static void make_tokenizers(void) {
    Tokenizer *bytes;
    size_t length;
    CHECK_OK(directory_create("words", &e), &e);
    Manifest manifest = {.dir = open("words", O_RDONLY)};
    CHECK_OK(directory_create("word", &e), &e);
    CHECK_OK(tokenizer_create_bytes(&bytes, &e), &e);
    CHECK_OK(tokenizer_save(bytes, 0, &manifest, &e), &e);
    close(manifest.dir);
    manifest_free(&manifest);
    memory_free(bytes);
    char *vocab = read_text("words/vocab.json", &length), *end = vocab ? strrchr(vocab, '}') : NULL;
    CHECK(end != NULL, "no vocab.json");
    if (!end) return;
    *end = 0;
    save_text("words/vocab.json", path_of("%s, \"he\": 256, \"the\": 257}", vocab));
    save_text("words/merges.txt", "#version: 0.2\nh e\nt he\n");
    save_text(
        "word/tokenizer.json",
        path_of("{\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false}, \"model\": {\"type\": "
                "\"BPE\", \"vocab\": %s, \"he\": 256, \"the\": 257}, \"merges\": [\"h e\", [\"t\", \"he\"]]}, "
                "\"added_tokens\": [{\"id\": 258, \"content\": \"<|endoftext|>\"}]}\n",
                vocab));
    memory_free(vocab);
    copy_tree("words", "added");
    save_text("added/tokenizer_config.json",
              "{\"added_tokens_decoder\": {\"258\": {\"content\": \"<|endoftext|>\", \"special\": true}, "
              "\"259\": {\"content\": \"<s>\", \"lstrip\": false, \"normalized\": false}, "
              "\"256\": {\"content\": \"he\"}}}\n");
    CHECK_OK(read_tokenizer("words", &e), &e);
    CHECK_OK(read_tokenizer("word", &e), &e);
    CHECK_OK(read_tokenizer("added", &e), &e);
}

// Checks that a state is refused if a 9 replaces the first digit after `place`.
static void check_refuses(const char *place, const char *field) {
    const char *path = "step/training/state.json";
    size_t bytes;
    char *text = read_text(path, &bytes), *spikes = text ? strstr(text, "\"spikes\"") : NULL;
    char *first = spikes ? strstr(spikes, "\"first\"") : NULL, *digit = first ? strstr(first, place) : NULL;
    CHECK(digit, "no %s", place);
    if (digit) digit += strcspn(digit, "0123456789");
    const char was = digit ? *digit : 0;
    if (digit) *digit = '9', save_text(path, text);
    CHECK(read_state("step", &e) == ERR_INPUT && strstr(e.what, field), "%s: %s", field, e.what);
    if (digit) *digit = was, save_text(path, text);
    memory_free(text);
}

// Checks that a state with a kind of outliers that this build does not know, in place of `rare`, is read.
static void check_reads_another_kind(void) {
    const char *path = "step/training/state.json";
    size_t bytes;
    char *text = read_text(path, &bytes), *changed = text ? strdup(text) : NULL;
    int kinds = 0;
    for (char *at = changed; at && (at = strstr(at, "\"rare\"")); kinds++) memcpy(at, "\"hard\"", 6);
    CHECK(kinds == 4, "%d", kinds); // spread, list, and its 2 rows
    if (changed) save_text(path, changed);
    CHECK_OK(read_state("step", &e), &e);
    if (text) save_text(path, text);
    free(changed);
    memory_free(text);
}

// Makes a run whose state has every field.
static void test_files_are_made(void) {
    const ModelConfig config = {LAYERS, 1, 8, 64, 8};
    CHECK_RUN(
        trainer_run("train_gpt2 --train train.bin --vocab-size 64 --model d1 --layers 2 --heads 1 --channels 8 "
                    "--seq-len 8 --threads 1 --batch-tokens 16 --gns exact --steps 140 --skip-loss-z 9 --outliers 2 "
                    "--on-spike rollback "
                    "--out run"),
        0);
    copy_tree("run/step_00000140", "step");
    CHECK_OK(model_create(&model, &config, &e), &e);
    CHECK_OK(dataset_open(&run.data.train, "train.bin", 8, 64, 1337, &e), &e);
    options_defaults(&run.options);
    run.options.on_spike = 1, run.options.outliers = 2;
    CHECK_OK(verify("step", &e), &e);
    CHECK_OK(read_state("step", &e), &e);
    check_refuses("\"ring\"", "spikes.first.ring[0]");
    check_reads_another_kind();
    make_models();
    make_tokenizers();
    CHECK_OK(tokenizer_create_bytes(&byte_tokenizer, &e), &e);
}

int main(int argc, char **argv) {
    if (argc > 1) seconds = atof(argv[1]);
    if (argc > 2) seed = strtoull(argv[2], NULL, 10);
    trainer_setup();
    RUN(test_files_are_made);
    for (; target < targets + TARGETS; target++)
        if (test_wanted(target->file)) test_run(__FILE__, target->file, fuzz);
    dataset_close(run.data.train);
    model_destroy(&model);
    memory_free(byte_tokenizer);
    return trainer_end();
}
