#include "text/hellaswag.h"

#include "text/shards.h"
#include "base/files.h"
#include "base/json.h"

#include <assert.h>
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
    ROW_MIN_BYTES = 3,        // of a file, at least: an ending is "" and a comma, or a count and a token
    WIDTH_STEP = 64           // info.width is a multiple of it, for the GPU's kernels
};

#define HINT_FILE "get it with data/hellaswag.sh, or make llm.c's hellaswag_val.bin"

typedef struct {
    uint32_t context, ending; // the places of their first tokens
    int context_count, ending_count;
} Row;

typedef struct {
    int label;
    int first_row, rows;
} Question;

struct HellaSwag {
    int vocab_size, seq_len, longest; // longest: tokens of a row
    HellaSwagInfo info;
    Question *questions; // (info.questions)
    Row *rows;           // (info.rows)
    uint16_t *tokens;
    size_t token_count;
};

// ---- Questions ------------------------------------------------------------------------------------------------------

// Writes the tokens of a question's next text, its context or an ending, to the end of h->tokens.
typedef int (*ReadText)(HellaSwag *h, void *source, size_t *count, Error *e);

// A row of T + 1 tokens fits the model: the last token is only predicted.
static int question_add(HellaSwag *h, int label, int endings, ReadText read, void *source, Error *e) {
    Row *rows = h->rows + h->info.rows;
    size_t context = h->token_count, context_count = 0, count = 0;
    bool fits = true;
    TRY(read(h, source, &context_count, e));
    h->token_count += context_count;
    for (int i = 0; i < endings; i++) {
        TRY(read(h, source, &count, e));
        rows[i] = (Row){(uint32_t)context, (uint32_t)h->token_count, (int)context_count, (int)count};
        h->token_count += count;
        fits = fits && (int)count <= h->seq_len;
    }
    if (!fits) {
        h->info.left_out++;
        h->token_count = context;
        return 0;
    }
    for (int i = 0; i < endings; i++) {
        int tokens = rows[i].context_count + rows[i].ending_count, excess = tokens - (h->seq_len + 1);
        if (excess > 0) {
            rows[i].context += (uint32_t)excess;
            rows[i].context_count -= excess;
            tokens -= excess;
            h->info.cut++;
        }
        if (tokens > h->longest) h->longest = tokens;
    }
    h->questions[h->info.questions++] = (Question){label, h->info.rows, endings};
    h->info.rows += endings;
    return 0;
}

// ---- jsonl ----------------------------------------------------------------------------------------------------------

typedef struct {
    Encoder *encoder;
    const cJSON *context, *ending; // the next text; context NULL: read
    char *text;                    // room for a line
} JsonSource;

static int json_text(HellaSwag *h, void *source, size_t *count, Error *e) {
    JsonSource *s = source;
    const cJSON *item = s->context ? s->context : s->ending;
    if (!cJSON_IsString(item)) return FAIL(e, ERR_INPUT, HINT_FILE, "an ending is not a string");
    int bytes = sprintf(s->text, s->context ? "%s" : " %s", item->valuestring);
    if (s->context) s->context = NULL;
    else s->ending = item->next;
    return encoder_run(s->encoder, s->text, (size_t)bytes, h->tokens + h->token_count, count, e);
}

// A whole number, or its digits in quotes, below `endings`; -1 otherwise.
static int json_label(const cJSON *item, int endings) {
    const char *text = cJSON_GetStringValue(item);
    double label = text && *text && !text[strspn(text, "0123456789")] ? strtod(text, NULL) : -1;
    if (json_whole(item, 0, endings - 1)) label = item->valuedouble;
    return label < endings ? (int)label : -1;
}

static int json_question(HellaSwag *h, JsonSource *s, const cJSON *object, Error *e) {
    const cJSON *context = json_get(object, "ctx"), *endings = json_get(object, "endings");
    int count = cJSON_IsArray(endings) ? cJSON_GetArraySize(endings) : 0;
    if (!cJSON_IsObject(object)) return FAIL(e, ERR_INPUT, HINT_FILE, "not a JSON object");
    if (!cJSON_IsString(context) || !*context->valuestring) return FAIL(e, ERR_INPUT, HINT_FILE, "no text \"ctx\"");
    if (count < 2 || count > ENDINGS_MAX)
        return FAIL(e, ERR_INPUT, HINT_FILE, "\"endings\" is not a list of 2 to %d strings", ENDINGS_MAX);
    int label = json_label(json_get(object, "label"), count);
    if (label < 0)
        return FAIL(e, ERR_INPUT, "the test part has no answers: use the validation part",
                    "\"label\" is not the number of an ending, 0 to %d", count - 1);
    s->context = context;
    s->ending = endings->child;
    return question_add(h, label, count, json_text, s, e);
}

