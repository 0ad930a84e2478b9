// The batch ramp: scripted aims, the law of the target, open-loop modes, and replay. run/test_loop.c closes the loop.
#include "../scratch.h"

#include "gns/ramp.h"
#include "math/rng.h"
#include <unistd.h>

static Error e; // set by the last call that failed

static RampConfig config_make(RampMode mode) {
    return (RampConfig){.mode = mode,
                        .batch_min = 2,
                        .batch_max = 16,
                        .batch_ref = 8,
                        .seq_len = 100,
                        .kappa = 1,
                        .waste = 1,
                        .step_rows = 1e9, // the target is the critical batch
                        .lr_power = 0.5,
                        .schedule = {SCHEDULE_COSINE, 0.01, 1e5, 1e6, 0.05, 0}};
}

static Ramp ramp_make(const RampConfig *c) {
    Ramp r;
    CHECK_OK(ramp_create(&r, c, NULL, &e), &e);
    return r;
}

// ---- scripted aims --------------------------------------------------------------------------------------------------

// The batch moves to the aim, by at most a factor of 2 per half-life (1,000 tokens), within 2 to 16 rows. Changes below
// one row add up. While the aim is unknown, the batch does not change.
static void test_follows(void) {
    RampConfig c = config_make(RAMP_GNS);
    static const struct {
        double tokens, aim, rows;
    } script[] = {{1000, 100, 4},       {500, 100, 5.656854249492381},
                  {1000, 6.25, 6.25},   {10, NAN, 6.25},
                  {1000, 1, 3.125},     {1000, 0, 2},
                  {1000, -5, 2},        {1000, 1e9, 4},
                  {1e9, 9.7, 9.7},      {1e9, INFINITY, 16},
                  {1e9, 40.5, 16},      {2000, 0.1, 4},
                  {1e9, 7.4999, 7.4999}};
    Ramp r = ramp_make(&c);
    CHECK(ramp_batch(&r, 0, 0) == 2, "starts at %lld rows", (long long)ramp_batch(&r, 0, 0));
    for (size_t i = 0; i < sizeof script / sizeof *script; i++) {
        ramp_observe(&r, script[i].tokens, 1000, script[i].aim);
        CHECK_CLOSE(r.rows, script[i].rows, 1e-12, 0);
        CHECK(ramp_batch(&r, 9, 9) == llround(script[i].rows), "%zu: %lld rows", i, (long long)ramp_batch(&r, 9, 9));
    }
    r.rows = 2;
    int steps = 0;
    for (; ramp_batch(&r, 9, 9) == 2; steps++) ramp_observe(&r, 10, 1000, 16); // +0.7% each
    CHECK(steps == (int)ceil(100 * log2(1.25)), "2.5 rows after %d steps", steps);
    c.mode = RAMP_FIXED;
    Ramp fixed = ramp_make(&c);
    for (int i = 0; i < 100; i++) ramp_observe(&fixed, 800, 1000, 1e9);
    CHECK(ramp_batch(&fixed, 100, 80000) == 8 && fixed.rows == 0, "a fixed batch listened");
}

