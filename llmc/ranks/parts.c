#include "ranks/transport.h"

enum { MATRICES = 4 }; // in a block: qkv, proj, fc, fcproj, with 3, 1, 4 and 4 C^2 elements

// Returns the begin of piece i of a block that is cut into `pieces`; i = pieces: the block's end.
static size_t piece_begin(const Model *model, int layer, int i, int pieces) {
    static const TensorKind first[][MATRICES] = {{LN1_W},
                                                 {LN1_W, LN2_W},
                                                 {LN1_W, LN2_W, FCPROJ_W},
                                                 {LN1_W, PROJ_W, LN2_W, FCPROJ_W},
                                                 {LN1_W, FCPROJ_W}}; // two pieces of every other block
    if (i == pieces) return model_bucket(model, 1 + layer).end;
    bool other = pieces == 2 && layer % 2;
    return model_tensor(model, first[other ? MATRICES : pieces - 1][i], layer)->offset;
}

// Deals the pieces of block after block to the ranks in turn. Within a block, lower ranks own the earlier pieces.
Range transport_whole_part(const Model *model, int bucket, int r, int ranks) {
    if (bucket == 0) return transport_part(model_bucket(model, 0), r, ranks);
    int layer = bucket - 1, pieces = ranks < MATRICES ? ranks : MATRICES, first = 0, end = 0;
    for (int i = 0; i < pieces; i++) {
        int owner = (int)(((int64_t)layer * pieces + i) % ranks);
        first += owner < r, end += owner <= r;
    }
    return (Range){piece_begin(model, layer, first, pieces), piece_begin(model, layer, end, pieces)};
}

Range transport_part_of(const Model *whole, Range bucket, int r, int ranks) {
    if (!whole) return transport_part(bucket, r, ranks);
    return transport_whole_part(whole, model_bucket_at(whole, bucket.begin), r, ranks);
}

int transport_fullest_rank(const Model *model, int ranks) {
    int fullest = 0, last = MATRICES * model->config.layers; // ranks from here on own no piece of a block
    size_t most = 0;
    for (int r = 0; r < ranks && r <= last; r++) {
        size_t elements = 0;
        for (int i = 0; i < model_bucket_count(model); i++)
            elements += range_length(transport_whole_part(model, i, r, ranks));
        if (elements > most) most = elements, fullest = r;
    }
    return fullest;
}
