#define _POSIX_C_SOURCE 200809L
#include "options.h"

#include "model.h"

#include <assert.h>
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---------------------------------------------------------------------------------------------------------------------
// The table as data

typedef enum { TYPE_INT, TYPE_REAL, TYPE_TEXT, TYPE_CHOICE, TYPE_FLAG } OptionType;
typedef enum { ALIAS_AS_IS, ALIAS_STEPS, ALIAS_MICRO_BATCHES } AliasUnit;

// Sections of --help, in the table's order.
#define SECTIONS(S)                                                                                                    \
    S(DATA, "Data and output")                                                                                         \
    S(MODEL, "Model")                                                                                                  \
    S(BATCH, "Batch and length of the run")                                                                            \
    S(OPTIMIZER, "Optimizer (AdamW)")                                                                                  \
    S(EVALUATION, "Validation and samples")                                                                            \
    S(CHECKPOINT, "Checkpoints and safety")                                                                            \
    S(GNS, "Gradient noise scale")                                                                                     \
    S(RAMP, "Batch ramp")                                                                                              \
    S(RANKS, "Several processes (mpirun -np N ...)")                                                                   \
    S(PROGRAM, "Program")

#define S(id, title) SECTION_##id,
typedef enum { SECTIONS(S) SECTION_COUNT } Section;
#undef S

#define S(id, title) title,
static const char *const section_titles[SECTION_COUNT] = {SECTIONS(S)};
#undef S

typedef struct {
    OptionType type;
    const char *field, *alias;
    AliasUnit alias_unit;
    const char *fallback, *values, *unit; // fallback: the default
    Section section;
    const char *help;
    size_t offset; // into struct Options
} OptionRow;

// clang-format off
#define X(type, field, alias, alias_unit, fallback, values, unit, section, help)                                       \
    {TYPE_##type, #field, alias, ALIAS_##alias_unit, fallback, values, unit, SECTION_##section, help,                  \
     offsetof(Options, field)},
// clang-format on
static const OptionRow rows[OPTION_COUNT] = {OPTIONS_TABLE(X)};
#undef X

// llm.c's flags whose subject does not exist here. Each takes a value, which is passed over.
static const struct {
    const char *flag, *subject;
} foreign_flags[] = {
    {"-nm", "major checkpoints"},
    {"-r", "recomputation"},
    {"-f", "TF32"},
    {"-w", "fp32 master weights, which are always kept"},
    {"-ge", "GELU fusion"},
    {"-a", "overfitting one batch"},
    {"-h", "HellaSwag; for help say --help"},
    {"-lg", "GPU log interval"},
    {"-pn", "number of processes, which mpirun -np says"},
    {"-pr", "process rank, which mpirun gives"},
    {"-pg", "GPUs a node, which mpirun says"},
    {"-ps", "server address, which mpirun knows"},
    {"-pp", "shared directory, which MPI does without"},
    {"-pf", "shared directory, which MPI does without"},
};

enum { FLAG_BYTES = 40 }; // of the longest flag, with its NUL

static void flag_write(char out[FLAG_BYTES], OptionId id) {
    snprintf(out, FLAG_BYTES, "--%s", rows[id].field);
    for (char *c = out; *c; c++)
        if (*c == '_') *c = '-';
}

// The option of a name without its leading dashes; OPTION_COUNT where there is none.
static OptionId option_find(const char *name) {
    int id = 0;
    for (char flag[FLAG_BYTES]; id < OPTION_COUNT; id++) {
        flag_write(flag, (OptionId)id);
        if (strcmp(flag + 2, name) == 0) break;
    }
    return (OptionId)id;
}

static OptionId option_find_alias(const char *alias) {
    int id = 0;
    while (id < OPTION_COUNT && strcmp(rows[id].alias, alias) != 0) id++;
    return (OptionId)id;
}

static void *option_field(Options *o, OptionId id) { return (char *)o + rows[id].offset; }

// ---------------------------------------------------------------------------------------------------------------------
// Values

typedef struct {
    double low, high;
    bool low_included, high_included;
} Interval;

static Interval interval_parse(const char *text) {
    char open = 0, close = 0;
    Interval interval = {0};
    int read = sscanf(text, "%c%lf, %lf%c", &open, &interval.low, &interval.high, &close);
    assert(read == 4), (void)read; // the table's own text
    interval.low_included = open == '[';
    interval.high_included = close == ']';
    return interval;
}

