#include "text/hellaswag.h"

#include "text/shards.h"
#include "base/files.h"

#include <assert.h>
#include <cjson/cJSON.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEADER_INTS = 256,
    MAGIC = 20240522,
    VERSION = 1,
    START = 65535,            // begins a question
    ENDINGS_MAX = 64,         // more than any such test has
    FILE_MAX_BYTES = 1 << 30, // the public file has 12 MB
    WIDTH_STEP = 64           // widths are multiples of it: GPUs like them
};

#define HINT_FILE "get it with data/hellaswag.sh, or make llm.c's hellaswag_val.bin"

typedef struct {
    size_t context, ending; // where their tokens begin
    int context_count, ending_count;
} Row;

typedef struct {
    int label;
    int first_row, rows;
} Question;

struct HellaSwag {
    int vocab_size, seq_len, width;
    Question *questions;
    Row *rows;
    uint16_t *tokens;
    size_t question_count, row_count, token_count;
    size_t question_room, row_room, token_room;
    int left_out, cut;
};

// ---------------------------------------------------------------------------------------------------------------------
// Questions as they come in: question_begin, question_tokens for the context and each ending, question_end

// Makes room for `need` items; *room counts those that there is room for.
static int grow(void **array, size_t *room, size_t need, size_t item_bytes, Error *e) {
    if (need <= *room) return 0;
    size_t more = size_max(need, *room * 2);
    void *bigger;
    TRY(memory_alloc(&bigger, more * item_bytes, "HellaSwag's questions", e));
    if (*array) memcpy(bigger, *array, *room * item_bytes);
    memory_free(*array);
    *array = bigger;
    *room = more;
    return 0;
}

static int question_begin(HellaSwag *h, int label, Error *e) {
    TRY(grow((void **)&h->questions, &h->question_room, h->question_count + 1, sizeof *h->questions, e));
    h->questions[h->question_count++] = (Question){label, (int)h->row_count, 0};
    return 0;
}

static int room_for_tokens(HellaSwag *h, size_t count, Error *e) {
    return grow((void **)&h->tokens, &h->token_room, h->token_count + count, sizeof *h->tokens, e);
}

// `count` tokens lie at the end of h->tokens already, and are the next ending's, behind the context's.
static int question_add_ending(HellaSwag *h, size_t context, size_t context_count, size_t count, Error *e) {
    TRY(grow((void **)&h->rows, &h->row_room, h->row_count + 1, sizeof *h->rows, e));
    h->rows[h->row_count++] = (Row){context, h->token_count, (int)context_count, (int)count};
    h->token_count += count;
    h->questions[h->question_count - 1].rows++;
    return 0;
}

