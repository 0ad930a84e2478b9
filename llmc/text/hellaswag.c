#include "text/hellaswag.h"

#include "base/files.h"
#include "base/text.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    ENDINGS_MAX = 64,         // more than any file of this kind has
    FILE_MAX_BYTES = 1 << 30, // the public file has 12 MB
    ROW_MIN_BYTES = 3,        // the shortest ending in a file: "" and a comma
    WIDTH_STEP = 64           // info.width is a multiple of this, or T, for the GPU's kernels
};

#define HINT_FILE "get it with data/hellaswag.sh"

typedef struct HellaSwagRow {
    size_t context, ending; // indices of their first tokens in HellaSwag.tokens
    size_t context_count, ending_count;
    bool right; // the right ending of its question
    bool last;  // the last ending of its question
} Row;

// Adds the question of one line of the file; `object` is the parsed line. text: scratch with room for the line. A row
// may have T + 1 tokens, since the model predicts the last token and does not read it.
static int question_add(HellaSwag *h, const Tokenizer *t, const cJSON *object, char *text, Error *e) {
    const cJSON *context = json_get(object, "ctx"), *endings = json_get(object, "endings"), *ending;
    const cJSON *label = json_get(object, "label");
    const char *digits = cJSON_GetStringValue(label);
    const size_t T = (size_t)h->seq_len, first = h->token_count;
    int endings_count = cJSON_GetArraySize(endings), strings = 0, i = 0;
    size_t count[1 + ENDINGS_MAX]; // tokens of the context, then tokens of each ending
    cJSON_ArrayForEach(ending, endings) strings += cJSON_IsString(ending);
    if (!cJSON_IsString(context) || !*context->valuestring || strings < 2 || strings > ENDINGS_MAX ||
        strings < endings_count)
        return FAIL(e, ERR_INPUT, HINT_FILE, "no text \"ctx\" with 2 to %d texts in \"endings\"", ENDINGS_MAX);
    bool quoted = digits && *digits && !digits[strspn(digits, "0123456789")]; // otherwise a JSON number is accepted
    double right = quoted ? strtod(digits, NULL) : json_whole(label, 0, endings_count - 1) ? label->valuedouble : -1;
    if (!(right >= 0 && right < endings_count))
        return FAIL(e, ERR_INPUT, "the test part has no answers: use the validation part",
                    "\"label\" is not the number of an ending, 0 to %d", endings_count - 1);
    uint16_t *out = h->tokens + first;
    TRY(tokenizer_encode(t, NULL, context->valuestring, strlen(context->valuestring), out, &count[0], e));
    cJSON_ArrayForEach(ending, endings) {
        out += count[i++];
        TRY(tokenizer_encode(t, NULL, text, (size_t)sprintf(text, " %s", ending->valuestring), out, &count[i], e));
    }
    for (i = 1; i <= endings_count; i++)
        if (count[i] > T) return h->info.left_out++, 0;
    size_t at = first + count[0];
    for (i = 1; i <= endings_count; at += count[i++]) {
        size_t tokens = count[0] + count[i], excess = tokens > T + 1 ? tokens - (T + 1) : 0;
        h->row[h->info.rows++] =
            (Row){first + excess, at, count[0] - excess, count[i], i - 1 == (int)right, i == endings_count};
        h->info.cut += excess > 0;
        h->info.width = (int)size_max((size_t)h->info.width, tokens - excess - 1);
    }
    h->info.questions++;
    h->token_count = at;
    return 0;
}

static int questions_read(HellaSwag *h, char *file, size_t bytes, const Tokenizer *tokenizer, Error *e) {
    int code = 0, number = 1;
    if (!tokenizer)
        return FAIL(e, ERR_USAGE, "give --tokenizer the directory of GPT-2's (data/gpt2)",
                    "no tokenizer for the text in it");
    for (char *line = file, *end; line < file + bytes && !code; line = end + 1, number++) {
        end = memchr(line, '\n', (size_t)(file + bytes - line));
        if (!end) end = file + bytes;
        *end = 0;
        if (line + strspn(line, " \t\r") == end) continue;
        cJSON *object = json_parse(line, (size_t)(end - line));
        code = question_add(h, tokenizer, object, line, e);
        cJSON_Delete(object);
        if (code) error_prefix(e, "line %d", number);
    }
    return code;
}

int hellaswag_open(HellaSwag **out, const char *path, const Tokenizer *tokenizer, int seq_len, Error *e) {
    HellaSwag *h;
    char *file;
    size_t bytes;
    *out = NULL;
    if (file_read(IN_PATH, path, FILE_MAX_BYTES, &file, &bytes, e))
        return e->code == ERR_INPUT ? error_hint(e, "check --hellaswag, or " HINT_FILE) : e->code;
    size_t rows = bytes / ROW_MIN_BYTES + 1; // an upper bound; memory that is never touched costs nothing
    int code = memory_alloc((void **)&h, sizeof *h + rows * sizeof *h->row + bytes * sizeof *h->tokens,
                            "HellaSwag's questions", e);
    if (code) return memory_free(file), code;
    *h = (HellaSwag){.seq_len = seq_len, .row = (Row *)(h + 1)};
    h->tokens = (uint16_t *)(h->row + rows);
    code = questions_read(h, file, bytes, tokenizer, e);
    if (!code && h->info.questions == 0)
        code = FAIL(e, ERR_INPUT, "use a longer --seq-len, or another file",
                    "no question in it whose endings have at most %d tokens", seq_len);
    if (code) error_prefix(e, "%s", path);
    h->info.width = (int)size_min(round_up((size_t)h->info.width, WIDTH_STEP), (size_t)seq_len);
    memory_free(file);
    if (code) memory_free(h);
    else *out = h;
    return code;
}

void hellaswag_rows(const HellaSwag *h, int first, int n, uint16_t *out) {
    assert(first >= 0 && n >= 0 && first + n <= h->info.rows);
    for (int i = 0; i < n; i++, out += h->info.width + 1) {
        const Row *row = &h->row[first + i];
        memset(out, 0, ((size_t)h->info.width + 1) * sizeof *out);
        memcpy(out, h->tokens + row->context, row->context_count * sizeof *out);
        memcpy(out + row->context_count, h->tokens + row->ending, row->ending_count * sizeof *out);
    }
}

void hellaswag_sums(const HellaSwag *h, int first, int n, const float *loss, double *sum) {
    assert(first >= 0 && n >= 0 && first + n <= h->info.rows);
    for (int i = 0; i < n; i++, loss += h->info.width) {
        const Row *row = &h->row[first + i];
        sum[i] = 0;
        for (size_t t = 0; t < row->ending_count; t++) sum[i] += loss[row->context_count - 1 + t];
    }
}

HellaSwagScore hellaswag_score(const HellaSwag *h, const double *sum) {
    HellaSwagScore score = {.questions = h->info.questions};
    const Row *row = h->row;
    for (int i = 0, best = 0, best_norm = 0; i < h->info.rows; i++) { // best: this question's best row so far
        if (sum[i] < sum[best]) best = i;
        if (sum[i] / row[i].ending_count < sum[best_norm] / row[best_norm].ending_count) best_norm = i;
        if (!row[i].last) continue;
        score.correct += row[best].right;
        score.correct_norm += row[best_norm].right;
        best = best_norm = i + 1;
    }
    return score;
}
