// Fuzzes the readers of checkpoints, tokenizers, shards and llm.c's .bin: fuzz_checkpoint [seconds] [seed]. Mutates files
// of a real run (safetensors and shards also have fuzzers of their own). Build it with ASan and UBSan. Beyond what these
// find, every rejection must be ERR_INPUT with a remedy and a message that names the file and where in it. GNS_LONG=1:
// at least ten thousand mutations of each file. With GNS_LIBFUZZER it is a libFuzzer target (make fuzz-coverage), and
// the environment's GNS_FUZZ_TARGET picks the reader.
#include "checkpoint/archive.h"
#include "checkpoint/checkpoint.h"
#include "run/run.h"
#include "text/tokenizer.h"
#include "../trainer.h"
#include "mutate.h"

enum { LAYERS = 2 };

// ---- The readers ----------------------------------------------------------------------------------------------------

static Model model;
static Run run; // that state.json is read into

static int ignore_values(void *context, Range range, const float *values, Error *e) {
    (void)context;
    (void)values;
    (void)e;
    CHECK(range.begin < range.end && range.end <= model.flat_count, "%zu to %zu", range.begin, range.end);
    return 0;
}

static int read_manifest(const char *directory, Error *e) {
    Manifest manifest;
    int code = manifest_read(&manifest, IN_PATH, directory, e);
    if (!code) code = manifest_verify(&manifest, directory, NULL, VERIFY_BYTES, e);
    manifest_free(&manifest);
    return code;
}

