// safetensors_writer: writes tensor files for tests, through stdio. Order of calls: create; add metadata, then tensors;
// write the data in the tensors' order; finish. save_model writes a model's state as a run saves it.
#pragma once

#include "checkpoint/layout.h"
#include "checkpoint/safetensors.h"
#include "base/text.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// A file's header. Call begin, add metadata, add tensors, call end.
typedef struct {
    Text text;             // after safetensors_end: the file's bytes up to the data
    int metadata, tensors; // number of entries so far
    uint64_t data;         // bytes of data so far
} SafetensorsHeader;

static inline int safetensors_begin(SafetensorsHeader *header, Error *e) {
    const uint64_t length = 0; // safetensors_end replaces it by the header's length
    *header = (SafetensorsHeader){.data = 0};
    TRY(text_begin(&header->text, e));
    fwrite(&length, sizeof length, 1, header->text.f);
    fputc('{', header->text.f);
    return 0;
}

static inline void safetensors_add_metadata(SafetensorsHeader *header, const char *key, const char *value) {
    FILE *f = header->text.f;
    fputs(header->metadata++ ? "," : "\"__metadata__\":{", f);
    text_write_json(f, key);
    fputc(':', f);
    text_write_json(f, value);
}

// Returns the bytes of an element: "BF16" 2, "F64" 8.
static inline size_t safetensors_type_bytes(const char *type) { return strtoul(strpbrk(type, "12368"), NULL, 10) / 8; }

static inline void safetensors_add(SafetensorsHeader *header, const char *name, const char *type, int dimensions,
                                   const uint64_t *shape) {
    FILE *f = header->text.f;
    uint64_t bytes = safetensors_type_bytes(type), from = header->data;
    fputs(header->tensors++ ? "," : header->metadata ? "}," : "", f);
    text_write_json(f, name);
    fprintf(f, ":{\"dtype\":\"%s\",\"shape\":[", type);
    for (int i = 0; i < dimensions; bytes *= shape[i++])
        fprintf(f, "%s%llu", i ? "," : "", (unsigned long long)shape[i]);
    header->data += bytes;
    fprintf(f, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)from, (unsigned long long)header->data);
}

static inline int safetensors_end(SafetensorsHeader *header, Error *e) {
    Text *text = &header->text;
    fputs(header->metadata && !header->tensors ? "}}" : "}", text->f);
    while (ftell(text->f) % 8) fputc(' ', text->f);
    TRY(text_end(text, e));
    uint64_t length = text->bytes - sizeof length;
    memcpy(text->text, &length, sizeof length);
    return 0;
}

typedef struct {
    SafetensorsHeader header;
    FILE *file;
    bool ended;
} SafetensorsWriter;

static inline int writer_create(SafetensorsWriter **out, const char *path, Error *e) {
    SafetensorsWriter *w = *out = calloc(1, sizeof *w);
    w->file = fopen(path, "wb");
    if (!w->file) return FAIL(e, ERR_WRITE, NULL, "%s: cannot create", path);
    return safetensors_begin(&w->header, e);
}

static inline int writer_write(SafetensorsWriter *w, const void *data, size_t bytes, Error *e) {
    if (!w->ended) TRY(safetensors_end(&w->header, e));
    if (!w->ended) fwrite(w->header.text.text, 1, w->header.text.bytes, w->file);
    w->ended = true;
    if (bytes && fwrite(data, bytes, 1, w->file) != 1) return FAIL(e, ERR_WRITE, NULL, "cannot write");
    return 0;
}

static inline int writer_finish(SafetensorsWriter *w, Error *e) {
    TRY(writer_write(w, NULL, 0, e));
    text_free(&w->header.text);
    int failed = fclose(w->file);
    free(w);
    return failed ? FAIL(e, ERR_WRITE, NULL, "cannot close") : 0;
}

// Writes the state of a model into a directory, as a run's checkpoint has it.
static inline int save_model(const char *directory, const Model *model, StateReader read, void *context, Error *e) {
    Layout layout;
    LayoutPiece *piece;
    int fd[LAYOUT_FILES], pieces;
    char path[4096];
    TRY(layout_create(&layout, model, e));
    TRY(layout_pieces(&layout, &(Range){0, SIZE_MAX}, 1, true, &piece, &pieces, e));
    snprintf(path, sizeof path, "%s/training", directory);
    mkdir(path, 0777);
    for (int f = 0; f < LAYOUT_FILES; f++) {
        snprintf(path, sizeof path, "%s/%s", directory, layout_names[f]);
        fd[f] = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    }
    int code = layout_write(&layout, piece, pieces, fd, read, context, NULL, e);
    for (int f = 0; f < LAYOUT_FILES; f++) close(fd[f]);
    memory_free(piece);
    layout_destroy(&layout);
    return code;
}
