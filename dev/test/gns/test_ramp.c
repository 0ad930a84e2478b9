// The batch ramp: exact rung sequences for scripted bounds and for simulated gradient noise, and replay.
#include "../test.h"

#include "gns/ramp.h"
#include "gns/gns.h"
#include "math/rng.h"
#include <unistd.h>

static RampConfig config_make(RampMode mode) {
    return (RampConfig){.mode = mode,
                        .batch_min = 2,
                        .batch_max = 16,
                        .batch_ref = 8,
                        .seq_len = 100,
                        .kappa = 1,
                        .lr_power = 0.5,
                        .half_life_tokens = 1000,
                        .train_tokens = 1e6,
                        .schedule = {SCHEDULE_COSINE, 0.01, 1e5, 1e6, 0.05}};
}

static Ramp ramp_make(const RampConfig *c) {
    Ramp r;
    Error e = {0};
    CHECK_OK(ramp_create(&r, c, NULL, &e), &e);
    return r;
}

// ---- scripted bounds ------------------------------------------------------------------------------------------------

typedef struct {
    int steps;
    double lower; // with this lower bound of the target
    int64_t rows; // and this many rows in each of them
} Phase;

// Each phase's batch is what ramp_batch says before the step; the bound is observed after it.
static void check_script(const char *name, const RampConfig *c, const Phase *phases) {
    Ramp r = ramp_make(c);
    double tokens = 0;
    int64_t step = 0;
    for (const Phase *p = phases; p->steps; p++)
        for (int i = 0; i < p->steps; i++, step++) {
            int64_t rows = ramp_batch(&r, step, tokens);
            CHECK(rows == p->rows, "%s, step %lld: %lld rows, want %lld", name, (long long)step, (long long)rows,
                  (long long)p->rows);
            tokens += (double)(rows * c->seq_len);
            ramp_observe(&r, (double)(rows * c->seq_len), p->lower);
        }
    ramp_destroy(&r);
}

// A step is 100 tokens a row, two half-lives are 2,000 tokens: 10 steps at 2 rows, 5 at 4, 3 (2,400) at 8.
static void test_scripts(void) {
    RampConfig c = config_make(RAMP_GNS);
    check_script("far above", &c, (Phase[]){{10, 100, 2}, {5, 100, 4}, {3, 100, 8}, {40, 100, 16}, {0, 0, 0}});
    check_script("without bound", &c, (Phase[]){{10, INFINITY, 2}, {5, INFINITY, 4}, {1, INFINITY, 8}, {0, 0, 0}});
    check_script(
        "rising", &c,
        (Phase[]){{50, 1, 2}, {10, 5, 2}, {50, 7, 4}, {5, 9, 4}, {50, 15, 8}, {3, 17, 8}, {9, 33, 16}, {0, 0, 0}});
    check_script("just 2B is not above", &c, (Phase[]){{50, 4, 2}, {10, 4.0001, 2}, {50, 8, 4}, {0, 0, 0}});
    check_script("a break starts again", &c,
                 (Phase[]){{9, 9, 2},
                           {1, 3, 2},
                           {9, 9, 2},
                           {1, 4, 2},
                           {10, 9, 2},
                           {4, 9, 4},
                           {1, 1, 4},
                           {5, 9, 4},
                           {1, 1, 8},
                           {0, 0, 0}});
    check_script("unknown is not above", &c,
                 (Phase[]){{9, 50, 2}, {1, NAN, 2}, {9, 50, 2}, {1, 0, 2}, {10, 50, 2}, {1, 50, 4}, {0, 0, 0}});
    check_script("falling", &c, (Phase[]){{10, 40, 2}, {5, 20, 4}, {50, 12, 8}, {50, 1, 8}, {50, 0, 8}, {0, 0, 0}});
    c.batch_min = 3;
    c.batch_max = 10; // no power of two: the last rung is the cap itself; 2,100 tokens = 7 steps of 3 rows, 4 of 6
    check_script("capped", &c, (Phase[]){{7, 100, 3}, {4, 100, 6}, {50, 100, 10}, {0, 0, 0}});
    check_script("capped: still above 2B", &c, (Phase[]){{7, 11, 3}, {50, 11, 6}, {0, 0, 0}});
}