// critical = kappa * c * scale, target = min(waste * critical, sqrt(step_rows * critical)). `aim` uses the scale minus
// one standard error; `lower` uses the scale's 95% bound.
static void test_target(void) {
    RampConfig c = config_make(RAMP_GNS);
    c.kappa = 4;
    Ramp r = ramp_make(&c);
    GnsTracker t = {0};
    RampTarget none = ramp_target(&r, &t, (GnsFactor){2.5, 0.01, 0.2});
    CHECK(isnan(none.target) && isnan(none.aim) && isnan(none.lower), "a target from nothing");
    for (uint64_t i = 0; i < 50; i++) {
        double g2 = 1 + 0.5 * rng_normal(4, 0, i), s = 3 + 0.2 * rng_normal(4, 1, i);
        gns_update(&t, 8, g2 + s, g2 + s / 8, 1, 20);
    }
    RampTarget seen = ramp_target(&r, &t, (GnsFactor){2.5, 0.01, 0.2});
    CHECK_CLOSE(seen.target, 10 * gns_estimate(&t).scale, 1e-12, 0);
    CHECK_CLOSE(seen.aim, gns_scaled_lower(&t, (GnsFactor){10, 0.01, 0.2}, 1, 0), 1e-12, 0);
    CHECK_CLOSE(seen.lower, gns_scaled_lower(&t, (GnsFactor){10, 0.01, 0.2}, 2, 10), 1e-12, 0);
    CHECK(seen.lower < 0.9 * seen.aim && seen.aim < 0.9 * seen.target, "%g, %g, %g", seen.lower, seen.aim, seen.target);
    r.config.step_rows = 5.9;
    RampTarget root = ramp_target(&r, &t, (GnsFactor){2.5, 0.01, 0.2});
    CHECK_CLOSE(root.target, sqrt(5.9 * seen.target), 1e-12, 0);
    CHECK_CLOSE(root.aim, sqrt(5.9 * seen.aim), 1e-12, 0);
    CHECK_CLOSE(root.lower, sqrt(5.9 * seen.lower), 1e-12, 0);
}

// ---- the law --------------------------------------------------------------------------------------------------------

// Returns the target for exact norms with a scale of 100 rows; g2 <= 0: with an unknown scale.
static RampTarget target_at(double x, double kappa, double waste, double rows, double g2) {
    RampConfig c = config_make(RAMP_GNS);
    c.step_rows = x, c.kappa = kappa, c.waste = waste;
    Ramp r = ramp_make(&c);
    GnsTracker t = {0};
    r.rows = rows;
    for (int i = 0; i < 50; i++) gns_update(&t, 8, g2 + 100, g2 + 100.0 / 8, 1, 20);
    return ramp_target(&r, &t, (GnsFactor){1, 0, 0});
}

// Returns the seconds per unit of progress if a step takes a + b B seconds.
static double seconds_at(double B, double a, double b, double critical) { return (a + b * B) * (1 / B + 1 / critical); }

// Up to the waste's limit the target must be the fastest of all batches. A batch f times as large takes
// (1 + y^2 + (f + 1 / f) y) / (1 + y)^2 times as long, y = sqrt(x / critical).
static void test_law(void) {
    static const double prices[][2] = {{0.003, 0.002}, {0.06, 0.01}, {1, 0.02}, {5, 0.005}}; // a, b
    for (size_t i = 0; i < sizeof prices / sizeof *prices; i++) {
        const double a = prices[i][0], b = prices[i][1], x = a / b, critical = 250, y = sqrt(x / critical);
        double best = 1;
        for (double B = 1; B < 2000; B *= 1.0001)
            if (seconds_at(B, a, b, critical) < seconds_at(best, a, b, critical)) best = B;
        CHECK_CLOSE(target_at(x, 2.5, 10, 8, 1).target, best, 2e-3, 0);
        for (double f = 0.25; f < 5; f *= 2) {
            RampTarget seen = target_at(x, 2.5, 10, f * sqrt(x * critical), 1);
            CHECK_CLOSE(1 + seen.extra, (1 + y * y + (f + 1 / f) * y) / pow(1 + y, 2), 1e-12, 0);
            CHECK_CLOSE(1 + seen.extra, seconds_at(f * best, a, b, critical) / seconds_at(best, a, b, critical), 1e-4,
                        0);
            CHECK_CLOSE(seen.waste, f * sqrt(x * critical) / critical, 1e-12, 0);
        }
    }
    CHECK_CLOSE(target_at(90, 2.5, 0.4, 8, 1).target, 100, 1e-12, 0); // not sqrt(90 x 250) = 150
    CHECK_CLOSE(target_at(90, 2.5, 0.7, 8, 1).target, 150, 1e-12, 0);
    CHECK_CLOSE(target_at(1e9, 1, 0.65, 8, 1).target, 65, 1e-12, 0);
    RampTarget hidden = target_at(6, 2, 0.4, 8, -1); // noise hides the gradient
    CHECK(isnan(hidden.target) && isnan(hidden.waste) && isnan(hidden.extra), "%g, %g, %g", hidden.target, hidden.waste,
          hidden.extra);
    CHECK(isinf(hidden.aim) && isinf(hidden.lower), "%g, %g", hidden.aim, hidden.lower);
}

