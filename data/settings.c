#include "settings.h"
#include "text/shards.h"
#include "base/files.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { THREADS_MAX = 256 };

const char *const SPLIT_NAMES[SPLITS] = {"train", "val"};

typedef struct {
    const char *name, *unit, *help;
    enum { TEXT, CHOICE, COUNT, FRACTION, SWITCH } kind; // CHOICE: an int, the number of a word of `unit`
    size_t offset;                                       // in TokenizeOptions
    uint64_t low, high;                                  // of a COUNT
} Flag;

#define AT(member) offsetof(TokenizeOptions, member)
// The options: parsed by this table, printed from it by --help.
static const Flag FLAGS[] = {
    {"--tokenizer", "bytes|DIR", "the vocabulary: bytes, or a directory with GPT-2's files", TEXT, AT(tokenizer), 0, 0},
    {"--out", "PREFIX", "writes PREFIX_train_000000.bin, PREFIX_val_000000.bin, ...", TEXT, AT(out), 0, 0},
    {"--files-from", "LIST", "a file or a pipe (-: standard input) that names more inputs, one path a line", TEXT,
     AT(files_from), 0, 0},
    {"--format", "auto|text|jsonl", "auto: jsonl for names in .jsonl and .ndjson, else text", CHOICE, AT(format), 0, 0},
    {"--field", "NAME", "the field of a jsonl line that holds the text (text)", TEXT, AT(field), 0, 0},
    {"--separator", "STRING", "between documents of a text file, with a newline or none", TEXT, AT(separator), 0, 0},
    {"--split", "train|val", "all text goes to this split; the other split's shards are kept", CHOICE, AT(split), 0, 0},
    {"--val-fraction", "F", "validation: the end of each text file; of jsonl and with --separator, documents by hash",
     FRACTION, AT(val_fraction), 0, 0},
    {"--val-every-file", "K", "validation: one file in K, by hash of its path", COUNT, AT(val_every_file), 2, 1000000},
    {"--max-bytes", "N", "stop after N bytes of input", COUNT, AT(max_bytes), 1, INT64_MAX},
    {"--shard-tokens", "N", "tokens in a shard (100000000)", COUNT, AT(shard_tokens), 1, SHARD_MAX_TOKENS},
    {"--invalid", "error|bytes|skip", "text that is not UTF-8: refuse it, keep its bytes, or leave it out (error)",
     CHOICE, AT(invalid), 0, 0},
    {"--threads", "N", "encoding threads (one a processor)", COUNT, AT(threads), 1, THREADS_MAX},
    {"--force", "", "replace shards of the same PREFIX, and start over", SWITCH, AT(force), 0, 0},
    {"--help", "", "this text", SWITCH, AT(help), 0, 0},
};
enum { FLAG_COUNT = sizeof FLAGS / sizeof *FLAGS };

void settings_print_help(void) {
    printf("Turns text into token shards.\n\n  data/tokenize --tokenizer bytes|DIR --out PREFIX [options] INPUT...\n\n"
           "INPUT is a text file, a .jsonl file, a directory (its .txt, .md, .jsonl and .ndjson files) or - for\n"
           "standard input. Every document begins with <|endoftext|>; bytes have no such token, and a newline\n"
           "separates documents. \n\n");
    for (int i = 0; i < FLAG_COUNT; i++) printf("  %-16s %-16s  %s\n", FLAGS[i].name, FLAGS[i].unit, FLAGS[i].help);
}

// The number of a word in "auto|text|jsonl", or -1.
static int choice_number(const char *words, const char *word) {
    size_t length = strlen(word);
    for (int i = 0;; i++) {
        size_t n = strcspn(words, "|");
        if (n == length && memcmp(words, word, n) == 0) return i;
        if (!words[n]) return -1;
        words += n + 1;
    }
}

