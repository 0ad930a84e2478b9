#define _POSIX_C_SOURCE 200809L
#include "checkpoint.h"

#include "safetensors.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

// Values that pass between file and engine at a time.
enum { CHUNK = 1 << 20 };

// ---------------------------------------------------------------------------------------------------------------------
// config.json

bool checkpoint_is_model(const char *path) {
    char file[PATH_MAX];
    Error ignored;
    return path_join(file, sizeof file, path, "config.json", &ignored) == 0 && access(file, F_OK) == 0;
}

static int config_int(const cJSON *root, const char *path, const char *name, int *out, Error *e) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, name);
    if (!item) return FAIL(e, ERR_INPUT, "is this a GPT-2 config.json?", "%s: no field \"%s\"", path, name);
    if (!cJSON_IsNumber(item) || item->valuedouble != (int)item->valuedouble || item->valuedouble < 1)
        return FAIL(e, ERR_INPUT, "it must be a whole number above 0", "%s: field \"%s\" is not one", path, name);
    *out = (int)item->valuedouble;
    return 0;
}

// Fields that would make it another model than the one computed here, with the values that do not.
static const struct {
    const char *name, *must_be;
    double number;
} config_fixed[] = {
    {"model_type", "gpt2", 0},
    {"activation_function", "gelu_new", 0}, // the tanh form
    {"layer_norm_epsilon", NULL, 1e-5},
    {"scale_attn_weights", NULL, 1},
    {"scale_attn_by_inverse_layer_idx", NULL, 0},
    {"add_cross_attention", NULL, 0},
    {"tie_word_embeddings", NULL, 1},
};

static bool config_field_fits(const cJSON *item, const char *text, double number) {
    if (!item || cJSON_IsNull(item)) return true; // transformers' default is the value that we need
    if (text) return cJSON_IsString(item) && strcmp(item->valuestring, text) == 0;
    double value = cJSON_IsNumber(item) ? item->valuedouble : cJSON_IsTrue(item) ? 1 : cJSON_IsFalse(item) ? 0 : -1;
    return value > number * (1 - 1e-6) - 1e-12 && value < number * (1 + 1e-6) + 1e-12;
}

static int config_parse(const cJSON *root, const char *path, ModelConfig *config, Error *e) {
    if (!cJSON_IsObject(root)) return FAIL(e, ERR_INPUT, "is this a GPT-2 config.json?", "%s: not a JSON object", path);
    for (size_t i = 0; i < sizeof config_fixed / sizeof *config_fixed; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, config_fixed[i].name);
        if (!config_field_fits(item, config_fixed[i].must_be, config_fixed[i].number))
            return FAIL(e, ERR_INPUT, "only GPT-2 as published is trained here",
                        "%s: field \"%s\" describes another model than GPT-2", path, config_fixed[i].name);
    }
    TRY(config_int(root, path, "n_layer", &config->layers, e));
    TRY(config_int(root, path, "n_head", &config->heads, e));
    TRY(config_int(root, path, "n_embd", &config->channels, e));
    TRY(config_int(root, path, "vocab_size", &config->vocab, e));
    TRY(config_int(root, path, "n_positions", &config->context, e));
    const cJSON *inner = cJSON_GetObjectItemCaseSensitive(root, "n_inner");
    if (cJSON_IsNumber(inner) && inner->valuedouble != 4.0 * config->channels)
        return FAIL(e, ERR_INPUT, "only GPT-2 as published is trained here", "%s: n_inner is not 4 n_embd", path);
    return 0;
}

int checkpoint_read_config(const char *directory, ModelConfig *config, Error *e) {
    char path[PATH_MAX], *text;
    size_t bytes;
    TRY(path_join(path, sizeof path, directory, "config.json", e));
    TRY(file_read(path, 1 << 20, &text, &bytes, e));
    const char *end = text;
    cJSON *root = cJSON_ParseWithLengthOpts(text, bytes, &end, false);
    int code =
        root ? config_parse(root, path, config, e)
             : FAIL(e, ERR_INPUT, "fetch the file again", "%s: malformed JSON at byte %zu", path, (size_t)(end - text));
    cJSON_Delete(root);
    memory_free(text);
    return code;
}

