// Loads models of other programs: safetensors in one file or several, in fp32, fp16 or bf16, and llm.c's .bin. Every
// value must reach its element. Errors name malformed files.
#include "checkpoint/checkpoint.h"
#include "base/float16.h"
#include "run/state.h"
#include "../safetensors_writer.h"
#include "half.h"
#include "../small_model.h"
#include "../scratch.h"

static Error e;
static Model model;
static float *values;   // (flat_count), written
static float *received; // (flat_count), read back

static int receive(void *context, StateKind kind, Range range, const float *from, Error *e) {
    CHECK(range.begin < range.end && range.end <= model.flat_count, "%zu to %zu", range.begin, range.end);
    memcpy(received + range.begin, from, range_length(range) * sizeof *from);
    return 0;
}

static int give(void *context, StateKind kind, Range range, float *to, Error *e) { // moment 2: -2 x moment 1
    for (size_t i = range.begin; i < range.end; i++)
        to[i - range.begin] = kind == STATE_MOMENT2 ? -2 * values[i] : values[i];
    return 0;
}

// Makes values that all three types hold exactly.
static void make_values(uint64_t seed) {
    small_params(&model, seed, values);
    for (size_t i = 0; i < model.flat_count; i++) values[i] = roundf(values[i] * 64) / 64;
    for (size_t i = 0; i < model.flat_count; i++)
        values[i] = fabsf(values[i]) > 2 ? copysignf(2, values[i]) : bf16_to_f32(f32_to_bf16(values[i]));
}

static Receiver receiver(const Model *of, StateWriter load) {
    static float buffer[RECEIVER_VALUES];
    return (Receiver){.model = of, .buffer = buffer, .load = load};
}

// Checks that a rank of --tensor 2 receives its part of each tensor.
static void check_local(const char *path, int rank) {
    Model local;
    CHECK_OK(model_create_local(&local, &model.config, rank, 2, &e), &e);
    const Receiver to = receiver(&local, receive);
    CHECK_OK(checkpoint_load_model(path, &to, &e), &e);
    for (int k = 0; k < local.tensor_count; k++) {
        const Tensor *t = &local.tensors[k];
        const float *whole = values + model.tensors[k].offset;
        size_t wrong = 0;
        for (size_t i = 0; i < t->count; i++) wrong += !(received[t->offset + i] == whole[tensor_whole_index(t, i)]);
        CHECK(wrong == 0, "%s, rank %d: %s: %zu of %zu values", path, rank, t->name, wrong, t->count);
    }
    model_destroy(&local);
}

static void check_received(const char *path) {
    const Receiver to = receiver(&model, receive);
    ModelConfig config;
    if (model.heads > 1) check_local(path, 0), check_local(path, 1);
    for (size_t i = 0; i < model.flat_count; i++) received[i] = NAN;
    CHECK(checkpoint_is_model(path), "%s is no model", path);
    CHECK_OK(checkpoint_read_config(path, &config, &e), &e);
    CHECK(memcmp(&config, &model.config, sizeof config) == 0, "%s: another shape", path);
    CHECK_OK(checkpoint_load_model(path, &to, &e), &e);
    for (int k = 0; k < model.tensor_count; k++) {
        const Tensor *t = &model.tensors[k];
        size_t wrong = 0;
        for (size_t i = t->offset; i < t->offset + t->count; i++) wrong += !(received[i] == values[i]);
        CHECK(wrong == 0, "%s: %s: %zu of %zu values", path, t->name, wrong, t->count);
    }
}

// Writes config.json and all weights.
static void save_all(const char *directory) {
    CHECK_OK(directory_create(directory, &e), &e);
    Manifest manifest = {.dir = open(directory, O_RDONLY)};
    CHECK_OK(checkpoint_save_config(&manifest, &model.config, -1, 0, &e), &e);
    CHECK_OK(save_model(directory, &model, give, NULL, &e), &e);
    close(manifest.dir);
    manifest_free(&manifest);
}

// ---- safetensors ----------------------------------------------------------------------------------------------------

