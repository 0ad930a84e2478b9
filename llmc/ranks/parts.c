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

Range transport_whole_part(const Model *model, int bucket, int r, int ranks) {
    if (bucket == 0) return transport_part(model_bucket(model, 0), r, ranks);
    int layer = bucket - 1, pieces = ranks < MATRICES ? ranks : MATRICES;
    int from = (int)((int64_t)layer * pieces % ranks); // ranks from, from + 1, ... own the block's pieces,
    int wrapped = from + pieces - ranks;               // and, after the last rank, ranks [0, wrapped)
    int i = r < wrapped ? r : r - from + (wrapped > 0 ? wrapped : 0); // pieces ascend with the ranks
    bool has = r < wrapped || (r >= from && r < from + pieces);
    if (has) return (Range){piece_begin(model, layer, i, pieces), piece_begin(model, layer, i + 1, pieces)};
    // Otherwise return an empty part where the next rank's part begins: parts ascend.
    int before = r < from ? (wrapped > 0 ? wrapped : 0) : pieces;
    size_t at = piece_begin(model, layer, before, pieces);
    return (Range){at, at};
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