static int write_config(const char *directory, const ModelConfig *c, Error *e) {
    char path[PATH_MAX];
    TRY(path_join(path, sizeof path, directory, "config.json", e));
    FILE *f = fopen(path, "we");
    if (!f) return FAIL(e, ERR_WRITE, "check --out", "%s: cannot write: %s", path, strerror(errno));
    fprintf(f,
            "{\n  \"model_type\": \"gpt2\",\n  \"architectures\": [\"GPT2LMHeadModel\"],\n  \"n_layer\": %d,\n"
            "  \"n_head\": %d,\n  \"n_embd\": %d,\n  \"vocab_size\": %d,\n  \"n_positions\": %d,\n  \"n_ctx\": %d,\n"
            "  \"activation_function\": \"gelu_new\",\n  \"layer_norm_epsilon\": 1e-05,\n"
            "  \"initializer_range\": 0.02,\n  \"resid_pdrop\": 0.0,\n  \"embd_pdrop\": 0.0,\n  \"attn_pdrop\": 0.0,\n"
            "  \"tie_word_embeddings\": true,\n  \"bos_token_id\": %s,\n  \"eos_token_id\": %s,\n"
            "  \"torch_dtype\": \"float32\"\n}\n",
            c->layers, c->heads, c->channels, c->vocab, c->context, c->context, c->vocab == 50257 ? "50256" : "null",
            c->vocab == 50257 ? "50256" : "null");
    bool bad = fflush(f) != 0 || fsync(fileno(f)) != 0;
    if (fclose(f) != 0 || bad)
        return FAIL(e, ERR_WRITE, "free some space and start again", "%s: cannot write: %s", path, strerror(errno));
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// model.safetensors

// Hub files name tensors with and without "transformer." in front.
static const SafetensorsEntry *entry_of(const SafetensorsReader *reader, const Tensor *t) {
    char long_name[64];
    snprintf(long_name, sizeof long_name, "transformer.%s", t->name);
    const SafetensorsEntry *entry = safetensors_find(reader, long_name);
    return entry ? entry : safetensors_find(reader, t->name);
}

static int check_entry(const SafetensorsReader *reader, const Tensor *t, Error *e) {
    const SafetensorsEntry *entry = entry_of(reader, t);
    if (!entry)
        return FAIL(e, ERR_INPUT, "does config.json belong to this file?", "%s: no tensor %s", reader->path, t->name);
    uint64_t rows = t->dimensions == 2 ? entry->shape[0] : 1;
    if (entry->dimensions != t->dimensions || rows != t->rows || entry->shape[entry->dimensions - 1] != t->columns)
        return FAIL(e, ERR_INPUT, "does config.json belong to this file?",
                    "%s: tensor %s has another shape than config.json says (%zu x %zu)", reader->path, t->name, t->rows,
                    t->columns);
    if (entry->type != SAFETENSORS_F32 && entry->type != SAFETENSORS_F16 && entry->type != SAFETENSORS_BF16)
        return FAIL(e, ERR_INPUT, "save it as float32, float16 or bfloat16", "%s: tensor %s is of type %s",
                    reader->path, t->name, safetensors_type_name(entry->type));
    return 0;
}

static int load_tensor(const SafetensorsReader *reader, const Tensor *t, float *buffer, RangeWriter load, void *context,
                       Error *e) {
    const SafetensorsEntry *entry = entry_of(reader, t);
    for (size_t first = 0; first < t->count; first += CHUNK) {
        size_t n = size_min(CHUNK, t->count - first);
        TRY(safetensors_read_f32(reader, entry, first, n, buffer, e));
        TRY(load(context, (Range){t->offset + first, t->offset + first + n}, buffer, e));
    }
    return 0;
}

int checkpoint_load_model(const char *directory, const Model *model, RangeWriter load, void *context, Error *e) {
    char path[PATH_MAX];
    SafetensorsReader reader;
    float *buffer = NULL;
    int code = 0;
    TRY(path_join(path, sizeof path, directory, "model.safetensors", e));
    TRY(safetensors_open(&reader, path, e));
    for (int i = 0; i < model->tensor_count; i++) TRY_GOTO(check_entry(&reader, &model->tensors[i], e));
    TRY_GOTO(memory_alloc((void **)&buffer, CHUNK * sizeof(float), "a file buffer", e));
    for (int i = 0; i < model->tensor_count; i++)
        TRY_GOTO(load_tensor(&reader, &model->tensors[i], buffer, load, context, e));
done:
    memory_free(buffer);
    safetensors_close(&reader);
    return code;
}

static int declare_tensors(SafetensorsWriter *writer, const Model *model, Error *e) {
    TRY(safetensors_add_metadata(writer, "format", "pt", e)); // transformers refuses a file without it
    for (int i = 0; i < model->tensor_count; i++) {
        const Tensor *t = &model->tensors[i];
        char name[64];
        snprintf(name, sizeof name, "transformer.%s", t->name);
        uint64_t matrix[2] = {t->rows, t->columns}, vector[1] = {t->columns};
        TRY(safetensors_add(writer, name, SAFETENSORS_F32, t->dimensions, t->dimensions == 2 ? matrix : vector, e));
    }
    return 0;
}

static int save_tensor(SafetensorsWriter *writer, const Tensor *t, float *buffer, RangeReader store, void *context,
                       Error *e) {
    for (size_t first = 0; first < t->count; first += CHUNK) {
        size_t n = size_min(CHUNK, t->count - first);
        TRY(store(context, (Range){t->offset + first, t->offset + first + n}, buffer, e));
        TRY(safetensors_write(writer, buffer, n * sizeof(float), e));
    }
    return 0;
}

int checkpoint_save_model(const char *directory, const Model *model, RangeReader store, void *context, Error *e) {
    char path[PATH_MAX];
    SafetensorsWriter *writer = NULL;
    float *buffer = NULL;
    int code = 0;
    TRY(path_join(path, sizeof path, directory, "model.safetensors", e));
    TRY_GOTO(memory_alloc((void **)&buffer, CHUNK * sizeof(float), "a file buffer", e));
    TRY_GOTO(safetensors_create(&writer, path, e));
    TRY_GOTO(declare_tensors(writer, model, e));
    for (int i = 0; i < model->tensor_count; i++)
        TRY_GOTO(save_tensor(writer, &model->tensors[i], buffer, store, context, e));
    code = safetensors_finish(writer, e);
    writer = NULL;
    if (code) goto done;
    code = write_config(directory, &model->config, e);
done:
    safetensors_abandon(writer);
    memory_free(buffer);
    return code;
}
