// tokenize: text in, token shards out (llmc/text/shards.h has their format).
//
//     data/tokenize --tokenizer bytes|DIR --out PREFIX [options] INPUT...
//
// One thread reads the inputs in blocks and writes tokens in the order of the blocks; encoding a block is an OpenMP
// task, which the other threads run in any order, and this one while it waits. Where a block ends depends on the input
// alone, so the shards do not depend on the number of threads. Memory is a fixed ring of blocks.
#include "reader.h"
#include "shards.h"
#include "base/process.h"
#include "base/signals.h"
#include "base/terminal.h"
#include "base/thread.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <omp.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

enum {
    BLOCKS_PER_THREAD = 3, // one in work, one waiting, one to be written
    LISTED_MAX = 20        // files that are named
};

typedef struct {
    TokenizeOptions options;
    Inputs inputs;
    Tokenizer *tokenizer;
    Reader reader;
    Writer writer;
    TextBlock *blocks;  // (block_count), a ring
    Encoder **encoders; // (thread_count)
    uint64_t thread_count;
    uint64_t block_count, filled, written; // blocks so far
    atomic_bool refused;                   // some input is refused: no block is encoded or written from here on
    double start, shown;                   // seconds: of the run, the last line of progress
    uint64_t total_bytes;                  // of input; 0: unknown
    int bad_files, last_bad;               // inputs that are refused, and the number of the last of them
    Error first_bad;                       // what is wrong with the first
    int marked;                            // text files that begin with a byte order mark
    const Input *first_marked;
} Run;

// ---- What the user sees ---------------------------------------------------------------------------------------------

static const char *plural(uint64_t count) { return count == 1 ? "" : "s"; }