static void test_target(void) {
    RampConfig c = config_make(RAMP_GNS);
    c.kappa = 4;
    Ramp r = ramp_make(&c);
    CHECK_CLOSE(ramp_target(&r, 2.5, 3), 30, 1e-15, 1);
    c.mode = RAMP_FIXED;
    Ramp fixed = ramp_make(&c);
    for (int i = 0; i < 100; i++) ramp_observe(&fixed, 800, 1e9);
    CHECK(ramp_batch(&fixed, 100, 80000) == 8 && fixed.state.batch == 0 && fixed.state.tokens_above == 0,
          "a fixed batch listened");
}

// ---- simulated gradient noise ---------------------------------------------------------------------------------------

enum { MAX_STEPS = 20000, DIRECTIONS = 40 };

// The truth of a trajectory: |G|^2 as the share x of the run goes by; tr(Sigma) is 1.
typedef double (*Truth)(double x);
static double truth_rising(double x) { return 0.5 * pow(0.001, x); } // GNS from 2 to 2,000
static double truth_far(double x) { return 1e-9 * (1 + x); }
static double truth_falling(double x) { return x < 0.5 ? 0.05 : 1; } // GNS 20, then 1

// One step's norms for isotropic noise in DIRECTIONS directions: the exact distribution, by way of the mean
// gradient's noise and, apart from it, the sum of squares around the mean. noise 0: their expected values.
static void norms_draw(double g2, double B, double noise, uint64_t step, double *n, double *q) {
    double spread = 0, around = 0, along = 0;
    for (uint64_t d = 0; d < DIRECTIONS; d++) {
        double z = rng_normal(31, step, d);
        if (d == 0) along = z;
        spread += z * z / DIRECTIONS;
    }
    double freedom = (B - 1) * DIRECTIONS;
    around = (B - 1) * (1 + noise * sqrt(2 / freedom) * rng_normal(32, step, 0)); // of trace 1
    *q = g2 + noise * 2 * sqrt(g2 / DIRECTIONS / B) * along + (1 + noise * (spread - 1)) / B;
    *n = *q + around / B;
}

typedef struct {
    int steps;
    double tokens[MAX_STEPS]; // of each step
    double lower[MAX_STEPS];  // of the target, seen after it
    int64_t rows[MAX_STEPS];
    double start[MAX_STEPS]; // tokens before it
    int insignificant;
} Run;

static void run_simulated(Run *run, const RampConfig *c, Truth truth, double noise, uint64_t seed) {
    Ramp r = ramp_make(c);
    GnsTracker t;
    gns_init(&t, c->half_life_tokens);
    double done = 0;
    run->insignificant = 0;
    for (run->steps = 0; done < c->train_tokens && run->steps < MAX_STEPS; run->steps++) {
        int i = run->steps;
        run->start[i] = done;
        run->rows[i] = ramp_batch(&r, i, done);
        run->tokens[i] = (double)(run->rows[i] * c->seq_len);
        double n, q;
        norms_draw(truth(done / c->train_tokens), (double)run->rows[i], noise, seed * MAX_STEPS + (uint64_t)i, &n, &q);
        gns_update(&t, (double)run->rows[i], n, q, run->tokens[i]);
        GnsEstimate e = gns_estimate(&t);
        run->insignificant += !e.significant;
        run->lower[i] = ramp_target(&r, 1, e.lower);
        ramp_observe(&r, run->tokens[i], run->lower[i]);
        done += run->tokens[i];
    }
    ramp_destroy(&r);
}

// The rule told backwards: before step i, had the bound been above 2B at every step since the present rung's first,
// or since its last break, for two half-lives? Answers with the batch of step i, given those before.
static int64_t rule(const RampConfig *c, const Run *run, int i) {
    if (i == 0) return c->batch_min;
    int64_t rows = run->rows[i - 1];
    double above = 0;
    for (int j = i - 1; j >= 0 && run->rows[j] == rows && run->lower[j] > 2.0 * (double)rows; j--)
        above += run->tokens[j];
    if (above < 2 * c->half_life_tokens || rows == c->batch_max) return rows;
    return 2 * rows > c->batch_max ? c->batch_max : 2 * rows;
}

