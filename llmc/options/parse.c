// The command line and the config file.
#include "options/table.h"

#include "base/pipe.h"
#include "base/text.h"

#include <assert.h>
#include <ctype.h>
#include <string.h>

// ---- Unknown names --------------------------------------------------------------------------------------------------

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

// The option that other trainers know by this name; NULL: none.
static const char *known_elsewhere(const char *name) {
    static const char *const names[][2] = {
        {"gpus", "ranks"},        {"num-gpus", "ranks"},         {"nproc", "ranks"},
        {"batch", "micro-batch"}, {"batch-size", "micro-batch"}, {"block-size", "seq-len"},
        {"lr-rate", "lr"},        {"learning-rate", "lr"},       {"max-iters", "steps"},
        {"n-layer", "layers"},    {"n-head", "heads"},           {"n-embd", "channels"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i][0]) == 0) return names[i][1];
    return NULL;
}

// name: without leading dashes. dashes: "--" for a flag, "" for a line of the config file.
static int unknown_option(const char *said, const char *name, const char *dashes, Error *e) {
    FAIL(e, ERR_USAGE, "--help lists the options", "unknown option " SAID, said);
    const char *elsewhere = known_elsewhere(name);
    if (elsewhere) return error_hint(e, "the option here is %s%s", dashes, elsewhere);
    char flag[FLAG_BYTES], nearest[FLAG_BYTES] = "";
    int best = 1 + (int)size_min(3, (strlen(name) + 1) / 3); // more edits: another name
    for (int id = 0; id < OPTION_COUNT && strlen(name) < FLAG_BYTES; id++) {
        option_flag(flag, (OptionId)id);
        int distance = edit_distance(name, flag + 2);
        if (distance >= best || distance >= (int)strlen(flag + 2)) continue;
        best = distance;
        strcpy(nearest, flag + 2);
    }
    return *nearest ? error_hint(e, "did you mean %s%s?", dashes, nearest) : e->code;
}

// ---- The command line -----------------------------------------------------------------------------------------------

// llm.c's flags without a counterpart here. Each takes a value, which is ignored.
static const struct {
    const char *flag, *subject;
} foreign_flags[] = {
    {"-nm", "major checkpoints"},
    {"-f", "TF32"},
    {"-w", "fp32 master weights, which are always kept"},
    {"-ge", "GELU fusion"},
    {"-a", "overfitting one batch"},
    {"-lg", "GPU log interval"},
    {"-pn", "number of processes, which mpirun -np sets"},
    {"-pr", "process rank, which mpirun sets"},
    {"-pg", "GPUs per node, which mpirun sets"},
    {"-ps", "server address, which mpirun knows"},
    {"-pp", "shared directory, which MPI does not need"},
    {"-pf", "shared directory, which MPI does not need"},
};

static const char *foreign_subject(const char *flag) { // NULL: not one of them
    for (size_t i = 0; i < sizeof foreign_flags / sizeof *foreign_flags; i++)
        if (strcmp(foreign_flags[i].flag, flag) == 0) return foreign_flags[i].subject;
    return NULL;
}

// True if a word of the command line is an option, not a value.
static bool is_option(const char *word) {
    if (strncmp(word, "--", 2) == 0) return option_find(word + 2) < OPTION_COUNT;
    return word[0] == '-' && (option_find_alias(word) < OPTION_COUNT || foreign_subject(word));
}

// Moves *i to the next word, which must be a value.
static int next_value(int argc, char **argv, int *i, const char **value, Error *e) {
    if (*i + 1 >= argc || is_option(argv[*i + 1]))
        return FAIL(e, ERR_USAGE, "--help lists the values", SAID " has no value", argv[*i]);
    *value = argv[++*i];
    return 0;
}

// --train and --val take several words, such as a pattern that the shell expanded. Joins the words up to the next
// option with blanks; a blank in a word becomes "\\ " (text/sources.h). A text over OPTION_TEXT is cut, and option_set
// refuses it.
static const char *join_words(OptionId id, int argc, char **argv, int *i, const char *first,
                              char joined[OPTION_TEXT + 2]) {
    size_t used = 0;
    if ((id != OPTION_train && id != OPTION_val) || *i + 1 >= argc || argv[*i + 1][0] == '-') return first;
    for (const char *word = first;; word = argv[++*i]) {
        for (const char *c = word; *c && used < OPTION_TEXT; c++) {
            if (*c == ' ') joined[used++] = '\\';
            joined[used++] = *c;
        }
        if (*i + 1 >= argc || argv[*i + 1][0] == '-') break;
        if (used < OPTION_TEXT) joined[used++] = ' ';
    }
    joined[used] = 0;
    return joined;
}

// --name value, --name=value, or --name for a flag.
static int parse_long(Options *o, int argc, char **argv, int *i, Error *e) {
    const char *word = argv[*i], *equals = strchr(word, '='), *value = equals ? equals + 1 : NULL;
    char said[FLAG_BYTES], joined[OPTION_TEXT + 2]; // no option is longer
    snprintf(said, sizeof said, "%.*s", (int)strcspn(word, "="), word);
    OptionId id = option_find(word + 2);
    if (id == OPTION_COUNT) return unknown_option(said, said + 2, "--", e);
    if (option_rows[id].type == TYPE_FLAG) {
        if (value) return FAIL(e, ERR_USAGE, "leave out what follows it", "%s takes no value", said);
        value = "true";
    } else if (!value) {
        TRY(next_value(argc, argv, i, &value, e));
        value = join_words(id, argc, argv, i, value, joined);
    }
    return option_set(o, id, said, value, OPTION_GIVEN_COMMAND_LINE, e);
}

