#include "checkpoint/checkpoint.h"

#include "base/text.h"
#include "base/thread.h"
#include "checkpoint/layout.h"
#include "checkpoint/llmc_bin.h"
#include "checkpoint/safetensors.h"
#include "math/layernorm.h"

#include <limits.h>
#include <string.h>

#define MODEL_FILE  "model.safetensors"
#define PICKLE_FILE "pytorch_model.bin"
#define INDEX       ".index.json" // ending of an index's name

// ---- config.json ----------------------------------------------------------------------------------------------------

bool checkpoint_is_model(const char *path) { return llmc_bin_is(path) || directory_holds(path, "config.json"); }

// Fields of config.json that must have a supported value: a word of must_be, or `number` if must_be is NULL. A missing
// field passes. remedy: the error's hint.
static const struct {
    const char *name, *must_be;
    double number;
    const char *remedy;
} config_fixed[] = {
    {"model_type", "gpt2", 0, "only GPT-2 as published is trained here"},
    {"activation_function", "gelu_new gelu_pytorch_tanh gelu_fast gelu_accurate", 0,
     "only GELU's tanh form is served; the exact GELU differs by up to 5e-4: write gelu_new to go on with the tanh "
     "form"},
    {"layer_norm_epsilon", NULL, LAYERNORM_EPSILON, "only 1e-5 is served"},
    {"scale_attn_weights", NULL, 1, "only true is served"},
    {"scale_attn_by_inverse_layer_idx", NULL, 0, "only false is served"},
    {"add_cross_attention", NULL, 0, "only false is served"},
    {"tie_word_embeddings", NULL, 1, "an output layer of its own (untied) is not served"},
};

// True if a field has a supported value. A missing field has the default of transformers, which is supported.
static bool config_field_fits(const cJSON *item, const char *words, double number) {
    if (!item || cJSON_IsNull(item)) return true;
    if (words) {
        const char *word = cJSON_GetStringValue(item), *at = word ? strstr(words, word) : NULL;
        size_t length = at ? strlen(word) : 0;
        return length && (at == words || at[-1] == ' ') && (at[length] == ' ' || !at[length]);
    }
    double value = cJSON_IsNumber(item) ? item->valuedouble : cJSON_IsTrue(item) ? 1 : cJSON_IsFalse(item) ? 0 : -1;
    return value > number * (1 - 1e-6) - 1e-12 && value < number * (1 + 1e-6) + 1e-12;
}

static int config_parse(const cJSON *root, const char *path, ModelConfig *config, Error *e) {
    const char *const sizes[] = {"n_layer", "n_head", "n_embd", "vocab_size", "n_positions"};
    int *const out[] = {&config->layers, &config->heads, &config->channels, &config->vocab, &config->context};
    if (!cJSON_IsObject(root)) return FAIL(e, ERR_INPUT, "is this a GPT-2 config.json?", "%s: not a JSON object", path);
    for (size_t i = 0; i < sizeof config_fixed / sizeof *config_fixed; i++) {
        const cJSON *item = json_get(root, config_fixed[i].name);
        if (!config_field_fits(item, config_fixed[i].must_be, config_fixed[i].number))
            return FAIL(e, ERR_INPUT, config_fixed[i].remedy, "%s: field \"%s\" describes another model than GPT-2",
                        path, config_fixed[i].name);
    }
    for (int i = 0; i < 5; i++) {
        const cJSON *item = json_get(root, sizes[i]);
        if (!json_whole(item, 1, INT_MAX))
            return FAIL(e, ERR_INPUT, "is this a GPT-2 config.json?",
                        "%s: field \"%s\" is missing or no whole number from 1 to %d", path, sizes[i], INT_MAX);
        *out[i] = (int)item->valuedouble;
    }
    const cJSON *inner = json_get(root, "n_inner");
    if (cJSON_IsNumber(inner) && inner->valuedouble != 4.0 * config->channels)
        return FAIL(e, ERR_INPUT, "only GPT-2 as published is trained here", "%s: n_inner is not 4 n_embd", path);
    return model_check_file(config, path, e);
}

int checkpoint_read_config(const char *directory, ModelConfig *config, Error *e) {
    char path[PATH_MAX];
    cJSON *root;
    if (llmc_bin_is(directory)) return llmc_bin_read_config(directory, config, e);
    TRY(path_join(path, sizeof path, directory, "config.json", e));
    TRY(json_read(&root, IN_PATH, path, 1 << 20, "fetch the file again", e));
    int code = config_parse(root, path, config, e);
    cJSON_Delete(root);
    return code;
}