static void check_rule(const char *name, const RampConfig *c, const Run *run) {
    for (int i = 0; i < run->steps; i++)
        CHECK(run->rows[i] == rule(c, run, i), "%s, step %d: %lld rows, want %lld", name, i, (long long)run->rows[i],
              (long long)rule(c, run, i));
}

// The first token at which each rung was taken: rungs 2, 4, 8 ... in turn. Returns how many.
static int rungs(const Run *run, double first[], int64_t rows[], int max) {
    int count = 0;
    for (int i = 0; i < run->steps && count < max; i++) {
        if (i > 0 && run->rows[i] == run->rows[i - 1]) continue;
        first[count] = run->start[i];
        rows[count++] = run->rows[i];
    }
    return count;
}

static RampConfig simulated_config(void) {
    RampConfig c = config_make(RAMP_GNS);
    c.batch_max = 64;
    c.half_life_tokens = 10000; // 50 steps of 2 rows, 3 of 32
    return c;
}

static void check_rungs(const char *name, const Run *run, const int64_t *want, int count) {
    double first[32];
    int64_t rows[32];
    int got = rungs(run, first, rows, 32);
    CHECK(got == count, "%s: %d rungs, want %d", name, got, count);
    for (int i = 0; i < got && i < count; i++)
        CHECK(rows[i] == want[i], "%s: rung %d has %lld rows, want %lld", name, i, (long long)rows[i],
              (long long)want[i]);
}

static const int64_t all_rungs[] = {2, 4, 8, 16, 32, 64};

static Run run; // one at a time: it is large

// Without noise the bound is the scale, up to the average's lag: each rung is due two half-lives after the truth passed
// 2B, and taken within another two.
static void test_rising(void) {
    RampConfig c = simulated_config();
    run_simulated(&run, &c, truth_rising, 0, 0);
    check_rule("rising", &c, &run);
    check_rungs("rising", &run, all_rungs, 6);
    double first[32];
    int64_t rows[32];
    int count = rungs(&run, first, rows, 32);
    for (int i = 1; i < count; i++) {
        double crossed = c.train_tokens * log((double)rows[i - 1]) / log(1000); // 1 / truth = 2 rows
        double due = crossed + 2 * c.half_life_tokens;
        double step = (double)(rows[i - 1] * c.seq_len), late = first[i] - due;
        CHECK(late >= 0 && late <= 2 * c.half_life_tokens + step, "%lld rows at %g, due at %g", (long long)rows[i],
              first[i], due);
    }
}

static void test_noisy(void) {
    RampConfig c = simulated_config();
    for (uint64_t seed = 0; seed < 10; seed++) {
        run_simulated(&run, &c, truth_rising, 1, seed);
        check_rule("noisy", &c, &run);
        double first[32];
        int64_t rows[32];
        int count = rungs(&run, first, rows, 32);
        for (int i = 1; i < count; i++) {
            CHECK(rows[i] == all_rungs[i], "seed %d: rung %d has %lld rows", (int)seed, i, (long long)rows[i]);
            double crossed = c.train_tokens * log((double)rows[i - 1]) / log(1000);
            CHECK(first[i] > crossed, "seed %d: %lld rows at %g, before the scale reached them at %g", (int)seed,
                  (long long)rows[i], first[i], crossed);
        }
        CHECK(count >= 5, "seed %d: only %d rungs", (int)seed, count);
    }
}

// A gradient lost in noise: the batch must grow all the same, a rung every two half-lives or so.
static void test_far_above(void) {
    RampConfig c = simulated_config();
    for (uint64_t seed = 0; seed < 5; seed++) {
        run_simulated(&run, &c, truth_far, 1, 100 + seed);
        check_rule("far above", &c, &run);
        check_rungs("far above", &run, all_rungs, 6);
        CHECK(run.insignificant > 0.9 * run.steps, "G2 was significant in %d of %d", run.steps - run.insignificant,
              run.steps);
        CHECK(run.rows[run.steps - 1] == 64, "ended at %lld rows", (long long)run.rows[run.steps - 1]);
    }
    run_simulated(&run, &c, truth_far, 0, 0);
    check_rungs("far above, no noise", &run, all_rungs, 6);
}

