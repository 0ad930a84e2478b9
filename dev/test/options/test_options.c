// The option table and what is built from it: command line, config file, --help, run.json. test_resolve.c tests several
// options together.
#include "model/model.h"
#include "model/modes.h"
#include "options_test.h"

#include <cjson/cJSON.h>
#include <ctype.h>

static void test_table_is_sound(void) {
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionRow *row = &option_rows[i];
        char open, close, words[256];
        double low, high;
        CHECK((row->type == TYPE_INT || row->type == TYPE_REAL) == (row->range != NULL), "%s", row->field);
        if (row->range) {
            bool reads = sscanf(row->range, "%c%lf, %lf%c", &open, &low, &high, &close) == 4;
            CHECK(reads && (open == '[' || open == '(') && (close == ']' || close == ')') && low < high, "%s: %s",
                  row->field, row->range);
        }
        if (row->type == TYPE_CHOICE) CHECK(strchr(row->names, '|'), "%s", row->field);
        for (int j = 0; j < i && row->alias; j++)
            CHECK(!option_rows[j].alias || strcmp(row->alias, option_rows[j].alias) != 0, "%s twice", row->alias);
        if (!row->init) continue;
        // A user can type the default.
        snprintf(words, sizeof words, "%s %s", row_flag(row).s, row->init);
        CHECK_OK(parse(&o, words, &e), &e);
        CHECK(o.given[i], "%s", words);
    }
}

// Names and enum of every choice.
static const struct {
    OptionId option;
    const char *name;
    int means;
} choices[] = {
    // clang-format off
    {OPTION_lr_schedule, "constant", SCHEDULE_CONSTANT}, {OPTION_lr_schedule, "linear", SCHEDULE_LINEAR},
    {OPTION_lr_schedule, "cosine", SCHEDULE_COSINE}, {OPTION_lr_schedule, "inverse-sqrt", SCHEDULE_INVERSE_SQRT},
    {OPTION_lr_schedule, "wsd", SCHEDULE_WSD}, {OPTION_optimizer, "adamw", OPTIMIZER_ADAMW},
    {OPTION_optimizer, "lamb", OPTIMIZER_LAMB}, {OPTION_optimizer, "muon", OPTIMIZER_MUON},
    {OPTION_gns, "off", GNS_OFF}, {OPTION_gns, "ln", GNS_LN}, {OPTION_gns, "exact", GNS_EXACT},
    {OPTION_recompute, "none", RECOMPUTE_NONE}, {OPTION_recompute, "gelu", RECOMPUTE_GELU},
    {OPTION_recompute, "block", RECOMPUTE_BLOCK}, {OPTION_zero, "0", ZERO_0}, {OPTION_zero, "1", ZERO_1},
    {OPTION_zero, "2", ZERO_2}, {OPTION_zero, "3", ZERO_3}, {OPTION_reduce, "step", REDUCE_STEP},
    {OPTION_reduce, "micro-step", REDUCE_MICRO_STEP}, {OPTION_shard, "all", false}, {OPTION_shard, "machine", true}, {OPTION_dtype, "fp32", DTYPE_FP32},
    {OPTION_dtype, "bf16", DTYPE_BF16}, {OPTION_dtype, "fp16", DTYPE_FP16}, {OPTION_dtype, "fp8", DTYPE_FP8},
    {OPTION_dtype, "fp8-dw", DTYPE_FP8_DW},
    {OPTION_comm_dtype, "fp32", WIRE_FP32}, {OPTION_comm_dtype, "bf16", WIRE_BF16},
    {OPTION_on_spike, "none", false}, {OPTION_on_spike, "rollback", true},
    // clang-format on
};

