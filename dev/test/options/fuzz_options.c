// Feeds mutated config files and command lines to the option parser. The answer is success or an error with a message
// and a hint, never a crash, a read out of bounds (run it under -fsanitize=address,undefined) or an option out of its
// range. Deterministic: case i is a function of (seed, i).
//
//     fuzz_options [seconds [seed]]     default: 2 seconds, seed 1
#include "options/options.h"
#include "../test.h"

typedef struct {
    uint64_t state;
} Random;

// SplitMix64 (Steele, Lea and Flood 2014)
static uint64_t random_next(Random *r) {
    uint64_t z = r->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static size_t random_below(Random *r, size_t n) { return (size_t)(random_next(r) % n); }

static const char *const seeds[] = {
    "# run\nlr = 3e-4\nprompt = \"a # b\" # c\ndry-run = true\nval-tokens = 1e5\r\nmodel=d4\nseq-len = 64\nsteps = 9\n",
    "train = 'x_*.bin'\nramp = gns\nbatch-min = 2\nbatch-max = 64\ntrain-tokens = 1e6\ngns = exact\n",
    "{\"parts\": [{\"options\": {\"lr\": 1, \"steps\": 9, \"out\": \"x\", \"dry_run\": true}}], \"options\": {\"lr\": "
    "0.5}}",
    "steps = 99999999999999999999\nlr = nan\nbeta1 = 1\n= =\n==\n\"\n#\nramp = replay:\n",
    "--train a --steps 5 --lr=0.1 -u 7 -m 3 -b 2 -t 32 -d 64 --gns-exact-every 3 --prompt=x --dry-run",
    "-i a -j b -e gpt2:d12 -x -1 -ge 2 -h 1 -pi mpi -sl 3 -pi tcp --ramp linear --batch-min 1 --batch-max 9 --help",
    "--train a --train-tokens 1e15 --seq-len 65536 --batch-tokens 1e12 -u 1e9 --micro-batch 512 -m 999999999999999",
    "--train a --steps 1e9 --seq-len 64 --batch-tokens 999999999936",
    "--train a --train-tokens 1e6 --ramp replay:x",
    "-nm 1 -f 1 -w 1 -ge 1 -a 1 -lg 1 -pn 1 -pr 1 -pg 1 -ps 1 -pp 1 -pf 1 -nm 1 -f 1 -w 1 -ge 1 -a 1 -lg 1 -pn 1 -pr 1 "
    "-pg 1 -ps 1 -pp 1 -pf 1 -nm 1 -f 1 -w 1 -ge 1 -a 1 -lg 1 -pn 1 -pr 1 -pg 1 -ps 1 -pp 1 -pf 1 --dry-run",
};

static const char *const tokens[] = {
    "--lr",
    "=",
    "\n",
    "\"",
    "#",
    " ",
    "-",
    "--",
    "1e308",
    "-1",
    "nan",
    "0x1p3",
    "9e18",
    "1e400",
    "\xff",
    "%s%n",
    "true",
    "--config",
    "-u",
    "-m",
    "replay:x",
    "--batch-min",
    "lr",
    "steps",
    "=\"",
    "-pi",
    "--steps=",
    "-x",
    "1e9",
    "--ramp=gns",
    "--model=dir",
    "gpt2:d",
    "--help=",
    "1000000000",
    "--seq-len",
    "--train-tokens",
    " --out --a-name-much-longer-than-any-option-has-and-than-a-buffer-for-one ",
};

enum { MAX_BYTES = 6000 };

// Inserts, deletes, overwrites and repeats.
static size_t mutate(Random *r, char *text, size_t bytes) {
    size_t at = random_below(r, bytes + 1);
    switch (random_below(r, 5)) {
    case 0: // overwrites a byte
        if (at < bytes) text[at] = (char)random_next(r);
        return bytes;
    case 1: { // removes a stretch
        size_t n = random_below(r, bytes - at + 1);
        memmove(text + at, text + at + n, bytes - at - n);
        return bytes - n;
    }
    case 2: { // repeats a stretch
        size_t n = size_min(random_below(r, bytes - at + 1), MAX_BYTES - bytes);
        memmove(text + at + n, text + at, bytes - at);
        return bytes + n;
    }
    default: { // inserts a word
        const char *token = tokens[random_below(r, sizeof tokens / sizeof *tokens)];
        size_t n = strlen(token);
        if (bytes + n > MAX_BYTES) return bytes;
        memmove(text + at + n, text + at, bytes - at);
        memcpy(text + at, token, n);
        return bytes + n;
    }
    }
}

// What was accepted is in range, and is resolved and written, or refused with a message and a hint.
static void check_outcome(Options *o, int code, Error *e) {
    CHECK(memchr(o->notes, 0, sizeof o->notes), "notes without a NUL");
    if (!code && !o->help && !o->version) {
        CHECK(o->lr >= 0 && o->lr <= 100 && o->beta1 >= 0 && o->beta1 < 1, "lr %g beta1 %g", o->lr, o->beta1);
        CHECK(o->micro_batch >= 1 && o->seq_len >= 1 && o->gns >= 0 && o->gns <= 2, "counts");
        code = options_resolve(o, e);
        if (!code) CHECK(o->run.batch_ref_rows >= 1 && o->run.horizon_tokens >= 0 && o->warmup_tokens >= 0, "resolved");
        FILE *f = fopen("/dev/null", "w");
        options_write_json(f, o, 0);
        fclose(f);
    }
    CHECK(code == 0 || code == ERR_USAGE || code == ERR_INPUT, "exit code %d: %s", code, e->what);
    CHECK(code == 0 || (e->what[0] && e->hint[0]), "'%s' without a hint", e->what);
}

// An exact-sized heap block, so that the sanitizer sees a read beyond its end.
static void fuzz_config(const char *text, size_t bytes) {
    static Options o;
    Error e = {0};
    char *copy = malloc(bytes + 1);
    memcpy(copy, text, bytes);
    copy[bytes] = 0;
    options_defaults(&o);
    check_outcome(&o, options_parse_config(&o, copy, bytes, "fuzz.cfg", &e), &e);
    free(copy);
}

static void fuzz_command_line(const char *text, size_t bytes) {
    static Options o;
    Error e = {0};
    char *argv[256] = {"fuzz"}, *blocks[256];
    int argc = 1;
    for (size_t at = 0; at < bytes && argc < 256;) {
        size_t n = 0;
        while (at + n < bytes && text[at + n] != ' ' && text[at + n]) n++;
        blocks[argc] = malloc(n + 1);
        memcpy(blocks[argc], text + at, n);
        blocks[argc][n] = 0;
        argv[argc] = blocks[argc];
        argc++;
        at += n + 1;
    }
    check_outcome(&o, options_parse(&o, argc, argv, false, &e), &e);
    for (int i = 1; i < argc; i++) free(blocks[i]);
}

static double fuzz_seconds = 2;
static uint64_t fuzz_seed = 1;

static void fuzz_options(void) {
    static char text[MAX_BYTES + 1];
    double start = clock_seconds();
    uint64_t cases = 0;
    for (; clock_seconds() - start < fuzz_seconds && !test_state.failures; cases++) {
        Random r = {fuzz_seed * 0x100000001b3u + cases};
        size_t which = random_below(&r, sizeof seeds / sizeof *seeds), bytes = strlen(seeds[which]);
        memcpy(text, seeds[which], bytes);
        for (size_t n = random_below(&r, 12); n > 0; n--) bytes = mutate(&r, text, bytes);
        fuzz_config(text, bytes);
        fuzz_command_line(text, bytes);
        if (test_state.failures) printf("  case %llu: %.*s\n", (unsigned long long)cases, (int)bytes, text);
    }
    printf("  %llu cases, seed %llu\n", (unsigned long long)cases, (unsigned long long)fuzz_seed);
}

int main(int argc, char **argv) {
    if (argc > 1) fuzz_seconds = atof(argv[1]);
    if (argc > 2) fuzz_seed = strtoull(argv[2], NULL, 10);
    RUN(fuzz_options);
    return test_summary();
}