static int flag_parse(const Flag *flag, const char *text, TokenizeOptions *o, Error *e) {
    void *member = (char *)o + flag->offset;
    char *end = "";
    errno = 0;
    if (flag->kind == TEXT) {
        *(const char **)member = text;
        if (!*text) return FAIL(e, ERR_USAGE, "see --help", "%s: empty", flag->name);
    } else if (flag->kind == CHOICE) {
        int number = *(int *)member = choice_number(flag->unit, text);
        if (number < 0) return FAIL(e, ERR_USAGE, "see --help", "%s %s: not one of %s", flag->name, text, flag->unit);
    } else if (flag->kind == COUNT) {
        uint64_t n = *(uint64_t *)member = strtoull(text, &end, 10);
        if (*text < '0' || *text > '9' || *end || errno || n < flag->low || n > flag->high)
            return FAIL(e, ERR_USAGE, "see --help", "%s %s: not a whole number from %" PRIu64 " to %" PRIu64,
                        flag->name, text, flag->low, flag->high);
    } else {
        double f = *(double *)member = strtod(text, &end);
        if (end == text || *end || !(f >= 0 && f < 1))
            return FAIL(e, ERR_USAGE, "see --help", "%s %s: not a number from 0 to below 1", flag->name, text);
    }
    return 0;
}

static int settings_check(const TokenizeOptions *o, int inputs, Error *e) {
    const char *val = o->val_every_file ? "--val-every-file" : o->val_fraction > 0 ? "--val-fraction" : NULL;
    if (!o->tokenizer && !o->out)
        return FAIL(e, ERR_USAGE, "say --tokenizer bytes, or name a directory, and --out data/NAME",
                    "--tokenizer and --out are missing");
    if (!o->tokenizer)
        return FAIL(e, ERR_USAGE, "say --tokenizer bytes, or name a directory", "--tokenizer is missing");
    if (!o->out) return FAIL(e, ERR_USAGE, "say --out data/NAME", "--out is missing");
    if (strlen(o->out) > PATH_MAX - 64) return FAIL(e, ERR_USAGE, "use a shorter path", "--out: path too long");
    if (!*path_name(o->out) || directory_exists(o->out)) {
        FAIL(e, ERR_USAGE, NULL, "--out %s: a directory, not what the names of shards begin with", o->out);
        return error_hint(e, "say --out %s%sNAME", o->out, *path_name(o->out) ? "/" : "");
    }
    if (inputs == 0 && !o->files_from)
        return FAIL(e, ERR_USAGE, "name a file or a directory, or - for standard input", "no INPUT");
    if (o->split != SPLITS && val) return FAIL(e, ERR_USAGE, "choose one", "--split and %s contradict each other", val);
    if (o->val_fraction > 0 && o->val_every_file)
        return FAIL(e, ERR_USAGE, "choose one", "--val-fraction and --val-every-file contradict each other");
    if (o->separator && o->format == FORMAT_JSONL)
        return FAIL(e, ERR_USAGE, "every line of jsonl is a document", "--separator does not go with --format jsonl");
    return 0;
}

int settings_parse(int argc, char **argv, TokenizeOptions *o, int *inputs, Error *e) {
    bool given[FLAG_COUNT] = {0}, only_inputs = false;
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    *o = (TokenizeOptions){.field = "text", .split = SPLITS, .shard_tokens = 100000000};
    o->threads = processors < 1 ? 1 : size_min((size_t)processors, THREADS_MAX);
    *inputs = 0;
    for (int i = 1; i < argc; i++) {
        if (only_inputs || argv[i][0] != '-' || !argv[i][1]) {
            argv[(*inputs)++] = argv[i];
            continue;
        }
        only_inputs = strcmp(argv[i], "--") == 0;
        if (only_inputs) continue;
        int f = 0;
        while (f < FLAG_COUNT && strcmp(argv[i], FLAGS[f].name)) f++;
        if (f == FLAG_COUNT) return FAIL(e, ERR_USAGE, "see --help", "%s: unknown option", argv[i]);
        if (given[f]) return FAIL(e, ERR_USAGE, "give it once", "%s is given twice", argv[i]);
        given[f] = true;
        if (FLAGS[f].kind == SWITCH) *(bool *)((char *)o + FLAGS[f].offset) = true;
        else if (i + 1 == argc) return FAIL(e, ERR_USAGE, "see --help", "%s needs a value", argv[i]);
        else TRY(flag_parse(&FLAGS[f], argv[++i], o, e));
    }
    return o->help ? 0 : settings_check(o, *inputs, e);
}