static bool interval_contains(Interval i, double x) {
    return (i.low_included ? x >= i.low : x > i.low) && (i.high_included ? x <= i.high : x < i.high); // false for NaN
}

// Decimal numbers only: no hexadecimal, no "nan", no "inf", nothing behind.
static bool parse_real(const char *text, double *out) {
    if (!*text || text[strspn(text, "0123456789+-.eE")]) return false;
    char *end;
    *out = strtod(text, &end);
    return *end == 0;
}

// Whole numbers, exactly, or written as in 10e9. What no int64_t holds becomes its nearest end.
static bool parse_int(const char *text, int64_t *out) {
    double real;
    if (!parse_real(text, &real) || real != floor(real)) return false;
    char *end;
    *out = strtoll(text, &end, 10);
    if (*end == 0) return true;
    const double limit = 9223372036854775808.0; // 2^63
    *out = real >= limit ? INT64_MAX : real < -limit ? INT64_MIN : (int64_t)real;
    return true;
}

// Index of text among "first|second|third", or -1.
static int choice_find(const char *choices, const char *text) {
    size_t length = strlen(text);
    for (int index = 0;; index++) {
        size_t width = strcspn(choices, "|");
        if (width == length && strncmp(choices, text, length) == 0) return index;
        if (!choices[width]) return -1;
        choices += width + 1;
    }
}

// How an option was called by the user, to be named in messages; the user's own text is cut to keep the rest readable.
#define SAID "%.60s"

static int value_refuse(const OptionRow *row, const char *said, const char *text, const char *why, Error *e) {
    FAIL(e, ERR_USAGE, NULL, SAID " '" SAID "': %s", said, text, why);
    if (row->type == TYPE_CHOICE) return error_hint(e, "use one of %s", row->values);
    if (row->type == TYPE_FLAG) return error_hint(e, "say true or false");
    if (row->type == TYPE_TEXT) return error_hint(e, "use at most %d bytes", OPTION_TEXT - 1);
    const char *kind = row->type == TYPE_INT ? "a whole number" : "a number";
    return error_hint(e, "use %s%s%s in %s", kind, *row->unit ? " of " : "", row->unit, row->values);
}

// Into *out, which has the row's type.
static int value_parse(const OptionRow *row, const char *said, const char *text, void *out, Error *e) {
    switch (row->type) {
    case TYPE_INT: {
        int64_t value;
        if (!parse_int(text, &value)) return value_refuse(row, said, text, "not a whole number", e);
        if (!interval_contains(interval_parse(row->values), (double)value))
            return value_refuse(row, said, text, "out of range", e);
        *(int64_t *)out = value;
        return 0;
    }
    case TYPE_REAL: {
        double value;
        if (!parse_real(text, &value)) return value_refuse(row, said, text, "not a number", e);
        if (!interval_contains(interval_parse(row->values), value))
            return value_refuse(row, said, text, "out of range", e);
        *(double *)out = value;
        return 0;
    }
    case TYPE_TEXT:
        if (strlen(text) >= OPTION_TEXT) return value_refuse(row, said, text, "too long", e);
        strcpy(out, text);
        return 0;
    case TYPE_CHOICE: {
        int index = choice_find(row->values, text);
        if (index < 0) return value_refuse(row, said, text, "no such choice", e);
        *(int *)out = index;
        return 0;
    }
    case TYPE_FLAG:
        if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0)
            return value_refuse(row, said, text, "neither true nor false", e);
        *(bool *)out = *text == 't';
        return 0;
    }
    assert(0);
    return ERR_INTERNAL;
}

void options_defaults(Options *o) {
    memset(o, 0, sizeof *o);
    for (int id = 0; id < OPTION_COUNT; id++) {
        if (!*rows[id].fallback) continue;
        Error e;
        int code = value_parse(&rows[id], rows[id].field, rows[id].fallback, option_field(o, (OptionId)id), &e);
        assert(code == 0), (void)code; // the table's own text
    }
}