// Step times a + b B give a / b, rounded to two digits and kept within the limits. A batch without a time is ignored.
static void test_step_rows(void) {
    static const int64_t rows[] = {4, 16, 64};
    static const struct {
        double a, b, want;
    } lines[] = {{5.94, 1, 5.9}, {0.0474, 0.001, 47}, {1.2345, 0.01, 120}, {0, 0.1, 0.1},
                 {-1, 2, 0.1},   {3, 0, 1e9},         {5, -0.01, 1e9},     {1e9, 0.01, 1e9}};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        double seconds[3];
        for (int j = 0; j < 3; j++) seconds[j] = lines[i].a + lines[i].b * (double)rows[j];
        const double got = ramp_step_rows(rows, seconds, 3);
        CHECK(got == lines[i].want, "%g + %g B: %.17g rows", lines[i].a, lines[i].b, got);
        if (i > 2) continue;
        seconds[1] = INFINITY;
        CHECK(ramp_step_rows(rows, seconds, 3) == lines[i].want, "%g + %g B, two batches", lines[i].a, lines[i].b);
    }
}

// ---- open-loop modes and the learning rate --------------------------------------------------------------------------

static void test_linear(void) {
    RampConfig c = config_make(RAMP_LINEAR);
    c.batch_min = 32, c.batch_max = 512;
    Ramp r = ramp_make(&c);
    CHECK(ramp_batch(&r, 0, 0) == 32 && ramp_batch(&r, 9, 5e5) == 272 && ramp_batch(&r, 9, 1e6) == 512, "landmarks");
    CHECK(ramp_batch(&r, 9, 2e6) == 512, "beyond the horizon");
    for (int i = 0; i <= 1000; i++) {
        double exact = 32 + 0.48 * i;
        CHECK(fabs((double)ramp_batch(&r, i, 1000.0 * i) - exact) <= 0.5, "%d: %lld, want %g", i,
              (long long)ramp_batch(&r, i, 1000.0 * i), exact);
    }
}

// After the warm-up, rows times schedule is constant up to rounding, and the rate is sqrt(lr0 schedule).
static void test_seesaw(void) {
    RampConfig c = config_make(RAMP_SEESAW);
    c.batch_min = 100, c.batch_ref = 100, c.batch_max = 1500;
    Ramp r = ramp_make(&c);
    for (int i = 0; i <= 1000; i++) {
        double tokens = 1000.0 * i, lr = schedule_lr(&c.schedule, tokens);
        int64_t rows = ramp_batch(&r, i, tokens);
        if (tokens < 1e5) {
            CHECK(rows == 100, "%lld rows during warm-up", (long long)rows);
            continue;
        }
        double exact = 100 * 0.01 / lr;
        if (exact < 1500) {
            CHECK(fabs((double)rows - exact) <= 0.5, "at %g: %lld rows, want %g", tokens, (long long)rows, exact);
            CHECK_CLOSE(ramp_lr(&r, lr, rows), sqrt(0.01 * lr), 0.003, 0);
        } else {
            CHECK(rows == 1500, "at %g: %lld rows", tokens, (long long)rows);
            CHECK_CLOSE(ramp_lr(&r, lr, rows), lr * sqrt(15), 1e-12, 0);
        }
    }
    c.schedule.final_frac = 0; // the rate reaches 0, so only batch_max limits the batch
    r = ramp_make(&c);
    CHECK(ramp_batch(&r, 9, 1e6) == 1500, "%lld rows at rate 0", (long long)ramp_batch(&r, 9, 1e6));
    r.config.schedule.lr = NAN;
    CHECK(ramp_batch(&r, 9, 5e5) == 100, "%lld rows at rate NaN", (long long)ramp_batch(&r, 9, 5e5));
    c.schedule.kind = SCHEDULE_CONSTANT;
    r = ramp_make(&c);
    CHECK(ramp_batch(&r, 9, 9e5) == 100, "a constant rate moved the batch");
}

