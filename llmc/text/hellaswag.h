// hellaswag: multiple-choice questions by completion: of a context's endings, which does the model find likeliest?
// (HellaSwag: Zellers et al. 2019, arXiv 1905.07830.)
//
// A row is a context and one of its endings. The model scores a row by the losses of the ending's tokens; with l(e) their
// sum and n(e) their number,
//
//     acc       share of questions whose right ending has the smallest l(e)
//     acc_norm  share of questions whose right ending has the smallest l(e) / n(e)
//
// which is what llm.c computes (dev/data/hellaswag.py; its trainer prints acc_norm). lm-evaluation-harness has the same
// acc up to its other wording of the context, and an acc_norm that divides by the ending's characters instead.
//
// Two kinds of file are read, told apart by their first bytes:
//
//   jsonl  the public one, one question a line: "ctx", a text; "endings", texts; "label", the number of the right one.
//          A row is the tokens of ctx, then those of " " + ending.
//   .bin   llm.c's, tokenized already (its dev/data/data_common.py, write_evalfile), little-endian: int32 header[256],
//          [0] magic 20240522, [1] version 1, [2] questions, [3] bytes of the longest; and for every question, in uint16:
//          65535, its bytes, its number, label, count of endings, then count and tokens of the context and of each
//          ending
//
// Rows too long for the model: the context is cut from its beginning, so that the last T + 1 tokens stay (as
// lm-evaluation-harness does). A question with an ending of more than T tokens is left out and counted.
#ifndef GNS_HELLASWAG_H
#define GNS_HELLASWAG_H

#include "text/tokenizer.h"

typedef struct HellaSwag HellaSwag;

typedef struct {
    int questions; // that are asked
    int left_out;  // questions with an ending of more than T tokens
    int rows;      // of all questions, an ending each
    int cut;       // rows whose context was cut
    int width;     // tokens of a row that the model reads: at most T
} HellaSwagInfo;

// T = seq_len. tokenizer: for jsonl; NULL where none is known. vocab_size: the model's.
int hellaswag_open(HellaSwag **out, const char *path, const Tokenizer *tokenizer, int vocab_size, int seq_len,
                   Error *e);
void hellaswag_close(HellaSwag *h); // NULL is fine
HellaSwagInfo hellaswag_describe(const HellaSwag *h);

// Rows [first, first + n), padded at their end, where a causal model's losses do not depend on it. out: (n, width + 1)
void hellaswag_rows(const HellaSwag *h, int first, int n, uint16_t *out);

// The l(e) of those rows. loss: (n, width), of predicting each token from those before it; sum: (n)
void hellaswag_sums(const HellaSwag *h, int first, int n, const float *loss, double *sum);

typedef struct HellaSwagScore {
    int questions, correct, correct_norm; // acc = correct / questions
} HellaSwagScore;

// sum: (rows), l(e) of all of them. Of equal endings the first is taken.
HellaSwagScore hellaswag_score(const HellaSwag *h, const double *sum);
#endif
