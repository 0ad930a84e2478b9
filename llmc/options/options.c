// The trainer's options: their table, the command line with llm.c's short flags and hints for other trainers' names,
// and the options as text: --help, --print-options and run.json.
#include "options/options.h"

#include "base/files.h"
#include "model/model.h"

#include <stdarg.h>
#include <string.h>

#define OPTION(type, field, ...)                                                                                       \
    {TYPE_##type, #field, offsetof(Options, field), sizeof((Options *)0)->field, .help = __VA_ARGS__},
const OptionRow option_rows[OPTION_COUNT] = {
#include "options/table.def"
};

void *option_field(Options *o, OptionId id) { return (char *)o + option_rows[id].offset; }

bool option_is_of_planning(int id) {
    return id == OPTION_dry_run || id == OPTION_print_options || option_rows[id].needs[0] == NEED_PLAN;
}

void options_defaults(Options *o) {
    memset(o, 0, sizeof *o);
    OptionTable t = options_table(o);
    for (int id = 0; id < OPTION_COUNT; id++) row_reset(&t, id);
}

void option_note(Options *o, const char *format, ...) {
    char line[1210] = "note: ";
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line + strlen(line), sizeof line - 1 - strlen(line), format, arguments);
    va_end(arguments);
    strcat(line, "\n");
    if (strlen(o->notes) + strlen(line) < sizeof o->notes && !strstr(o->notes, line)) strcat(o->notes, line);
}

// ---- The command line -----------------------------------------------------------------------------------------------

// Names in nanoGPT, Hugging Face and others that differ from ours: dev/docs/coming-from.md.
static const ForeignName foreign_names[] = {
    {"adam-beta1", "beta1", NULL},
    {"adam-beta2", "beta2", "default 0.95 here, 0.999 there"},
    {"adam-epsilon", "eps", NULL},
    {"attn-pdrop embd-pdrop resid-pdrop", "dropout", "one for all three kinds"},
    {"always-save-checkpoint", "checkpoint-every", "N steps; False is 0, with keep-best"},
    {"batch batch-size per-device-train-batch-size per-device-eval-batch-size", "micro-batch", "rows of a device"},
    {"block-size n-positions", "seq-len", NULL},
    {"config-name init-from model-name-or-path", "model", "a preset starts from scratch; the same command resumes"},
    {"config-overrides n-layer", "layers", NULL},
    {"decay-lr lr-scheduler-type", "lr-schedule", "constant is decay_lr = False"},
    {"deepspeed", "zero", "its stage"},
    {"eval-interval eval-steps", "val-every", NULL},
    {"eval-iters", "val-tokens", "times batch_size times block_size"},
    {"gpus num-gpus nproc nproc-per-node", "ranks", "to plan for with dry-run; mpirun -np starts as many"},
    {"gradient-accumulation-steps", "batch-tokens", "times rows of a device, devices and the length of a row"},
    {"gradient-checkpointing", "recompute", "block"},
    {"label-smoothing-factor", "label-smoothing", NULL},
    {"learning-rate lr-rate", "lr", NULL},
    {"load-best-model-at-end", "keep-best", NULL},
    {"lr-decay-iters max-iters max-steps", "steps", "or train-tokens; the schedule ends where the run ends"},
    {"max-grad-norm", "grad-clip", NULL},
    {"max-new-tokens", "sample-tokens", NULL},
    {"min-lr", "final-lr-frac", "as a share of the learning rate"},
    {"n-embd", "channels", NULL},
    {"n-head", "heads", NULL},
    {"num-samples", "samples", NULL},
    {"num-train-epochs", "epochs", NULL},
    {"optim", "optimizer", "adamw, lamb or muon"},
    {"out-dir output-dir", "out", NULL},
    {"overwrite-output-dir", "fresh", "the earlier run is moved aside"},
    {"save-steps", "checkpoint-every", NULL},
    {"save-total-limit", "keep", NULL},
    {"start", "prompt", NULL},
    {"train-file", "train", "token shards, made by data/tokenize"},
    {"validation-file", "val", "token shards, made by data/tokenize"},
    {"warmup-iters warmup-steps", "warmup-tokens", "times the tokens of a step"},
    {"warmup-ratio", "warmup-tokens", "times the tokens of the run"},
    {"report-to wandb-log", NULL, "run scripts/to_tensorboard.py RUN --follow, or to_wandb.py, beside the run"},
    {"bias compile resume-from-checkpoint compare-every", NULL, "leave it out: dev/docs/coming-from.md"},
    {"deadline-setup deadline-step deadline-checkpoint", "deadline", "that of a step"},
    {NULL, NULL, NULL},
};

static OptionId find_alias(const char *flag) { // OPTION_COUNT: none
    int id = 0;
    while (id < OPTION_COUNT && !(option_rows[id].alias && strcmp(option_rows[id].alias, flag) == 0)) id++;
    return (OptionId)id;
}

// True for llm.c's flags without a counterpart here. Each has a value, which the parser ignores.
static bool is_foreign(const char *flag) {
    char word[8];
    const bool fits = snprintf(word, sizeof word, " %s ", flag) < (int)sizeof word;
    return fits && strstr(" -nm -f -w -ge -a -lg -pi -pm -pn -pr -pg -ps -pp -pf ", word);
}