static int receive_moments(void *context, StateKind kind, Range range, const float *from, Error *e) {
    if (kind == STATE_MOMENT1) return receive(context, kind, range, from, e);
    for (size_t i = range.begin; i < range.end; i++) received[i] += from[i - range.begin] == -2 * values[i]; // moment 2
    return 0;
}

static int ignore(void *context, StateKind kind, Range range, const float *from, Error *e) { return 0; }

// Saves and loads a tensor and its moments in several chunks. The last chunk is short.
static void test_beyond_a_chunk(void) {
    const ModelConfig shape = {1, 1, 512, 20000, 8};
    const Model small = model;
    float *const small_values = values, *const small_received = received;
    size_t wrong = 0;
    CHECK_OK(model_create(&model, &shape, &e), &e);
    CHECK(model.tensors[0].count > RECEIVER_VALUES, "%zu", model.tensors[0].count);
    Receiver to = receiver(&model, receive_moments);
    values = malloc(model.flat_count * sizeof *values);
    received = malloc(model.flat_count * sizeof *received);
    for (size_t i = 0; i < model.flat_count; i++) values[i] = (float)(i + 1);
    save_all("large");
    check_received("large");
    memset(received, 0, model.flat_count * sizeof *received);
    for (StateKind k = STATE_MOMENT1; k <= STATE_MOMENT2; k++)
        CHECK_OK(checkpoint_load_moment("large", k, &model, &to, &e), &e);
    for (const Tensor *t = model.tensors; t < model.tensors + model.tensor_count; t++) // skips padding
        for (size_t i = t->offset; i < t->offset + t->count; i++) wrong += received[i] != values[i] + 1;
    // A rank reads both moments of the ranges that it owns.
    const Range owned[] = {{0, 64}, {600, 700}, {1280, 1281}};
    to.wanted = owned, to.count = 3;
    for (size_t i = 0; i < model.flat_count; i++) received[i] = -7;
    for (StateKind k = STATE_MOMENT1; k <= STATE_MOMENT2; k++)
        CHECK_OK(checkpoint_load_moment("large", k, &model, &to, &e), &e);
    for (size_t i = 0; i < model.flat_count; i++)
        wrong += received[i] != (i < 64 || (i >= 600 && i < 700) || i == 1280 ? values[i] + 1 : -7);
    CHECK(wrong == 0, "%zu of %zu moments", wrong, model.flat_count);
    model_destroy(&model);
    free(values);
    free(received);
    model = small, values = small_values, received = small_received;
}

static void write_tensor(SafetensorsWriter *writer, const Tensor *t, const char *type) {
    for (size_t i = 0; i < t->count; i++) {
        float x = values[t->offset + i];
        uint16_t half = strcmp(type, "F16") == 0 ? f16_of(x) : f32_to_bf16(x);
        CHECK_OK(strcmp(type, "F32") == 0 ? writer_write(writer, &x, 4, &e) : writer_write(writer, &half, 2, &e), &e);
    }
}

// Writes the tensors whose index is `part` modulo `parts`.
static void write_part(const char *path, const char *type, int part, int parts, const char *prefix) {
    SafetensorsWriter *writer;
    CHECK_OK(writer_create(&writer, path, &e), &e);
    for (int k = part; k < model.tensor_count; k += parts) {
        const Tensor *t = &model.tensors[k];
        uint64_t shape[2] = {t->rows, t->columns};
        safetensors_add(&writer->header, path_of("%s%s", prefix, t->name), type, t->dimensions,
                        shape + (t->dimensions == 1));
    }
    for (int k = part; k < model.tensor_count; k += parts) write_tensor(writer, &model.tensors[k], type);
    CHECK_OK(writer_finish(writer, &e), &e);
}

static void check_note(const char *path, const char *want) {
    Text note;
    CHECK_OK(text_begin(&note, &e), &e);
    CHECK_OK(checkpoint_note_unknown(path, &model, note.f, &e), &e);
    CHECK_OK(text_end(&note, &e), &e);
    CHECK(strcmp(note.text, want) == 0, "'%s', not '%s'", note.text, want);
    text_free(&note);
}