// Checks that the table lists a choice's names in the order of its enum, and that the list above is complete.
static void test_choices_match_enums(void) {
    int told[OPTION_COUNT] = {0};
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++) {
        OptionId id = choices[i].option;
        const char *words = path_of("%s %s", row_flag(&option_rows[id]).s, choices[i].name);
        CHECK_OK(parse(&o, words, &e), &e);
        int got = *(int *)option_field(&o, id);
        CHECK(got == choices[i].means, "%s: %d", words, got);
        told[id]++;
    }
    for (int i = 0; i < OPTION_COUNT; i++) {
        int names = 1;
        if (option_rows[i].type != TYPE_CHOICE) continue;
        for (const char *c = option_rows[i].names; *c; c++) names += *c == '|';
        CHECK(told[i] == names, "%s has %d choices, %d of them known", option_rows[i].field, names, told[i]);
    }
    for (int i = 0; i < 6; i++) { // llm.c's scripts give numbers
        const char *words = i < 3 ? path_of("-r %d", i) : path_of("--recompute %s", recompute_names[i % 3]);
        CHECK_OK(parse(&o, words, &e), &e);
        CHECK(o.recompute == i % 3, "%s: %d", words, o.recompute);
    }
}

// The options' ranges equal the model's limits.
static void test_limits_are_the_models(void) {
    const struct {
        OptionId id;
        int least, most;
    } limits[] = {{OPTION_layers, 1, MODEL_LAYERS_MAX},     {OPTION_heads, 1, MODEL_HEADS_MAX},
                  {OPTION_channels, 1, MODEL_CHANNELS_MAX}, {OPTION_vocab_size, 2, MODEL_VOCAB_MAX},
                  {OPTION_seq_len, 1, MODEL_CONTEXT_MAX},   {OPTION_micro_batch, 1, MICRO_BATCH_MAX}};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        const OptionRow *row = &option_rows[limits[i].id];
        CHECK(option_range_contains(row, limits[i].least) && !option_range_contains(row, limits[i].least - 1),
              "--%s from %d", row->field, limits[i].least);
        CHECK(option_range_contains(row, limits[i].most) && !option_range_contains(row, limits[i].most + 1.0),
              "--%s to %d", row->field, limits[i].most);
    }
}

static void test_numbers(void) {
    CHECK_OK(parse(&o, "--train-tokens 10e9 --lr=.5 --seed 9007199254740993 --eps 1E-5 --vocab-size +256", &e), &e);
    CHECK(o.train_tokens == 10000000000 && o.lr == 0.5 && o.eps == 1e-5 && o.vocab_size == 256, "values");
    CHECK(o.seed == 9007199254740993, "2^53 + 1 exactly, got %lld", (long long)o.seed);
    CHECK_OK(parse(&o, "--steps 1.5e3", &e), &e);
    CHECK(o.steps == 1500, "%lld", (long long)o.steps);

    const char *not_numbers[] = {"nan", "inf", "-inf",   "1e", "0x10", "1.0.0", "abc", "1k",
                                 "3%",  "--",  "1e400x", "+",  "e5",   "1,5",   "NaN", "infinity"};
    for (size_t i = 0; i < sizeof not_numbers / sizeof *not_numbers; i++) {
        CHECK_ERROR(parse(&o, path_of("--lr %s", not_numbers[i]), &e), &e, ERR_USAGE, "--lr");
        CHECK(strstr(e.what, "not a number"), "%s", e.what);
        CHECK_ERROR(parse(&o, path_of("--steps=%s", not_numbers[i]), &e), &e, ERR_USAGE, "--steps");
    }
    CHECK_ERROR(parse(&o, "--lr=", &e), &e, ERR_USAGE, "not a number");
    CHECK_ERROR(parse(&o, "--steps=", &e), &e, ERR_USAGE, "not a whole number");
    CHECK_ERROR(parse(&o, "--steps 1.5", &e), &e, ERR_USAGE, "not a whole number");
    const char *beyond[] = {
        "--lr 1e400",     "--lr -0.1",           "--lr 100.1",           "--beta1 .99999999",
        "--eps 1e-50",    "--steps 0",           "--steps -1",           "--steps 99999999999999999999",
        "--steps 1e30",   "--seed -1e30",        "--top-k -1",           "--vocab-size 65537",
        "--ramp-kappa 0", "--ramp-waste 0",      "--ramp-step-rows 2e9", "--micro-batch 0",
        "--seq-len 0",    "--final-lr-frac 1.01"};
    for (size_t i = 0; i < sizeof beyond / sizeof *beyond; i++)
        CHECK_ERROR(parse(&o, beyond[i], &e), &e, ERR_USAGE, "out of range");
    CHECK(strstr(e.hint, "[0, 1]"), "%s", e.hint);
    CHECK_OK(parse(&o, "--beta1 0 --final-lr-frac 1 --eps 1 --lr 0", &e), &e);
}

