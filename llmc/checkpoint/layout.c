#include "checkpoint/layout.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

enum { BLOCK = 4096 }; // O_DIRECT writes whole blocks (files.c)

const char *const layout_names[LAYOUT_FILES] = {"model.safetensors", TRAINING "optimizer.safetensors"};

void layout_moment_name(char *out, size_t bytes, StateKind moment, const Model *model) {
    snprintf(out, bytes, "moment%d.0-%zu", moment == STATE_MOMENT1 ? 1 : 2, model->flat_count);
}

// Adds a tensor to a safetensors header, and appends its span. The span's offset counts from the header's end;
// layout_create then adds the header's length. rows 0: one dimension. *at: where the tensor begins; set to its end.
static void add_tensor(Layout *layout, FILE *f, int file, const char *name, size_t rows, size_t columns, StateKind kind,
                       Range range, uint64_t *at) {
    layout->span[layout->spans++] = (LayoutSpan){file, *at, kind, range};
    fprintf(f, "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[", file == LAYOUT_OPTIMIZER && !*at ? "" : ",", name);
    if (rows) fprintf(f, "%zu,", rows);
    fprintf(f, "%zu],\"data_offsets\":[%" PRIu64 ",", columns, *at);
    *at += range_float_bytes(range);
    fprintf(f, "%" PRIu64 "]}", *at);
}

int layout_create(Layout *layout, const Model *model, Error *e) {
    *layout = (Layout){0};
    TRY(memory_alloc((void **)&layout->span, (size_t)(model->tensor_count + 2) * sizeof *layout->span, "a layout", e));
    for (int f = 0, first = 0; f < LAYOUT_FILES; f++, first = layout->spans) {
        uint64_t length = 0, data = 0;
        char name[64];
        Text text;
        TRY(text_begin(&text, e));
        fwrite(&length, sizeof length, 1, text.f);                                        // set below
        fputs(f == LAYOUT_MODEL ? "{\"__metadata__\":{\"format\":\"pt\"}" : "{", text.f); // as transformers requires
        for (int i = 0; i < model->tensor_count && f == LAYOUT_MODEL; i++) {
            const Tensor *t = &model->tensors[i];
            snprintf(name, sizeof name, "transformer.%s", t->name);
            add_tensor(layout, text.f, f, name, t->dimensions == 2 ? t->rows : 0, t->columns, STATE_PARAM,
                       tensor_range(t), &data);
        }
        for (int k = 0; k < 2 && f == LAYOUT_OPTIMIZER; k++) {
            const StateKind moment = k ? STATE_MOMENT2 : STATE_MOMENT1;
            layout_moment_name(name, sizeof name, moment, model);
            add_tensor(layout, text.f, f, name, 0, model->flat_count, moment, (Range){0, model->flat_count}, &data);
        }
        fputc('}', text.f);
        while ((size_t)ftell(text.f) % BLOCK) fputc(' ', text.f);
        TRY(text_end(&text, e));
        length = text.bytes - sizeof length;
        memcpy(text.text, &length, sizeof length);
        layout->header[f] = text.text;
        layout->header_bytes[f] = text.bytes;
        layout->bytes[f] = text.bytes + data;
        for (int i = first; i < layout->spans; i++) layout->span[i].offset += text.bytes;
    }
    return 0;
}

void layout_destroy(Layout *layout) {
    for (int f = 0; f < LAYOUT_FILES; f++) text_free(&(Text){.text = layout->header[f]});
    memory_free(layout->span);
    *layout = (Layout){0};
}

// ---- Pieces ---------------------------------------------------------------------------------------------------------

int layout_pieces(const Layout *layout, const Range *owned, int count, bool headers, LayoutPiece **out, int *pieces,
                  Error *e) {
    // In each of the three arrays (parameters, two moments) spans and owned ranges ascend, so they overlap at most
    // spans + 3 * count times. An overlap makes at most 2 pieces that are shorter than MANIFEST_PIECE.
    size_t most = 2 * (size_t)(layout->spans + 3 * count + LAYOUT_FILES);
    for (int f = 0; f < LAYOUT_FILES; f++) most += layout->bytes[f] / MANIFEST_PIECE;
    TRY(memory_alloc((void **)out, most * sizeof **out, "pieces of a checkpoint", e));
    LayoutPiece *next = *out;
    for (int i = 0; i < layout->spans; i++) {
        const LayoutSpan *span = &layout->span[i];
        if (headers && (i == 0 || span->file != span[-1].file))
            *next++ = (LayoutPiece){{.file = span->file}, {.bytes = layout->header_bytes[span->file]}};
        for (int k = 0; k < count; k++) {
            Range rest = range_overlap(span->range, owned[k]);
            for (; range_length(rest); rest.begin = next++->at.range.end) {
                const uint64_t offset = span->offset + (rest.begin - span->range.begin) * sizeof(float);
                const size_t most_here = (MANIFEST_PIECE - offset % MANIFEST_PIECE) / sizeof(float);
                const Range range = {rest.begin, size_min(rest.end, rest.begin + most_here)};
                *next = (LayoutPiece){{span->file, offset, span->kind, range}, {.bytes = range_float_bytes(range)}};
            }
        }
    }
    *pieces = (int)(next - *out);
    return 0;
}

int layout_write(const Layout *layout, LayoutPiece *piece, int pieces, const int fd[LAYOUT_FILES], StateReader read,
                 void *context, const Pulse *pulse, Error *e) {
    char *memory, *block;
    int code = 0;
    TRY(memory_alloc((void **)&memory, MANIFEST_PIECE + 2 * BLOCK, "a file buffer", e));
    block = (char *)round_up((size_t)memory, BLOCK);
    for (int i = 0; i < pieces && !code; i++) {
        LayoutPiece *p = &piece[i];
        const int f = p->at.file;
        size_t bytes = p->digest.bytes;
        char *at = block + p->at.offset % BLOCK; // O_DIRECT needs address and offset that are equal modulo BLOCK
        if (range_length(p->at.range)) code = read(context, p->at.kind, p->at.range, (float *)at, e);
        else memcpy(at, layout->header[f], bytes);
        p->digest = digest_of(at, bytes);
        if (!code) code = file_write_range(fd[f], layout_names[f], p->at.offset, at, bytes, e);
        pulse_beat(pulse);
    }
    memory_free(memory);
    return code;
}

int layout_list(const Layout *layout, const LayoutPiece *piece, int pieces, Manifest *manifest, Error *e) {
    FileDigest *digest;
    int code = 0, i = 0;
    TRY(memory_alloc((void **)&digest, (size_t)pieces * sizeof *digest, "digests", e));
    for (int f = 0; f < LAYOUT_FILES && !code; f++) {
        uint64_t at = 0;
        int n = 0;
        for (; i < pieces && piece[i].at.file == f; at += piece[i++].digest.bytes) {
            assert(piece[i].at.offset == at);
            digest[n++] = piece[i].digest;
        }
        assert(at == layout->bytes[f]);
        code = manifest_add(manifest, layout_names[f], digest, n, e);
    }
    memory_free(digest);
    return code;
}
