// Rows, sums and scores of a small file equal values computed by hand. Errors name file and line of a bad question.
// dev/oracle/check_evaluation.py checks scores of random questions.
#include "text/hellaswag.h"
#include "../scratch.h"

static Error e;
static Tokenizer *bytes_tokenizer; // token b is byte b, so rows are texts

static int open_questions(HellaSwag **h, const char *text, int T) {
    write_text("q.jsonl", text);
    return hellaswag_open(h, "q.jsonl", bytes_tokenizer, T, &e);
}

// Three questions with T = 5: the second question's context is cut in both rows; the third has an ending of 6 tokens.
static void test_rows_and_scores(void) {
    static const char text[] = "{\"ctx\": \"ab\", \"endings\": [\"c\", \"de\"], \"label\": \"1\"}\n\n"
                               "{\"label\": 0, \"ctx\": \"vwxyz\", \"endings\": [\"\u00e9f\", \"g\"]}\n"
                               "{\"ctx\": \"a\", \"endings\": [\"b\", \"cdefg\"], \"label\": 0}\n";
    static const char *const rows[] = {"ab c\0", "ab de",
                                       "yz \xc3\xa9"
                                       "f",
                                       "wxyz g"};
    static const double sums[] = {2 + 3, 2 + 3 + 4, 2 + 3 + 4 + 5, 4 + 5}; // column t has the loss t + 1
    HellaSwag *h;
    CHECK_OK(open_questions(&h, text, 5), &e);
    HellaSwagInfo info = h->info;
    CHECK(info.questions == 2 && info.left_out == 1 && info.rows == 4 && info.cut == 2 && info.width == 5,
          "questions %d, left out %d, rows %d, cut %d, width %d", info.questions, info.left_out, info.rows, info.cut,
          info.width);
    for (int at_a_time = 1; at_a_time <= 4; at_a_time += 3) {
        double sum[4] = {NAN, NAN, NAN, NAN};
        for (int first = 0; first < 4; first += at_a_time) {
            uint16_t got[4 * 6];
            float loss[4 * 5];
            memset(got, 0xff, sizeof got);
            hellaswag_rows(h, first, at_a_time, got);
            for (int i = 0; i < at_a_time; i++)
                for (int t = 0; t < 6; t++)
                    CHECK(got[6 * i + t] == (unsigned char)rows[first + i][t], "row %d, token %d: %d", first + i, t,
                          got[6 * i + t]);
            for (int i = 0; i < 5 * at_a_time; i++) loss[i] = (float)(i % 5 + 1);
            hellaswag_sums(h, first, at_a_time, loss, sum + first);
        }
        for (int i = 0; i < 4; i++) CHECK(sum[i] == sums[i], "row %d: %g, not %g", i, sum[i], sums[i]);
    }
    const double by_length[4] = {5, 6, 9, 8}; // means per token 2.5, 2, 2.25, 4
    HellaSwagScore score = hellaswag_score(h, by_length);
    CHECK(score.questions == 2 && score.correct == 0 && score.correct_norm == 2, "%d and %d right", score.correct,
          score.correct_norm);
    score = hellaswag_score(h, (double[]){1, 1, 2, 3}); // the first of equal endings wins
    CHECK(score.correct == 1, "%d right with a tie", score.correct);
    memory_free(h);
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
    memory_free(h);
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
    memory_free(bytes_tokenizer);
    return scratch_end();
}