// Up to where 2B fails to lie below 20, and not down again with the scale.
static void test_falling(void) {
    RampConfig c = simulated_config();
    run_simulated(&run, &c, truth_falling, 0, 0);
    check_rule("falling", &c, &run);
    check_rungs("falling", &run, all_rungs, 4); // 2, 4, 8, 16: 20 is above 16 but not above 32
    run_simulated(&run, &c, truth_falling, 1, 200);
    check_rule("falling, noisy", &c, &run);
    for (int i = 1; i < run.steps; i++) CHECK(run.rows[i] >= run.rows[i - 1], "shrank at step %d", i);
}

// A new ramp with the state of any step continues as the old one does.
static void test_resume(void) {
    enum { STEPS = 300 };
    RampConfig c = config_make(RAMP_GNS);
    c.batch_max = 64;
    RampState states[STEPS + 1];
    for (int cut = 0; cut < STEPS; cut++) { // the first round is the uninterrupted run
        Ramp r = ramp_make(&c);
        if (cut > 0) r.state = states[cut];
        for (int i = cut; i < STEPS; i++) {
            if (cut == 0) states[i] = r.state;
            CHECK(r.state.batch == states[i].batch && r.state.tokens_above == states[i].tokens_above,
                  "cut at %d, step %d: %lld rows, want %lld", cut, i, (long long)r.state.batch,
                  (long long)states[i].batch);
            double lower = 300 * rng_uniform(3, 0, (uint64_t)i / 17);
            ramp_observe(&r, (double)(ramp_batch(&r, i, 0) * c.seq_len), lower);
        }
    }
    CHECK(states[STEPS - 1].batch > 8, "only %lld rows", (long long)states[STEPS - 1].batch);
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

// After warm-up rows x schedule is constant up to rounding, and the rate is the root of lr0 x schedule.
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
    c.schedule.final_frac = 0; // the rate reaches 0: the cap holds
    r = ramp_make(&c);
    CHECK(ramp_batch(&r, 9, 1e6) == 1500, "%lld rows at rate 0", (long long)ramp_batch(&r, 9, 1e6));
    c.schedule.kind = SCHEDULE_CONSTANT;
    r = ramp_make(&c);
    CHECK(ramp_batch(&r, 9, 9e5) == 100, "a constant rate moved the batch");
}

// What schedules must not do to a batch: a rate of 0 or worse, below the smallest batch it stays.
static void test_seesaw_without_a_rate(void) {
    RampConfig c = config_make(RAMP_SEESAW);
    Error e = {0};
    Ramp r;
    for (int i = 0; i < 3; i++) {
        c.schedule.lr = (const double[]){0, -1, NAN}[i];
        CHECK_ERROR(ramp_create(&r, &c, NULL, &e), &e, ERR_USAGE, "--ramp seesaw");
        CHECK(strstr(e.what, "--lr") && e.hint[0], "'%s' (%s)", e.what, e.hint);
    }
    c.schedule.lr = 0.01;
    r = ramp_make(&c);
    r.config.schedule.lr = NAN;
    CHECK(ramp_batch(&r, 9, 5e5) == c.batch_min, "%lld rows at rate NaN", (long long)ramp_batch(&r, 9, 5e5));
    r.config.schedule.lr = 0;
    CHECK(ramp_batch(&r, 9, 5e5) == c.batch_min, "%lld rows at rate 0", (long long)ramp_batch(&r, 9, 5e5));
}

