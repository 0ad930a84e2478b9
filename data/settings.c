#include "settings.h"
#include "base/files.h"
#include "base/thread.h"
#include "options/parser.h"

#include <omp.h>
#include <string.h>

enum { THREADS_MAX = 256 };

const char *const SPLIT_NAMES[SPLITS] = {"train", "val"};

#define OPTION(type, field, ...)                                                                                       \
    { TYPE_##type, #field, offsetof(TokenizeOptions, field), sizeof((TokenizeOptions *)0)->field, .help = __VA_ARGS__ }
static const OptionRow rows[] = {
    OPTION(TEXT, tokenizer, "the vocabulary: bytes, or a directory with GPT-2's files", .unit = "bytes|DIR"),
    OPTION(TEXT, out, "writes PREFIX_train_000000.bin, PREFIX_val_000000.bin, ...", .unit = "prefix"),
    OPTION(TEXT, files_from, "a file or a pipe (-: standard input) that names more inputs, one path a line",
           .unit = "list", .empty = "name a file"),
    OPTION(CHOICE, format, "auto: by the name, .jsonl, .ndjson, .jl, .txt or .md, else by the first line",
           .names = "auto|text|jsonl", .init = "auto"),
    OPTION(TEXT, field, "the field of a jsonl line that holds the text; a.b is b in the object a", .init = "text",
           .unit = "name", .empty = "name a field"),
    OPTION(TEXT, separator, "between documents of a text file, with a newline or none", .unit = "string",
           .empty = "say what stands between documents"),
    OPTION(CHOICE, split, "all text goes to this split; the other split's shards are kept", .names = "train|val|both",
           .init = "both"),
    OPTION(REAL, val_fraction,
           "validation: the end of each text file; of jsonl and with --separator, documents by hash",
           .range = "[0, 1)"),
    OPTION(INT, val_every_file, "validation: one file in N, by hash of its path", .range = "[2, 1000000]"),
    OPTION(INT, max_bytes, "stop after N bytes of input", .range = "[1, 9e18]"),
    OPTION(INT, shard_tokens, "tokens in a shard", .range = "[1, 2147483647]", .init = "100000000"),
    OPTION(CHOICE, invalid, "text that is not UTF-8: refuse it, keep its bytes, or leave it out, with malformed jsonl",
           .names = "error|bytes|skip", .init = "error"),
    OPTION(INT, threads, "encoding threads; default: one per core, within a container's quota", .range = "[1, 256]"),
    OPTION(FLAG, force, "replace shards of the same PREFIX"),
    OPTION(FLAG, help, "print this, or of --help NAME that option's lines, then end; -h does the same",
           .kind = ROW_ENDS),
    OPTION(FLAG, version, "print the version, then end", .kind = ROW_ENDS),
};
#undef OPTION
enum { COUNT = sizeof rows / sizeof *rows };

void settings_print_help(const TokenizeOptions *o) {
    OptionTable t = {.rows = rows, .count = COUNT};
    if (o->help_about) return row_print_help(stdout, &rows[row_find(&t, o->help_about)]);
    printf("Turns text into token shards.\n\n  data/tokenize --tokenizer bytes|DIR --out PREFIX [options] INPUT...\n\n"
           "INPUT is a text file, JSON Lines, a directory (its .txt, .md, .jsonl, .ndjson and .jl files) or - for\n"
           "standard input. Every document begins with the vocabulary's end token, <|endoftext|>; bytes have no such\n"
           "token, and a newline separates documents.\n\n");
    for (int i = 0; i < COUNT; i++) row_print_help(stdout, &rows[i]);
}

// Handles a word that is no --option: an input, - (standard input), -- (all later words are inputs) or -h. ERR_USAGE
// for any other word that begins with -.
static int read_input(const OptionTable *t, int argc, char **argv, int *i, Error *e) {
    int *inputs = t->context;
    const char *word = argv[*i];
    if (strcmp(word, "-h") == 0) return row_set(t, row_find(t, "help"), word, "true", OPTION_GIVEN_COMMAND_LINE, e);
    if (strcmp(word, "--") == 0)
        while (++*i < argc) argv[(*inputs)++] = argv[*i];
    else if (word[0] == '-' && word[1])
        return FAIL(e, ERR_USAGE, "options begin with --; --help lists them", "unknown option " SAID, word);
    else argv[(*inputs)++] = argv[*i];
    return 0;
}

static int settings_check(const TokenizeOptions *o, int inputs, Error *e) {
    const char *val = o->val_every_file ? "--val-every-file" : o->val_fraction > 0 ? "--val-fraction" : NULL;
    if (!*o->tokenizer || !*o->out)
        return FAIL(e, ERR_USAGE, "say --tokenizer bytes, or name a directory, and --out data/NAME", "%s missing",
                    *o->out         ? "--tokenizer is"
                    : *o->tokenizer ? "--out is"
                                    : "--tokenizer and --out are");
    if (!*path_name(o->out) || directory_exists(o->out)) {
        FAIL(e, ERR_USAGE, NULL, "--out %s: a directory, not what the names of shards begin with", o->out);
        return error_hint(e, "say --out %s%sNAME", o->out, *path_name(o->out) ? "/" : "");
    }
    if (inputs == 0 && !*o->files_from)
        return FAIL(e, ERR_USAGE, "name a file or a directory, or - for standard input", "no INPUT");
    if (o->split != SPLITS && val) return FAIL(e, ERR_USAGE, "choose one", "--split and %s contradict each other", val);
    if (o->val_fraction > 0 && o->val_every_file)
        return FAIL(e, ERR_USAGE, "choose one", "--val-fraction and --val-every-file contradict each other");
    if (*o->separator && o->format == FORMAT_JSONL)
        return FAIL(e, ERR_USAGE, "every line of jsonl is a document", "--separator does not go with --format jsonl");
    return 0;
}

int settings_parse(int argc, char **argv, TokenizeOptions *o, int *inputs, Error *e) {
    uint8_t given[COUNT];
    OptionTable t = {.rows = rows, .count = COUNT, .values = o, .given = given, .context = inputs};
    t.read_word = read_input;
    *inputs = 0;
    for (int id = 0; id < COUNT; id++) row_reset(&t, id);
    o->max_bytes = INT64_MAX;
    size_t cores = size_min((size_t)omp_get_num_procs(), (size_t)thread_quota(""));
    o->threads = (int64_t)size_min(cores, THREADS_MAX);
    TRY(parser_command_line(&t, argc, argv, e));
    o->help_about = t.about;
    return o->help || o->version ? 0 : settings_check(o, *inputs, e);
}