static int read_state(const char *directory, Error *e) {
    Text changes = {0};
    RunSummary summary;
    TRY(noise_create(&run.position.noise, &model, 60, 0, e));
    run.setup.model = model;
    run.setup.shape.seq_len = 8;
    run.setup.comm = &(Comm){.ranks = 1};
    int code = run_state_summary(&summary, directory, e);
    if (!code) code = run_state_read(&run, directory, &changes, e);
    if (!code) {
        outliers_z(&run.position.at.loss_window, 1);
        gns_estimate(&run.position.noise.ln);
    }
    text_free(&changes);
    noise_destroy(&run.position.noise);
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

static int read_weights(const char *directory, Error *e) {
    return checkpoint_load_model(directory, &model, ignore_values, NULL, e);
}

static int read_optimizer(const char *directory, Error *e) {
    return checkpoint_load_optimizer(directory, &model, NULL, 0, ignore_values, ignore_values, NULL, e);
}

static int read_tokenizer(const char *directory, Error *e) {
    static const char text[] = "the hen \xff there";
    uint16_t tokens[sizeof text];
    size_t count, bytes;
    Tokenizer *t;
    TRY(tokenizer_load(&t, directory, e));
    int code = tokenizer_encode(t, text, sizeof text, tokens, &count, e);
    for (size_t i = 0; !code && i < count; i++) tokenizer_decode(t, tokens[i], &bytes);
    tokenizer_destroy(t);
    return code;
}

static int read_shard(const char *path, Error *e) {
    Dataset *data;
    uint16_t row[8 + 1];
    TRY(dataset_open(&data, path, 8, 64, 1, e));
    int code = dataset_check(data, e);
    if (!code) code = dataset_rows(data, 0, 1, row, e);
    dataset_close(data);
    return code;
}

static int read_bin(const char *path, Error *e) {
    ModelConfig config;
    if (!checkpoint_is_model(path)) return FAIL(e, ERR_INPUT, "none", "%s: no magic at byte 0", path);
    TRY(checkpoint_read_config(path, &config, e));
    return memcmp(&config, &model.config, sizeof config) == 0
               ? checkpoint_load_model(path, &model, ignore_values, NULL, e)
               : 0;
}

// ---- One file after the other ---------------------------------------------------------------------------------------

#ifndef GNS_LIBFUZZER
static double seconds = 5;
static uint64_t seed = 1;
#endif

// A manifest with a wrong hash of itself is refused at once: half of the mutants get the right one.
static void sign_manifest(Sample *s, uint64_t *state) {
    const size_t last = strlen("  \"xxh3_128_above\": \"\"\n}\n") + HASH_TEXT - 1;
    if (draw(state, 2) || s->count <= last || s->count + 1 >= MAX_BYTES) return;
    snprintf(s->bytes + s->count - last, last + 1, "  \"xxh3_128_above\": \"%s\"\n}\n",
             digest_of(s->bytes, s->count - last).hash);
}

typedef struct {
    const char *file;  // what is mutated
    const char *named; // what a message must mention: a manifest and an index also name other files
    const char *path;  // the reader's argument
    int (*reader)(const char *path, Error *e);
    size_t first_bytes; // mutations begin within these
    bool byte;          // must a message name the byte? A vocabulary's names tokens, merges and lines
} Target;

static const Target targets[] = {
    {"step/MANIFEST.json", "step/", "step", read_manifest, MAX_BYTES, false},
    {"step/training/state.json", "step/training/state.json", "step", read_state, MAX_BYTES, false},
    {"step/config.json", "step/config.json", "step", read_config, MAX_BYTES, false},
    {"many/model.safetensors.index.json", "many/", "many", read_weights, MAX_BYTES, false},
    {"step/model.safetensors", "step/model.safetensors", "step", read_weights, MAX_BYTES, false},
    {"step/training/optimizer.safetensors", "step", "step", read_optimizer, 400, false}, // nearly all of it is values
    {"words/vocab.json", "words/vocab.json", "words", read_tokenizer, MAX_BYTES, false},
    {"words/merges.txt", "words/", "words", read_tokenizer, MAX_BYTES, false},
    {"word/tokenizer.json", "word/tokenizer.json", "word", read_tokenizer, MAX_BYTES, false},
    {"shard.bin", "shard.bin", "shard.bin", read_shard, 1100, true},
    {"model.bin", "model.bin", "model.bin", read_bin, 40, true}, // the header is what can be wrong
    {"added/tokenizer_config.json", "added/tokenizer_config.json", "added", read_tokenizer, MAX_BYTES, false},
};
enum { TARGETS = sizeof targets / sizeof *targets };

// Writes the file, runs the reader and checks its error. Returns the reader's code.
static int try_reader(const Target *t, const Sample *s) {
    unlink(t->file); // some file systems wait for the disk when a file is overwritten
    FILE *f = fopen(t->file, "wb");
    CHECK(f && fwrite(s->bytes, 1, s->count, f) == s->count, "%s", t->file);
    if (f) fclose(f);
    Error e = {0};
    int code = t->reader(t->path, &e);
    CHECK(code == 0 || (code == ERR_INPUT && e.hint[0]), "code %d: %s (%s)", code, e.what, e.hint);
    CHECK(code == 0 || strstr(e.what, t->named), "'%s' does not name %s", e.what, t->named);
    CHECK(code == 0 || !t->byte || test_says_byte(e.what) || strstr(e.what, "too few for one window"), "no byte: %s",
          e.what);
    return code;
}

#ifndef GNS_LIBFUZZER
static void fuzz(const Target *t) {
    static Sample original, mutant;
    size_t accepted = 0, rejected = 0;
    char *text = read_text(t->file, &original.count);
    CHECK(text && original.count < MAX_BYTES, "%s: %zu bytes", t->file, original.count);
    if (!text) return;
    memcpy(original.bytes, text, original.count);
    memory_free(text);
    size_t wanted = trainer.thorough ? 10000 : 20;
    double end = clock_seconds() + seconds / TARGETS;
    while ((clock_seconds() < end || accepted + rejected < wanted) && !test_state.failures) {
        uint64_t state = seed << 32 | (accepted + rejected);
        mutant = original;
        for (size_t changes = draw(&state, 4); changes > 0; changes--)
            mutate(&mutant, 0, size_min(mutant.count + 1, t->first_bytes), &state);
        if (t->reader == read_manifest) sign_manifest(&mutant, &state);
        int code = try_reader(t, &mutant);
        accepted += code == 0;
        rejected += code != 0;
    }
    printf("  %s: %zu accepted, %zu rejected\n", t->file, accepted, rejected);
    CHECK(accepted > 0 && rejected > 0, "one of the two never happened");
    if (!test_state.failures) try_reader(t, &original); // as it was
}

static void test_manifest(void) { fuzz(&targets[0]); }
static void test_state_json(void) { fuzz(&targets[1]); }
static void test_config(void) { fuzz(&targets[2]); }
static void test_index(void) { fuzz(&targets[3]); }
static void test_weights(void) { fuzz(&targets[4]); }
static void test_optimizer(void) { fuzz(&targets[5]); }
static void test_vocab(void) { fuzz(&targets[6]); }
static void test_merges(void) { fuzz(&targets[7]); }
static void test_tokenizer_json(void) { fuzz(&targets[8]); }
static void test_shard(void) { fuzz(&targets[9]); }
static void test_bin(void) { fuzz(&targets[10]); }
static void test_tokenizer_config(void) { fuzz(&targets[11]); }
#endif

static void make_index(void) {
    Error e = {0};
    copy_tree("step", "many");
    CHECK(rename("many/model.safetensors", "many/part-0.safetensors") == 0, "rename");
    FILE *f = fopen("many/model.safetensors.index.json", "w");
    fputs("{\"weight_map\": {", f);
    for (int k = 0; k < model.tensor_count; k++)
        fprintf(f, "%s\"%s\": \"part-0.safetensors\"", k ? ", " : "", model.tensors[k].name);
    fputs("}}\n", f);
    fclose(f);
    CHECK_OK(read_weights("many", &e), &e);
}

static void make_bin(void) {
    int32_t header[256] = {20240326, 3, 8, 64, LAYERS, 1, 8, 64};
    float zero = 0;
    Error e = {0};
    FILE *f = fopen("model.bin", "wb");
    fwrite(header, sizeof header, 1, f);
    for (size_t i = 0; i < model.parameters; i++) fwrite(&zero, 4, 1, f);
    fclose(f);
    CHECK_OK(read_bin("model.bin", &e), &e);
}

static void save_text(const char *path, const char *text) {
    Error e = {0};
    CHECK_OK(file_save(path, text, strlen(text), &e), &e);
}

// GPT-2's files in small: all bytes, and "he", "the".
static void make_tokenizers(void) {
    Error e = {0};
    Tokenizer *bytes;
    size_t length;
    CHECK_OK(directory_create("words", &e), &e);
    CHECK_OK(directory_create("word", &e), &e);
    CHECK_OK(tokenizer_create_bytes(&bytes, &e), &e);
    CHECK_OK(tokenizer_save(bytes, 0, "words", NULL, &e), &e);
    tokenizer_destroy(bytes);
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

// A run whose state has every field.
static void test_files_are_made(void) {
    Error e = {0};
    const ModelConfig config = {LAYERS, 1, 8, 64, 8};
    CHECK(trainer_run("train_gpt2 --train train.bin --vocab-size 64 --model d1 --layers 2 --heads 1 --channels 8 "
                      "--seq-len 8 --threads 1 --batch-tokens 16 --gns exact --steps 140 --skip-loss-z 9 --out run") ==
              0,
          "%s", log_tail());
    copy_tree("run/step_00000140", "step");
    CHECK_OK(model_create(&model, &config, &e), &e);
    CHECK_OK(dataset_open(&run.data.train, "train.bin", 8, 64, 1337, &e), &e);
    CHECK_OK(shard_list_create(&run.data.shards, run.data.train, &e), &e);
    options_defaults(&run.setup.options);
    CHECK_OK(read_manifest("step", &e), &e);
    CHECK_OK(read_state("step", &e), &e);
    make_index();
    make_bin();
    make_tokenizers();
    trainer_make_shard("shard.bin", 4, 300);
}

#ifdef GNS_LIBFUZZER
int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static const Target *target = &targets[0];

// The corpus, in the scratch directory's "corpus", begins with the unchanged file.
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    Error e;
    const char *name = getenv("GNS_FUZZ_TARGET");
    trainer_setup();
    test_files_are_made();
    for (int i = 0; i < TARGETS; i++)
        if (name && strcmp(name, targets[i].file) == 0) target = &targets[i];
    if (directory_create("corpus", &e) == 0) copy_file(target->file, "corpus/as_written");
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static Sample s;
    uint64_t state = bytes;
    if (bytes >= MAX_BYTES) return 0;
    memcpy(s.bytes, data, bytes);
    s.count = bytes;
    if (target->reader == read_manifest) sign_manifest(&s, &state);
    try_reader(target, &s);
    if (test_state.failures) abort();
    return 0;
}
#else
int main(int argc, char **argv) {
    if (argc > 1) seconds = atof(argv[1]);
    if (argc > 2) seed = strtoull(argv[2], NULL, 10);
    trainer_setup();
    RUN(test_files_are_made);
    RUN(test_manifest);
    RUN(test_state_json);
    RUN(test_config);
    RUN(test_index);
    RUN(test_weights);
    RUN(test_optimizer);
    RUN(test_vocab);
    RUN(test_merges);
    RUN(test_tokenizer_json);
    RUN(test_shard);
    RUN(test_bin);
    RUN(test_tokenizer_config);
    shard_list_destroy(&run.data.shards);
    dataset_close(run.data.train);
    model_destroy(&model);
    return trainer_end();
}
#endif