static void test_command_line_errors(void) {
    // clang-format off
    static const struct {
        const char *words, *says, *hint;
    } cases[] = {
        {"--micro-bach 4", "--micro-bach", "--micro-batch"}, {"--batch-sise 4", "unknown option", ""},
        {"--frobnicate", "unknown option", "--help"}, {"--gpus 8", "unknown option", "--ranks"},
        {"--batch_size=8", "unknown option", "--micro-batch"}, {"--learning_rate 1", "unknown option", "the option here is --lr"},
        {"--n-layer 4", "unknown option", "--layers"},
        {"--warmup_steps 4", "unknown option", "--warmup-tokens: times the tokens of a step"},
        {"--gradient_accumulation_steps 4", "unknown option", "--batch-tokens: times rows"},
        {"--resume_from_checkpoint x", "unknown option", "leave it out"}, {"--", "unknown option", ""}, {"-", "'-'", ""},
        {"-Q 4", "-Q", ""}, {"train.bin", "train.bin", ""}, {"--lr 1 2", "'2' is no option", ""},
        {"--lr 1 --lr 1", "--lr is given twice", ""}, {"--lr 1 -l 1", "twice", ""}, {"-u 5 --warmup-tokens 1", "twice", ""},
        {"--dry-run --dry-run", "twice", ""}, {"--lr", "--lr has no value", ""}, {"--train --val x", "--train has no value", ""},
        {"--train -j x", "--train has no value", ""}, {"-i", "-i has no value", ""}, {"--dry-run=yes", "neither true nor false", ""},
        {"--gns maybe", "--gns 'maybe'", "off|ln|exact"}, {"--gns off|ln", "no such choice", ""}, {"--gns=", "no such choice", ""},
        {"--micro_batch 4 --micro-batch 4", "twice", ""}, {"--help learning_rate", "learning_rate", ""},
    };
    // clang-format on
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_ERROR(parse(&o, cases[i].words, &e), &e, ERR_USAGE, cases[i].says);
        CHECK(strstr(e.hint, cases[i].hint), "%s: %s", cases[i].words, e.hint);
    }
    CHECK_ERROR(parse(&o, "--foos 8", &e), &e, ERR_USAGE, "--foos");
    CHECK(!strstr(e.hint, "did you mean"), "%s", e.hint);
    CHECK_OK(parse(&o, "--micro_batch 4 --lr_schedule=linear", &e), &e);
    CHECK(o.micro_batch == 4 && o.lr_schedule == SCHEDULE_LINEAR, "_ is -");

    char words[OPTION_TEXT + 16] = "--out=";
    memset(words + 6, 'x', OPTION_TEXT);
    words[6 + OPTION_TEXT] = 0;
    CHECK_ERROR(parse(&o, words, &e), &e, ERR_USAGE, "too long");
    words[6 + OPTION_TEXT - 1] = 0;
    CHECK_OK(parse(&o, words, &e), &e);

    CHECK_OK(parse(&o, "--prompt=--lr --train=a=b", &e), &e);
    CHECK(strcmp(o.prompt, "--lr") == 0 && strcmp(o.train, "a=b") == 0, "%s %s", o.prompt, o.train);
    CHECK_OK(parse(&o, "--help --lr wrong", &e), &e);
    CHECK(o.help && !o.version, "help");
    CHECK_OK(parse(&o, "--help ramp_kappa", &e), &e);
    CHECK(o.help && o.help_about == &option_rows[OPTION_ramp_kappa], "--help NAME");
    CHECK_OK(parse(&o, "--help=false --lr 1 --version --frobnicate", &e), &e);
    CHECK(o.version && !o.help, "version");
}