// Leaves out a question that does not fit the model, and cuts the contexts that do not. A row of T + 1 tokens fits: the
// last one is only predicted.
static void question_end(HellaSwag *h) {
    Question *q = &h->questions[h->question_count - 1];
    Row *row = h->rows + q->first_row;
    for (int i = 0; i < q->rows; i++) {
        if (row[i].ending_count <= h->seq_len) continue;
        h->left_out++;
        h->token_count = row[0].context;
        h->row_count = (size_t)q->first_row;
        h->question_count--;
        return;
    }
    for (int i = 0; i < q->rows; i++) {
        int excess = row[i].context_count + row[i].ending_count - (h->seq_len + 1);
        if (excess <= 0) continue;
        row[i].context += (size_t)excess;
        row[i].context_count -= excess;
        h->cut++;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// jsonl

typedef struct {
    HellaSwag *h;
    Encoder *encoder;
    char *text; // the ending, with the blank before it
} JsonReader;

static int encode(JsonReader *r, const char *text, size_t *count, Error *e) {
    size_t bytes = strlen(text);
    TRY(room_for_tokens(r->h, bytes, e));
    return encoder_run(r->encoder, text, bytes, r->h->tokens + r->h->token_count, count, e);
}

// A whole number, or its digits in quotes, below `endings`; -1 otherwise.
static int json_label(const cJSON *item, int endings) {
    double label = -1;
    if (cJSON_IsNumber(item)) label = item->valuedouble;
    else if (cJSON_IsString(item) && *item->valuestring && !item->valuestring[strspn(item->valuestring, "0123456789")])
        label = strtod(item->valuestring, NULL);
    return label >= 0 && label < endings && label == (int)label ? (int)label : -1;
}

static int json_question(JsonReader *r, const cJSON *object, Error *e) {
    const cJSON *ctx = cJSON_GetObjectItemCaseSensitive(object, "ctx"), *ending;
    const cJSON *endings = cJSON_GetObjectItemCaseSensitive(object, "endings");
    int count = cJSON_IsArray(endings) ? cJSON_GetArraySize(endings) : 0;
    if (!cJSON_IsString(ctx) || !*ctx->valuestring) return FAIL(e, ERR_INPUT, HINT_FILE, "no text \"ctx\"");
    if (count < 2 || count > ENDINGS_MAX)
        return FAIL(e, ERR_INPUT, HINT_FILE, "\"endings\" is no list of 2 to %d texts", ENDINGS_MAX);
    int label = json_label(cJSON_GetObjectItemCaseSensitive(object, "label"), count);
    if (label < 0)
        return FAIL(e, ERR_INPUT, "the test part has no answers: use the validation part",
                    "\"label\" is not the number of an ending, 0 to %d", count - 1);
    TRY(question_begin(r->h, label, e));
    size_t context = r->h->token_count, context_count, tokens;
    TRY(encode(r, ctx->valuestring, &context_count, e));
    r->h->token_count += context_count;
    cJSON_ArrayForEach(ending, endings) {
        if (!cJSON_IsString(ending)) return FAIL(e, ERR_INPUT, HINT_FILE, "an ending is no text");
        sprintf(r->text, " %s", ending->valuestring);
        TRY(encode(r, r->text, &tokens, e));
        TRY(question_add_ending(r->h, context, context_count, tokens, e));
    }
    question_end(r->h);
    return 0;
}

static int json_line(JsonReader *r, const char *line, size_t bytes, Error *e) {
    const char *end;
    cJSON *object = strlen(line) == bytes ? cJSON_ParseWithOpts(line, &end, true) : NULL;
    int code =
        cJSON_IsObject(object) ? json_question(r, object, e) : FAIL(e, ERR_INPUT, HINT_FILE, "not a JSON object");
    cJSON_Delete(object);
    return code;
}

static int json_read(HellaSwag *h, char *file, size_t bytes, const Tokenizer *tokenizer, Error *e) {
    JsonReader r = {.h = h};
    int code = 0, number = 1;
    if (!tokenizer)
        return FAIL(e, ERR_USAGE,
                    "give --tokenizer the directory of GPT-2's (data/gpt2), or --hellaswag llm.c's .bin, which holds "
                    "tokens",
                    "no tokenizer for the text in it");
    TRY_GOTO(memory_alloc((void **)&r.text, bytes + 2, "HellaSwag's questions", e)); // a line's texts fit the line
    TRY_GOTO(encoder_create(&r.encoder, tokenizer, e));
    for (char *line = file; line < file + bytes; number++) {
        char *newline = memchr(line, '\n', (size_t)(file + bytes - line));
        char *end = newline ? newline : file + bytes;
        *end = 0;
        if (line[strspn(line, " \t\r")] || strlen(line) < (size_t)(end - line)) {
            code = json_line(&r, line, (size_t)(end - line), e);
            if (code) error_prefix(e, "line %d", number);
            if (code) goto done;
        }
        line = end + 1;
    }
done:
    encoder_destroy(r.encoder);
    memory_free(r.text);
    return code;
}

// ---------------------------------------------------------------------------------------------------------------------
// llm.c's .bin

typedef struct {
    HellaSwag *h;
    const uint16_t *at, *end; // of the question
} BinReader;

static int bin_damaged(const char *what, Error *e) { return FAIL(e, ERR_INPUT, HINT_FILE, "%s", what); }

// A count, and so many tokens behind it, to the end of h->tokens.
static int bin_tokens(BinReader *r, size_t *count, Error *e) {
    HellaSwag *h = r->h;
    if (r->at == r->end) return bin_damaged("it ends in the middle", e);
    *count = *r->at++;
    if (*count == 0) return bin_damaged("a text without tokens", e);
    if (*count > (size_t)(r->end - r->at)) return bin_damaged("it ends in the middle", e);
    TRY(room_for_tokens(h, *count, e));
    for (size_t i = 0; i < *count; i++) {
        if (r->at[i] >= h->vocab_size)
            return FAIL(e, ERR_INPUT, "the file was made with another tokenizer than the model's: use the jsonl",
                        "token %d is outside the vocabulary of %d", r->at[i], h->vocab_size);
        h->tokens[h->token_count + i] = r->at[i];
    }
    r->at += *count;
    return 0;
}

static int bin_question(BinReader *r, Error *e) {
    HellaSwag *h = r->h;
    int label = r->at[3], endings = r->at[4];
    if (endings < 2 || endings > ENDINGS_MAX || label >= endings)
        return FAIL(e, ERR_INPUT, HINT_FILE, "%d endings, of which number %d is right", endings, label);
    r->at += 5;
    TRY(question_begin(h, label, e));
    size_t context = h->token_count, context_count, count;
    TRY(bin_tokens(r, &context_count, e));
    h->token_count += context_count;
    for (int i = 0; i < endings; i++) {
        TRY(bin_tokens(r, &count, e));
        TRY(question_add_ending(h, context, context_count, count, e));
    }
    if (r->at != r->end) return bin_damaged("it is longer than its endings", e);
    question_end(h);
    return 0;
}

static int bin_read(HellaSwag *h, const char *file, size_t bytes, Error *e) {
    enum { HEAD = 5 }; // uint16 before the context
    int32_t header[HEADER_INTS];
    if (bytes < sizeof header) return bin_damaged("too short for its header", e);
    memcpy(header, file, sizeof header);
    if (header[1] != VERSION) return FAIL(e, ERR_INPUT, HINT_FILE, "version %d, only %d is known", header[1], VERSION);
    const uint16_t *at = (const uint16_t *)(const void *)(file + sizeof header),
                   *end = at + (bytes - sizeof header) / 2;
    for (int i = 0; i < header[2]; i++) {
        if (end - at < HEAD || at[0] != START || at[1] / 2 < HEAD || at[1] % 2 || at[1] / 2 > end - at)
            return FAIL(e, ERR_INPUT, HINT_FILE, "damaged or cut off at question %d of %d", i, header[2]);
        BinReader r = {h, at, at + at[1] / 2};
        if (bin_question(&r, e)) return error_prefix(e, "question %d", i);
        at = r.end;
    }
    if (at != end || bytes % 2) return FAIL(e, ERR_INPUT, HINT_FILE, "longer than its %d questions", header[2]);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// The file

static int32_t first_int(const char *file, size_t bytes) {
    int32_t magic = 0;
    if (bytes >= sizeof magic) memcpy(&magic, file, sizeof magic);
    return magic;
}

static int file_parse(HellaSwag *h, char *file, size_t bytes, const Tokenizer *tokenizer, Error *e) {
    int32_t magic = first_int(file, bytes);
    if (magic == SHARD_MAGIC) return FAIL(e, ERR_INPUT, "give it to --val", "token shards, not questions");
    TRY(magic == MAGIC ? bin_read(h, file, bytes, e) : json_read(h, file, bytes, tokenizer, e));
    if (h->question_count == 0 && h->left_out)
        return FAIL(e, ERR_INPUT, "use a longer --seq-len", "all %d questions have endings of more than %d tokens",
                    h->left_out, h->seq_len);
    if (h->question_count == 0) return FAIL(e, ERR_INPUT, HINT_FILE, "no question in it");
    if (h->row_count > INT_MAX) return FAIL(e, ERR_INPUT, HINT_FILE, "too many questions");
    return 0;
}

static int longest_row(const HellaSwag *h) {
    int longest = 0;
    for (size_t i = 0; i < h->row_count; i++) {
        int count = h->rows[i].context_count + h->rows[i].ending_count;
        if (count > longest) longest = count;
    }
    return longest;
}

int hellaswag_open(HellaSwag **out, const char *path, const Tokenizer *tokenizer, int vocab_size, int seq_len,
                   Error *e) {
    char *file;
    size_t bytes;
    HellaSwag *h;
    *out = NULL;
    int code = file_read(path, FILE_MAX_BYTES, &file, &bytes, e);
    if (code == ERR_INPUT) return error_hint(e, "check --hellaswag, or " HINT_FILE);
    TRY(code);
    code = memory_alloc_zero((void **)&h, sizeof *h, "HellaSwag's questions", e);
    if (code) goto done;
    h->vocab_size = vocab_size;
    h->seq_len = seq_len;
    code = file_parse(h, file, bytes, tokenizer, e);
    if (code) {
        error_prefix(e, "%s", path);
        hellaswag_close(h);
        goto done;
    }
    h->width = (int)size_min(round_up((size_t)longest_row(h) - 1, WIDTH_STEP), (size_t)seq_len);
    *out = h;
done:
    memory_free(file);
    return code;
}

void hellaswag_close(HellaSwag *h) {
    if (!h) return;
    memory_free(h->tokens);
    memory_free(h->rows);
    memory_free(h->questions);
    memory_free(h);
}

HellaSwagInfo hellaswag_describe(const HellaSwag *h) {
    return (HellaSwagInfo){(int)h->question_count, h->left_out, (int)h->row_count, h->cut, h->width};
}

// ---------------------------------------------------------------------------------------------------------------------
// Asking and scoring

void hellaswag_rows(const HellaSwag *h, int first, int n, uint16_t *out) {
    assert(first >= 0 && n >= 0 && first + n <= (int)h->row_count);
    for (int i = 0; i < n; i++, out += h->width + 1) {
        const Row *row = &h->rows[first + i];
        size_t context = (size_t)row->context_count, ending = (size_t)row->ending_count;
        memset(out, 0, ((size_t)h->width + 1) * sizeof *out);
        memcpy(out, h->tokens + row->context, context * sizeof *out);
        memcpy(out + context, h->tokens + row->ending, ending * sizeof *out);
    }
}

void hellaswag_sums(const HellaSwag *h, int first, int n, const float *loss, double *sum) {
    assert(first >= 0 && n >= 0 && first + n <= (int)h->row_count);
    for (int i = 0; i < n; i++, loss += h->width) {
        const Row *row = &h->rows[first + i];
        sum[i] = 0;
        for (int t = 0; t < row->ending_count; t++) sum[i] += loss[row->context_count - 1 + t];
    }
}

HellaSwagScore hellaswag_score(const HellaSwag *h, const double *sum) {
    HellaSwagScore score = {.questions = (int)h->question_count};
    for (size_t i = 0; i < h->question_count; i++) {
        const Question *q = &h->questions[i];
        int best = 0, best_norm = 0;
        const double *l = sum + q->first_row;
        const Row *row = h->rows + q->first_row;
        for (int k = 1; k < q->rows; k++) {
            if (l[k] < l[best]) best = k;
            if (l[k] / row[k].ending_count < l[best_norm] / row[best_norm].ending_count) best_norm = k;
        }
        score.correct += best == q->label;
        score.correct_norm += best_norm == q->label;
    }
    return score;
}