static int json_lines(HellaSwag *h, JsonSource *s, char *file, size_t bytes, Error *e) {
    const char *end = file + bytes;
    int number = 1;
    for (char *line = file; line < end; line++, number++) {
        const char *newline = memchr(line, '\n', (size_t)(end - line));
        size_t length = (size_t)((newline ? newline : end) - line);
        line[length] = 0;
        if (strspn(line, " \t\r") < length) {
            cJSON *object = strlen(line) == length ? cJSON_ParseWithOpts(line, NULL, true) : NULL;
            int code = json_question(h, s, object, e);
            cJSON_Delete(object);
            if (code) return error_prefix(e, "line %d", number);
        }
        line += length;
    }
    return 0;
}

static int jsonl_read(HellaSwag *h, char *file, size_t bytes, const Tokenizer *tokenizer, Error *e) {
    JsonSource s = {0};
    if (!tokenizer)
        return FAIL(e, ERR_USAGE,
                    "give --tokenizer the directory of GPT-2's (data/gpt2), or --hellaswag llm.c's .bin, which holds "
                    "tokens",
                    "no tokenizer for the text in it");
    int code = memory_alloc((void **)&s.text, bytes + 2, "HellaSwag's questions", e);
    if (!code) code = encoder_create(&s.encoder, tokenizer, e);
    if (!code) code = json_lines(h, &s, file, bytes, e);
    encoder_destroy(s.encoder);
    memory_free(s.text);
    return code;
}

// ---- llm.c's .bin ---------------------------------------------------------------------------------------------------

typedef struct {
    const uint16_t *at, *end; // the rest of the question
} BinSource;

static int bin_text(HellaSwag *h, void *source, size_t *count, Error *e) {
    BinSource *s = source;
    if (s->at == s->end || *s->at >= s->end - s->at) return FAIL(e, ERR_INPUT, HINT_FILE, "it ends in the middle");
    *count = *s->at++;
    if (*count == 0) return FAIL(e, ERR_INPUT, HINT_FILE, "a text without tokens");
    for (size_t i = 0; i < *count; i++) {
        if (*s->at >= h->vocab_size)
            return FAIL(e, ERR_INPUT, "the file was made with another tokenizer than the model's: use the jsonl",
                        "token %d is outside the vocabulary of %d", *s->at, h->vocab_size);
        h->tokens[h->token_count + i] = *s->at++;
    }
    return 0;
}

static int bin_read(HellaSwag *h, const char *file, size_t bytes, Error *e) {
    enum { HEAD = 5 }; // uint16 before the context
    int32_t header[HEADER_INTS];
    if (bytes < sizeof header) return FAIL(e, ERR_INPUT, HINT_FILE, "too short for its header");
    memcpy(header, file, sizeof header);
    if (header[1] != VERSION) return FAIL(e, ERR_INPUT, HINT_FILE, "version %d, only %d is known", header[1], VERSION);
    const uint16_t *at = (const uint16_t *)(const void *)(file + sizeof header),
                   *end = at + (bytes - sizeof header) / 2;
    for (int i = 0; i < header[2]; i++) {
        if (end - at < HEAD || at[0] != START || at[1] / 2 < HEAD || at[1] % 2 || at[1] / 2 > end - at)
            return FAIL(e, ERR_INPUT, HINT_FILE, "damaged or cut off at question %d of %d", i, header[2]);
        int label = at[3], endings = at[4];
        BinSource s = {at + HEAD, at + at[1] / 2};
        if (endings < 2 || endings > ENDINGS_MAX || label >= endings)
            return FAIL(e, ERR_INPUT, HINT_FILE, "question %d: %d endings, of which number %d is right", i, endings,
                        label);
        if (question_add(h, label, endings, bin_text, &s, e)) return error_prefix(e, "question %d", i);
        if (s.at != s.end) return FAIL(e, ERR_INPUT, HINT_FILE, "question %d: it is longer than its endings", i);
        at = s.end;
    }
    if (at != end || bytes % 2) return FAIL(e, ERR_INPUT, HINT_FILE, "longer than its %d questions", header[2]);
    return 0;
}