static void test_lr(void) {
    RampConfig c = config_make(RAMP_GNS);
    const double powers[] = {0, 0.5, 1};
    const double want[] = {0.003, 0.006, 0.012};
    for (int i = 0; i < 3; i++) {
        c.lr_power = powers[i];
        Ramp r = ramp_make(&c);
        CHECK_CLOSE(ramp_lr(&r, 0.003, 32), want[i], 1e-15, 0);
        CHECK(ramp_lr(&r, 0.003, 8) == 0.003, "the reference batch has the schedule's rate");
    }
    c = config_make(RAMP_FIXED); // a last step that the horizon cuts: the same rule in every mode
    Ramp r = ramp_make(&c);
    CHECK_CLOSE(ramp_lr(&r, 0.003, 2), 0.0015, 1e-15, 0);
}

static void test_parse(void) {
    RampMode mode;
    const char *path;
    Error e = {0};
    for (int m = 0; m < RAMP_MODES; m++) {
        if (m == RAMP_REPLAY) continue;
        CHECK_OK(ramp_parse(ramp_mode_names[m], &mode, &path, &e), &e);
        CHECK((int)mode == m && !path, "%s", ramp_mode_names[m]);
    }
    CHECK_OK(ramp_parse("replay:a:b/c.jsonl", &mode, &path, &e), &e);
    CHECK(mode == RAMP_REPLAY && path && strcmp(path, "a:b/c.jsonl") == 0, "path");
    const char *bad[] = {"", "replay", "replay:", "gns:", "gns:x", "fix", "fixedly", "GNS", ":"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_ERROR(ramp_parse(bad[i], &mode, &path, &e), &e, ERR_USAGE, "--ramp");
}

static void test_bad_config(void) {
    Ramp r;
    Error e = {0};
    RampConfig c = config_make(RAMP_LINEAR);
    c.batch_min = 17;
    CHECK_ERROR(ramp_create(&r, &c, NULL, &e), &e, ERR_USAGE, "--batch-min 17");
    c.batch_min = 0;
    CHECK_ERROR(ramp_create(&r, &c, NULL, &e), &e, ERR_USAGE, "--batch-min 0");
    c = config_make(RAMP_GNS);
    c.batch_min = 1;
    CHECK_ERROR(ramp_create(&r, &c, NULL, &e), &e, ERR_USAGE, "1 row");
    c = config_make(RAMP_GNS);
    c.kappa = NAN;
    CHECK_ERROR(ramp_create(&r, &c, NULL, &e), &e, ERR_USAGE, "--ramp-kappa");
    c = config_make(RAMP_GNS);
    c.half_life_tokens = 0;
    CHECK_ERROR(ramp_create(&r, &c, NULL, &e), &e, ERR_USAGE, "--gns-half-life");
    c = config_make(RAMP_FIXED);
    c.train_tokens = NAN;
    CHECK_ERROR(ramp_create(&r, &c, NULL, &e), &e, ERR_USAGE, "horizon");
    CHECK_ERROR(
        ramp_create(&r, &(RampConfig){.mode = RAMP_REPLAY, .batch_ref = 1, .seq_len = 1, .train_tokens = 1}, NULL, &e),
        &e, ERR_USAGE, "replay");
}

// A checkpoint's batch under today's options; and the most that a step can take by them.
static void test_settle(void) {
    RampConfig c = config_make(RAMP_GNS);
    Error e = {0};
    Ramp r = ramp_make(&c);
    static const int64_t cases[][2] = {{1, 2}, {2, 2}, {8, 8}, {16, 16}, {64, 16}}; // 2 to 16 rows are allowed
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double want = cases[i][0] == cases[i][1] ? 1900 : 0; // the bound was not above twice another rung
        r.state = (RampState){.batch = cases[i][0], .tokens_above = 1900};
        CHECK_OK(ramp_settle(&r, 7, 7000, &e), &e);
        CHECK(r.state.batch == cases[i][1], "%lld rows become %lld", (long long)cases[i][0], (long long)r.state.batch);
        CHECK(r.state.tokens_above == want, "%lld rows: %g tokens above", (long long)cases[i][0], r.state.tokens_above);
    }
    CHECK(ramp_largest(&r) == 16 && ramp_smallest(&r) == 2, "gns: %lld", (long long)ramp_largest(&r));
    ramp_observe(&r, 100, INFINITY); // at the top nothing is counted that a larger --batch-max would inherit
    CHECK(r.state.batch == 16 && r.state.tokens_above == 0, "%g tokens above", r.state.tokens_above);
    r.config.mode = RAMP_FIXED;
    CHECK(ramp_largest(&r) == 8 && ramp_smallest(&r) == 8, "fixed: %lld", (long long)ramp_largest(&r));
    ramp_destroy(&r);
}