// Checks the rate at four times the reference batch, at the schedule's peak (0.01) and at 30% of the peak: schedule x
// 4^power. A power up to 0.5 is constant. A larger power falls with the schedule; power 1 falls to 0.5 + 0.3 x 0.5.
static void test_lr(void) {
    RampConfig c = config_make(RAMP_GNS);
    static const struct {
        double power, peak, later;
    } cases[] = {{0, 1, 1},
                 {0.25, M_SQRT2, M_SQRT2},
                 {0.5, 2, 2},
                 {0.8, 3.031433133020796, 2.265767770591597},
                 {1, 4, 2.462288826689833}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        c.lr_power = cases[i].power;
        Ramp r = ramp_make(&c);
        CHECK_CLOSE(ramp_lr(&r, 0.01, 32), 0.01 * cases[i].peak, 1e-12, 0);
        CHECK_CLOSE(ramp_lr(&r, 0.003, 32), 0.003 * cases[i].later, 1e-12, 0);
        CHECK(ramp_lr(&r, 0.003, 8) == 0.003, "the reference batch has the schedule's rate");
        CHECK(ramp_lr(&r, 0, 32) == 0, "no rate, yet %g", ramp_lr(&r, 0, 32));
        r.config.schedule.lr = 0;
        CHECK(ramp_lr(&r, 0, 32) == 0, "a schedule of 0, yet %g", ramp_lr(&r, 0, 32));
    }
    c = config_make(RAMP_FIXED); // here only a last step that the horizon cuts has another batch
    Ramp r = ramp_make(&c);
    CHECK_CLOSE(ramp_lr(&r, 0.003, 2), 0.0015, 1e-15, 0);
}