// A line on stderr, over the line of progress.
__attribute__((format(printf, 1, 2))) static void print_note(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (isatty(STDERR_FILENO)) fputs("\r\x1b[K", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

// A line on stderr: on a terminal every 0.2 s, in a log as rarely as log_interval says. The last one is at 100%.
static void show_progress(Run *run, uint64_t bytes, bool last) {
    static const char done[] = "####################", to_do[] = "....................";
    enum { WIDTH = sizeof done - 1 };
    const struct SplitState *splits = run->writer.split;
    bool terminal = isatty(STDERR_FILENO);
    double now = clock_seconds(), every = terminal ? 0.2 : log_interval(now - run->start);
    Line line = {0};
    char text[200];
    if (last ? !terminal && run->shown == run->start : now - run->shown < every) return;
    run->shown = now;
    double rate = (double)bytes / (now - run->start + 1e-9);
    if (run->total_bytes) {
        double share = last ? 1 : fmin(1, (double)bytes / (double)run->total_bytes);
        double left = rate > 0 ? (1 - share) * (double)run->total_bytes / rate : 0;
        int filled = (int)(share * WIDTH);
        line_add(&line, 1, "[%.*s%.*s]", filled, done, WIDTH - filled, to_do);
        line_add(&line, 6, " %5.1f%%", floor(1000 * share) / 10);
        line_add(&line, 5, "  ETA %d:%02d:%02d", (int)(left / 3600), (int)(left / 60) % 60, (int)left % 60);
    }
    line_add(&line, 4, "  %.1f MB", (double)bytes / 1e6);
    line_add(&line, 3, "  %.1f MB/s", rate / 1e6);
    line_add(&line, 2, "  %" PRIu64 " tokens", splits[TRAIN].tokens + splits[VAL].tokens);
    line_fit(&line, terminal_columns(stderr) - terminal, text, sizeof text);
    fprintf(stderr, "%s%s%s", terminal ? "\r\x1b[K" : "", text, last || !terminal ? "\n" : "");
}

// Records the first error of an input. Errors are printed from the second input on.
static void add_complaint(Run *run, int input, const Error *why) {
    if (run->bad_files && run->last_bad == input) return;
    run->bad_files++;
    run->last_bad = input;
    if (run->bad_files == 1) run->first_bad = *why;
    if (run->bad_files == 2) print_note("%s", run->first_bad.what);
    if (run->bad_files >= 2 && run->bad_files <= LISTED_MAX) print_note("%s", why->what);
}

static int finish_complaints(const Run *run, Error *e) {
    const Error *first = &run->first_bad;
    if (run->bad_files > LISTED_MAX) print_note("and %d more", run->bad_files - LISTED_MAX);
    *e = *first;
    if (run->bad_files == 1) return e->code;
    return FAIL(e, first->code, first->hint, "%d of %d files are refused; the first is %s", run->bad_files,
                run->inputs.count, first->what);
}

// ---- The run --------------------------------------------------------------------------------------------------------

static void run_encode(Run *run, TextBlock *b) {
    Encoder **encoder = &run->encoders[omp_get_thread_num()];
    b->code = *encoder ? 0 : encoder_create(encoder, run->tokenizer, &b->error);
    if (!b->code) b->code = block_check(b, &run->options, &b->error);
    if (b->code) atomic_store(&run->refused, true);
    if (!atomic_load(&run->refused)) b->code = block_encode(b, *encoder, &b->error);
}

static int run_write_oldest(Run *run, Error *e) {
    TextBlock *b = &run->blocks[run->written % run->block_count];
#pragma omp taskwait depend(in : *b)
    if (b->code && b->code != ERR_INPUT) {
        *e = b->error;
        return b->code;
    }
    if (b->code) {
        add_complaint(run, b->start.file, &b->error);
        run->inputs.all[b->start.file].left_out = true; // its rest
    }
    if (!b->input->jsonl && b->start.offset == 0 && utf8_mark(b->text, b->bytes) && !run->marked++)
        run->first_marked = b->input;
    if (!atomic_load(&run->refused)) TRY(writer_block(&run->writer, b, e));
    run->written++;
    show_progress(run, b->start.taken + b->bytes, false);
    return 0;
}

// Keeps the ring full and writes from its other end. An error is reported after everything before it has been written,
// so of several errors it is always the first in the input. After an input is refused the other files are checked as
// well, but not its own rest, and not pipes, which may take any time. Ends at a signal.
static int run_blocks(Run *run, Error *e) {
    Error reader_error;
    int reader_code = 0;
    for (bool more = true; (more || run->written < run->filled) && !reader_stopped(&run->reader);) {
        if (!more || run->filled - run->written == run->block_count) {
            TRY(run_write_oldest(run, e));
            continue;
        }
        TextBlock *b = &run->blocks[run->filled % run->block_count];
        reader_code = reader_next(&run->reader, b, &more, &reader_error);
        more = more && !reader_code;
        if (!more) continue;
        run->filled++;
#pragma omp task depend(out : *b) firstprivate(b)
        run_encode(run, b);
    }
    if (run->bad_files && reader_code) add_complaint(run, run->reader.place.file, &reader_error);
    if (run->bad_files) return finish_complaints(run, e);
    if (reader_code) *e = reader_error;
    return reader_code;
}

static void print_left_out(const Run *run) {
    const Inputs *in = &run->inputs;
    uint64_t files = 0, lines = run->writer.left_out;
    for (int i = 0; i < in->count; i++) files += in->all[i].left_out;
    if (files) printf("left out: %" PRIu64 " file%s not UTF-8\n", files, files == 1 ? " that is" : "s that are");
    for (int i = 0, listed = 0; i < in->count && listed < LISTED_MAX; i++)
        if (in->all[i].left_out) printf("  %s\n", in->all[i].path), listed++;
    if (files > LISTED_MAX) printf("  and %" PRIu64 " more\n", files - LISTED_MAX);
    if (lines) printf("left out: %" PRIu64 " line%s of jsonl whose text is not UTF-8\n", lines, plural(lines));
    if (run->marked)
        print_note("note: %d file%s with a byte order mark, which stays in the text; the first is %s", run->marked,
                   run->marked == 1 ? " begins" : "s begin", run->first_marked->path);
}

// True if the run fails when the split stays empty.
static bool fills_split(const TokenizeOptions *o, int split) {
    return o->val_fraction > 0 || o->val_every_file || split == (o->split == SPLITS ? TRAIN : o->split);
}

static int run_finish(Run *run, Error *e) {
    const TokenizeOptions *o = &run->options;
    const struct SplitState *splits = run->writer.split;
    if (run->reader.stopped) return FAIL(e, ERR_STOPPED, "run the same command again: it starts over", "a signal");
    if (splits[TRAIN].tokens + splits[VAL].tokens == 0)
        return FAIL(e, ERR_INPUT, "is this the right input?", "%s: no text in it", input_name(&run->inputs.all[0]));
    for (int i = 0; i < SPLITS; i++)
        if (splits[i].tokens == 0 && fills_split(o, i))
            return FAIL(e, ERR_INPUT, "give more documents, or another share for validation",
                        "no text fell into the %s split of %s", SPLIT_NAMES[i], o->out);
    TRY(writer_publish(&run->writer, e));
    show_progress(run, run->reader.place.taken, true);
    for (int i = 0; i < SPLITS; i++)
        if (splits[i].tokens)
            print_folded(stdout, 4, "%s_%s_*.bin: %" PRIu64 " tokens of %" PRIu64 " document%s in %d shard%s\n", o->out,
                         SPLIT_NAMES[i], splits[i].tokens, splits[i].documents, plural(splits[i].documents),
                         splits[i].shards, plural((uint64_t)splits[i].shards));
    print_left_out(run);
    return 0;
}

static int run_prepare(Run *run, Error *e) {
    const TokenizeOptions *o = &run->options;
    bool known = true;
    run->reader.tokenizer = run->tokenizer;
    if (o->invalid == INVALID_SKIP) TRY(reader_leave_out(&run->reader, e));
    run->start = run->shown = clock_seconds();
    for (int i = 0; i < run->inputs.count; i++) {
        const Input *input = &run->inputs.all[i];
        if (!input->left_out) run->total_bytes += input->bytes;
        known = known && !input->pipe;
    }
    if (!known) run->total_bytes = o->max_bytes < INT64_MAX ? (uint64_t)o->max_bytes : 0;
    run->total_bytes = size_min(run->total_bytes, (uint64_t)o->max_bytes);
    TRY(writer_open(&run->writer, o, run->tokenizer, &run->inputs, e));
    run->thread_count = (uint64_t)o->threads + 1; // and this one, which may wait for a pipe
    run->block_count = BLOCKS_PER_THREAD * (uint64_t)o->threads;
    TRY(memory_alloc_zero((void **)&run->blocks, run->block_count * sizeof *run->blocks, "blocks", e));
    return memory_alloc_zero((void **)&run->encoders, run->thread_count * sizeof *run->encoders, "encoders", e);
}

static int tokenize(int argc, char **argv, Error *e) {
    Run run = {.writer.lock = -1};
    int inputs, code;
    TRY(settings_parse(argc, argv, &run.options, &inputs, e));
    if (run.options.help) return settings_print_help(&run.options), 0;
    if (run.options.version) return printf("%s\n", version_text()), 0;
    run.reader = (Reader){.o = &run.options, .inputs = &run.inputs, .refused = &run.refused, .place.line = 1, .fd = -1};
    TRY_GOTO(tokenizer_load(&run.tokenizer, run.options.tokenizer, e));
    TRY_GOTO(inputs_gather(&run.inputs, &run.options, argv, inputs, e)); // may wait for a pipe, which a signal ends
    signals_block();
    thread_start_team((int)run.options.threads + 1);
    TRY_GOTO(run_prepare(&run, e));
#pragma omp parallel num_threads((int)run.thread_count)
#pragma omp single
    code = run_blocks(&run, e);
    TRY_GOTO(code);
    TRY_GOTO(run_finish(&run, e));
done:
    writer_close(&run.writer);
    for (uint64_t i = 0; run.blocks && i < run.block_count; i++) block_free(&run.blocks[i]);
    for (uint64_t i = 0; run.encoders && i < run.thread_count; i++) encoder_destroy(run.encoders[i]);
    memory_free(run.blocks);
    memory_free(run.encoders);
    reader_free(&run.reader);
    inputs_free(&run.inputs);
    tokenizer_destroy(run.tokenizer);
    return code;
}

// Not a part of main, whose stack may be too small.
static __attribute__((noinline)) int run_tokenize(int argc, char **argv) {
    Error e;
    int code = tokenize(argc, argv, &e);
    if (!code) code = process_end(&e);
    if (code) error_print(&e);
    return code;
}

int main(int argc, char **argv) {
    process_begin();
    return run_tokenize(argc, argv);
}
