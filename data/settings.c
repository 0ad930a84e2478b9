// One table says everything about the options.
#define _POSIX_C_SOURCE 200809L
#include "settings.h"
#include "text/shards.h"
#include "text/tokenizer.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { THREADS_MAX = 256 };

typedef enum { TEXT, COUNT, FRACTION, SWITCH } FlagKind;

typedef struct {
    const char *name, *unit, *help;
    FlagKind kind;
    size_t offset; // in TokenizeOptions
    uint64_t low, high;
} Flag;

#define AT(member) offsetof(TokenizeOptions, member)
static const Flag FLAGS[] = {
    {"--tokenizer", "bytes|DIR", "the vocabulary: bytes, or a directory with GPT-2's files", TEXT, AT(tokenizer), 0, 0},
    {"--out", "PREFIX", "writes PREFIX_train_000000.bin, PREFIX_val_000000.bin, ...", TEXT, AT(out), 0, 0},
    {"--train-bpe", "N", "instead: learn a BPE vocabulary of N tokens, written to the directory --out", COUNT,
     AT(train_bpe), BYTE_VALUES + 1, VOCAB_MAX},
    {"--files-from", "LIST", "a file that names more inputs, one path a line", TEXT, AT(files_from), 0, 0},
    {"--format", "auto|text|jsonl", "auto: jsonl where the name ends in .jsonl or .ndjson, else text", TEXT, AT(format),
     0, 0},
    {"--field", "NAME", "the field of a jsonl line that holds the text (text)", TEXT, AT(field), 0, 0},
    {"--separator", "STRING", "parts the documents of a text file; a newline before and behind it goes too", TEXT,
     AT(separator), 0, 0},
    {"--split", "train|val", "all of it goes there, and the shards of the other split stay as they are", TEXT,
     AT(split), 0, 0},
    {"--val-fraction", "F",
     "validation: the last part of each text file; of jsonl and with --separator, documents by hash", FRACTION,
     AT(val_fraction), 0, 0},
    {"--val-every-file", "K", "validation: one file in K, by hash of its path", COUNT, AT(val_every_file), 2, 1000000},
    {"--max-bytes", "N", "stop after N bytes of input", COUNT, AT(max_bytes), 1, INT64_MAX},
    {"--shard-tokens", "N", "tokens in a shard (100000000)", COUNT, AT(shard_tokens), 1, SHARD_MAX_TOKENS},
    {"--invalid", "error|bytes|skip",
     "text that is not UTF-8: refuse it, take its bytes as they are, or leave it out "
     "(error)",
     TEXT, AT(invalid), 0, 0},
    {"--threads", "N", "encoding threads (one a processor)", COUNT, AT(threads), 1, THREADS_MAX},
    {"--force", "", "replace shards of the same PREFIX, and start over", SWITCH, AT(force), 0, 0},
    {"--help", "", "this text", SWITCH, AT(help), 0, 0},
};
enum { FLAG_COUNT = sizeof FLAGS / sizeof *FLAGS };

void settings_print_help(void) {
    printf("Turns text into token shards.\n\n  data/tokenize --tokenizer bytes|DIR --out PREFIX [options] INPUT...\n"
           "  data/tokenize --train-bpe N --out DIR [options] INPUT...\n\n"
           "INPUT is a text file, a .jsonl file, a directory (its .txt, .md, .jsonl and .ndjson files) or - for\n"
           "standard input. Every document begins with <|endoftext|>; bytes have no such token, and a newline\n"
           "stands between documents where there is none. The same command goes on after an interruption.\n\n");
    for (int i = 0; i < FLAG_COUNT; i++) printf("  %-16s %-16s  %s\n", FLAGS[i].name, FLAGS[i].unit, FLAGS[i].help);
}

static int flag_parse(const Flag *flag, const char *text, TokenizeOptions *o, Error *e) {
    char *member = (char *)o + flag->offset, *end;
    errno = 0;
    if (flag->kind == TEXT) *(const char **)member = text;
    if (flag->kind == TEXT && !*text) return FAIL(e, ERR_USAGE, "see --help", "%s: empty", flag->name);
    if (flag->kind == COUNT) {
        unsigned long long n = strtoull(text, &end, 10);
        if (*text < '0' || *text > '9' || *end || errno || n < flag->low || n > flag->high)
            return FAIL(e, ERR_USAGE, "see --help", "%s %s: not a whole number from %" PRIu64 " to %" PRIu64,
                        flag->name, text, flag->low, flag->high);
        *(uint64_t *)member = n;
    }
    if (flag->kind == FRACTION) {
        double f = strtod(text, &end);
        if (end == text || *end || !(f >= 0 && f < 1))
            return FAIL(e, ERR_USAGE, "see --help", "%s %s: not a number from 0 to below 1", flag->name, text);
        *(double *)member = f;
    }
    return 0;
}

static bool one_of(const char *value, const char *a, const char *b, const char *c) {
    return !strcmp(value, a) || !strcmp(value, b) || (c && !strcmp(value, c));
}

static int settings_check(const TokenizeOptions *o, int inputs, Error *e) {
    if (o->train_bpe && o->tokenizer)
        return FAIL(e, ERR_USAGE, "choose one", "--train-bpe and --tokenizer contradict each other");
    if (!o->tokenizer && !o->train_bpe)
        return FAIL(e, ERR_USAGE, "say --tokenizer bytes, or name a directory", "--tokenizer is missing");
    if (!o->out) return FAIL(e, ERR_USAGE, "say --out data/NAME", "--out is missing");
    if (strlen(o->out) > PATH_MAX - 64) return FAIL(e, ERR_USAGE, "use a shorter path", "--out: path too long");
    if (inputs == 0 && !o->files_from)
        return FAIL(e, ERR_USAGE, "name a file or a directory, or - for standard input", "no INPUT");
    if (!one_of(o->format, "auto", "text", "jsonl"))
        return FAIL(e, ERR_USAGE, "it is auto, text or jsonl", "--format %s: unknown", o->format);
    if (!one_of(o->invalid, "error", "bytes", "skip"))
        return FAIL(e, ERR_USAGE, "it is error, bytes or skip", "--invalid %s: unknown", o->invalid);
    if (o->split && !one_of(o->split, "train", "val", NULL))
        return FAIL(e, ERR_USAGE, "it is train or val", "--split %s: unknown", o->split);
    if (o->split && (o->val_fraction > 0 || o->val_every_file))
        return FAIL(e, ERR_USAGE, "choose one", "--split and --val-%s contradict each other",
                    o->val_every_file ? "every-file" : "fraction");
    if (o->val_fraction > 0 && o->val_every_file)
        return FAIL(e, ERR_USAGE, "choose one", "--val-fraction and --val-every-file contradict each other");
    if (o->separator && !strcmp(o->format, "jsonl"))
        return FAIL(e, ERR_USAGE, "every line of jsonl is a document", "--separator does not go with --format jsonl");
    return 0;
}

int settings_parse(int argc, char **argv, TokenizeOptions *o, int *inputs, Error *e) {
    bool given[FLAG_COUNT] = {0}, only_inputs = false;
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    *o = (TokenizeOptions){.format = "auto", .field = "text", .invalid = "error", .shard_tokens = 100000000};
    o->threads = processors < 1 ? 1 : processors > THREADS_MAX ? THREADS_MAX : (uint64_t)processors;
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