int checkpoint_save_config(Manifest *manifest, const ModelConfig *c, int eot, double dropout, Error *e) {
    char end[16] = "null", drop[32], text[1024];
    snprintf(drop, sizeof drop, dropout == 0 ? "%.1f" : "%.15g", dropout);
    if (eot >= 0) snprintf(end, sizeof end, "%d", eot);
    int bytes = snprintf(
        text, sizeof text,
        "{\n  \"model_type\": \"gpt2\",\n  \"architectures\": [\"GPT2LMHeadModel\"],\n  \"n_layer\": %d,\n"
        "  \"n_head\": %d,\n  \"n_embd\": %d,\n  \"vocab_size\": %d,\n  \"n_positions\": %d,\n  \"n_ctx\": %d,\n"
        "  \"activation_function\": \"gelu_new\",\n  \"layer_norm_epsilon\": %g,\n  \"initializer_range\": 0.02,\n"
        "  \"resid_pdrop\": %s,\n  \"embd_pdrop\": %s,\n  \"attn_pdrop\": %s,\n  \"tie_word_embeddings\": true,\n"
        "  \"bos_token_id\": %s,\n  \"eos_token_id\": %s,\n  \"dtype\": \"float32\",\n  \"torch_dtype\": "
        "\"float32\"\n}\n",
        c->layers, c->heads, c->channels, c->vocab, c->context, c->context, LAYERNORM_EPSILON, drop, drop, drop, end,
        end);
    TRY(manifest_save(manifest, "config.json", text, (size_t)bytes, e));
    bytes = snprintf(text, sizeof text, "{\"_from_model_config\": true, \"bos_token_id\": %s, \"eos_token_id\": %s}\n",
                     end, end);
    return manifest_save(manifest, "generation_config.json", text, (size_t)bytes, e);
}

// ---- model.safetensors ----------------------------------------------------------------------------------------------

// The one or more open files that hold the weights.
typedef struct {
    SafetensorsReader *reader;
    int count;
} ModelFiles;

static int files_add(ModelFiles *files, const char *directory, const char *name, Error *e) {
    char path[PATH_MAX];
    TRY(path_join(path, sizeof path, directory, name, e));
    TRY(safetensors_open(&files->reader[files->count], path, e));
    files->count++;
    return 0;
}

int checkpoint_refuse_pickle(const char *path, Error *e) {
    bool readable = directory_holds(path, MODEL_FILE) || directory_holds(path, MODEL_FILE INDEX);
    if (readable || !(directory_holds(path, PICKLE_FILE) || directory_holds(path, PICKLE_FILE INDEX))) return 0;
    FAIL(e, ERR_INPUT, NULL, "%s: its weights are in " PICKLE_FILE ", a pickle, and not in " MODEL_FILE, path);
    return error_hint(e,
                      "with torch and transformers, next to its config.json: python3 -c \"from transformers import "
                      "GPT2LMHeadModel as M; M.from_pretrained('%s').save_pretrained('%s')\"",
                      path, path);
}

// Opens model.safetensors; if it is missing, all *.safetensors.
static int files_open(ModelFiles *files, const char *directory, Error *e) {
    Names names;
    bool one = directory_holds(directory, MODEL_FILE);
    *files = (ModelFiles){0};
    TRY(checkpoint_refuse_pickle(directory, e));
    TRY(directory_list(IN_PATH, directory, &names, e));
    int code = memory_alloc_zero((void **)&files->reader, (size_t)(names.count + 1) * sizeof *files->reader,
                                 "the model's files", e);
    for (int i = 0; i < names.count && !code && !one; i++)
        if (path_ends(names.entry[i]->d_name, ".safetensors") && strcmp(names.entry[i]->d_name, OPTIMIZER_NAME) != 0)
            code = files_add(files, directory, names.entry[i]->d_name, e);
    names_free(&names);
    return code || files->count ? code : files_add(files, directory, MODEL_FILE, e); // fails: names the missing file
}

static void files_close(ModelFiles *files) {
    for (int i = 0; i < files->count; i++) safetensors_close(&files->reader[i]);
    memory_free(files->reader);
}

// Returns a tensor's name without the prefixes of DistributedDataParallel, torch.compile and GPT2LMHeadModel.
static const char *bare_name(const char *name) {
    static const char *const prefixes[] = {"module.", "_orig_mod.", "transformer."};
    for (int i = 0; i < 3; i++)
        if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0) name += strlen(prefixes[i]);
    return name;
}