// --train and --val accept several words, up to the next option, since a shell may have expanded a pattern.
static void test_several_words(void) {
    CHECK_OK(parse(&o, "--train a:0.7 b:0.3 --lr 1 -j c d --steps 5", &e), &e);
    CHECK(strcmp(o.train, "a:0.7 b:0.3") == 0 && strcmp(o.val, "c d") == 0 && o.steps == 5, "'%s' '%s'", o.train,
          o.val);
    char *argv[] = {"train_gpt2", "-i", "my file", "b", "-x", "5", NULL},
         *one[] = {"train_gpt2", "--train", "my file", NULL};
    CHECK_OK(options_parse(&o, 6, argv, &e), &e);
    CHECK(strcmp(o.train, "my\\ file b") == 0 && o.steps == 5, "'%s'", o.train);
    CHECK_OK(options_parse(&o, 3, one, &e), &e);
    CHECK(strcmp(o.train, "my file") == 0, "'%s'", o.train);

    static char word[OPTION_TEXT]; // makes the longest value, or one up to 4 bytes too long
    for (int more = 0; more < 5; more++) {
        int length = OPTION_TEXT - 1 - 4 + more; // " abc" follows
        memset(word, more == 4 ? ' ' : 'x', (size_t)length);
        word[length] = 0;
        char *many[] = {"train_gpt2", "--train", word, "abc", NULL};
        int code = options_parse(&o, 4, many, &e);
        CHECK(code == (more ? ERR_USAGE : 0), "%d bytes: %d", length + 4, code);
        if (code) CHECK(strstr(e.what, "too long") && strstr(e.hint, "quote the pattern"), "%s (%s)", e.what, e.hint);
    }
}