// Sets an option from one of the two places. The command line is read first and wins, but what the file says must be
// right all the same.
static int option_set(Options *o, OptionId id, const char *said, const char *text, int place, Error *e) {
    union {
        int64_t i;
        double d;
        int choice;
        bool flag;
        char text[OPTION_TEXT];
    } overruled;
    if (o->given[id] & place) return FAIL(e, ERR_USAGE, "give it once", SAID " is given twice", said);
    bool wins = !(o->given[id] & OPTION_GIVEN_COMMAND_LINE);
    TRY(value_parse(&rows[id], said, text, wins ? option_field(o, id) : (void *)&overruled, e));
    o->given[id] |= (uint8_t)place;
    return 0;
}

bool options_given(const Options *o, const char *flag) {
    assert(strncmp(flag, "--", 2) == 0);
    OptionId id = option_find(flag + 2);
    assert(id < OPTION_COUNT);
    return o->given[id] != 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Unknown names

// Edit distance (Levenshtein 1966): insertions, deletions and substitutions that make b of a.
static int edit_distance(const char *a, const char *b) {
    int cost[FLAG_BYTES + 1]; // of making b's first j characters of a's first i
    int n = (int)strlen(b);
    assert(n <= FLAG_BYTES);
    for (int j = 0; j <= n; j++) cost[j] = j;
    for (int i = 0; a[i]; i++) {
        int diagonal = cost[0];
        cost[0] = i + 1;
        for (int j = 1; j <= n; j++) {
            int substitute = diagonal + (a[i] != b[j - 1]);
            int insert_or_delete = (cost[j] < cost[j - 1] ? cost[j] : cost[j - 1]) + 1;
            diagonal = cost[j];
            cost[j] = substitute < insert_or_delete ? substitute : insert_or_delete;
        }
    }
    return cost[n];
}

// name: without leading dashes. dashes: "--" for a flag, "" for a line of the config file.
static int unknown_option(const char *said, const char *name, const char *dashes, Error *e) {
    FAIL(e, ERR_USAGE, "--help lists the options", "unknown option " SAID, said);
    char flag[FLAG_BYTES], nearest[FLAG_BYTES] = "";
    int best = 4; // a name further off than 3 edits is another name
    for (int id = 0; id < OPTION_COUNT && strlen(name) < FLAG_BYTES; id++) {
        flag_write(flag, (OptionId)id);
        int distance = edit_distance(name, flag + 2);
        if (distance >= best || distance >= (int)strlen(flag + 2)) continue;
        best = distance;
        strcpy(nearest, flag + 2);
    }
    return *nearest ? error_hint(e, "did you mean %s%s?", dashes, nearest) : e->code;
}

// ---------------------------------------------------------------------------------------------------------------------
// The command line

static bool is_foreign(const char *flag, const char **subject) {
    for (size_t i = 0; i < sizeof foreign_flags / sizeof *foreign_flags; i++) {
        *subject = foreign_flags[i].subject;
        if (strcmp(foreign_flags[i].flag, flag) == 0) return true;
    }
    return false;
}

// Does a word of the command line name an option rather than be a value?
static bool is_option(const char *word) {
    char name[FLAG_BYTES];
    const char *subject;
    if (word[0] != '-') return false;
    if (word[1] != '-') return option_find_alias(word) < OPTION_COUNT || is_foreign(word, &subject);
    snprintf(name, sizeof name, "%.*s", (int)size_min(strcspn(word + 2, "="), sizeof name - 1), word + 2);
    return option_find(name) < OPTION_COUNT;
}

// The word behind argv[*i], which must be a value. Moves *i there.
static int next_value(int argc, char **argv, int *i, const char **value, Error *e) {
    if (*i + 1 >= argc || is_option(argv[*i + 1]))
        return FAIL(e, ERR_USAGE, "give one, as --help says", SAID " has no value", argv[*i]);
    *value = argv[++*i];
    return 0;
}

// --name value, --name=value, or --name for a flag.
static int parse_long(Options *o, int argc, char **argv, int *i, Error *e) {
    const char *word = argv[*i];
    const char *equals = strchr(word, '=');
    size_t length = equals ? (size_t)(equals - word) : strlen(word);
    char said[FLAG_BYTES]; // a longer one is no option anyway
    snprintf(said, sizeof said, "%.*s", (int)size_min(length, sizeof said - 1), word);
    OptionId id = length < sizeof said ? option_find(said + 2) : OPTION_COUNT;
    if (id == OPTION_COUNT) return unknown_option(said, said + 2, "--", e);

    const char *value = equals ? equals + 1 : NULL;
    if (rows[id].type == TYPE_FLAG) {
        if (value) return FAIL(e, ERR_USAGE, "leave out what follows it", "%s takes no value", said);
        value = "true";
    } else if (!value) TRY(next_value(argc, argv, i, &value, e));
    return option_set(o, id, said, value, OPTION_GIVEN_COMMAND_LINE, e);
}

// One of llm.c's flags that mean something here.
static int parse_alias(Options *o, OptionId id, const char *alias, const char *value, Error *e) {
    const OptionRow *row = &rows[id];
    if (row->type == TYPE_INT && strcmp(value, "-1") == 0) return 0;        // llm.c's way of saying "the default"
    if (id == OPTION_model && strncmp(value, "gpt2:d", 6) == 0) value += 5; // llm.c: "gpt2:d12" and "d12" are the same
    if (id == OPTION_fresh && strcmp(value, "1") == 0) return 0;            // llm.c's -y 1: resume
    if (id == OPTION_fresh && strcmp(value, "0") == 0) value = "true";      // and -y 0: start over
    char said[2 * FLAG_BYTES], flag[FLAG_BYTES];
    flag_write(flag, id);
    snprintf(said, sizeof said, "%s (%s)", alias, flag);
    TRY(option_set(o, id, said, value, OPTION_GIVEN_COMMAND_LINE, e));
    o->alias_unit[id] = (uint8_t)row->alias_unit;
    return 0;
}

// llm.c's own start of several processes: MPI does that here.
static int check_nccl_init(const char *flag, const char *value, const char *program, Error *e) {
    if (strcmp(value, "mpi") == 0) return 0;
    FAIL(e, ERR_USAGE, NULL, "%s '" SAID "': processes are started by MPI only", flag, value);
    return error_hint(e, "run mpirun -np PROCESSES " SAID " and the options, without %s", program, flag);
}

static void note_foreign(Options *o, const char *flag, const char *subject) {
    char line[160];
    int length = snprintf(line, sizeof line, "note: llm.c's %s (%s) has no counterpart here: ignored\n", flag, subject);
    if (strlen(o->notes) + (size_t)length < sizeof o->notes) strcat(o->notes, line);
}

// llm.c's flags: one dash, always a value.
static int parse_short(Options *o, int argc, char **argv, int *i, Error *e) {
    const char *flag = argv[*i], *value, *subject = NULL;
    bool nccl_init = strcmp(flag, "-pi") == 0 || strcmp(flag, "-pm") == 0; // llm.c's code takes one, its help says two
    OptionId id = option_find_alias(flag);
    if (id == OPTION_COUNT && !nccl_init && !is_foreign(flag, &subject)) return unknown_option(flag, flag + 1, "--", e);
    TRY(next_value(argc, argv, i, &value, e));
    if (nccl_init) return check_nccl_init(flag, value, argv[0], e);
    if (id < OPTION_COUNT) return parse_alias(o, id, flag, value, e);
    note_foreign(o, flag, subject);
    return 0;
}

static int parse_command_line(Options *o, int argc, char **argv, Error *e) {
    for (int i = 1; i < argc && !o->help && !o->version; i++) {
        const char *word = argv[i];
        if (strncmp(word, "--", 2) == 0) TRY(parse_long(o, argc, argv, &i, e));
        else if (word[0] == '-' && word[1]) TRY(parse_short(o, argc, argv, &i, e));
        else return FAIL(e, ERR_USAGE, "options begin with --; --help lists them", "'" SAID "' is no option", word);
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// The config file
//
//     # a comment: from a # at the beginning of a line or behind a blank
//     name = value
//     prompt = " in quotes, blanks and # are kept; there are no escapes "

static char *trim(char *s) {
    while (isspace((unsigned char)*s)) s++;
    char *end = s + strlen(s);
    while (end > s && isspace((unsigned char)end[-1])) end--;
    *end = 0;
    return s;
}

static void cut_comment(char *s) {
    for (char *c = s; *c; c++) {
        if (*c != '#' || (c > s && !isspace((unsigned char)c[-1]))) continue;
        *c = 0;
        return;
    }
}

// A value as it stands behind "=": without its comment, blanks and quotes.
static int config_value(char *s, char **value, Error *e) {
    *value = s;
    while (isspace((unsigned char)*s)) s++;
    if (*s != '"') {
        cut_comment(s);
        *value = trim(s);
        return 0;
    }
    char *close = strchr(++s, '"');
    if (!close) return FAIL(e, ERR_USAGE, "end the value with a quote", "a quote is not closed");
    *close = 0;
    cut_comment(close + 1);
    if (*trim(close + 1)) return FAIL(e, ERR_USAGE, "a value holds no quotes inside", "text behind the closing quote");
    *value = s;
    return 0;
}

static int parse_config_line(Options *o, char *line, Error *e) {
    char *first = line + strspn(line, " \t\r\v\f");
    if (!*first || *first == '#') return 0;
    char *equals = strchr(first, '=');
    if (!equals) return FAIL(e, ERR_USAGE, "write name = value", "'" SAID "' has no =", trim(first));
    *equals = 0;
    const char *name = trim(first);
    OptionId id = option_find(name);
    if (id == OPTION_COUNT) {
        unknown_option(name, name, "", e);
        return strncmp(name, "--", 2) == 0 ? error_hint(e, "write it without the dashes") : e->code;
    }
    if (id == OPTION_config || id == OPTION_help || id == OPTION_version)
        return FAIL(e, ERR_USAGE, "take it out of the file", "%s is for the command line", name);
    char *value;
    int code = config_value(equals + 1, &value, e);
    if (code) return error_prefix(e, "%s", name), code;
    return option_set(o, id, name, value, OPTION_GIVEN_CONFIG, e);
}

int options_parse_config(Options *o, char *text, size_t bytes, const char *name, Error *e) {
    char *line = text, *end = text + bytes;
    for (int number = 1; line < end; number++) {
        char *newline = memchr(line, '\n', (size_t)(end - line));
        char *line_end = newline ? newline : end;
        *line_end = 0;
        int code = strlen(line) < (size_t)(line_end - line)
                       ? FAIL(e, ERR_USAGE, "write plain text, name = value", "a zero byte: this is no text file")
                       : parse_config_line(o, line, e);
        if (code) return error_prefix(e, "--config %.200s line %d", name, number);
        line = line_end + 1;
    }
    return 0;
}

static int read_config(Options *o, Error *e) {
    const size_t max_bytes = 1 << 20; // far more than all options take
    char *text;
    size_t bytes;
    int code = file_read(o->config, max_bytes, &text, &bytes, e);
    if (code) return error_prefix(e, "--config");
    code = options_parse_config(o, text, bytes, o->config, e);
    memory_free(text);
    return code;
}

int options_parse(Options *o, int argc, char **argv, Error *e) {
    options_defaults(o);
    TRY(parse_command_line(o, argc, argv, e));
    if (o->help || o->version || !o->given[OPTION_config]) return 0;
    return read_config(o, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// What follows from the options together

static bool given(const Options *o, OptionId id) { return o->given[id] != 0; }

static int resolve_model(const Options *o, Error *e) {
    static const OptionId shape[] = {OPTION_layers, OPTION_heads, OPTION_channels};
    if (!*o->model) return FAIL(e, ERR_USAGE, model_preset_help, "--model is empty");
    ModelConfig ignored;
    bool preset = model_preset(&ignored, o->model);
    for (size_t i = 0; !preset && i < sizeof shape / sizeof *shape; i++) {
        if (!given(o, shape[i])) continue;
        FAIL(e, ERR_USAGE, NULL, "--%s goes with a preset, and --model " SAID " is none", rows[shape[i]].field,
             o->model);
        return error_hint(e, "leave it out, since the files say the shape, or use %s", model_preset_help);
    }
    if (preset && o->sample_only)
        return FAIL(e, ERR_USAGE, "give --model the directory of a trained model",
                    "--sample-only of the preset " SAID ", which is not trained", o->model);
    return 0;
}

static int resolve_batch(Options *o, Error *e) {
    if (o->batch_tokens % o->seq_len != 0) {
        FAIL(e, ERR_USAGE, NULL, "--batch-tokens %lld is not a multiple of --seq-len %lld", (long long)o->batch_tokens,
             (long long)o->seq_len);
        int64_t below = o->batch_tokens / o->seq_len * o->seq_len;
        return error_hint(e, "use %lld", (long long)(below ? below : o->seq_len));
    }
    bool ramp = o->run.ramp_mode != RAMP_FIXED;
    int64_t one_micro_batch = o->micro_batch;
    int64_t unsaid = ramp && o->batch_min ? o->batch_min : one_micro_batch;
    o->run.batch_ref_rows = o->batch_tokens ? o->batch_tokens / o->seq_len : unsaid;
    o->run.batch_min_rows = ramp && o->batch_min ? o->batch_min : o->run.batch_ref_rows;
    o->run.batch_max_rows = ramp && o->batch_max ? o->batch_max : o->run.batch_ref_rows;
    return 0;
}

static int resolve_ramp(Options *o, Error *e) {
    TRY(ramp_parse(o->ramp, &o->run.ramp_mode, &o->run.ramp_replay, e));
    if (o->run.ramp_mode == RAMP_FIXED) {
        if (!o->batch_min && !o->batch_max) return 0;
        return FAIL(e, ERR_USAGE, "use --ramp linear, seesaw or gns, or --batch-tokens for a constant batch",
                    "--batch-%s goes with a --ramp, and there is none", o->batch_min ? "min" : "max");
    }
    if (given(o, OPTION_steps))
        return FAIL(e, ERR_USAGE, "use --train-tokens", "--steps does not say how long a run with --ramp " SAID " is",
                    o->ramp);
    if (o->run.ramp_mode != RAMP_REPLAY && (!o->batch_min || !o->batch_max))
        return FAIL(e, ERR_USAGE, "say how many rows", "--ramp " SAID " needs --batch-%s", o->ramp,
                    o->batch_min ? "max" : "min");
    if (o->batch_min && o->batch_max && o->batch_min > o->batch_max)
        return FAIL(e, ERR_USAGE, "swap them", "--batch-min %lld is above --batch-max %lld", (long long)o->batch_min,
                    (long long)o->batch_max);
    return 0;
}

// What llm.c's flags count in steps or micro-batches is tokens here.
static int resolve_aliases(Options *o, Error *e) {
    for (int id = 0; id < OPTION_COUNT; id++) {
        if (o->alias_unit[id] == ALIAS_AS_IS) continue;
        int64_t batch = o->alias_unit[id] == ALIAS_STEPS ? o->run.batch_ref_rows : o->micro_batch;
        int64_t *count = option_field(o, (OptionId)id);
        if (__builtin_mul_overflow(*count, batch * o->seq_len, count) ||
            !interval_contains(interval_parse(rows[id].values), (double)*count))
            return FAIL(e, ERR_USAGE, "use a smaller number", "%s comes to too many tokens", rows[id].alias);
        o->alias_unit[id] = ALIAS_AS_IS;
    }
    return 0;
}

static int resolve_horizon(Options *o, Error *e) {
    o->run.horizon_tokens = 0;
    if (o->steps && o->train_tokens)
        return FAIL(e, ERR_USAGE, "give one of them", "--steps and --train-tokens both say how long the run is");
    if (!o->steps && !o->train_tokens) {
        if (o->sample_only || o->dry_run || *o->check) return 0;
        return FAIL(e, ERR_USAGE, "give --train-tokens or --steps", "nothing says how long the run is");
    }
    int64_t tokens = o->train_tokens;
    if (o->steps && __builtin_mul_overflow(o->steps, o->run.batch_ref_rows * o->seq_len, &tokens))
        return FAIL(e, ERR_USAGE, "use fewer steps", "--steps %lld comes to too many tokens", (long long)o->steps);
    o->run.horizon_tokens = tokens / o->seq_len * o->seq_len;
    if (!o->run.horizon_tokens)
        return FAIL(e, ERR_USAGE, "train on one row at least", "--train-tokens %lld is less than --seq-len %lld",
                    (long long)tokens, (long long)o->seq_len);
    return 0;
}

enum { GNS_IS_OFF, GNS_IS_LN, GNS_IS_EXACT }; // indices into the choices of --gns, in the order of engine.h's GnsMode

static int resolve_gns(Options *o, Error *e) {
    const int64_t calibration_interval = 16; // steps: c drifts slowly, and an exact step costs a fraction more
    bool ramp = o->run.ramp_mode == RAMP_GNS;
    bool ratio_open = ramp && o->gns_ratio == 0;
    if (o->gns == GNS_IS_OFF && ramp)
        return FAIL(e, ERR_USAGE, "use --gns ln", "--ramp gns needs the noise scale that --gns off does not measure");
    if (o->gns == GNS_IS_OFF && o->gns_exact_every)
        return FAIL(e, ERR_USAGE, "use --gns ln or exact", "--gns-exact-every measures what --gns off switches off");
    if (ratio_open && o->gns == GNS_IS_LN && given(o, OPTION_gns_exact_every) && !o->gns_exact_every)
        return FAIL(e, ERR_USAGE, "give --gns-ratio, or --gns-exact-every above 0",
                    "--ramp gns with --gns-exact-every 0 has no ratio of the model's noise scale to ln's");
    int64_t unsaid = o->gns == GNS_IS_EXACT ? 1 : ratio_open ? calibration_interval : 0;
    o->run.gns_exact_interval = o->gns_exact_every ? o->gns_exact_every : unsaid;
    const double horizon_share = 0.005; // of the run, where --gns-half-life says nothing
    o->run.gns_half_life_tokens =
        o->gns_half_life ? (double)o->gns_half_life : horizon_share * (double)o->run.horizon_tokens;
    return 0;
}

int options_resolve(Options *o, Error *e) {
    TRY(resolve_model(o, e));
    TRY(resolve_ramp(o, e));
    TRY(resolve_batch(o, e));
    TRY(resolve_aliases(o, e));
    TRY(resolve_horizon(o, e));
    TRY(resolve_gns(o, e));
    if (o->keep == 1) return FAIL(e, ERR_USAGE, "use 2 or more, or 0 for all", "--keep 1: one of them may get damaged");
    if (!*o->train && !o->sample_only && !o->dry_run && !*o->check)
        return FAIL(e, ERR_USAGE, "give token shards, made by the programs in data/", "--train is missing");
    if (!*o->out) return FAIL(e, ERR_USAGE, "name a directory", "--out is empty");
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// --help

enum { HELP_WIDTH = 100, HELP_COLUMN = 28 };

// Puts a word, or some that stay together, on this line or the next. *column: where the cursor is.
static void print_word(FILE *f, int *column, const char *word, int width) {
    if (*column > HELP_COLUMN && *column + 1 + width > HELP_WIDTH)
        *column = HELP_COLUMN, fprintf(f, "\n%*s", HELP_COLUMN, "");
    if (*column > HELP_COLUMN) ++*column, fputc(' ', f);
    fprintf(f, "%.*s", width, word);
    *column += width;
}

static void print_words(FILE *f, int *column, const char *text) {
    while (*text) {
        int width = (int)strcspn(text, " ");
        print_word(f, column, text, width);
        text += width + strspn(text + width, " ");
    }
}

// "--micro-batch ROWS": what follows the flag is the unit where there is one.
static int print_flag(FILE *f, OptionId id) {
    static const char *const kinds[] = {"N", "X", "TEXT", "NAME", ""};
    char text[2 * FLAG_BYTES];
    const OptionRow *row = &rows[id];
    const char *operand = *row->unit ? row->unit : kinds[row->type];
    flag_write(text, id);
    if (*operand) strcat(text, " ");
    for (char *end = text + strlen(text); *operand; operand++)
        *end++ = (char)toupper((unsigned char)*operand), *end = 0;
    return fprintf(f, "  %s", text);
}

// "[default 4; llm.c -b]", or nothing.
static void help_suffix(char *out, size_t bytes, const OptionRow *row) {
    static const char *const counts[] = {"", ", in steps", ", in micro-batches"};
    char fallback[80] = "", alias[80] = "";
    if (*row->fallback) snprintf(fallback, sizeof fallback, "default %s", row->fallback);
    if (*row->alias) snprintf(alias, sizeof alias, "llm.c %s%s", row->alias, counts[row->alias_unit]);
    *out = 0;
    if (*fallback || *alias) snprintf(out, bytes, "[%s%s%s]", fallback, *fallback && *alias ? "; " : "", alias);
}

static void print_row(FILE *f, OptionId id) {
    const OptionRow *row = &rows[id];
    char suffix[200], names[200] = "";
    bool named = row->type == TYPE_CHOICE || row->type == TYPE_TEXT;
    if (named && *row->values) snprintf(names, sizeof names, "%s:", row->values);
    help_suffix(suffix, sizeof suffix, row);
    int column = HELP_COLUMN;
    fprintf(f, "%*s", HELP_COLUMN - print_flag(f, id), "");
    print_words(f, &column, names);
    print_words(f, &column, row->help);
    if (*suffix) print_word(f, &column, suffix, (int)strlen(suffix));
    fputc('\n', f);
}

void options_print_help(FILE *f, const char *program) {
    const char *slash = strrchr(program, '/');
    fprintf(f, "Trains GPT-2, measures its gradient noise scale and can grow the batch with it.\n\n");
    fprintf(f, "usage: %s --train FILES [--val FILES] (--train-tokens N | --steps N) [options]\n",
            slash ? slash + 1 : program);
    for (int id = 0; id < OPTION_COUNT; id++) {
        if (id == 0 || rows[id].section != rows[id - 1].section) fprintf(f, "\n%s\n", section_titles[rows[id].section]);
        print_row(f, (OptionId)id);
    }
    fprintf(f, "\nExit codes: 0 done; 64 usage; 65 bad input; 69 no usable GPU; 70 internal; 71 out of memory;\n"
               "74 writing failed; 75 stopped by a signal with a checkpoint, run me again; 76 the loss or gradient\n"
               "is not finite.\n");
}

// ---------------------------------------------------------------------------------------------------------------------
// run.json

// Bytes of the UTF-8 character at s (RFC 3629), 0 where there is none.
static int utf8_length(const unsigned char *s) {
    int length = s[0] < 0x80 ? 1 : s[0] >= 0xc2 && s[0] < 0xe0 ? 2 : s[0] >= 0xe0 && s[0] < 0xf0 ? 3 : 4;
    if (length == 4 && (s[0] < 0xf0 || s[0] > 0xf4)) return 0;
    for (int i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    bool overlong = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90);
    bool surrogate = s[0] == 0xed && s[1] > 0x9f, beyond = s[0] == 0xf4 && s[1] > 0x8f;
    return overlong || surrogate || beyond ? 0 : length;
}

// RFC 8259; a byte that is no UTF-8 becomes U+FFFD.
static void write_json_text(FILE *f, const char *text) {
    fputc('"', f);
    for (const unsigned char *s = (const unsigned char *)text; *s;) {
        int length = utf8_length(s);
        if (!length) fputs("\\ufffd", f);
        else if (*s == '"' || *s == '\\') fprintf(f, "\\%c", *s);
        else if (*s < 0x20) fprintf(f, "\\u%04x", *s);
        else fwrite(s, 1, (size_t)length, f);
        s += length ? length : 1;
    }
    fputc('"', f);
}

// The fewest digits that read back as the same number.
static void write_json_real(FILE *f, double x) {
    char text[40];
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, x);
        if (strtod(text, NULL) == x) break;
    }
    fputs(text, f);
}

static void write_json_value(FILE *f, OptionType type, const char *values, const void *field) {
    switch (type) {
    case TYPE_INT: fprintf(f, "%lld", (long long)*(const int64_t *)field); break;
    case TYPE_REAL: write_json_real(f, *(const double *)field); break;
    case TYPE_TEXT: write_json_text(f, field); break;
    case TYPE_FLAG: fputs(*(const bool *)field ? "true" : "false", f); break;
    case TYPE_CHOICE: {
        for (int i = *(const int *)field; i > 0; i--) values += strcspn(values, "|") + 1;
        fprintf(f, "\"%.*s\"", (int)strcspn(values, "|"), values);
    }
    }
}

static void write_json_resolved(FILE *f, const Options *o, int indent) {
    const char *comma = "";
    fputc('{', f);
#define R(type, field)                                                                                                 \
    fprintf(f, "%s\n%*s\"%s\": ", comma, indent + 2, "", #field);                                                      \
    write_json_value(f, TYPE_##type, "", &o->run.field);                                                               \
    comma = ",";
    OPTIONS_RESOLVED(R)
#undef R
    fprintf(f, "\n%*s}", indent, "");
}

void options_write_json(FILE *f, const Options *o, int indent) {
    fputs("{\n", f);
    for (int id = 0; id < OPTION_COUNT; id++) {
        fprintf(f, "%*s\"%s\": ", indent + 2, "", rows[id].field);
        write_json_value(f, rows[id].type, rows[id].values, (const char *)o + rows[id].offset);
        fputs(",\n", f);
    }
    fprintf(f, "%*s\"resolved\": ", indent + 2, "");
    write_json_resolved(f, o, indent + 2);
    fprintf(f, "\n%*s}", indent, "");
}
