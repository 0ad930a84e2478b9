// HellaSwag: a file gives the rows and scores that hellaswag.h defines, computed here from the texts alone. Malformed
// files are refused by name and line.
#include "text/hellaswag.h"
#include "../scratch.h"

enum { QUESTIONS = 60, ENDINGS_MOST = 5, TEXT_MOST = 90 };

static Error e;
static Tokenizer *bytes_tokenizer; // token b is byte b, so rows are texts

static int draw_int(int below) { return (int)draw((uint32_t)below); }

static int open_questions(HellaSwag **h, const char *text, int T) {
    write_text("q.jsonl", text);
    return hellaswag_open(h, "q.jsonl", bytes_tokenizer, T, &e);
}

// ---- Questions, and files with them ---------------------------------------------------------------------------------

typedef struct {
    char context[TEXT_MOST + 1], ending[ENDINGS_MOST][TEXT_MOST + 1];
    int endings, label;
} Example;

static void draw_text(char *text, int most) {
    static const char *const pieces[] = {"a", "b", "c", "d", " ", ",", ".", "'", "\"", "\\", "\n", "\t", "\xc3\xa9"};
    *text = 0;
    for (int n = 1 + draw_int(most / 2); n > 0; n--) strcat(text, pieces[draw_int(sizeof pieces / sizeof *pieces)]);
}

static void draw_examples(Example *examples, int count) {
    for (Example *x = examples; x < examples + count; x++) {
        x->endings = 2 + draw_int(ENDINGS_MOST - 1);
        x->label = draw_int(x->endings);
        draw_text(x->context, TEXT_MOST);
        for (int i = 0; i < x->endings; i++) draw_text(x->ending[i], TEXT_MOST);
    }
}

static const char *write_jsonl(const Example *examples, int count) {
    const char *path = "examples.jsonl";
    FILE *f = fopen(path, "wb");
    for (const Example *x = examples; x < examples + count; x++) {
        fprintf(f, "{\"ind\": 24, \"activity_label\": \"[header]\", \"ctx_a\": \"x\", \"ctx\": ");
        text_write_json(f, x->context);
        fprintf(f, ", \"endings\": [");
        for (int i = 0; i < x->endings; i++) {
            fputs(i ? ", " : "", f);
            text_write_json(f, x->ending[i]);
        }
        fprintf(f, draw_int(2) ? "], \"label\": %d}\n" : "], \"label\": \"%d\"}\n\n", x->label);
    }
    fclose(f);
    return path;
}

// ---- A model that sees only the token before: its loss of predicting b after a --------------------------------------

static float loss_of(int a, int b) { return (float)((a * 37 + b * 101) % 59) / 8; } // exact in fp32

static HellaSwagScore ask(const HellaSwag *h, int at_a_time, double *sum) {
    HellaSwagInfo info = hellaswag_describe(h);
    size_t width = (size_t)info.width;
    uint16_t *rows = malloc((size_t)at_a_time * (width + 1) * sizeof *rows);
    float *loss = malloc((size_t)at_a_time * width * sizeof *loss);
    for (int i = 0; i < info.rows; i++) sum[i] = NAN;
    for (int first = 0, n; first < info.rows; first += n) {
        n = info.rows - first < at_a_time ? info.rows - first : at_a_time;
        memset(rows, 0xff, (size_t)at_a_time * (width + 1) * sizeof *rows);
        hellaswag_rows(h, first, n, rows);
        for (size_t i = 0; i < (size_t)n; i++)
            for (size_t t = 0; t < width; t++)
                loss[i * width + t] = loss_of(rows[i * (width + 1) + t], rows[i * (width + 1) + t + 1]);
        hellaswag_sums(h, first, n, loss, sum + first);
    }
    free(rows);
    free(loss);
    return hellaswag_score(h, sum);
}

typedef struct {
    HellaSwagInfo info;
    HellaSwagScore score;
    double sum[QUESTIONS * ENDINGS_MOST];
} Expected;

// Computes rows and scores from the texts: a row is the last T + 1 bytes of context, space and ending.
static void expect(Expected *x, const Example *examples, int count, int T) {
    memset(x, 0, sizeof *x);
    int longest = 0;
    for (const Example *q = examples; q < examples + count; q++) {
        int best = 0, best_norm = 0, first = x->info.rows;
        double mean[ENDINGS_MOST];
        bool fits = true;
        for (int i = 0; i < q->endings; i++) fits = fits && (int)strlen(q->ending[i]) + 1 <= T;
        x->info.left_out += !fits;
        if (!fits) continue;
        for (int i = 0; i < q->endings; i++) {
            char text[2 * TEXT_MOST + 2];
            int length = snprintf(text, sizeof text, "%s %s", q->context, q->ending[i]);
            int scored = (int)strlen(q->ending[i]) + 1;
            double sum = 0;
            for (int t = length - scored; t < length; t++)
                sum += loss_of((unsigned char)text[t - 1], (unsigned char)text[t]);
            x->info.cut += length > T + 1;
            if ((length > T + 1 ? T + 1 : length) > longest) longest = length > T + 1 ? T + 1 : length;
            x->sum[x->info.rows++] = sum;
            mean[i] = sum / scored;
            if (sum < x->sum[first + best]) best = i;
            if (mean[i] < mean[best_norm]) best_norm = i;
        }
        x->score.questions++;
        x->score.correct += best == q->label;
        x->score.correct_norm += best_norm == q->label;
    }
    x->info.questions = x->score.questions;
    x->info.width = (longest - 1 + 63) / 64 * 64 < T ? (longest - 1 + 63) / 64 * 64 : T;
}