// ---- replay ---------------------------------------------------------------------------------------------------------

static char directory[256], file[300];

static void file_put(const char *text, size_t bytes) {
    FILE *f = fopen(file, "wb");
    CHECK(f && fwrite(text, 1, bytes, f) == bytes, "cannot write %s", file);
    if (f) fclose(f);
}

// A run of a simulated gns ramp, written the way a metrics file is (validation lines in between, the last step cut to
// end on the horizon), comes back step by step.
static void test_replay(void) {
    RampConfig c = simulated_config();
    c.train_tokens = 999900;
    run_simulated(&run, &c, truth_rising, 1, 300);
    FILE *f = fopen(file, "w");
    CHECK(f != NULL, "cannot write %s", file);
    if (!f) return;
    double tokens = 0;
    for (int i = 0; i < run.steps; i++) {
        double left = (c.train_tokens - tokens) / 100;
        if (left < (double)run.rows[i]) run.rows[i] = (int64_t)left;
        tokens += (double)run.rows[i] * 100;
        if (i % 50 == 0) fprintf(f, "{\"step\": %d, \"val_loss\": 2.5, \"nested\": {\"batch\": -1}}\n", i);
        fprintf(f, "{\"step\": %d, \"tokens\": %.0f, \"batch\": %lld, \"gns_ln\": null}\n", i + 1, tokens,
                (long long)run.rows[i]);
    }
    fclose(f);
    CHECK(tokens == c.train_tokens, "%g tokens", tokens);
    c.mode = RAMP_REPLAY;
    Ramp r;
    Error e = {0};
    CHECK_OK(ramp_create(&r, &c, file, &e), &e);
    CHECK(r.replay_steps == run.steps, "%lld steps, want %d", (long long)r.replay_steps, run.steps);
    for (int i = 0; i < run.steps && i < r.replay_steps; i++)
        CHECK(ramp_batch(&r, i, run.start[i]) == run.rows[i], "step %d: %lld rows, want %lld", i,
              (long long)ramp_batch(&r, i, run.start[i]), (long long)run.rows[i]);
    int64_t most = 0;
    for (int i = 0; i < run.steps; i++) most = run.rows[i] > most ? run.rows[i] : most;
    CHECK(ramp_largest(&r) == most, "at most %lld rows, want %lld", (long long)ramp_largest(&r), (long long)most);
    r.config.batch_max = 10 * most; // says nothing of a replay
    CHECK(ramp_largest(&r) == most, "at most %lld rows, want %lld", (long long)ramp_largest(&r), (long long)most);
    ramp_destroy(&r);
    CHECK(r.replay == NULL, "destroyed");
    c.train_tokens += 100; // one row more than the file holds
    CHECK_ERROR(ramp_create(&r, &c, file, &e), &e, ERR_INPUT, "ends at line");
    CHECK(strstr(e.what, file) != NULL, "'%s' does not name the file", e.what);
}

static void replay_make(Ramp *r, double train_tokens, const int64_t *rows, int steps) {
    char text[1024];
    int length = 0;
    RampConfig c = config_make(RAMP_REPLAY);
    Error e = {0};
    c.train_tokens = train_tokens;
    for (int i = 0; i < steps; i++)
        length += snprintf(text + length, sizeof text - (size_t)length, "{\"step\": %d, \"batch\": %lld}\n", i + 1,
                           (long long)rows[i]);
    file_put(text, (size_t)length);
    CHECK_OK(ramp_create(r, &c, file, &e), &e);
}

