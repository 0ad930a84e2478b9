// hellaswag: scores a model on questions. The model chooses the likeliest of a context's endings (HellaSwag: Zellers et
// al. 2019, arXiv 1905.07830).
//
// A row is a context and one of its endings. l(e) sums the losses of ending e's tokens; n(e) counts them:
//
//     acc       fraction of questions whose right ending has the smallest l(e)
//     acc_norm  fraction of questions whose right ending has the smallest l(e) / n(e)
//
// Both formulas are llm.c's (dev/data/hellaswag.py; llm.c's trainer prints acc_norm). lm-evaluation-harness words the
// context differently, and its acc_norm divides l(e) by the number of characters of e.
//
// The public file has one question per line: "ctx" is a text, "endings" is a list of texts, "label" is the index of the
// right ending. A row is the tokens of ctx, then the tokens of " " + ending.
//
// A row that is too long keeps its last T + 1 tokens, as in lm-evaluation-harness. A question with an ending of more
// than T tokens is left out, and counted in left_out.
#pragma once

#include "text/tokenizer.h"

typedef struct {
    int questions; // questions that are scored
    int left_out;  // questions with an ending of more than T tokens
    int rows;      // one for each ending
    int cut;       // rows whose context was cut
    int width;     // tokens of a row that the model reads, at most T
} HellaSwagInfo;

typedef struct {
    HellaSwagInfo info;
    int seq_len;
    struct HellaSwagRow *row; // (info.rows)
    uint16_t *tokens;
    size_t token_count;
} HellaSwag;

// Reads a file's questions. T = seq_len. ERR_USAGE if tokenizer is NULL. Release *out with memory_free.
int hellaswag_open(HellaSwag **out, const char *path, const Tokenizer *tokenizer, int seq_len, Error *e);

// Copies rows [first, first + n) to out (n, width + 1), padded at their end. The model is causal, so padding changes no
// ending's loss.
void hellaswag_rows(const HellaSwag *h, int first, int n, uint16_t *out);

// Sets sum (n) to l(e) of rows [first, first + n). loss (n, width): column t has the loss of token t + 1.
void hellaswag_sums(const HellaSwag *h, int first, int n, const float *loss, double *sum);

typedef struct HellaSwagScore {
    int questions, correct, correct_norm; // acc = correct / questions
} HellaSwagScore;

// Scores all questions. sum (rows): each row's l(e). Of endings with equal values the first is chosen.
HellaSwagScore hellaswag_score(const HellaSwag *h, const double *sum);