// Masks and a tied head are ignored; other unknown tensors get a note.
static void test_unknown_tensors(void) {
    static const char *const names[] = {"h.0.attn.bias",     "transformer.h.2.attn.masked_bias",
                                        "h.0.attn.bias2",    "score.weight",
                                        "wte.weight.lora_A", "lm_head.weight"};
    SafetensorsWriter *writer;
    const uint64_t none = 0;
    CHECK_OK(directory_create("more", &e), &e);
    CHECK_OK(writer_create(&writer, "more/model.safetensors", &e), &e);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        safetensors_add(&writer->header, names[i], "F32", 1, &none);
    CHECK_OK(writer_finish(writer, &e), &e);
    check_note("more", "note: more: not read, as GPT-2 has no such tensor: h.0.attn.bias2 and 2 more\n");
}

static void test_one_file(void) {
    static const char *const types[] = {"F32", "F16", "BF16"};
    make_values(1);
    save_all("one");
    check_received("one");
    for (int i = 0; i < 3; i++) {
        make_values(2 + (uint64_t)i);
        write_part("one/model.safetensors", types[i], 0, 1, i ? "" : "transformer.");
        check_received("one");
    }
    static const char *const wrapped[] = {"_orig_mod.", "module.transformer.", "module._orig_mod.transformer."};
    for (int i = 0; i < 3; i++) {
        write_part("one/model.safetensors", "F32", 0, 1, wrapped[i]);
        check_received("one");
        check_note("one", "");
    }
}

// A config.json of another model is refused. Each case puts one field before the fields of a valid file, since the
// reader uses the first of two fields with one name.
static void test_other_models(void) {
    static const char *const fields[] = {"\"model_type\": \"gpt_neo\"",
                                         "\"activation_function\": \"gelu\"",
                                         "\"activation_function\": \"gelu_\"",
                                         "\"layer_norm_epsilon\": 1e-6",
                                         "\"scale_attn_weights\": false",
                                         "\"scale_attn_by_inverse_layer_idx\": true",
                                         "\"add_cross_attention\": true",
                                         "\"tie_word_embeddings\": false",
                                         "\"n_inner\": 95",
                                         "\"n_layer\": 2.5",
                                         "\"n_embd\": 48",
                                         "\"n_positions\": 20",
                                         "\"vocab_size\": 102",
                                         "\"vocab_size\": 100",
                                         "\"n_positions\": 18",
                                         "\"n_layer\": 4",
                                         "\"n_layer\": 2"};
    char *text, *changed;
    size_t bytes;
    make_values(1);
    save_all("other");
    CHECK_OK(file_read(IN_PATH, "other/config.json", 1 << 16, &text, &bytes, &e), &e);
    changed = malloc(bytes + 100);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        ModelConfig config;
        Model another;
        sprintf(changed, "{%s, %s", fields[i], text + 1);
        write_text("other/config.json", changed);
        int code = checkpoint_read_config("other", &config, &e);
        if (!code) {
            CHECK_OK(model_create(&another, &config, &e), &e);
            const Receiver to = receiver(&another, ignore);
            code = checkpoint_load_model("other", &to, &e);
            model_destroy(&another);
        }
        CHECK(code == ERR_INPUT, "%s: exit code %d", fields[i], code);
    }
    for (int i = 0; i < 2; i++) {
        ModelConfig config;
        int length =
            sprintf(changed, "{\"activation_function\": \"gelu_%s\", %s", i ? "new" : "pytorch_tanh", text + 1);
        CHECK_OK(file_replace(IN_PATH, "other/config.json", changed, (size_t)length, &e), &e);
        CHECK_OK(checkpoint_read_config("other", &config, &e), &e);
    }
    CHECK(strstr(text, "\"dtype\": \"float32\"") && strstr(text, "\"torch_dtype\": \"float32\""), "%s", text);
    CHECK(file_exists("other/generation_config.json"), "no generation_config.json");
    free(changed);
    memory_free(text);
}