// A resumed replay must have the file's tokens, less what an earlier horizon cut from one step, or be complete. 100 tokens
// a row.
static void test_replay_resumed(void) {
    static const int64_t rows[] = {5, 3, 4, 8, 1, 1};
    enum { REST = 8 }; // after the file's end: the largest batch, or what is left
    static const struct {
        int64_t step, tokens;
        double horizon;
        int64_t next; // rows of the file's next step; 0: refused
    } cases[] = {
        {0, 0, 2000, 5},    {1, 500, 2000, 3},       {3, 1200, 2000, 8}, {4, 2000, 2000, 1},    {1, 300, 300, 3},
        {5, 2100, 2200, 1}, {700, 2200, 2200, REST}, {1, 100, 2000, 3},  {2, 600, 2000, 4},     {3, 1100, 2000, 8},
        {3, 800, 2000, 8},  {4, 1300, 2200, 1},      {5, 1400, 2200, 1}, {6, 2100, 2200, REST}, {6, 1500, 2200, REST},
        {1, 0, 2000, 0},    {3, 1300, 2000, 0},      {3, 700, 2000, 0},  {4, 1200, 2200, 0},    {5, 1300, 2200, 0},
        {7, 2100, 2200, 0}, {700, 2100, 2200, 0},    {0, 100, 2000, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Ramp r;
        Error e = {0};
        replay_make(&r, cases[i].horizon, rows, 6);
        int code = ramp_settle(&r, cases[i].step, cases[i].tokens, &e);
        CHECK(code == (cases[i].next ? 0 : ERR_INPUT), "case %d: exit code %d", (int)i, code);
        if (code) CHECK(strstr(e.what, file) && e.hint[0], "'%s' (%s)", e.what, e.hint);
        else // and the sequence continues from there
            CHECK(ramp_batch(&r, cases[i].step, (double)cases[i].tokens) == cases[i].next, "case %d", (int)i);
        ramp_destroy(&r);
    }
    Ramp r;
    Error e = {0};
    replay_make(&r, 2000, (const int64_t[]){5, 3, 4, 8}, 4);
    CHECK_ERROR(ramp_settle(&r, 9, 900, &e), &e, ERR_INPUT, "up to its step 4 it has 2000 tokens");
    CHECK(strstr(e.what, "9 steps of 900 tokens"), "'%s'", e.what);
    ramp_destroy(&r);
}

// Wherever an earlier horizon cut a step, the run reaches its end, resumes after any of its steps, and takes the missing
// tokens in one step after the file's last.
static void test_replay_cut(void) {
    static const int64_t rows[] = {5, 3, 4, 8, 1, 2};
    for (int64_t cut = 1; cut < 23; cut++) {
        Ramp r;
        Error e = {0};
        int64_t step = 0, tokens = 0, batch;
        replay_make(&r, 100 * (double)cut, rows, 6);
        for (; (batch = ramp_next(&r, step, tokens)) > 0; step++) tokens += 100 * batch;
        ramp_destroy(&r);
        int64_t lag = -tokens;
        for (int64_t i = 0; i < step; i++) lag += 100 * rows[i];
        replay_make(&r, 2300, rows, 6);
        CHECK_OK(ramp_settle(&r, step, tokens, &e), &e);
        for (; (batch = ramp_next(&r, step, tokens)) > 0; step++) {
            CHECK(batch == (step < 6 ? rows[step] : lag / 100), "cut at %lld, step %lld: %lld rows", (long long)cut,
                  (long long)step, (long long)batch);
            CHECK(batch <= ramp_largest(&r), "%lld rows", (long long)batch);
            tokens += 100 * batch;
            CHECK_OK(ramp_settle(&r, step + 1, tokens, &e), &e);
        }
        CHECK(tokens == 2300 && step == 6 + (lag > 0), "cut at %lld: %lld steps, %lld tokens", (long long)cut,
              (long long)step, (long long)tokens);
        ramp_destroy(&r);
    }
}

// The fewest rows of a step, but for the last, which may have been cut.
static void test_replay_smallest(void) {
    static const struct {
        double horizon;
        int64_t fewest;
    } cases[] = {{500, 5},  {100, 5},  {501, 5},  {801, 3},  {1200, 3},
                 {1900, 3}, {2000, 3}, {2001, 3}, {2050, 3}, {2101, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Ramp r;
        replay_make(&r, cases[i].horizon, (const int64_t[]){5, 3, 4, 8, 1, 9}, 6);
        CHECK(ramp_smallest(&r) == cases[i].fewest, "horizon %g: %lld rows, want %lld", cases[i].horizon,
              (long long)ramp_smallest(&r), (long long)cases[i].fewest);
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
        {GOOD "{\"step\":2,\"batch\":4} x\n", "line 2: not a JSON object"},
        {GOOD "\n", "line 2: not a JSON object"},
        {GOOD "[]\n", "line 2: not a JSON object"},
        {GOOD "7", "line 2: not a JSON object"},
        {"PK\x03\x04", "line 1: not a JSON object"},
        {GOOD "{\"step\":3,\"batch\":4}\n", "line 2: `step` is not 2"},
        {GOOD GOOD, "line 2: `step` is not 2"},
        {"{\"step\":0,\"batch\":4}\n", "line 1: `step` is not 1"},
        {"{\"step\":\"1\",\"batch\":4}\n", "line 1: `step` is not 1"},
        {"{\"step\":1,\"batch\":\"4\"}\n", "line 1: `batch` is not a number of rows"},
        {"{\"step\":1,\"batch\":0}\n", "line 1: `batch` is not a number of rows"},
        {"{\"step\":1,\"batch\":-4}\n", "line 1: `batch` is not a number of rows"},
        {"{\"step\":1,\"batch\":4.5}\n", "line 1: `batch` is not a number of rows"},
        {"{\"step\":1,\"batch\":1e300}\n", "line 1: `batch` is not a number of rows"},
        {"{\"step\":1,\"batch\":null}\n", "line 1: `batch` is not a number of rows"},
        {"{\"step\":1,\"batch\":NaN}\n", "line 1: not a JSON object"},
    };
    RampConfig c = config_make(RAMP_REPLAY);
    c.train_tokens = 500; // 5 rows: one more than GOOD has
    Ramp r;
    Error e = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        file_put(cases[i].text, strlen(cases[i].text));
        CHECK_ERROR(ramp_create(&r, &c, file, &e), &e, ERR_INPUT, cases[i].says);
        CHECK(strstr(e.what, file) == e.what && e.hint[0], "'%s' (%s)", e.what, e.hint);
    }
    file_put(GOOD "{\"st\0p\":2}\n", sizeof GOOD "{\"st\0p\":2}\n" - 1);
    CHECK_ERROR(ramp_create(&r, &c, file, &e), &e, ERR_INPUT, "line 2: a NUL byte");
    file_put(GOOD "{\"step\":2,\"batch\":1}", strlen(GOOD "{\"step\":2,\"batch\":1}")); // no newline at the end: fine
    CHECK_OK(ramp_create(&r, &c, file, &e), &e);
    CHECK(ramp_batch(&r, 0, 0) == 4 && ramp_batch(&r, 1, 400) == 1, "batches");
    ramp_destroy(&r);
    unlink(file);
    CHECK_ERROR(ramp_create(&r, &c, file, &e), &e, ERR_INPUT, file);
}

int main(void) {
    const char *base = getenv("TMPDIR");
    snprintf(directory, sizeof directory, "%s/test_ramp_XXXXXX", base ? base : "/tmp");
    if (!mkdtemp(directory)) return ERR_INTERNAL;
    snprintf(file, sizeof file, "%s/metrics.jsonl", directory);
    RUN(test_scripts);
    RUN(test_target);
    RUN(test_rising);
    RUN(test_noisy);
    RUN(test_far_above);
    RUN(test_falling);
    RUN(test_resume);
    RUN(test_linear);
    RUN(test_seesaw);
    RUN(test_seesaw_without_a_rate);
    RUN(test_lr);
    RUN(test_parse);
    RUN(test_bad_config);
    RUN(test_settle);
    RUN(test_replay);
    RUN(test_replay_resumed);
    RUN(test_replay_cut);
    RUN(test_replay_smallest);
    RUN(test_replay_bad_files);
    unlink(file);
    rmdir(directory);
    return test_summary();
}
