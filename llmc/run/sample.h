// sample: draws text from a model, token by token.
#pragma once

#include "ranks/parallel.h"
#include "text/tokenizer.h"

typedef struct {
    int tokens;         // to draw
    double temperature; // 0: always the likeliest
    int top_k;          // draw among the k likeliest; 0: among all
    double top_p;       // draw among the fewest of these whose probabilities reach top_p together; 1: all
    uint64_t seed;
    const char *prompt; // "" or NULL: from the beginning of a document
    bool hide_prompt;   // leave it out, with "..." in `out`
    const Pulse *pulse; // beats for each token; may be NULL
    Parallel *parallel; // ranks that gather weights for the engine; may be NULL
} SampleConfig;

// Returns the token at quantile u in [0, 1) of softmax(logits / temperature), restricted to the top_k likeliest and
// then to their nucleus of top_p (Holtzman et al. 2020, arXiv 1904.09751, section 3.1). Sets all other logits (V) to
// -INFINITY; overwrites scratch (V). Equal logits rank by token number, so the draw is a function of its arguments.
int sample_token(float *logits, double *scratch, int V, const SampleConfig *config, double u);

// Draws a text. Writes the prompt and the text to `out`, and to `copy` unless that is NULL. stream: the number of the
// sample in its run. When the context is full, the oldest tokens are dropped.
int sample_text(Engine *engine, const EngineConfig *shape, const Tokenizer *tokenizer, const SampleConfig *config,
                uint64_t stream, FILE *out, FILE *copy, Error *e);
