// sample: drawing tokens from a model, one after the other.
#pragma once

#include "model/engine.h"
#include "text/tokenizer.h"

typedef struct {
    int tokens;         // how many to draw
    double temperature; // 0: always the likeliest
    int top_k;          // draw among the k likeliest; 0: among all
    uint64_t seed;
    const char *prompt; // "" or NULL: from the beginning of a document
    size_t shown;       // bytes of the prompt, its last, that are written at most; 0: all of it
    bool copy_prompt;   // or only what follows it (sample_text)
    const Pulse *pulse; // beats for each token; may be NULL
} SampleConfig;

// The token at quantile u in [0, 1) of softmax(logits / temperature), cut to the top_k likeliest. logits (V) is
// overwritten, and so is scratch (V). Equal logits rank by token number, so the draw is a function of its arguments.
int sample_token(float *logits, float *scratch, int V, double temperature, int top_k, double u);

// Draws a text and writes it to `out`, with the prompt (behind "..." where that is not shown from its beginning), and
// to `copy`, where that is not NULL, with all of the prompt or (copy_prompt) without it. `stream` numbers the samples of
// a run.
// A context that is full slides: the oldest tokens are forgotten.
int sample_text(Engine *engine, const EngineConfig *shape, const Tokenizer *tokenizer, const SampleConfig *config,
                uint64_t stream, FILE *out, FILE *copy, Error *e);