// Moments must be fp32, and as many as the tensor's name says.
static void test_moments_of_another_kind(void) {
    static const struct {
        const char *type;
        uint64_t more; // elements beyond the count in the name
        const char *name, *said;
    } cases[] = {
        {"BF16", 0, "moment2.0-%zu", "does not hold its range in F32"},
        {"F32", 1, "moment2.0-%zu", "does not hold its range in F32"},
        {"F32", 0, "moment2.0-%zu.", "no tensor moment2.0-"},
    };
    const Receiver to = receiver(&model, ignore);
    CHECK_OK(directory_create("kind", &e), &e);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SafetensorsWriter *writer;
        uint64_t count = model.flat_count + cases[i].more;
        size_t bytes = model.flat_count * sizeof(float) + count * safetensors_type_bytes(cases[i].type);
        void *zeros = calloc(1, bytes);
        CHECK_OK(writer_create(&writer, "kind/optimizer.safetensors", &e), &e);
        safetensors_add(&writer->header, path_of("moment1.0-%zu", model.flat_count), "F32", 1,
                        &(uint64_t){model.flat_count});
        safetensors_add(&writer->header, path_of(cases[i].name, model.flat_count), cases[i].type, 1, &count);
        CHECK_OK(writer_write(writer, zeros, bytes, &e), &e);
        CHECK_OK(writer_finish(writer, &e), &e);
        free(zeros);
        CHECK_ERROR(checkpoint_load_moment("kind", STATE_MOMENT2, &model, &to, &e), &e, ERR_INPUT, cases[i].said);
        CHECK(strstr(e.what, "kind/optimizer.safetensors: ") && e.hint[0], "case %zu: %s (%s)", i, e.what, e.hint);
    }
}

static void test_several_files(void) {
    const Receiver to = receiver(&model, receive);
    save_all("many");
    unlink("many/model.safetensors");
    make_values(10);
    static const char *const types[] = {"F16", "F32", "BF16"};
    for (int part = 0; part < 3; part++)
        write_part(path_of("many/part-%d.safetensors", part), types[part], part, 3, "transformer.");
    check_received("many");
    for (int other = 0; other < 2; other++) { // an output layer must equal wte
        const Tensor *wte = model_tensor(&model, WTE, -1);
        SafetensorsWriter *writer;
        CHECK_OK(writer_create(&writer, "many/head.safetensors", &e), &e);
        safetensors_add(&writer->header, "lm_head.weight", "F32", 2, (uint64_t[]){wte->rows, wte->columns});
        values[wte->offset] += (float)other;
        write_tensor(writer, wte, "F32");
        values[wte->offset] -= (float)other;
        CHECK_OK(writer_finish(writer, &e), &e);
        if (!other) check_received("many");
    }
    CHECK_ERROR(checkpoint_load_model("many", &to, &e), &e, ERR_INPUT,
                "many/head.safetensors: tensor lm_head.weight is not wte.weight");
    unlink("many/head.safetensors");
    unlink("many/part-1.safetensors");
    CHECK_ERROR(checkpoint_load_model("many", &to, &e), &e, ERR_INPUT, "many: no tensor");
    save_all("many"); // writes model.safetensors, so the other files are ignored
    check_received("many");
}

// ---- llm.c's .bin: 16 arrays, weights as (out, in) ------------------------------------------------------------------

enum { PADDED = 128 };

static void put_value(FILE *f, int version, float x) {
    uint16_t half = f32_to_bf16(x);
    if (version == 3) fwrite(&x, 4, 1, f);
    else fwrite(&half, 2, 1, f);
}

static void put_rows(FILE *f, int version, const Tensor *t, size_t rows, size_t columns, bool turned) {
    const float *v = values + t->offset;
    CHECK(t->count == rows * columns, "%s", t->name);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++) put_value(f, version, turned ? v[c * rows + r] : v[r * columns + c]);
}