static void check_against(const char *path, const Example *examples, int count, int T) {
    HellaSwag *h = NULL;
    static Expected want;
    expect(&want, examples, count, T);
    CHECK_OK(hellaswag_open(&h, path, bytes_tokenizer, T, &e), &e);
    if (!h) return;
    HellaSwagInfo info = hellaswag_describe(h);
    CHECK(memcmp(&info, &want.info, sizeof info) == 0,
          "T %d: questions %d (%d), left out %d (%d), rows %d (%d), cut %d (%d), width %d (%d)", T, info.questions,
          want.info.questions, info.left_out, want.info.left_out, info.rows, want.info.rows, info.cut, want.info.cut,
          info.width, want.info.width);
    for (int at_a_time = 1; info.rows == want.info.rows && at_a_time <= 9; at_a_time += 4) {
        double sum[QUESTIONS * ENDINGS_MOST];
        HellaSwagScore score = ask(h, at_a_time, sum);
        for (int i = 0; i < info.rows; i++) CHECK(sum[i] == want.sum[i], "row %d: %g, not %g", i, sum[i], want.sum[i]);
        CHECK(memcmp(&score, &want.score, sizeof score) == 0, "T %d: %d and %d right, not %d and %d", T, score.correct,
              score.correct_norm, want.score.correct, want.score.correct_norm);
    }
    hellaswag_close(h);
}

// Random questions, from a T that fits hardly any to a T that cuts none.
static void test_rows_and_scores(void) {
    static Example examples[QUESTIONS];
    for (int trial = 0; trial < 8; trial++) {
        draw_examples(examples, QUESTIONS);
        const int lengths[] = {45 + draw_int(20), 64, 65, 100 + draw_int(60), 200, 1024};
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
            check_against(write_jsonl(examples, QUESTIONS), examples, QUESTIONS, lengths[i]);
    }
}

// ---- Bad files ------------------------------------------------------------------------------------------------------

static void refuse_json(const char *text, const char *mention) {
    HellaSwag *h;
    CHECK_ERROR(open_questions(&h, text, 64), &e, ERR_INPUT, mention);
    CHECK(strstr(e.what, "q.jsonl") && e.hint[0], "no file or remedy: %s (%s)", e.what, e.hint);
}

#define GOOD "{\"ctx\": \"a\", \"endings\": [\"b\", \"c\"], \"label\": 1}\n"

static void test_bad_jsonl(void) {
    static const char *const cases[][2] = {
        {"", "no question"},
        {"\n \n", "no question"},
        {GOOD "nonsense\n", "line 2: no text"},
        {GOOD "\n[1]\n", "line 3: no text"},
        {GOOD "{\"ctx\": \"a\"} x", "line 2: no text"},
        {"{\"ctx\": \"a\", \"endings\": [\"b\", \"c\"], \"label\": 1", "line 1: no text"},
        {"{\"endings\": [\"b\", \"c\"], \"label\": 1}", "line 1: no text \"ctx\""},
        {"{\"ctx\": \"\", \"endings\": [\"b\", \"c\"], \"label\": 1}", "no text \"ctx\""},
        {"{\"ctx\": \"a\", \"label\": 1}", "\"endings\""},
        {"{\"ctx\": \"a\", \"endings\": [\"b\"], \"label\": 0}", "\"endings\""},
        {"{\"ctx\": \"a\", \"endings\": [\"b\", 7], \"label\": 0}", "\"endings\""},
        {"{\"ctx\": \"a\", \"endings\": [\"b\", \"c\"]}", "\"label\""}};
    HellaSwag *h;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) refuse_json(cases[i][0], cases[i][1]);
    static const char *const labels[] = {"2",      "-1",     "0.5",    "\"\"", "\"2\"",
                                         "\"1x\"", "\"-0\"", "\"+1\"", "null", "1e99"};
    for (size_t i = 0; i < sizeof labels / sizeof *labels; i++) {
        char text[200];
        snprintf(text, sizeof text, GOOD "{\"ctx\": \"a\", \"endings\": [\"b\", \"c\"], \"label\": %s}", labels[i]);
        refuse_json(text, "line 2: \"label\"");
    }
    static const char zero[] = GOOD "{\"ctx\": \0\"a\"}\n";
    write_bytes("q.jsonl", zero, sizeof zero - 1);
    CHECK_ERROR(hellaswag_open(&h, "q.jsonl", bytes_tokenizer, 64, &e), &e, ERR_INPUT, "line 2");
    CHECK_ERROR(open_questions(&h, GOOD, 1), &e, ERR_INPUT, "no question in it whose endings have at most 1 tokens");
    CHECK_OK(open_questions(&h, GOOD, 2), &e);
    hellaswag_close(h);
    CHECK_ERROR(hellaswag_open(&h, "q.jsonl", NULL, 64, &e), &e, ERR_USAGE, "q.jsonl: no tokenizer");
    CHECK(strstr(e.hint, "--tokenizer"), "%s", e.hint);
    CHECK_ERROR(hellaswag_open(&h, "nosuch", NULL, 64, &e), &e, ERR_INPUT, "nosuch");
    CHECK(strstr(e.hint, "data/hellaswag.sh"), "%s", e.hint);
    CHECK_ERROR(hellaswag_open(&h, scratch, NULL, 64, &e), &e, ERR_INPUT, "not a regular file");
}

int main(void) {
    scratch_begin();
    if (tokenizer_create_bytes(&bytes_tokenizer, &e)) return ERR_INTERNAL;
    RUN(test_rows_and_scores, test_bad_jsonl);
    tokenizer_destroy(bytes_tokenizer);
    return scratch_end();
}
