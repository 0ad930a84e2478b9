#include "checkpoint/llmc_bin.h"

#include "base/files.h"
#include "base/float16.h"

#include <unistd.h>

enum { HEADER_INTS = 256, MAGIC = 20240326, VERSION_FP32 = 3, VERSION_BF16 = 5 };

static const char *const hint = "write it again with llm.c, or name a directory with config.json and model.safetensors";

typedef struct {
    const char *path;
    int fd;
    uint64_t bytes; // the file's size
    ModelConfig config;
    int vocab_padded;
    size_t value_bytes; // bytes of one value: 4 or 2
    uint64_t at;        // offset of the next value, in bytes
} Bin;

static int bin_read(Bin *bin, void *out, size_t bytes, Error *e) {
    TRY(file_read_range(bin->fd, bin->path, bin->at, out, bytes, e));
    bin->at += bytes;
    return 0;
}

// Reads the header. Checks it and the file's size, since a wrong header could ask for any amount of memory.
static int bin_header(Bin *bin, Error *e) {
    int32_t header[HEADER_INTS];
    Model model;
    TRY(bin_read(bin, header, sizeof header, e));
    if (header[1] != VERSION_FP32 && header[1] != VERSION_BF16)
        return FAIL(e, ERR_INPUT, hint, "%s: version %d at byte 4, only 3 (fp32) and 5 (bf16) are known", bin->path,
                    header[1]);
    bin->value_bytes = header[1] == VERSION_FP32 ? 4 : 2;
    bin->config = (ModelConfig){
        .context = header[2], .vocab = header[3], .layers = header[4], .heads = header[5], .channels = header[6]};
    bin->vocab_padded = header[7];
    if (bin->vocab_padded < bin->config.vocab)
        return FAIL(e, ERR_INPUT, hint, "%s: a vocabulary of %d at byte 12, padded to %d at byte 28", bin->path,
                    bin->config.vocab, bin->vocab_padded);
    TRY(model_check_file(&bin->config, bin->path, e));
    TRY(model_create(&model, &bin->config, e));
    const uint64_t padding = (uint64_t)(bin->vocab_padded - bin->config.vocab) * (uint64_t)bin->config.channels;
    const uint64_t want = bin->at + (model.parameters + padding) * bin->value_bytes;
    model_destroy(&model);
    if (bin->bytes == want) return 0;
    return FAIL(e, ERR_INPUT, hint, "%s: it ends at byte %llu, but its header makes %llu", bin->path,
                (unsigned long long)bin->bytes, (unsigned long long)want);
}

static int bin_open(Bin *bin, const char *path, Error *e) {
    *bin = (Bin){.path = path};
    TRY(file_open_input(IN_PATH, path, &bin->fd, &bin->bytes, e));
    int code = bin_header(bin, e);
    if (code) close(bin->fd);
    return code;
}

bool llmc_bin_is(const char *path) {
    Bin bin = {.path = path};
    Error ignored;
    int32_t magic = 0;
    if (file_open_input(IN_PATH, path, &bin.fd, &bin.bytes, &ignored)) return false;
    bool is = bin_read(&bin, &magic, sizeof magic, &ignored) == 0 && magic == MAGIC;
    close(bin.fd);
    return is;
}

int llmc_bin_read_config(const char *path, ModelConfig *config, Error *e) {
    Bin bin;
    TRY(bin_open(&bin, path, e));
    close(bin.fd);
    *config = bin.config;
    return 0;
}

// Reads the next tensor and hands it to `load`. Transposes the matrices of transformer blocks. buffer: (2, half). half:
// count of values of the largest tensor.
static int bin_load_tensor(Bin *bin, const Tensor *t, float *buffer, size_t half, StateWriter load, void *context,
                           Error *e) {
    const size_t rows = t->whole_rows, columns = t->whole_columns, count = rows * columns, bytes = bin->value_bytes;
    const bool bf16 = bytes == sizeof(uint16_t), transposed = t->layer >= 0 && t->dimensions == 2;
    float *values = transposed ? buffer + half : buffer;
    TRY(bin_read(bin, bf16 ? (void *)half_place(buffer, count) : buffer, count * bytes, e));
    if (bf16) half_widen(buffer, count, true);
    if (t->kind == WTE) bin->at += (uint64_t)(bin->vocab_padded - bin->config.vocab) * columns * bytes;
    for (size_t r = 0; r < rows && transposed; r++)
        for (size_t c = 0; c < columns; c++) buffer[half + r * columns + c] = buffer[c * rows + r];
    for (size_t at = 0, n; at < t->count; at += n) { // keeps what a local model holds
        n = tensor_run(t, at);
        memmove(values + at, values + tensor_whole_index(t, at), n * sizeof *values);
    }
    return load(context, STATE_PARAM, tensor_range(t), values, e);
}

int llmc_bin_load(const char *path, const Model *model, StateWriter load, void *context, Error *e) {
    Bin bin;
    float *buffer = NULL;
    size_t largest = 0;
    int code = 0;
    TRY(bin_open(&bin, path, e));
    for (const Tensor *t = model->tensors; t < model->tensors + model->tensor_count; t++)
        largest = size_max(largest, t->whole_rows * t->whole_columns);
    TRY_GOTO(memory_alloc((void **)&buffer, 2 * largest * sizeof(float), "a tensor of the file", e));
    for (int kind = 0; kind < TENSOR_KINDS; kind++)
        for (int i = 0; i < model->tensor_count; i++)
            if ((int)model->tensors[i].kind == kind)
                TRY_GOTO(bin_load_tensor(&bin, &model->tensors[i], buffer, largest, load, context, e));
done:
    memory_free(buffer);
    close(bin.fd);
    return code;
}
