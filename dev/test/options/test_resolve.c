// Several options together: values that follow, contradictions, options without effect. test_options.c checks single
// options.
#include "options_test.h"

#define TRAIN "--train a --train-tokens 1e6 "

static void test_horizon_and_batch(void) {
#define GNS "--ramp gns --batch-min 2 --batch-max 32 "
    static const char *const cases[][2] = {
        {"--train a --steps 10 --batch-tokens 512 --seq-len 64",
         "horizon_tokens 5120, batch_ref_rows 8, batch_min_rows 8, batch_max_rows 8, gns_half_life_tokens 25.6, "
         "gns_exact_interval 0, ramp_lr_power 0.5"},
        {"--train a --train-tokens 1000 --seq-len 64 --gns-half-life 77",
         "horizon_tokens 960, gns_half_life_tokens 77"},
        {TRAIN GNS,
         "batch_ref_rows 2, batch_max_rows 32, gns_exact_interval 0, gns_calibrates true, ramp_lr_power 0.8"},
        {TRAIN GNS "--gns-ratio 2.5", "gns_exact_interval 0, gns_calibrates false"},
        {TRAIN GNS "--ramp-lr-power 0", "ramp_lr_power 0"},
        {TRAIN "--ramp linear --batch-min 2 --batch-max 32", "batch_ref_rows 2, ramp_lr_power 0.5"},
        {TRAIN "--ramp seesaw --batch-min 2 --batch-max 32", "ramp_lr_power 0.5"},
        {TRAIN "--ramp seesaw --batch-min 2 --batch-max 32 --ramp-lr-power 0.6", "ramp_lr_power 0.6"},
        {TRAIN "--ramp replay:x --micro-batch 3", "batch_ref_rows 3, batch_min_rows 3, ramp_lr_power 0.8"},
        {"--train a --steps 1 --gns exact", "gns_exact_interval 1"},
        {"--train a --steps 1 --gns exact --gns-exact-every 8", "gns_exact_interval 8"},
        {"--dry-run", "horizon_tokens 0"},
        {"--sample-only --model some/directory", "horizon_tokens 0"},
        {"--train a --steps 1 --model d4 --layers 2 --vocab-size 256", "layers 2, vocab_size 256"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_OK(resolve(&o, cases[i][0], &e), &e);
        check_options(&o, cases[i][0], cases[i][1]);
    }
    CHECK_OK(resolve(&o, TRAIN "--ramp replay:x/metrics.jsonl --batch-tokens 4096", &e), &e);
    CHECK(o.run.ramp_mode == RAMP_REPLAY && strcmp(o.run.ramp_argument, "x/metrics.jsonl") == 0, "replay");
}

// --epochs sets the run's length only once the data's number of rows is known (options_resolve_epochs).
static void test_epochs(void) {
    CHECK_OK(resolve(&o, "--train a --epochs 1.5 --seq-len 64", &e), &e);
    CHECK(o.run.horizon_tokens == 0, "known before the data");
    CHECK_OK(options_resolve_epochs(&o, 101, &e), &e);
    CHECK(o.run.horizon_tokens == 152 * 64, "%lld tokens", (long long)o.run.horizon_tokens);
    CHECK_CLOSE(o.run.gns_half_life_tokens, 0.005 * 152 * 64, 1e-15, 0);
    CHECK_OK(resolve(&o, "--train a --epochs 0.29 --seq-len 1", &e), &e); // in floating point 0.29 x 100 < 29
    CHECK(options_resolve_epochs(&o, 100, &e) == 0 && o.run.horizon_tokens == 29, "%lld",
          (long long)o.run.horizon_tokens);
    CHECK_ERROR(options_resolve_epochs(&o, 1, &e), &e, ERR_USAGE, "--epochs 0.29 of 1 rows");
    CHECK_OK(resolve(&o, "--train a --epochs 1e6", &e), &e);
    CHECK_ERROR(options_resolve_epochs(&o, 1000000, &e), &e, ERR_USAGE, "means 1e+12 rows");
    CHECK_OK(resolve(&o, "--train a --epochs 2 --ramp linear --batch-min 1 --batch-max 2", &e), &e);
    CHECK_OK(resolve(&o, "--train a --steps 7 --batch-tokens 1024", &e), &e);
    CHECK_OK(options_resolve_epochs(&o, 100, &e), &e);
    CHECK(o.run.horizon_tokens == 7 * 1024, "without --epochs nothing changes");
    CHECK_OK(resolve(&o, "--dry-run --epochs 2", &e), &e);
    CHECK(strstr(o.notes, "no effect: --epochs (the run refuses it) without --train"), "%s", o.notes);
    static const char *const bad[] = {"0", "-1", "nan", "inf", "1e7", "x"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_ERROR(resolve(&o, path_of("--train a --epochs %s", bad[i]), &e), &e, ERR_USAGE, "--epochs");
}

static void test_contradictions(void) {
    static const struct {
        const char *words, *mention;
    } cases[] = {
        {"--train a", "--train-tokens nor --steps"},
        {"--steps 5", "--train is missing"},
        {"--train a --steps 5 --train-tokens 5", "--steps and --train-tokens"},
        {"--train a --steps 5 --epochs 5", "--steps and --epochs"},
        {"--train a --epochs 5 --train-tokens 5", "--train-tokens and --epochs"},
        {"--train a --steps 5 --ramp linear --batch-min 1 --batch-max 2", "--steps"},
        {"--train a --train-tokens 5000 --ramp linear", "--batch-min"},
        {"--train a --train-tokens 5000 --ramp steps:64", "--ramp steps:64: no list of batches"},
        {"--train a --train-tokens 5000 --ramp seesaw --batch-min 1", "--batch-max"},
        {"--train a --train-tokens 5000 --ramp gns --batch-min 3 --batch-max 2", "--batch-min 3 is above"},
        {"--train a --steps 5 --ramp steep", "--ramp"},
        {"--train a --steps 5 --ramp replay:", "--ramp"},
        {"--train a --train-tokens 5000 --ramp gns --batch-min 2 --batch-max 3 --gns off", "--gns off"},
        {"--train a --train-tokens 5000 --ramp gns --batch-min 2 --batch-max 3 --gns-exact-every 0", "--gns-exact"},
        {"--train a --train-tokens 5000 --ramp gns --batch-min 1 --batch-max 2", "a batch of 1 row"},
        {"--train a --train-tokens 5000 --ramp seesaw --batch-min 1 --batch-max 2 --lr 0", "--lr is 0"},
        {"--train a --steps 5 --batch-tokens 1000 --seq-len 64", "multiple of --seq-len"},
        {"--train a --train-tokens 10 --seq-len 64", "less than --seq-len"},
        {"--train a --steps 1e9 --batch-tokens 999999995904", "--steps"},
        {"--train a --steps 5 --model=", "--model"},
        {"--train a --steps 5 --out=", "--out"},
        {"--sample-only", "--sample-only"},
        {"--eval-only --val b", "--eval-only of the preset"},
        {"--eval-only --model dir", "nothing to evaluate"},
        {"--eval-only --model dir --val b --sample-only", "--sample-only and --eval-only"},
        {"--eval-only --model dir --val b --check c", "--eval-only and --check"},
        {"--train a --steps 5 --hellaswag-every 5 --hellaswag=", "--hellaswag is empty"},
        {"--train a --steps 5 --check=", "--check is empty"}, // as from --check="$UNSET" in a script
        {"--check dir --sample-only --model dir", "--sample-only and --check"},
        {"--train a --steps 5 --train-hours 1", "--steps and --train-hours"},
        {"--train a --steps 5 --zero 1 --reduce micro-step", "--reduce micro-step is only useful with --zero 2 or 3"},
        {"--dry-run --micro-batch 65536 --seq-len 65536", "--micro-batch 65536 x --seq-len 65536"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_ERROR(resolve(&o, cases[i].words, &e), &e, ERR_USAGE, cases[i].mention);
        CHECK(e.hint[0], "%s: no hint", cases[i].words);
    }
    CHECK_ERROR(resolve(&o, "--train a --batch-tokens 1000 --seq-len 64", &e), &e, ERR_USAGE, "--batch-tokens 1000");
    CHECK(strstr(e.hint, "use 960"), "%s", e.hint);
}

// Options without effect. REFUSED: the error names the option and what it needs. NOTED: llm.c's scripts give the
// option, another option overrides it, or nothing is trained. SILENT: the option has an effect, or its value (0, empty)
// asks for no effect.
typedef enum { REFUSED, NOTED, SILENT } Effect;
// clang-format off
static const struct {
    Effect effect;
    const char *base, *words, *says[2];
} effects[] = {
    {REFUSED, TRAIN, "--val-every 5", {"--val-every", "--val"}},
    {REFUSED, TRAIN, "--val b --patience 3", {"--patience", "--keep-best"}},
    {REFUSED, TRAIN, "--prompt x", {"--prompt", "--sample-every"}},
    {REFUSED, "", "--prompt x --model dir", {"--prompt", "--sample-only"}},
    {REFUSED, TRAIN, "--top-k 5", {"--top-k", "--sample-every"}},
    {REFUSED, TRAIN, "--hellaswag q", {"--hellaswag", "--hellaswag-every"}},
    {REFUSED, TRAIN, "--batch-min 3", {"--batch-min", "--ramp"}},
    {REFUSED, TRAIN, "--ramp steps:0:4,64:8 --batch-max 6", {"--batch-max", "--ramp linear"}},
    {REFUSED, TRAIN, "--ramp-kappa 1", {"--ramp-kappa", "--ramp gns"}},
    {REFUSED, TRAIN, "--gns off --gns-half-life 500", {"--gns-half-life", "--gns ln"}},
    {REFUSED, TRAIN, "--lr-schedule constant --final-lr-frac 0", {"--final-lr-frac", "--lr-schedule"}},
    {REFUSED, TRAIN, "--lr-schedule inverse-sqrt --final-lr-frac 0.5", {"--final-lr-frac", "--lr-schedule"}},
    {REFUSED, TRAIN, "--adamw-lr-factor 4", {"--adamw-lr-factor", "--optimizer muon"}},
    {REFUSED, TRAIN, "--price 3", {"--price", "--dry-run"}},
    {REFUSED, TRAIN, "--ranks 8", {"--ranks", "--dry-run"}},
    {REFUSED, TRAIN, "--on-spike rollback --checkpoint-every 0", {"--on-spike", "--checkpoint-every above 0"}},
    {REFUSED, TRAIN, "--gns off --outliers 5", {"--outliers", "--gns ln"}},
    {REFUSED, TRAIN, "--spike-z 5", {"--spike-z", "--on-spike rollback"}},
    {NOTED, TRAIN, "-v 250", {"--val-every", ""}},
    {NOTED, TRAIN, "-s 0 -g 144", {"--sample-tokens", ""}},
    {NOTED, TRAIN, "-k constant -q 0.0", {"--final-lr-frac", ""}},
    {NOTED, "", "--dry-run --val-every 250 --train a --steps 5", {"--val-every", "--val-every (the run refuses it) without --val\n"}},
    {NOTED, "", "--dry-run -v 250 --train a --steps 5", {"--val-every", "no effect: --val-every without --val\n"}},
    {REFUSED, "", "--check dir --price 3", {"has no effect without --dry-run", ""}},
    {REFUSED, "", "--train a --steps 5 --interactive", {"--interactive has no effect without --sample-only", ""}},
    {REFUSED, "", "--train a --steps 5 --fp8-head", {"--fp8-head has no effect without --dtype fp8 or fp8-dw", ""}},
    {SILENT, "", "--train a --steps 5 --interactive=false", {"", ""}},
    {SILENT, TRAIN, "--val b --val-every 5 --val-tokens 512", {0}},
    {SILENT, TRAIN, "--patience 0 --val-every 0", {0}},
    {SILENT, TRAIN, "--sample-every 9 --prompt x --temperature 0.5 --top-k 5 --sample-tokens 5", {0}},
    {SILENT, TRAIN, "--prompt= --top-k 0", {0}},
    {SILENT, TRAIN, "--ramp gns --batch-min 2 --batch-max 4 --ramp-kappa 2 --ramp-lr-power 0 --gns-ratio 2 --gns-half-life 500", {0}},
    {SILENT, TRAIN, "--ramp linear --batch-min 2 --batch-max 4 --ramp-lr-power 1 --gns off", {0}},
    {SILENT, TRAIN, "--gns off --gns-half-life 0 --gns-exact-every 0 --gns-ratio 0", {0}},
    {SILENT, TRAIN, "--lr-schedule wsd --final-lr-frac 0 --lr-hold-frac 0.4", {0}},
    {SILENT, TRAIN, "--zero 2 --reduce micro-step", {0}},
    {SILENT, TRAIN, "--dry-run --price 3 --device H200 --ranks 8 --link 50", {0}},
    {SILENT, "", "--sample-only --model dir --prompt x --temperature 0.5 --top-k 5 --top-p 0.9 --sample-tokens 5 --seed 3 --tokenizer t "
                 "--seq-len 64 --threads 1", {0}},
    {SILENT, "", "--eval-only --model dir --val b --val-tokens 512 --tokenizer t --micro-batch 2 --seq-len 64 --threads 1", {0}},
    {SILENT, "", "--check dir", {0}},
    {SILENT, "", "--dry-run --model d4 --layers 2", {0}},
};
// clang-format on

static bool one_note(const Options *o) {
    return strncmp(o->notes, "note: ", 6) == 0 && strchr(o->notes, '\n') == o->notes + strlen(o->notes) - 1;
}

static void test_effects(void) {
    for (size_t i = 0; i < sizeof effects / sizeof *effects; i++) {
        char words[300], config[300], *c = config;
        const char *const *says = effects[i].says;
        snprintf(words, sizeof words, "%s%s", effects[i].base, effects[i].words);
        int code = resolve(&o, words, &e);
        CHECK(code == (effects[i].effect == REFUSED ? ERR_USAGE : 0), "%s: %d", words, code);
        if (effects[i].effect == SILENT) CHECK(!*o.notes, "%s: %s", words, o.notes);
        if (effects[i].effect == NOTED)
            CHECK(one_note(&o) && strstr(o.notes, says[0]) && strstr(o.notes, says[1]), "%s: '%s'", words, o.notes);
        if (effects[i].effect != REFUSED) continue;
        CHECK(strstr(e.what, says[0]) && strstr(e.what, says[1]) && e.hint[0], "%s: %s (%s)", words, e.what, e.hint);
        if (!*effects[i].base) continue;
        // In a file an option without effect is only noted, since several runs may share the file.
        for (const char *w = words; *w; w++) {
            if (strncmp(w, " --", 3) == 0) *c++ = '\n', w += 2;
            else if (strncmp(w, "--", 2) == 0) w++;
            else *c++ = *w == ' ' ? '=' : *w;
        }
        *c = 0;
        CHECK_OK(parse_config(&o, config, &e), &e);
        CHECK_OK(options_resolve(&o, &e), &e);
        CHECK(one_note(&o) && strstr(o.notes, says[0]) && strstr(o.notes, says[1]), "%s: '%s'", config, o.notes);
    }
    // A training run's config file also serves --sample-only, without a note.
    CHECK_OK(parse_config(&o, "train = a\nlr = 1\nmodel = dir\nsample-only = true\n", &e), &e);
    CHECK_OK(options_resolve(&o, &e), &e);
    CHECK(!*o.notes, "%s", o.notes);
}

// Resolves `words` with a --config file of these lines.
static int resolve_with_file(Options *o, const char *lines, const char *words, Error *e) {
    char all[1000];
    write_text("file", lines);
    snprintf(all, sizeof all, "--config file %s", words);
    return resolve(o, all, e);
}

// The command line overrules a config file's options of the same group. A model from files brings its own shape.
static void test_the_command_line_wins(void) {
#define SHAPE "model = d4\nlayers = 2\nheads = 2\nchannels = 64\nvocab-size = 256\n"
    static const char *const cases[][3] = {
        {"steps = 50\n", "--train a --train-tokens 20000 --seq-len 10", "horizon_tokens 20000, steps 0"},
        {"train-tokens = 20000\n", "--train a --steps 3 --batch-tokens 40 --seq-len 10",
         "horizon_tokens 120, train_tokens 0"},
        {"train-tokens = 20000\n", "--train a --epochs 2", "epochs 2, train_tokens 0"},
        {"train-tokens = 20000\n", "-i a -x 3 -d 40 -t 10", "horizon_tokens 120, train_tokens 0"},
        {"steps = 50\n", TRAIN "--ramp gns --batch-min 2 --batch-max 8", "steps 0"},
        {"sample-only = true\nval = b\n", "--eval-only --model dir", "eval_only true, sample_only false"},
        {"eval-only = true\nval = b\n", "--check dir", "check 'dir', eval_only false"},
        {SHAPE, "--sample-only --model some/dir", "layers 0, heads 0, channels 0, vocab_size 0"},
        {SHAPE, "--train a --steps 5 --model d12", "layers 2, vocab_size 256"},
        {SHAPE, "--sample-only --model some/dir --layers 3", "layers 3"},
    };
    static const char *const bad[][3] = {
        // Both options in one place:
        {"steps = 50\ntrain-tokens = 20000\n", "--train a", "--steps and"},
        {"", "--train a --steps 5 --train-tokens 5", "--steps and"},
        {"steps = 50\nramp = linear\n", "--train a", "--steps does not"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_OK(resolve_with_file(&o, cases[i][0], cases[i][1], &e), &e);
        check_options(&o, cases[i][1], cases[i][2]);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_ERROR(resolve_with_file(&o, bad[i][0], bad[i][1], &e), &e, ERR_USAGE, bad[i][2]);
}

// Without --gns, options_resolve assumes ln until the device is known.
static void test_gns_default(void) {
    static const char ramp[] = "--train a --train-tokens 1e6 --ramp gns --batch-min 2 --batch-max 32";
    static const struct {
        const char *more;
        GnsMode mode;
        int64_t interval;
        bool calibrates;
        bool total; // the ramp follows the whole model's noise scale
    } cases[] = {
        {"", GNS_EXACT, 1, false, true},
        {"", GNS_LN, 0, true, false},
        {"--gns-exact-every 8", GNS_EXACT, 8, false, false},
        {"--gns-exact-every 8", GNS_LN, 8, false, false},
        {"--gns-exact-every 1", GNS_LN, 1, false, true},
        {"--gns-ratio 2", GNS_EXACT, 1, false, false},
        {"--gns-ratio 2", GNS_LN, 0, false, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_OK(resolve(&o, path_of("%s %s", ramp, cases[i].more), &e), &e);
        CHECK(o.gns == GNS_LN && !o.given[OPTION_gns], "case %zu: mode %d", i, o.gns);
        CHECK_OK(options_resolve_gns(&o, cases[i].mode, &e), &e);
        CHECK(o.gns == (int)cases[i].mode && o.run.gns_exact_interval == cases[i].interval,
              "case %zu: mode %d every %lld", i, o.gns, (long long)o.run.gns_exact_interval);
        CHECK(o.run.gns_calibrates == cases[i].calibrates, "case %zu: calibrates %d", i, o.run.gns_calibrates);
        CHECK(ramp_follows_total(&o) == cases[i].total, "case %zu: total", i);
    }
    CHECK_OK(resolve(&o, "--train a --steps 5", &e), &e);
    CHECK_OK(options_resolve_gns(&o, GNS_EXACT, &e), &e);
    CHECK(o.run.gns_exact_interval == 1 && !ramp_follows_total(&o), "without a ramp");
    CHECK_OK(resolve(&o, "--train a --steps 5 --gns-half-life 500", &e), &e);
    CHECK_ERROR(options_resolve_gns(&o, GNS_OFF, &e), &e, ERR_USAGE, "--gns-half-life");
}

int main(void) {
    scratch_begin();
    RUN(test_gns_default, test_horizon_and_batch, test_epochs, test_contradictions, test_effects,
        test_the_command_line_wins);
    return scratch_end();
}
