// tokenize: turns text into token shards (format: llmc/text/shards.h).
//
//     data/tokenize --tokenizer bytes|DIR --out PREFIX [options] INPUT...
//
// Each thread reads the next block of text, encodes it, and writes its tokens when all earlier blocks are written.
#include "reader.h"
#include "writer.h"
#include "base/files.h"
#include "base/signals.h"
#include "base/thread.h"
#include "options/rows.h"
#include "run/progress.h"

#include <inttypes.h>
#include <omp.h>
#include <string.h>

// ---- The command line -----------------------------------------------------------------------------------------------

const char *const SPLIT_NAMES[SPLITS] = {"train", "val"};

#define OPTION(type, field, ...)                                                                                       \
    {TYPE_##type, #field, offsetof(TokenizeOptions, field), sizeof((TokenizeOptions *)0)->field, .help = __VA_ARGS__}
static const OptionRow rows[] = {
    OPTION(TEXT, tokenizer, "the vocabulary: bytes, or a directory with GPT-2's files", .unit = "bytes|DIR"),
    OPTION(TEXT, out, "writes PREFIX_train_000000.bin, PREFIX_val_000000.bin, ...", .unit = "prefix"),
    OPTION(TEXT, files_from, "a file or a pipe (-: standard input) that names more inputs, one path per line",
           .unit = "list", .empty = "name a file"),
    OPTION(CHOICE, format, "auto: by the name's ending (.jsonl, .ndjson, .jl, .txt, .md), else by the first line",
           .names = "auto|text|jsonl", .init = "auto"),
    OPTION(TEXT, field, "the field of a jsonl line that holds the text; a.b is b in the object a", .init = "text",
           .unit = "name", .empty = "name a field"),
    OPTION(TEXT, separator, "ends a document of a text file; one newline on each side is dropped", .unit = "string",
           .empty = "say what stands between documents"),
    OPTION(CHOICE, split, "all text goes to this split; the other split's shards are kept", .names = "train|val|both",
           .init = "both"),
    OPTION(REAL, val_fraction, "validation: the end of each text file; with jsonl or --separator, documents by hash",
           .range = "[0, 1)"),
    OPTION(INT, val_every_file, "validation: one file in N, by hash of its path", .range = "[2, 1000000]"),
    OPTION(INT, max_bytes, "stop after N bytes of input", .range = "[1, 9e18]"),
    OPTION(INT, shard_tokens, "tokens in a shard", .range = "[1, 2147483647]", .init = "100000000"),
    OPTION(CHOICE, invalid, "text that is not UTF-8: refuse it, keep its bytes, or skip it and malformed jsonl, too",
           .names = "error|bytes|skip", .init = "error"),
    OPTION(INT, threads, "encoding threads; default: one per core, within a container's quota", .range = "[1, 256]"),
    OPTION(FLAG, force, "replace shards of the same PREFIX"),
    OPTION(FLAG, help, "print this, or with NAME that option's lines, then end; -h does the same", .kind = ROW_ENDS),
    OPTION(FLAG, version, "print the version, then end", .kind = ROW_ENDS),
};
#undef OPTION
enum { OPTIONS = sizeof rows / sizeof *rows };

static void settings_print_help(const OptionRow *about) { // about: the option that --help NAME asks for; NULL: all
    if (about) return row_print_help(stdout, about);
    printf("Turns text into token shards.\n\n  data/tokenize --tokenizer bytes|DIR --out PREFIX [options] INPUT...\n\n"
           "INPUT is a text file, JSON Lines, a directory (its .txt, .md, .jsonl, .ndjson, .jl and .json files) or - for\n"
           "standard input. Every document begins with the vocabulary's end token, <|endoftext|>; bytes have no such\n"
           "token, and a newline separates documents.\n\n");
    for (int i = 0; i < OPTIONS; i++) row_print_help(stdout, &rows[i]);
}

// Handles a word that is no --option: an input, - (standard input), -- (all later words are inputs) or -h. ERR_USAGE
// for any other word that begins with -.
static int read_input(const OptionTable *t, int argc, char **argv, int *i, Error *e) {
    int *inputs = &((TokenizeOptions *)t->values)->inputs;
    const char *word = argv[*i];
    if (strcmp(word, "-h") == 0) return row_set(t, row_find(t, "help"), word, "true", OPTION_GIVEN_COMMAND_LINE, e);
    if (strcmp(word, "--") == 0)
        while (++*i < argc) argv[(*inputs)++] = argv[*i];
    else if (word[0] == '-' && word[1])
        return FAIL(e, ERR_USAGE, "options begin with --; --help lists them", "unknown option " SAID, word);
    else argv[(*inputs)++] = argv[*i];
    return 0;
}

// Sets *o, or prints what --help or --version asks for. Moves the inputs to the front of argv. ERR_USAGE for a mistake.
static int settings_parse(int argc, char **argv, TokenizeOptions *o, Error *e) {
    uint8_t given[OPTIONS];
    OptionTable t = {.rows = rows, .count = OPTIONS, .values = o, .given = given, .read_word = read_input};
    for (int id = 0; id < OPTIONS; id++) row_reset(&t, id);
    o->max_bytes = INT64_MAX;
    size_t cores = size_min((size_t)omp_get_num_procs(), (size_t)thread_quota(""));
    o->threads = (int64_t)size_min(cores, 256); // the most that --threads takes
    TRY(rows_read_command_line(&t, argc, argv, e));
    if (o->help) return settings_print_help(t.about), 0;
    if (o->version) return printf("%s\n", version_text()), 0;
    if (!*o->tokenizer || !*o->out)
        return FAIL(e, ERR_USAGE, "say --tokenizer bytes, or name a directory, and --out data/NAME", "%s missing",
                    *o->out ? "--tokenizer is" : *o->tokenizer ? "--out is" : "--tokenizer and --out are");
    if (!*path_name(o->out) || directory_exists(o->out))
        return FAIL(e, ERR_USAGE, "say --out DIRECTORY/NAME",
                    "--out %s: a directory, not what the names of shards begin with", o->out);
    if (o->inputs == 0 && !*o->files_from)
        return FAIL(e, ERR_USAGE, "name a file or a directory, or - for standard input", "no INPUT");
    if ((o->split != SPLITS) + (o->val_fraction > 0) + (o->val_every_file > 0) > 1)
        return FAIL(e, ERR_USAGE, "choose one", "--split, --val-fraction and --val-every-file contradict each other");
    if (*o->separator && o->format == FORMAT_JSONL)
        return FAIL(e, ERR_USAGE, "every line of jsonl is a document", "--separator does not go with --format jsonl");
    return 0;
}

// ---- The pipeline ---------------------------------------------------------------------------------------------------

typedef struct {
    TokenizeOptions options;
    Inputs inputs;
    Tokenizer *tokenizer;
    Reader reader;
    Writer writer;
    pthread_mutex_t turn; // guards the fields below, except `read`
    pthread_cond_t next;
    uint64_t read, written;  // number of blocks so far; the critical section `reading` guards `read`
    Error error;             // the first error that is not a fault of an input; code 0: none
    Error fault[FAULTS_MAX]; // the first faults of inputs
    int faults;              // faults so far
    Progress progress;
} Pipeline;

// Runs on every thread: reads blocks, encodes them, counts their faults, and writes them. After an input is refused, it
// only looks for more faults, and skips pipes and the rest of a refused text file. A signal or an error stops it.
static void run_thread(Pipeline *run) {
    TextBlock b = {0};
    WordCache *cache = NULL;
    Error e;
    for (bool more = true; more;) {
        uint64_t number;
        int code;
#pragma omp critical(reading)
        {
            number = run->read++;
            code = reader_next(&run->reader, &b, &more, &e);
            progress_next(&run->progress, (int64_t)run->reader.taken);
        }
        if (more && !code && !cache && !run->tokenizer->is_bytes) code = word_cache_create(&cache, &e);
        if (more && !code) code = block_encode(&b, &run->reader, cache, &e);
        pthread_mutex_lock(&run->turn);
        while (run->written != number) pthread_cond_wait(&run->next, &run->turn);
        more = more && !code && !run->error.code && !signals_requested();
        if (more) {
            for (int i = 0; i < b.fault_count && !b.input->left_out; i++, run->faults++)
                if (run->faults < FAULTS_MAX) run->fault[run->faults] = b.faults[i];
            b.input->left_out |= b.ends; // later blocks of this input add no faults
            if (!atomic_load(&run->reader.refused)) code = writer_block(&run->writer, &b, &e);
        }
        if (code && !run->error.code) {
            run->error = e;
            atomic_store(&run->reader.refused, true); // stops threads that wait for a pipe
        }
        run->written++;
        pthread_cond_broadcast(&run->next);
        pthread_mutex_unlock(&run->turn);
    }
    memory_free(cache);
    memory_free(b.pieces);
}

static const char *plural_s(uint64_t count) { return count == 1 ? "" : "s"; }

// Returns the run's error once all blocks are done. Lists several faults; a single fault is the error.
static int run_verdict(const Pipeline *run, Error *e) {
    const Error *first = run->fault;
    if (run->error.code) return *e = run->error, e->code;
    if (run->faults == 1) return *e = *first, e->code;
    if (!run->faults)
        return signals_requested() ? FAIL(e, ERR_STOPPED, "run the same command again: it starts over", "a signal") : 0;
    for (int i = 0; i < run->faults && i < FAULTS_MAX; i++) fprintf(stderr, "%s\n", run->fault[i].what);
    return FAIL(e, first->code, first->hint, "%d faults; the first is %s", run->faults, first->what);
}

static void print_input_notes(const Pipeline *run) {
    static const char *const notes[NOTES] = {
        [NOTE_JSONL] = "by the first line, read as JSON Lines; --format text or jsonl decides",
        [NOTE_JSON] = "by the first line, read as text, braces and all; --format text or jsonl decides",
        [NOTE_MARK] = "a byte order mark stays in the text",
        [NOTE_EOT] = "<|endoftext|> is text there; --separator '<|endoftext|>' ends documents at it"};
    for (int k = 0; k < NOTES; k++) {
        const char *first = NULL;
        int files = 0;
        for (int i = run->inputs.count; i-- > 0;)
            if (run->inputs.all[i].notes >> k & 1) files++, first = input_name(&run->inputs.all[i]);
        if (files == 1) fprintf(stderr, "note: %s: %s\n", first, notes[k]);
        if (files > 1) fprintf(stderr, "note: %d files, the first is %s: %s\n", files, first, notes[k]);
    }
}

static int run_finish(Pipeline *run, Error *e) {
    const TokenizeOptions *o = &run->options;
    const struct SplitState *splits = run->writer.split;
    const Inputs *in = &run->inputs;
    uint64_t files = 0, lines = run->reader.left_out;
    for (int i = 0; i < in->count; i++) files += in->all[i].left_out;
    if (*o->separator && !run->reader.separated)
        fprintf(stderr, "note: --separator %s is nowhere in the text\n", o->separator);
    if (run->writer.eot < 0 && !run->tokenizer->is_bytes)
        fprintf(stderr, "note: %s declares no eos_token and has no <|endoftext|>: %s separates documents\n",
                o->tokenizer, run->writer.newline < 0 ? "nothing" : "a newline");
    if (splits[TRAIN].tokens + splits[VAL].tokens == 0)
        return FAIL(e, ERR_INPUT, files + lines ? "--invalid error says why" : "is this the right input?",
                    "%s: no text in it%s", input_name(&in->all[0]),
                    files + lines ? " but what --invalid skip left out" : "");
    bool both = o->val_fraction > 0 || o->val_every_file;
    for (int i = 0; i < SPLITS; i++)
        if (splits[i].tokens == 0 && (both || i == (o->split == VAL ? VAL : TRAIN)))
            return FAIL(e, ERR_INPUT, "give more documents, or another share for validation",
                        "no text fell into the %s split of %s", SPLIT_NAMES[i], o->out);
    TRY(writer_publish(&run->writer, e));
    for (int i = 0; i < SPLITS; i++)
        if (splits[i].tokens)
            printf("%s_%s_*.bin: %" PRIu64 " tokens of %" PRIu64 " document%s in %d shard%s\n", o->out, SPLIT_NAMES[i],
                   splits[i].tokens, splits[i].documents, plural_s(splits[i].documents), splits[i].shards,
                   plural_s((uint64_t)splits[i].shards));
    if (files) printf("left out: %" PRIu64 " file%s not UTF-8\n", files, files == 1 ? " that is" : "s that are");
    for (int i = 0; i < in->count; i++)
        if (in->all[i].left_out) printf("  %s\n", in->all[i].path);
    if (lines)
        printf("left out: %" PRIu64 " line%s of jsonl, malformed or without text that is UTF-8\n", lines,
               plural_s(lines));
    return 0;
}

static int tokenize(int argc, char **argv, Error *e) {
    Pipeline run = {.writer.lock = -1, .turn = PTHREAD_MUTEX_INITIALIZER, .next = PTHREAD_COND_INITIALIZER};
    TokenizeOptions *o = &run.options;
    int code;
    TRY(settings_parse(argc, argv, o, e));
    if (o->help || o->version) return 0;
    TRY_GOTO(tokenizer_load(&run.tokenizer, o->tokenizer, e));
    run.reader = (Reader){.o = o, .inputs = &run.inputs, .tokenizer = run.tokenizer, .line = 1, .fd = -1};
    TRY_GOTO(memory_alloc((void **)&run.reader.buffer, LINE_BYTES_MAX, "reading the input", e));
    // Gather before signals_install: gathering may wait for a pipe, and a signal must then end the program at once.
    TRY_GOTO(inputs_gather(&run.inputs, o, argv, e));
    signals_install();
    progress_create(&run.progress, stderr, false);
    run.progress.answered = true; // the thread must not announce a save: a signal ends this run without one
    TRY_GOTO(ticker_start(&run.progress.ticker, "the progress", e));
    TRY_GOTO(writer_open(&run.writer, o, run.tokenizer, &run.inputs, e));
    const size_t bytes = run.inputs.pipes ? 0 : size_min(run.inputs.bytes, (size_t)o->max_bytes); // 0: unknown
    progress_begin(&run.progress, "tokenizing", (int64_t)bytes);
#pragma omp parallel num_threads((int)o->threads + 1) // + 1: one thread may wait for a pipe or the disk
    run_thread(&run);
    if (run.error.code || run.faults || signals_requested()) progress_break(&run.progress);
    else progress_end(&run.progress);
    code = run_verdict(&run, e);
    print_input_notes(&run);
    TRY_GOTO(code);
    TRY_GOTO(run_finish(&run, e));
done:
    progress_destroy(&run.progress);
    writer_close(&run.writer);
    memory_free(run.reader.buffer);
    inputs_free(&run.inputs);
    memory_free(run.tokenizer);
    return code;
}

int main(int argc, char **argv) {
    Error e;
    process_begin();
    int code = tokenize(argc, argv, &e);
    if (!code) code = process_end(&e);
    if (code && strstr(e.hint, "--micro-batch")) error_hint(&e, "free some memory, or use fewer --threads");
    if (code) error_print(&e);
    return code;
}