// llm.c's flags have the same meaning as in llm.c.
static void test_aliases(void) {
    static const char *const cases[][2] = {
        {"-i a -j b -o c -e d12 -b 8 -t 64 -d 2048 -x 10 -l 6e-4 -k linear -u 7 -q 0.25 -c 0.2 -v 5 -m 3 -s 9 -g 12 -z "
         "2 -r 2",
         "train 'a', val 'b', out 'c', model 'd12', micro_batch 8, seq_len 64, batch_tokens 2048, horizon_tokens "
         "20480, "
         "lr 0.0006, lr_schedule 'linear', warmup_tokens 14336, final_lr_frac 0.25, weight_decay 0.2, val_every 5, "
         "val_tokens 1536, zero '2', recompute 'block', sample_every 9, sample_tokens 12"},
        {"-i a -x 3 -e gpt2:d24 -d -1 -u 2", "model 'd24', batch_ref_rows 4, warmup_tokens 8192"},
        {"-i a -x 1 -n 7 -nk 5 -y 1 -sl 3.5 -sg 4",
         "checkpoint_every 7, keep 5, fresh false, skip_loss_z 3.5, skip_grad_z 4"},
        {"-i a -x 1 -nk 0 -y 0", "keep 0, fresh true"},
        {"-i a -x 1 -h 1 -v 30", "hellaswag_every 30"}, // at each validation
        {"-i a -x 1 -h 0", "hellaswag_every 0"},
        {"-i a -x 1 -h 1 -v 0", "hellaswag_every 0"},
        {"-i a -h -x 1", "help true"}, // -h without a value
    };
    static const char *const bad[][2] = {
        {"-i a -x -1", "--train-tokens nor --steps"},
        {"-i a -x 1 -u 1e12", "-u"},
        {"--fresh -y 1", "given twice"},
        {"-y 2", "-y (--fresh)"},
        {"-i a -x 1 -h 10000000 -v 1000", "-h means too many steps"},
        {"-b nan", "-b (--micro-batch)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_OK(parse(&o, cases[i][0], &e), &e);
        if (!o.help) CHECK_OK(options_resolve(&o, &e), &e);
        check_options(&o, cases[i][0], cases[i][1]);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_ERROR(resolve(&o, bad[i][0], &e), &e, ERR_USAGE, bad[i][1]);

    const char *foreign = "-nm 1 -f 0 -w 1 -ge 2 -a 1 -lg 5 -pn 8 -pr 0 "
                          "-pg 8 -ps host -pp /tmp -pf /tmp -pi mpi --lr 1";
    CHECK_OK(parse(&o, foreign, &e), &e);
    int lines = 0;
    for (const char *c = o.notes; *c; c++) lines += *c == '\n';
    CHECK(lines == 13 && strstr(o.notes, "-ge") && strstr(o.notes, "-lg "), "%d lines: %s", lines, o.notes);
    CHECK(o.lr == 1, "values of foreign flags are ignored");
}

static void test_config_lines(void) {
    const char *good = "# a comment\n"
                       "\n"
                       "  lr = 0.5   # the rate\r\n"
                       "prompt = \" once # upon \" # kept\n"
                       "train=a b#c\n"
                       "dry-run = true\n"
                       "val-tokens\t=\t5e3";
    CHECK_OK(parse_config(&o, good, &e), &e);
    CHECK(o.lr == 0.5 && strcmp(o.prompt, " once # upon ") == 0 && strcmp(o.train, "a b#c") == 0, "%s", o.prompt);
    CHECK(o.dry_run && o.val_tokens == 5000, "flag and number");
    CHECK_OK(parse_config(&o, "", &e), &e);
    CHECK_OK(parse_config(&o, "prompt =\ndry-run = false", &e), &e);

    // clang-format off
    static const char *const bad[][2] = {
        {"\nlr 5", "run.cfg line 2"}, {"lr = x", "run.cfg line 1: lr 'x': not a number"}, {"lr = 1\nlr = 1", "line 2: lr is given twice"},
        {"larry = 1", "larry"}, {" = 1", "unknown"}, {"config = b.cfg", "command line"}, {"help = true", "command line"},
        {"dry-run = yes", "dry-run"}, {"prompt = \"open", "not closed"}, {"prompt = \"a\" b", "closing quote"}, {"--lr = 1", "--lr"},
    };
    // clang-format on
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_ERROR(parse_config(&o, bad[i][0], &e), &e, ERR_USAGE, bad[i][1]);
    CHECK(strstr(e.hint, "dashes"), "%s", e.hint);
    char zero[] = "lr = 1\0x\n";
    options_defaults(&o);
    const OptionTable t = options_table(&o);
    CHECK_ERROR(rows_read_config(&t, zero, sizeof zero - 1, "run.cfg", &e), &e, ERR_USAGE, "zero byte");
}

static void test_config_precedence(void) {
    write_text("a", "lr = 0.5\nbeta1 = 0.5\nwarmup_tokens = 5\nfresh = true\nsteps = 7\nprompt = long text\n");
    CHECK_OK(parse(&o, "--lr 0.25 --config a -u 3", &e), &e);
    CHECK(o.lr == 0.25 && o.beta1 == 0.5 && o.warmup_tokens == 3 && o.fresh, "lr %g beta1 %g", o.lr, o.beta1);
    CHECK(o.given[OPTION_beta1] && !o.given[OPTION_beta2], "given");
    CHECK_OK(parse(&o, "-y 1 --config a", &e), &e);
    CHECK(!o.fresh, "llm.c's -y 1 resumes, whatever the file says");
    CHECK_OK(resolve(&o, "--train x --config a --prompt=", &e), &e); // no prompt, so none without effect

    // A later file overrules an earlier one, also with an option that excludes an option of the earlier file.
    write_text("b", "train-tokens = 4096\nlr = 0.75\nfresh = false\n");
    CHECK_OK(resolve(&o, "--train x --config a --beta1 0.25 --config=b", &e), &e);
    CHECK(o.lr == 0.75 && o.beta1 == 0.25 && !o.fresh && o.steps == 0 && o.run.horizon_tokens == 4096, "a, then b");
    CHECK(strcmp(o.config, "a b") == 0, "%s", o.config);
    CHECK_OK(resolve(&o, "--train x --config b --config a", &e), &e);
    CHECK(o.lr == 0.5 && o.fresh && o.steps == 7 && o.train_tokens == 0, "b, then a");
    CHECK_ERROR(parse(&o, "--config a --fresh --fresh", &e), &e, ERR_USAGE, "--fresh is given twice");

    // A file's value must be valid even if it is overruled.
    write_text("wrong", "\neps = wrong\n");
    CHECK_ERROR(parse(&o, "--eps 1e-9 --config=wrong", &e), &e, ERR_USAGE, "wrong line 2: eps");
    CHECK_ERROR(parse(&o, "--config=none", &e), &e, ERR_INPUT, "none");

    // An option without effect is noted once if a file gives it, and refused if the command line gives it.
    write_text("idle", "final-lr-frac = 0.2\nlr-schedule = constant\nval-every = 5\n");
    CHECK_OK(resolve(&o, "--train x --steps 5 --config idle", &e), &e);
    CHECK(strcmp(o.notes, "note: no effect: --final-lr-frac without --lr-schedule linear, cosine "
                          "or wsd, --val-every without --val\n") == 0,
          "%s", o.notes);

    // --config run.json sets the final values of all options given to any part of the run, except --out and --fresh.
    write_text("run.json",
               "{\"parts\": [{\"options\": {\"lr\": 1, \"out\": \"old\", \"fresh\": true, \"steps\": 9, "
               "\"lr_hold_frac\": 0, \"document_mask\": true}}, {\"options\": {\"lr\": 0.5, \"steps\": 0}}], "
               "\"options\": {\"lr\": 0.5, \"eps\": 1, \"out\": \"old\", \"steps\": 0, \"document_mask\": true}}");
    CHECK_OK(parse(&o, "--config run.json", &e), &e);
    CHECK(o.lr == 0.5 && o.document_mask && !o.given[OPTION_steps] && o.eps == 1e-8, "lr %g", o.lr);
    CHECK(strcmp(o.out, "runs/gpt2") == 0 && !o.fresh && o.given[OPTION_lr_hold_frac], "%s", o.out); // 0 is in range
    write_text("run.json", "{\"parts\": [{\"options\": {\"seed\": 9007199254740993}}], \"options\": {}}");
    CHECK_ERROR(parse(&o, "--config run.json", &e), &e, ERR_USAGE, "run.json: seed: a number above 2^53");
    write_text("run.json", "{\"options\": 1}");
    CHECK_ERROR(parse(&o, "--config run.json", &e), &e, ERR_USAGE, "not of a run");
    write_text("run.json", "{\"parts\": [{\"options\": [1]}], \"options\": {}}");
    CHECK_ERROR(parse(&o, "--config run.json", &e), &e, ERR_USAGE, "not of a run");

    // --print-options prints a file that sets the same options.
    static Options again;
    const char *words = "--train a:0.7 b:0.3 --steps 5 --prompt=#1 --sample_every 2 --lr 0.1 -u 3 --config b --zero 2 "
                        "--document-mask --print-options";
    CHECK_OK(resolve(&o, words, &e), &e);
    FILE *f = fopen("printed", "w");
    CHECK_OK(options_print(f, &o, &e), &e);
    fclose(f);
    CHECK_OK(resolve(&again, "--config printed", &e), &e);
    for (int id = 0; id < OPTION_COUNT; id++) {
        const OptionRow *row = &option_rows[id];
        if (id == OPTION_config || id == OPTION_print_options) continue;
        bool same = !o.given[id] == !again.given[id] &&
                    (row->type == TYPE_TEXT
                         ? strcmp(option_field(&o, (OptionId)id), option_field(&again, (OptionId)id))
                         : memcmp(option_field(&o, (OptionId)id), option_field(&again, (OptionId)id), row->bytes)) == 0;
        CHECK(same, "%s", row->field);
    }
    strcpy(o.prompt, "two\nlines");
    CHECK_ERROR(options_print(stdout, &o, &e), &e, ERR_USAGE, "--prompt");
}

static void test_help(void) {
    static char flat[1 << 16]; // the text with one blank for several blanks and newlines
    char *text = NULL;
    size_t bytes, used = 0;
    FILE *f = open_memstream(&text, &bytes);
    options_defaults(&o);
    options_print_help(f, &o, "./build/train_gpt2");
    fclose(f);
    for (const char *c = text; *c && used < sizeof flat - 1; c++)
        if (!isspace((unsigned char)*c)) flat[used++] = *c;
        else if (used && flat[used - 1] != ' ') flat[used++] = ' ';
    for (int i = 0; i < OPTION_COUNT; i++) {
        const Flag flag = row_flag(&option_rows[i]);
        const char *row = strstr(text, path_of("\n  %s ", flag.s)), *alias = option_rows[i].alias;
        CHECK(row, "%s is not in the help", flag.s);
        if (alias) CHECK(strstr(flat, path_of("llm.c %s", alias)), "%s", alias);
    }
    static const char *const says[] = {
        "usage: train_gpt2 ", " --train FILES token ",      " --model NAME|PATH ",   " --link GB/s ", " --seed N ",
        " --lr X ",           " --gns NAME off|ln|exact: ", "[default 4; llm.c -b]", "in \"quotes\"",
    };
    for (size_t i = 0; i < sizeof says / sizeof *says; i++) CHECK(strstr(flat, says[i]), "%s", says[i]);
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        CHECK(strlen(line) <= 100 && line[strlen(line) - 1] != ' ', "line of %zu: %s", strlen(line), line);
        if (strncmp(line, "  ", 2) != 0) continue;
        const char *gap = strstr(line + 3, "  "), *words = line[2] == ' ' ? line : gap;
        if (words) CHECK((int)(words + strspn(words, " ") - line) == 28, "one column: %s", line);
    }
    free(text);
}

static void test_json(void) {
    CHECK_OK(resolve(&o, "--train a --steps 3 --lr 0.1 --beta2 0.98765432109876543 --seq-len 64", &e), &e);
    strcpy(o.prompt, "\"quote\" \\ tab\t newline\n \x01 caf\xc3\xa9 bad\xe9 \xf0\x9f\x98\x80 \xed\xa0\x80");
    char *text = NULL;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    options_write_json(f, &o, NULL);
    fclose(f);
    cJSON *json = cJSON_ParseWithOpts(text, NULL, 1);
    CHECK(json != NULL, "no JSON: %s", text);
    if (!json) return free(text);
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionRow *row = &option_rows[i];
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, row->field);
        // run.json leaves out the section "Planning" and --print-options.
        if ((i >= OPTION_dry_run && i <= OPTION_link) || i == OPTION_print_options) {
            CHECK(!item, "%s is no part of a run", row->field);
            continue;
        }
        bool fits = row->range               ? cJSON_IsNumber(item)
                    : row->type == TYPE_FLAG ? cJSON_IsBool(item)
                                             : cJSON_IsString(item);
        CHECK(fits, "%s", row->field);
    }
    CHECK(cJSON_GetObjectItem(json, "lr")->valuedouble == 0.1 && strstr(text, "\"lr\": 0.1,"), "shortest digits");
    CHECK(cJSON_GetObjectItem(json, "beta2")->valuedouble == o.beta2, "round trip");
    CHECK(strcmp(cJSON_GetObjectItem(json, "lr_schedule")->valuestring, "cosine") == 0, "choice by name");
    CHECK(strcmp(cJSON_GetObjectItem(json, "gns")->valuestring, "ln") == 0, "choice by name");
    const char *prompt = cJSON_GetObjectItem(json, "prompt")->valuestring;
    const char *want = "\"quote\" \\ tab\t newline\n \x01 caf\xc3\xa9 bad\xef\xbf\xbd \xf0\x9f\x98\x80 "
                       "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd";
    CHECK(strcmp(prompt, want) == 0, "prompt: %s", prompt);
    const cJSON *resolved = cJSON_GetObjectItem(json, "resolved");
    CHECK(cJSON_GetObjectItem(resolved, "horizon_tokens")->valuedouble == 3 * 4 * 64, "resolved");
    cJSON_Delete(json);
    free(text);
}

int main(void) {
    scratch_begin();
    RUN(test_table_is_sound, test_choices_match_enums, test_limits_are_the_models, test_numbers,
        test_command_line_errors, test_several_words, test_aliases, test_config_lines, test_config_precedence,
        test_help, test_json);
    return scratch_end();
}