// One of llm.c's flags with a counterpart here.
static int parse_alias(Options *o, OptionId id, const char *alias, const char *value, Error *e) {
    const OptionRow *row = &option_rows[id];
    if (row->type == TYPE_INT && strcmp(value, "-1") == 0) return 0;        // llm.c's "default"
    if (id == OPTION_model && strncmp(value, "gpt2:d", 6) == 0) value += 5; // llm.c: "gpt2:d12" and "d12" are the same
    if (id == OPTION_recompute && strlen(value) == 1 && strchr("012", *value)) // llm.c counts them
        value = recompute_names[*value - '0'];
    if (id == OPTION_fresh && strcmp(value, "1") == 0) value = "false"; // llm.c's -y 1: resume
    if (id == OPTION_fresh && strcmp(value, "0") == 0) value = "true";  // and -y 0: start over
    char said[2 * FLAG_BYTES], flag[FLAG_BYTES];
    option_flag(flag, id);
    snprintf(said, sizeof said, "%s (%s)", alias, flag);
    TRY(option_set(o, id, said, value, OPTION_GIVEN_COMMAND_LINE, e));
    o->given[id] |= OPTION_GIVEN_ALIAS | (row->alias_unit ? OPTION_IN_ALIAS_UNIT : 0);
    return 0;
}

// llm.c's own ways to start several processes: here only MPI does that.
static int check_nccl_init(const char *flag, const char *value, const char *program, Error *e) {
    if (strcmp(value, "mpi") == 0) return 0;
    FAIL(e, ERR_USAGE, NULL, "%s '" SAID "': processes are started by MPI only", flag, value);
    return error_hint(e, "run mpirun -np PROCESSES " SAID " and the options, without %s", program, flag);
}

// llm.c's flags: one dash, always a value. -h without a value is --help.
static int parse_short(Options *o, int argc, char **argv, int *i, Error *e) {
    const char *flag = argv[*i], *value = NULL, *subject = foreign_subject(flag);
    char joined[OPTION_TEXT + 2];
    if (strcmp(flag, "-h") == 0 && (*i + 1 >= argc || is_option(argv[*i + 1])))
        return option_set(o, OPTION_help, flag, "true", OPTION_GIVEN_COMMAND_LINE, e);
    bool nccl_init = strcmp(flag, "-pi") == 0 || strcmp(flag, "-pm") == 0; // one in llm.c's code, the other in its help
    OptionId id = option_find_alias(flag);
    if (id == OPTION_COUNT && !nccl_init && !subject) return unknown_option(flag, flag + 1, "--", e);
    TRY(next_value(argc, argv, i, &value, e));
    if (nccl_init) return check_nccl_init(flag, value, argv[0], e);
    if (id < OPTION_COUNT) return parse_alias(o, id, flag, join_words(id, argc, argv, i, value, joined), e);
    option_note(o, "llm.c's %s (%s) has no counterpart here: ignored", flag, subject);
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
//     # a comment: from a # at the beginning of a line or after a blank
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

// The value after "=", without its comment, blanks and quotes.
static int config_value(char *s, char **value, Error *e) {
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
    if (*trim(close + 1)) return FAIL(e, ERR_USAGE, "a value contains no quotes", "text after the closing quote");
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
        return FAIL(e, ERR_USAGE, "remove it from the file", "%s is for the command line only", name);
    char *value = NULL;
    int code = config_value(equals + 1, &value, e);
    if (code) return error_prefix(e, "%s", name);
    return option_set(o, id, name, value, OPTION_GIVEN_CONFIG, e);
}

int options_parse_config(Options *o, char *text, size_t bytes, const char *name, Error *e) {
    if (strlen(text) < bytes)
        return FAIL(e, ERR_USAGE, "write plain text, name = value",
                    "--config %.200s: a zero byte: this is no text file", name);
    char *line;
    text += utf8_mark(text, bytes);
    for (int number = 1; (line = strsep(&text, "\n")); number++)
        if (parse_config_line(o, line, e)) return error_prefix(e, "--config %.200s line %d", name, number);
    return 0;
}

int options_parse(Options *o, int argc, char **argv, bool alone, Error *e) {
    options_defaults(o);
    TRY(parse_command_line(o, argc, argv, e));
    if (o->help || o->version || !o->given[OPTION_config]) return 0;
    const size_t max_bytes = 1 << 20; // far more than all options take
    char *text;
    size_t bytes;
    if (!alone && pipe_is(o->config))
        return FAIL(e, ERR_USAGE, "write it to a file", "--config %.200s: no regular file, and every rank reads it",
                    o->config);
    int code = pipe_read(o->config, max_bytes, &text, &bytes, e);
    if (code) return error_prefix(e, "--config");
    code = options_parse_config(o, text, bytes, o->config, e);
    memory_free(text);
    return code;
}