// Returns the tensor of this name, or NULL if no file has it.
static const SafetensorsEntry *find_tensor(const ModelFiles *files, const char *name) {
    for (int f = 0; f < files->count; f++)
        for (int i = 0; i < files->reader[f].count; i++)
            if (strcmp(bare_name(files->reader[f].entries[i].name), name) == 0) return &files->reader[f].entries[i];
    return NULL;
}

// True for the model's tensors, and for other tensors of GPT-2's files: masks and the tied head.
static bool is_known(const Model *model, const char *name) {
    for (int i = 0; i < model->tensor_count; i++)
        if (strcmp(model->tensors[i].name, bare_name(name)) == 0) return true;
    return path_ends(name, ".attn.bias") || path_ends(name, ".attn.masked_bias") || path_ends(name, "_head.weight");
}

static int check_tensor(const ModelFiles *files, const char *directory, const Tensor *t, Error *e) {
    const SafetensorsEntry *entry = find_tensor(files, t->name);
    if (!entry)
        return FAIL(e, ERR_INPUT, "is a file missing, or does config.json belong to another model?", "%s: no tensor %s",
                    files->count > 1 ? directory : files->reader->path, t->name);
    uint64_t rows = t->dimensions == 2 ? entry->shape[0] : 1, columns = entry->shape[entry->dimensions == 2];
    if (entry->dimensions == t->dimensions && rows == t->whole_rows && columns == t->whole_columns) return 0;
    return FAIL(e, ERR_INPUT, "does config.json belong to this file?",
                "%s: tensor %s has another shape than config.json says (%zu x %zu)", entry->reader->path, t->name,
                t->whole_rows, t->whole_columns);
}

// ERR_INPUT if the files hold an output layer whose first values differ from wte's, since GPT-2 ties the two.
static int check_head(const ModelFiles *files, const Tensor *wte, Error *e) {
    const SafetensorsEntry *head = find_tensor(files, "lm_head.weight"), *tied = find_tensor(files, wte->name);
    float values[2][64];
    const size_t n = size_min(64, wte->columns);
    if (!head) return 0;
    const bool alike = head->dimensions == 2 && head->shape[0] == wte->rows && head->shape[1] == wte->columns;
    for (int i = 0; i < 2 && alike; i++) TRY(safetensors_read(i ? tied : head, 0, n, values[i], e));
    if (alike && memcmp(values[0], values[1], n * sizeof(float)) == 0) return 0;
    return FAIL(e, ERR_INPUT, "only GPT-2 as published is trained here: it ties the two",
                "%s: tensor lm_head.weight is not %s", head->reader->path, wte->name);
}

// Elements [first, first + n) of a tensor, on the way to a receiver.
typedef struct {
    const Tensor *tensor;
    size_t first, n;
    float *out;
    TensorReader read;
    const void *context;
} Chunk;

static int read_chunk(void *chunk, int part, int parts, Error *e) {
    const Chunk *c = chunk;
    const size_t end = c->n * (size_t)(part + 1) / (size_t)parts;
    for (size_t at = c->n * (size_t)part / (size_t)parts, n; at < end; at += n) {
        n = size_min(tensor_run(c->tensor, c->first + at), end - at);
        TRY(c->read(c->context, tensor_whole_index(c->tensor, c->first + at), n, c->out + at, e));
    }
    return 0;
}

int checkpoint_load_tensor(const Receiver *to, StateKind kind, int i, TensorReader read, const void *context,
                           Error *e) {
    const Tensor *t = &to->model->tensors[i];
    for (int k = 0; k < to->count || k == 0; k++) {
        const Range part = to->count ? range_overlap(tensor_range(t), to->wanted[k]) : tensor_range(t);
        for (size_t at = part.begin, n; at < part.end; at += n) {
            n = size_min(RECEIVER_VALUES, part.end - at);
            Chunk chunk = {t, at - t->offset, n, to->buffer, read, context};
            TRY(thread_divide(read_chunk, &chunk, e));
            TRY(to->load(to->context, kind, (Range){at, at + n}, to->buffer, e));
        }
    }
    return 0;
}

int checkpoint_digest_model(const char *path, FileDigest *digest, Error *e) {
    char file[PATH_MAX];
    *digest = (FileDigest){0};
    TRY(path_join(file, sizeof file, path, MODEL_FILE, e));
    const char *weights = llmc_bin_is(path) ? path : file;
    return file_missing(IN_PATH, weights) ? 0 : file_digest(weights, digest, e);
}