static bool is_short(const char *word) { return find_alias(word) < OPTION_COUNT || is_foreign(word); }

// Reads one of llm.c's flags: one dash and always a value. -h without a value is --help.
static int parse_short(const OptionTable *t, int argc, char **argv, int *i, Error *e) {
    const char *flag = argv[*i], *value = NULL;
    char joined[OPTION_TEXT + 2], said[2 * FLAG_BYTES];
    if (flag[0] != '-' || !flag[1])
        return FAIL(e, ERR_USAGE, "options begin with --; --help lists them", "'" SAID "' is no option", flag);
    if (strcmp(flag, "-h") == 0 && (*i + 1 >= argc || strncmp(argv[*i + 1], "--", 2) == 0 || is_short(argv[*i + 1])))
        return row_set(t, OPTION_help, flag, "true", OPTION_GIVEN_COMMAND_LINE, e);
    OptionId id = find_alias(flag);
    if (id == OPTION_COUNT && !is_foreign(flag)) return rows_unknown(t, flag, flag + 1, "--", e);
    const OptionRow *row = id < OPTION_COUNT ? &option_rows[id] : NULL;
    TRY(rows_next_value(t, row, argc, argv, i, joined, &value, e));
    if (!row) return option_note(t->values, "llm.c's %s has no counterpart here: ignored", flag), 0;
    if (row->type == TYPE_INT && strcmp(value, "-1") == 0) return 0;        // means "default" in llm.c
    if (id == OPTION_model && strncmp(value, "gpt2:d", 6) == 0) value += 5; // llm.c: "gpt2:d12" and "d12" are the same
    if (id == OPTION_recompute && strlen(value) == 1 && strchr("012", *value)) // llm.c numbers the modes
        value = recompute_names[*value - '0'];
    if (id == OPTION_fresh && strcmp(value, "1") == 0) value = "false"; // llm.c's -y 1: resume
    if (id == OPTION_fresh && strcmp(value, "0") == 0) value = "true";  // and -y 0: start over
    snprintf(said, sizeof said, "%s (%s)", flag, row_flag(row).s);
    TRY(row_set(t, id, said, value, OPTION_GIVEN_COMMAND_LINE, e));
    t->given[id] |= OPTION_GIVEN_ALIAS;
    return 0;
}

OptionTable options_table(Options *o) {
    return (OptionTable){option_rows,         OPTION_COUNT,      foreign_names,
                         .values = o,         .given = o->given, .read_word = parse_short,
                         .is_short = is_short};
}

int options_parse(Options *o, int argc, char **argv, Error *e) {
    options_defaults(o);
    OptionTable t = options_table(o);
    int code = rows_read_command_line(&t, argc, argv, e);
    o->help_about = t.about;
    return code;
}

// ---- Text -----------------------------------------------------------------------------------------------------------

void options_print_help(FILE *f, const Options *o, const char *program) {
    if (o->help_about) return row_print_help(f, o->help_about);
    fprintf(f, "Trains GPT-2, measures its gradient noise scale and can grow the batch with it.\n\n");
    fprintf(f, "usage: %s --train FILES (--train-tokens N|--steps N|--epochs X|--train-hours X) [options]\n",
            path_name(program));
#define SECTION(title)           fprintf(f, "\n%s\n", title);
#define OPTION(type, field, ...) row_print_help(f, &option_rows[OPTION_##field]);
#include "options/table.def"
    fprintf(f, "\nExit codes: 0 done; 64 usage; 65 bad input; 69 no usable GPU or instructions; 70 internal;\n"
               "71 out of memory; 74 writing failed; 75 stopped by a signal, run the same command again;\n"
               "76 the loss or gradient is not finite; 78 a rank was lost, a deadline passed, or the ranks'\n"
               "weights differ.\n");
}

int options_print(FILE *f, const Options *o, Error *e) {
    for (int id = 0; id < OPTION_COUNT; id++) {
        const OptionRow *row = &option_rows[id];
        if (row->kind == ROW_FILE || row->kind == ROW_ENDS || id == OPTION_print_options) continue;
        if (!o->given[id] && !row->init) continue;
        if (!o->given[id]) fputs("# ", f);
        TRY(row_write_config(f, row, (const char *)o + row->offset, e));
    }
    return 0;
}

// ---- run.json -------------------------------------------------------------------------------------------------------

void options_write_json(FILE *f, const Options *o, const uint8_t *which) {
    const char *separator = which ? "" : "\n    ";
    fputc('{', f);
    for (int id = 0; id < OPTION_COUNT; id++) {
        const OptionRow *row = &option_rows[id];
        if ((which && !which[id]) || option_is_of_planning(id)) continue;
        fprintf(f, "%s\"%s\": ", separator, row->field);
        row_write_json(f, row->type, row->names, (const char *)o + row->offset);
        separator = which ? ", " : ",\n    ";
    }
    if (!which) {
        separator = ",\n    \"resolved\": {\n      ";
#define R(type, field)                                                                                                 \
    fprintf(f, "%s\"%s\": ", separator, #field);                                                                       \
    row_write_json(f, TYPE_##type, "", &o->run.field);                                                                 \
    separator = ",\n      ";
        OPTIONS_RESOLVED(R)
#undef R
        fputs("\n    }\n  ", f);
    }
    fputc('}', f);
}