// ---- The file -------------------------------------------------------------------------------------------------------

static int file_parse(HellaSwag *h, char *file, size_t bytes, const Tokenizer *tokenizer, Error *e) {
    int32_t magic = 0;
    memcpy(&magic, file, size_min(bytes, sizeof magic));
    if (magic == SHARD_MAGIC) return FAIL(e, ERR_INPUT, "give it to --val", "token shards, not questions");
    size_t most = bytes / ROW_MIN_BYTES + 1; // memory that is never touched costs nothing
    TRY(memory_alloc((void **)&h->tokens, bytes * sizeof *h->tokens, "HellaSwag's questions", e));
    TRY(memory_alloc((void **)&h->rows, most * sizeof *h->rows, "HellaSwag's questions", e));
    TRY(memory_alloc((void **)&h->questions, most * sizeof *h->questions, "HellaSwag's questions", e));
    TRY(magic == MAGIC ? bin_read(h, file, bytes, e) : jsonl_read(h, file, bytes, tokenizer, e));
    if (h->info.questions == 0 && h->info.left_out)
        return FAIL(e, ERR_INPUT, "use a longer --seq-len", "all %d questions have endings of more than %d tokens",
                    h->info.left_out, h->seq_len);
    if (h->info.questions == 0) return FAIL(e, ERR_INPUT, HINT_FILE, "no question in it");
    h->info.width = (int)size_min(round_up((size_t)h->longest - 1, WIDTH_STEP), (size_t)h->seq_len);
    return 0;
}

int hellaswag_open(HellaSwag **out, const char *path, const Tokenizer *tokenizer, int vocab_size, int seq_len,
                   Error *e) {
    HellaSwag *h;
    char *file;
    size_t bytes;
    *out = NULL;
    TRY(memory_alloc_zero((void **)&h, sizeof *h, "HellaSwag's questions", e));
    h->vocab_size = vocab_size;
    h->seq_len = seq_len;
    int code = file_read(path, FILE_MAX_BYTES, &file, &bytes, e);
    if (code == ERR_INPUT) error_hint(e, "check --hellaswag, or " HINT_FILE);
    if (!code) {
        code = file_parse(h, file, bytes, tokenizer, e);
        if (code) error_prefix(e, "%s", path);
        memory_free(file);
    }
    if (code) hellaswag_close(h);
    else *out = h;
    return code;
}

void hellaswag_close(HellaSwag *h) {
    if (!h) return;
    memory_free(h->tokens);
    memory_free(h->rows);
    memory_free(h->questions);
    memory_free(h);
}

HellaSwagInfo hellaswag_describe(const HellaSwag *h) { return h->info; }

// ---- Rows and scores ------------------------------------------------------------------------------------------------

void hellaswag_rows(const HellaSwag *h, int first, int n, uint16_t *out) {
    assert(first >= 0 && n >= 0 && first + n <= h->info.rows);
    for (int i = 0; i < n; i++, out += h->info.width + 1) {
        const Row *row = &h->rows[first + i];
        size_t context = (size_t)row->context_count, ending = (size_t)row->ending_count;
        memset(out, 0, ((size_t)h->info.width + 1) * sizeof *out);
        memcpy(out, h->tokens + row->context, context * sizeof *out);
        memcpy(out + context, h->tokens + row->ending, ending * sizeof *out);
    }
}

void hellaswag_sums(const HellaSwag *h, int first, int n, const float *loss, double *sum) {
    assert(first >= 0 && n >= 0 && first + n <= h->info.rows);
    for (int i = 0; i < n; i++, loss += h->info.width) {
        const Row *row = &h->rows[first + i];
        sum[i] = 0;
        for (int t = 0; t < row->ending_count; t++) sum[i] += loss[row->context_count - 1 + t];
    }
}

HellaSwagScore hellaswag_score(const HellaSwag *h, const double *sum) {
    HellaSwagScore score = {.questions = h->info.questions};
    for (int i = 0; i < h->info.questions; i++) {
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