int checkpoint_verify_model(const char *path, bool moments, Share share, const Pulse *pulse, Error *e) {
    char file[PATH_MAX];
    Manifest manifest;
    TRY(path_join(file, sizeof file, path, MANIFEST_NAME, e));
    if (file_missing(IN_PATH, file)) return 0;
    int code = manifest_read(&manifest, IN_PATH, path, e), read = !code;
    manifest.share = share;
    manifest.pulse = pulse;
    if (!code) code = manifest_verify(&manifest, moments ? NULL : OPTIMIZER_NAME, VERIFY_BYTES, e);
    manifest_free(&manifest);
    if (code != ERR_INPUT || !read || e->unreadable) return code;
    return error_hint(e, "use another checkpoint; if the change is intended, remove %s", file);
}

int checkpoint_note_unknown(const char *path, const Model *model, FILE *notes, Error *e) {
    ModelFiles files;
    int unknown = 0;
    if (llmc_bin_is(path)) return 0;
    int code = files_open(&files, path, e);
    for (int i = 0; !code && i < files.count; i++)
        for (int k = 0; k < files.reader[i].count; k++)
            if (!is_known(model, files.reader[i].entries[k].name) && unknown++ == 0)
                fprintf(notes, "note: %s: not read, as GPT-2 has no such tensor: %.100s", path,
                        files.reader[i].entries[k].name);
    if (unknown > 1) fprintf(notes, " and %d more", unknown - 1);
    if (unknown) fprintf(notes, "\n");
    files_close(&files);
    return code;
}

int checkpoint_load_model(const char *path, const Receiver *to, Error *e) {
    const Model *model = to->model;
    ModelFiles files;
    char more[40];
    if (llmc_bin_is(path)) return llmc_bin_load(path, model, to->load, to->context, e);
    int code = files_open(&files, path, e);
    for (int i = 0; i < model->tensor_count && !code; i++) code = check_tensor(&files, path, &model->tensors[i], e);
    snprintf(more, sizeof more, "h.%d.ln_1.weight", model->config.layers);
    const SafetensorsEntry *beyond = code ? NULL : find_tensor(&files, more);
    if (beyond)
        code = FAIL(e, ERR_INPUT, "does config.json belong to this file?",
                    "%s: tensor %s is of a layer beyond the %d of config.json", beyond->reader->path, more,
                    model->config.layers);
    if (!code) code = check_head(&files, model_tensor(model, WTE, -1), e);
    for (int i = 0; i < model->tensor_count && !code; i++)
        code = checkpoint_load_tensor(to, STATE_PARAM, i, safetensors_read, find_tensor(&files, model->tensors[i].name),
                                      e);
    files_close(&files);
    return code;
}

// ---- The optimizer's moments ----------------------------------------------------------------------------------------

int checkpoint_training_path(char *out, size_t bytes, const char *directory, const char *name, Error *e) {
    char of_folder[MANIFEST_NAME_BYTES];
    TRY(path_join(out, bytes, directory, name, e));
    if (!file_missing(IN_PATH, out)) return 0;
    snprintf(of_folder, sizeof of_folder, TRAINING "%s", name);
    return path_join(out, bytes, directory, of_folder, e);
}

int checkpoint_load_moment(const char *directory, StateKind moment, const Model *whole, const Receiver *to, Error *e) {
    const char *const hint = "use another checkpoint";
    char path[PATH_MAX], name[40];
    SafetensorsReader reader;
    int code = 0;
    TRY(checkpoint_training_path(path, sizeof path, directory, OPTIMIZER_NAME, e));
    TRY(safetensors_open(&reader, path, e));
    layout_moment_name(name, sizeof name, moment, whole);
    const SafetensorsEntry *entry = find_tensor(&(ModelFiles){&reader, 1}, name);
    if (!entry) code = FAIL(e, ERR_INPUT, hint, "%s: no tensor %s", path, name);
    else if (entry->value_bytes != sizeof(float) || entry->count != whole->flat_count)
        code = FAIL(e, ERR_INPUT, hint, "%s: tensor %s does not hold its range in F32", path, name);
    for (int i = 0; i < whole->tensor_count && !code; i++) {
        SafetensorsEntry tensor = *entry; // the same values, from tensor i's first on
        tensor.begin += whole->tensors[i].offset * sizeof(float);
        code = checkpoint_load_tensor(to, moment, i, safetensors_read, &tensor, e);
    }
    safetensors_close(&reader);
    return code;
}