static void write_bin(const char *path, int version) {
    const ModelConfig *c = &model.config;
    size_t C = (size_t)c->channels;
    int32_t header[256] = {20240326, version, c->context, c->vocab, c->layers, c->heads, c->channels, PADDED};
    FILE *f = fopen(path, "wb");
    fwrite(header, sizeof header, 1, f);
    put_rows(f, version, model_tensor(&model, WTE, -1), (size_t)c->vocab, C, false);
    for (size_t i = 0; i < (size_t)(PADDED - c->vocab) * C; i++) put_value(f, version, NAN);
    put_rows(f, version, model_tensor(&model, WPE, -1), (size_t)c->context, C, false);
    const struct {
        TensorKind kind;
        size_t rows, columns;
    } layers[] = {{LN1_W, 1, C},
                  {LN1_B, 1, C},
                  {QKV_W, 3 * C, C},
                  {QKV_B, 1, 3 * C},
                  {PROJ_W, C, C},
                  {PROJ_B, 1, C},
                  {LN2_W, 1, C},
                  {LN2_B, 1, C},
                  {FC_W, 4 * C, C},
                  {FC_B, 1, 4 * C},
                  {FCPROJ_W, C, 4 * C},
                  {FCPROJ_B, 1, C}};
    for (size_t k = 0; k < sizeof layers / sizeof *layers; k++)
        for (int l = 0; l < c->layers; l++)
            put_rows(f, version, model_tensor(&model, layers[k].kind, l), layers[k].rows, layers[k].columns,
                     layers[k].rows > 1);
    put_rows(f, version, model_tensor(&model, LNF_W, -1), 1, C, false);
    put_rows(f, version, model_tensor(&model, LNF_B, -1), 1, C, false);
    fclose(f);
}

static void test_llmc_bin(void) {
    for (int version = 3; version <= 5; version += 2) {
        make_values((uint64_t)version);
        write_bin("model.bin", version);
        check_received("model.bin");
    }
}

static void patch(const char *path, long at, int32_t value) {
    FILE *f = fopen(path, "r+b");
    fseek(f, at, SEEK_SET);
    fwrite(&value, sizeof value, 1, f);
    fclose(f);
}

static void test_bad_bin(void) {
    static const struct {
        int index, value;
        const char *said;
    } cases[] = {{1, 4, "version 4 at byte 4,"},
                 {1, 1, "version 1 at byte 4,"},
                 {1, 5, "its header makes"},
                 {2, 0, ": 0 tokens of context"},
                 {3, -1, ": -1 tokens in the vocabulary"},
                 {4, 4, "its header makes"},
                 {4, 1001, "it describes no GPT-2 that this program can train: 1001 layers"},
                 {5, 5, "heads"},
                 {6, 1 << 30, ": 1073741824 channels"},
                 {6, 1 << 20, "1 to 65536"},
                 {6, 1 << 10, "makes"},
                 {7, 12, "padded to 12 at byte 28"},
                 {7, 256, "its header makes"}};
    ModelConfig config;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_bin("bad.bin", 3);
        patch("bad.bin", 4 * cases[i].index, cases[i].value);
        CHECK_ERROR(checkpoint_read_config("bad.bin", &config, &e), &e, ERR_INPUT, cases[i].said);
        CHECK(strstr(e.what, "bad.bin"), "'%s' does not name the file", e.what);
    }
    write_bin("bad.bin", 3);
    CHECK(truncate("bad.bin", 2000) == 0, "truncate");
    CHECK_ERROR(checkpoint_read_config("bad.bin", &config, &e), &e, ERR_INPUT, "ends at byte 2000");
    CHECK(truncate("bad.bin", 700) == 0, "truncate");
    CHECK_ERROR(checkpoint_read_config("bad.bin", &config, &e), &e, ERR_INPUT, "byte 700");
    CHECK(truncate("bad.bin", 3) == 0 && !checkpoint_is_model("bad.bin"), "three bytes are a model");
}

int main(void) {
    const ModelConfig config = {3, 2, 24, 101, 19};
    scratch_begin();
    if (model_create(&model, &config, &e)) return 1;
    values = malloc(model.flat_count * sizeof *values);
    received = malloc(model.flat_count * sizeof *received);
    RUN(test_one_file, test_unknown_tensors, test_beyond_a_chunk, test_other_models, test_moments_of_another_kind,
        test_several_files, test_llmc_bin, test_bad_bin);
    free(values);
    free(received);
    model_destroy(&model);
    return scratch_end();
}
