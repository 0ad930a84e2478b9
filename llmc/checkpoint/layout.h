// layout: where each value of a run's state lies in a checkpoint's files. The layout follows from the model alone, so
// every rank knows where to write its values.
//
//     model.safetensors                 the fp32 master weights in the layout of the tensor table, vocabulary unpadded
//     training/optimizer.safetensors    tensors "moment1.0-COUNT" and "moment2.0-COUNT": flat arrays, with padding
//
// In both files the data begins at a multiple of 4 KiB.
#pragma once

#include "base/manifest.h"
#include "model/engine.h"

enum { LAYOUT_MODEL, LAYOUT_OPTIMIZER, LAYOUT_FILES };
extern const char *const layout_names[LAYOUT_FILES];

// Values that are neighbours both in a file and in a flat array.
typedef struct {
    int file;
    uint64_t offset; // byte of the file at which the values begin
    StateKind kind;
    Range range; // elements of the flat array
} LayoutSpan;

typedef struct {
    char *header[LAYOUT_FILES];
    uint64_t header_bytes[LAYOUT_FILES], bytes[LAYOUT_FILES]; // bytes: size of the whole file
    LayoutSpan *span;                                         // (spans), ordered by file and offset
    int spans;
} Layout;

int layout_create(Layout *layout, const Model *model, Error *e);
void layout_destroy(Layout *layout); // accepts {0}

// Writes a moment's name in the file: "moment1.0-124475904" holds elements [0, 124475904), all of the flat array.
void layout_moment_name(char *out, size_t bytes, StateKind moment, const Model *model);

// Bytes of one file that are written and hashed at once: a part of one span, or a header. A piece crosses no multiple
// of MANIFEST_PIECE.
typedef struct {
    LayoutSpan at;     // range empty: the file's header
    FileDigest digest; // layout_pieces sets digest.bytes, layout_write the hash
} LayoutPiece;

// Lists the pieces that a rank writes, ordered by file and offset. owned: the ascending ranges of the flat array that
// it owns. headers: adds the files' headers. *out from memory_alloc.
int layout_pieces(const Layout *layout, const Range *owned, int count, bool headers, LayoutPiece **out, int *pieces,
                  Error *e);

// Writes pieces to the open files at their places, and sets their digests. The pulse beats after each piece.
int layout_write(const Layout *layout, LayoutPiece *piece, int pieces, const int fd[LAYOUT_FILES], StateReader read,
                 void *context, const Pulse *pulse, Error *e);

// Adds both files to the manifest. piece: the pieces of all owners, ordered by file and offset.
int layout_list(const Layout *layout, const LayoutPiece *piece, int pieces, Manifest *manifest, Error *e);