static void test_parse(void) {
    RampMode mode;
    const char *path;
    static const char *const names[RAMP_MODES] = {
        [RAMP_FIXED] = "fixed", [RAMP_LINEAR] = "linear", [RAMP_SEESAW] = "seesaw", [RAMP_GNS] = "gns"};
    for (int m = 0; m < RAMP_MODES; m++) {
        if (m == RAMP_REPLAY || m == RAMP_STEPS) continue;
        CHECK_OK(ramp_parse(names[m], &mode, &path, &e), &e);
        CHECK((int)mode == m && !path, "%s", names[m]);
    }
    CHECK_OK(ramp_parse("replay:a:b/c.jsonl", &mode, &path, &e), &e);
    CHECK(mode == RAMP_REPLAY && path && strcmp(path, "a:b/c.jsonl") == 0, "path");
    CHECK_OK(ramp_parse("steps:0:4,1e6:8", &mode, &path, &e), &e);
    CHECK(mode == RAMP_STEPS && path && strcmp(path, "0:4,1e6:8") == 0, "list");
    const char *bad[] = {"", "replay", "replay:", "steps", "steps:", "gns:", "gns:x", "fix", "fixedly", "GNS", ":"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_ERROR(ramp_parse(bad[i], &mode, &path, &e), &e, ERR_USAGE, "--ramp");
}

static void test_steps(void) {
    int64_t fewest, most;
    RampConfig c = config_make(RAMP_STEPS);
    const char *list = "0:8,1000:4,1e5:4096";
    CHECK_OK(ramp_check_list(list, &fewest, &most, &e), &e);
    CHECK(fewest == 4 && most == 4096, "%lld to %lld", (long long)fewest, (long long)most);
    c.batch_min = fewest, c.batch_max = most;
    Ramp r = {.config = c, .argument = list};
    const struct {
        double tokens;
        int64_t rows;
    } want[] = {{0, 8}, {999, 8}, {1000, 4}, {99999, 4}, {1e5, 4096}, {1e12, 4096}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        CHECK(ramp_batch(&r, 7, want[i].tokens) == want[i].rows, "%lld rows at %g tokens",
              (long long)ramp_batch(&r, 7, want[i].tokens), want[i].tokens);
    const char *bad[] = {"1:8",     "0",           "0:",        ":8",     "0:8,", "0:8,1000",
                         "0:8,0:9", "0:8,5:9,4:9", "0:0",       "0:1.5",  "0:-1", "0:nan",
                         "0:8;5:9", "nan:8",       "0:8,nan:9", "0:1e10", "x"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_ERROR(ramp_check_list(bad[i], &fewest, &most, &e), &e, ERR_USAGE, "no list of batches");
}

// The present options limit a checkpoint's batch.
static void test_settle(void) {
    RampConfig c = config_make(RAMP_GNS);
    Ramp r = ramp_make(&c);
    static const double cases[][2] = {{0, 2}, {1, 2},   {2.25, 2.25},
                                      {8, 8}, {16, 16}, {64, 16}}; // options allow 2 to 16 rows
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        r.rows = cases[i][0];
        CHECK_OK(ramp_settle(&r, 7, 7000, &e), &e);
        CHECK(r.rows == cases[i][1], "%g rows become %g", cases[i][0], r.rows);
    }
}

// ---- replay ---------------------------------------------------------------------------------------------------------

static const char *const file = "metrics.jsonl";

static void replay_make(Ramp *r, double train_tokens, const int64_t *rows, int steps) {
    char text[1024];
    int length = 0;
    RampConfig c = config_make(RAMP_REPLAY);
    c.schedule.train_tokens = train_tokens;
    for (int i = 0; i < steps; i++)
        length += snprintf(text + length, sizeof text - (size_t)length, "{\"step\": %d, \"batch\": %lld}\n", i + 1,
                           (long long)rows[i]);
    write_bytes(file, text, (size_t)length);
    CHECK_OK(ramp_create(r, &c, file, &e), &e);
}

// A replay resumes only if the file has the run's tokens by that step, or if the run is complete. A row has 100 tokens.
static void test_replay_resumed(void) {
    static const int64_t rows[] = {5, 3, 4, 8, 1, 1};
    enum { REST = 1 }; // after the file's end: its last batch but one, which no horizon cut
    static const struct {
        int64_t step, tokens;
        double horizon;
        int64_t next; // rows of the file's next step; 0: refused
    } cases[] = {
        {0, 0, 2000, 5},      {1, 500, 2000, 3},       {3, 1200, 2000, 8}, {4, 2000, 2000, 1}, {1, 300, 300, 3},
        {5, 2100, 2200, 1},   {700, 2200, 2200, REST}, {2, 600, 2000, 0},  {6, 2100, 2200, 0}, {1, 0, 2000, 0},
        {3, 1300, 2000, 0},   {3, 700, 2000, 0},       {4, 1200, 2200, 0}, {5, 1300, 2200, 0}, {7, 2100, 2200, 0},
        {700, 2100, 2200, 0}, {0, 100, 2000, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Ramp r;
        replay_make(&r, cases[i].horizon, rows, 6);
        int code = ramp_settle(&r, cases[i].step, cases[i].tokens, &e);
        CHECK(code == (cases[i].next ? 0 : ERR_INPUT), "case %d: exit code %d", (int)i, code);
        if (code) CHECK(strstr(e.what, file) && e.hint[0], "'%s' (%s)", e.what, e.hint);
        else // the sequence continues at this step
            CHECK(ramp_batch(&r, cases[i].step, (double)cases[i].tokens) == cases[i].next, "case %d", (int)i);
        ramp_destroy(&r);
    }
    Ramp r;
    replay_make(&r, 2000, (const int64_t[]){5, 3, 4, 8}, 4);
    CHECK_ERROR(ramp_settle(&r, 9, 900, &e), &e, ERR_INPUT, "the file has 2000 tokens up to step 4");
    CHECK(strstr(e.what, "900 tokens in 9 steps"), "'%s'", e.what);
    ramp_destroy(&r);
}

// Finds the fewest and the most rows of a step. The minimum ignores the last step, which the horizon may have cut.
static void test_replay_limits(void) {
    static const struct {
        double horizon;
        int64_t fewest;
    } cases[] = {{500, 5},  {100, 5},  {501, 5},  {801, 3},  {1200, 3},
                 {1900, 3}, {2000, 3}, {2001, 3}, {2050, 3}, {2101, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Ramp r;
        replay_make(&r, cases[i].horizon, (const int64_t[]){5, 3, 4, 8, 1, 9}, 6);
        const RampConfig *c = &r.config;
        CHECK(c->batch_min == cases[i].fewest && c->batch_max == 9, "horizon %g: %lld to %lld rows, want %lld to 9",
              cases[i].horizon, (long long)c->batch_min, (long long)c->batch_max, (long long)cases[i].fewest);
        ramp_destroy(&r);
    }
}

static void test_replay_bad_files(void) {
#define GOOD "{\"step\":1,\"batch\":4}\n"
    static const struct {
        const char *text, *says;
    } cases[] = {
        {"", "ends at line 0"},
        {GOOD, "ends at line 1 after 400 tokens"},
        {"{\"val_loss\":1}\n", "ends at line 1 after 0 tokens"},
        {GOOD "{\"step\":2,\"batch\":\n", "line 2: not a JSON object"},
        {GOOD "\n", "line 2: not a JSON object"},
        {GOOD "[]\n", "line 2: not a JSON object"},
        {"PK\x03\x04", "line 1: not a JSON object"},
        {GOOD "{\"step\":3,\"batch\":4}\n", "line 2: not the rows of step 2"},
        {GOOD GOOD, "line 2: not the rows of step 2"},
        {"{\"step\":\"1\",\"batch\":4}\n", "line 1: not the rows of step 1"},
        {"{\"step\":1,\"batch\":\"4\"}\n", "line 1: not the rows of step 1"},
        {"{\"step\":1,\"batch\":0}\n", "line 1: not the rows of step 1"},
        {"{\"step\":1,\"batch\":4.5}\n", "line 1: not the rows of step 1"},
        {"{\"step\":1,\"batch\":1e300}\n", "line 1: not the rows of step 1"},
    };
    RampConfig c = config_make(RAMP_REPLAY);
    c.schedule.train_tokens = 500; // 5 rows, one more than in GOOD
    Ramp r;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_text(file, cases[i].text);
        CHECK_ERROR(ramp_create(&r, &c, file, &e), &e, ERR_INPUT, cases[i].says);
        CHECK(strstr(e.what, file) == e.what && e.hint[0], "'%s' (%s)", e.what, e.hint);
    }
    write_bytes(file, GOOD "{\"st\0p\":2}\n", sizeof GOOD "{\"st\0p\":2}\n" - 1);
    CHECK_ERROR(ramp_create(&r, &c, file, &e), &e, ERR_INPUT, "line 2: not a JSON object");
    write_text(file, GOOD "{\"step\":2,\"batch\":1}"); // no newline at the end: fine
    CHECK_OK(ramp_create(&r, &c, file, &e), &e);
    CHECK(ramp_batch(&r, 0, 0) == 4 && ramp_batch(&r, 1, 400) == 1, "batches");
    ramp_destroy(&r);
    unlink(file);
    CHECK_ERROR(ramp_create(&r, &c, file, &e), &e, ERR_INPUT, file);
}

int main(void) {
    scratch_begin();
    RUN(test_follows, test_target, test_law, test_step_rows, test_linear, test_seesaw, test_lr, test_parse, test_steps,
        test_settle, test_replay_resumed, test_replay_limits, test_replay_bad_files);
    return scratch_end();
}
