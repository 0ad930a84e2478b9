// tokenize: text in, token shards out (llmc/text/shards.h has their format).
//
//     data/tokenize --tokenizer bytes|DIR --out PREFIX [options] INPUT...
//     data/tokenize --train-bpe N --out DIR [options] INPUT...     learns a vocabulary instead (bpe_train.h)
//
// One thread, the coordinator, reads the inputs in blocks and writes tokens in the order of the blocks; the others
// encode blocks in whatever order they come to them. Where a block ends is a function of the input alone, so the bytes
// that come out do not depend on the number of threads. Memory is a fixed number of blocks, whatever the input.
//
// Shards are written as PREFIX_train_000000.bin.partial, ... and get their names together, when all is done. Meanwhile
// PREFIX.state says how far input and output are: the same command, given again after an interruption, goes on there.
#define _POSIX_C_SOURCE 200809L
#include "base/files.h"
#include "text/tokenizer_impl.h"
#include "blocks.h"
#include "bpe_train.h"
#include "complaints.h"
#include "jsonl.h"
#include "reader.h"
#include "settings.h"
#include "shards.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    BLOCKS_PER_THREAD = 3, // one in work, one waiting, one to be written
    SAVE_SECONDS = 20      // between two saves of the state
};

// ---------------------------------------------------------------------------------------------------------------------
// The workers

typedef struct {
    const TokenizeOptions *o;
    const Tokenizer *tokenizer;
    TextBlock *blocks; // a ring
    int block_count;
    uint64_t filled, taken; // blocks so far
    bool failed;            // nothing will be written: blocks are looked at only, for what else is wrong
    atomic_bool refused;    // some block is, perhaps not the one looked at
    bool over;
    pthread_mutex_t lock;
    pthread_cond_t work, done; // there is a block to encode; one has been
} Pool;

static bool is_blank(const char *text, size_t bytes) {
    while (bytes > 0 && (text[bytes - 1] == ' ' || text[bytes - 1] == '\t' || text[bytes - 1] == '\r')) bytes--;
    return bytes == 0;
}

#define HINT_INVALID "repair it, or say --invalid bytes to take it as it is, --invalid skip to leave it out"

static bool refuses_invalid(const TokenizeOptions *o) { return strcmp(o->invalid, "error") == 0; }

static int block_parse_jsonl(const TokenizeOptions *o, TextBlock *b, Error *e) {
    uint64_t line = b->start.line;
    size_t end = 0, begin = b->start.offset ? 0 : byte_order_mark(b->text, b->bytes); // no part of any text
    for (size_t at = begin; at < b->bytes; at = end + 1, line++) {
        char *newline = memchr(b->text + at, '\n', b->bytes - at);
        end = newline ? (size_t)(newline - b->text) : b->bytes;
        if (is_blank(b->text + at, end - at)) continue;
        TextPiece piece = {.at = at, .begins = true, .split = split_of(o, b->input, b->start.file, line)};
        const char *why = jsonl_field(b->text + at, end - at, o->field, &piece.bytes);
        if (why)
            return fail_at_line(e, b->input, line, "every line must be a JSON object with a text field: see --field",
                                why);
        bool valid = strcmp(o->invalid, "bytes") == 0 || utf8_invalid_at(b->text + at, piece.bytes) == piece.bytes;
        if (!valid && refuses_invalid(o))
            return fail_at_line(e, b->input, line, HINT_INVALID, "its text is not valid UTF-8");
        if (!valid) {
            b->left_out++;
            continue;
        }
        TRY(block_add_piece(b, piece, e));
    }
    return 0;
}

static int block_check_utf8(const TextBlock *b, const TextPiece *piece, Error *e) {
    size_t bad = utf8_invalid_at(b->text + piece->at, piece->bytes);
    if (bad == piece->bytes) return 0;
    char why[80];
    bad += piece->at;
    snprintf(why, sizeof why, "byte 0x%02x at offset %" PRIu64 " is not valid UTF-8", (unsigned char)b->text[bad],
             b->start.offset + bad);
    return fail_at_line(e, b->input, b->start.line + count_lines(b->text, bad), HINT_INVALID, why);
}

// Whether the text can be taken; of jsonl, what it is.
static int block_check(const TokenizeOptions *o, TextBlock *b, Error *e) {
    if (b->start.offset == 0 && strcmp(o->invalid, "bytes")) TRY(check_kind(b->input, b->text, b->bytes, e));
    if (b->jsonl) return block_parse_jsonl(o, b, e);
    for (int i = 0; i < b->piece_count && refuses_invalid(o); i++) TRY(block_check_utf8(b, &b->pieces[i], e));
    return 0;
}

static int pool_check(Pool *pool, TextBlock *b, Error *e) {
    int code = block_check(pool->o, b, e);
    if (code) atomic_store(&pool->refused, true);
    return code;
}

static int block_encode(TextBlock *b, Encoder *encoder, Error *e) {
    size_t count = 0;
    for (int i = 0; i < b->piece_count; i++) {
        TextPiece *piece = &b->pieces[i];
        TRY(encoder_run(encoder, b->text + piece->at, piece->bytes, b->tokens + count, &piece->tokens, e));
        count += piece->tokens;
    }
    return 0;
}

static void *worker_main(void *argument) {
    Pool *pool = argument;
    Encoder *encoder = NULL;
    Error error;
    int code = encoder_create(&encoder, pool->tokenizer, &error);
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->taken == pool->filled && !pool->over) pthread_cond_wait(&pool->work, &pool->lock);
        if (pool->taken == pool->filled) break;
        TextBlock *b = &pool->blocks[pool->taken++ % (uint64_t)pool->block_count];
        b->state = BLOCK_TAKEN;
        bool failed = pool->failed;
        pthread_mutex_unlock(&pool->lock);
        b->error = error;
        b->code = code ? code : pool_check(pool, b, &b->error);
        if (!b->code && !failed) b->code = block_encode(b, encoder, &b->error);
        pthread_mutex_lock(&pool->lock);
        b->state = BLOCK_DONE;
        pthread_cond_signal(&pool->done);
    }
    pthread_mutex_unlock(&pool->lock);
    encoder_destroy(encoder);
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// Progress

typedef struct {
    double start, shown;
    uint64_t start_bytes, total_bytes; // total 0: unknown
    bool terminal;
} Progress;

static void progress_show(Progress *p, uint64_t bytes, uint64_t tokens, bool last) {
    enum { WIDTH = 30 };
    double now = clock_seconds(), every = p->terminal ? 0.2 : 10; // seconds between two lines
    if (!last && now - p->shown < every) return;
    if (last && !p->terminal) return; // the summary says it all
    p->shown = now;
    double rate = (double)(bytes - p->start_bytes) / (now - p->start + 1e-9);
    char line[256];
    int n = 0;
    if (p->total_bytes) {
        double part = (double)bytes / (double)p->total_bytes;
        part = part > 1 ? 1 : part;
        char bar[WIDTH + 1];
        for (int i = 0; i < WIDTH; i++) bar[i] = i < part * WIDTH ? '#' : '.';
        bar[WIDTH] = 0;
        double left = rate > 0 ? (double)(p->total_bytes - size_min(bytes, p->total_bytes)) / rate : 0;
        n = snprintf(line, sizeof line, "[%s] %5.1f%%  ETA %d:%02d:%02d  ", bar, 100 * part, (int)(left / 3600),
                     (int)(left / 60) % 60, (int)left % 60);
    }
    snprintf(line + n, sizeof line - (size_t)n, "%.1f MB  %.1f MB/s  %" PRIu64 " tokens", (double)bytes / 1e6,
             rate / 1e6, tokens);
    fprintf(stderr, p->terminal ? "\r%s\x1b[K" : "%s\n", line);
    if (last) fprintf(stderr, "\n");
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

typedef struct {
    TokenizeOptions options;
    Inputs inputs;
    Tokenizer *tokenizer;
    Reader reader;
    Writer writer;
    Pool pool;
    pthread_t *threads;
    int thread_count;
    Progress progress;
    Complaints complaints;
    int marked;         // files that begin with a byte order mark
    const Input *marks; // the first of them
    Place written;      // all before it is in the shards
    double saved;       // when the state was
    uint64_t blocks;    // written
} Run;

static int inputs_gather(Run *run, char **names, int count, Error *e) {
    const TokenizeOptions *o = &run->options;
    int pipes = 0;
    for (int i = 0; i < count; i++) TRY(inputs_add(&run->inputs, names[i], e));
    if (o->files_from) TRY(inputs_add_list(&run->inputs, o->files_from, e));
    if (run->inputs.count == 0)
        return FAIL(e, ERR_INPUT, "a directory is searched for .txt, .md, .jsonl and .ndjson files", "no text in %s",
                    count ? names[0] : o->files_from);
    if (run->inputs.passed_over)
        fprintf(stderr, "%d file%s with other endings passed over; --files-from takes any\n", run->inputs.passed_over,
                run->inputs.passed_over == 1 ? "" : "s");
    for (int i = 0; i < run->inputs.count; i++) {
        Input *input = &run->inputs.all[i];
        if (strcmp(o->format, "auto")) input->jsonl = !strcmp(o->format, "jsonl");
        if (!strcmp(input->path, "-") && pipes++)
            return FAIL(e, ERR_USAGE, "name it once", "standard input is named twice");
        if (input->pipe && !input->jsonl && !strcmp(o->invalid, "skip"))
            return FAIL(e, ERR_USAGE, "write it to a file first, or give --format jsonl",
                        "--invalid skip: whether %s is UTF-8 is not known before", input_name(input));
        if (input->pipe && reader_has_tail(o, input))
            return FAIL(e, ERR_USAGE, "write it to a file first, or give --separator or --format jsonl",
                        "--val-fraction: where %s ends is not known before", input_name(input));
    }
    return 0;
}

// A prefix is the beginning of a file's name: what is a directory has none.
static int prefix_check(const TokenizeOptions *o, Error *e) {
    if (*path_name(o->out) && !directory_exists(o->out)) return 0;
    FAIL(e, ERR_USAGE, NULL, "--out %s: a directory, not what the shards' names begin with", o->out);
    return error_hint(e, "say --out %s%sNAME", o->out, *path_name(o->out) ? "/" : "");
}

static int output_check(const TokenizeOptions *o, Error *e) {
    char path[PATH_MAX];
    for (int split = 0; split < SPLITS && !o->force; split++)
        for (int shard = 0; shard < 2 && owns_split(o, split); shard++) { // llm.c's training shards count from 1
            shard_file(o, split, shard, path);
            if (access(path, F_OK) == 0)
                return FAIL(e, ERR_USAGE, "choose another --out, or --force to replace it", "%s: exists", path);
        }
    return 0;
}

static int threads_start(Run *run, Error *e) {
    Pool *pool = &run->pool;
    int count = (int)run->options.threads;
    pool->block_count = BLOCKS_PER_THREAD * count;
    TRY(memory_alloc_zero((void **)&pool->blocks, (size_t)pool->block_count * sizeof(TextBlock), "blocks", e));
    TRY(memory_alloc_zero((void **)&run->threads, (size_t)count * sizeof(pthread_t), "threads", e));
    for (; run->thread_count < count; run->thread_count++) {
        int code = pthread_create(&run->threads[run->thread_count], NULL, worker_main, pool);
        if (code) return FAIL(e, ERR_MEMORY, "use fewer --threads", "cannot start a thread: %s", strerror(code));
    }
    return 0;
}

static void threads_stop(Run *run) {
    Pool *pool = &run->pool;
    pthread_mutex_lock(&pool->lock);
    pool->over = true;
    pool->filled = pool->taken; // what nobody has begun, nobody begins
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < run->thread_count; i++) pthread_join(run->threads[i], NULL);
    for (int i = 0; pool->blocks && i < pool->block_count; i++) block_free(&pool->blocks[i]);
    memory_free(pool->blocks);
    memory_free(run->threads);
}

static void pool_give(Pool *pool, TextBlock *b) {
    pthread_mutex_lock(&pool->lock);
    b->state = BLOCK_FILLED;
    pool->filled++;
    pthread_cond_signal(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

// What is said of a block's file: that it cannot be taken, which ends the writing but not the looking, or how it begins.
static int run_look_at(Run *run, const TextBlock *b, Error *e) {
    Pool *pool = &run->pool;
    if (b->code && b->code != ERR_INPUT) {
        *e = b->error;
        return b->code;
    }
    if (b->code) {
        complaints_add(&run->complaints, b->start.file, &b->error);
        reader_pass_over(&run->reader, b->start.file);
    }
    if (b->code && !pool->failed) {
        pthread_mutex_lock(&pool->lock);
        pool->failed = true;
        pthread_mutex_unlock(&pool->lock);
    }
    if (!b->jsonl && b->start.offset == 0 && byte_order_mark(b->text, b->bytes) && !run->marked++)
        run->marks = b->input;
    return 0;
}

// Waits for the oldest block and writes it.
static int run_write_oldest(Run *run, Error *e) {
    Pool *pool = &run->pool;
    TextBlock *b = &pool->blocks[run->blocks % (uint64_t)pool->block_count];
    pthread_mutex_lock(&pool->lock);
    while (b->state != BLOCK_DONE) pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    TRY(run_look_at(run, b, e));
    if (!pool->failed) {
        TRY(writer_block(&run->writer, b, e));
        run->written = b->end;
    }
    b->state = BLOCK_FREE;
    run->blocks++;
    const Split *s = run->writer.splits;
    progress_show(&run->progress, b->end.taken, s[TRAIN].tokens + s[VAL].tokens, false);
    if (pool->failed || clock_seconds() - run->saved < SAVE_SECONDS) return 0;
    run->saved = clock_seconds();
    return state_save(&run->writer, &run->written, e);
}

// Keeps the ring full and writes from its other end. An error is reported when all before it has been written, so that
// of several errors it is always the first in the input. After an input that cannot be taken the other files are looked at, but
// neither its own rest nor pipes, of which nobody knows how long they take.
static int run_blocks(Run *run, Error *e) {
    Pool *pool = &run->pool;
    Error reader_error;
    int reader_code = 0;
    for (bool more = true; more || run->blocks < pool->filled;) {
        if (more && pool->filled - run->blocks < (uint64_t)pool->block_count) {
            TextBlock *b = &pool->blocks[pool->filled % (uint64_t)pool->block_count];
            reader_code = reader_next(&run->reader, b, &more, &reader_error);
            if (reader_code) more = false;
            if (more) pool_give(pool, b);
        } else TRY(run_write_oldest(run, e));
    }
    if (run->complaints.files == 0) {
        if (reader_code) *e = reader_error;
        return reader_code;
    }
    if (reader_code) complaints_add(&run->complaints, run->reader.place.file, &reader_error);
    return complaints_finish(&run->complaints, run->inputs.count, e);
}

// Where only names were left to give, the input has nothing new.
static int run_expect_end(Run *run, Error *e) {
    TextBlock b = {0};
    bool more;
    int code = reader_next(&run->reader, &b, &more, e);
    if (!code && more)
        code = FAIL(e, ERR_INPUT, HINT_SAME_INPUT, "%s: longer than when this was interrupted", input_name(b.input));
    block_free(&b);
    return code;
}

// What is not as it might seem: text that is missing, and marks that are no text to the eye.
static void say_exceptions(const Run *run, uint64_t lines) {
    int files = 0;
    for (int i = 0; i < run->inputs.count; i++) files += run->inputs.all[i].left_out;
    if (files) printf("left out: %d file%s not UTF-8\n", files, files == 1 ? " that is" : "s that are");
    for (int i = 0, listed = 0; i < run->inputs.count && listed < LISTED_MAX; i++)
        if (run->inputs.all[i].left_out) printf("  %s\n", run->inputs.all[i].path), listed++;
    if (files > LISTED_MAX) printf("  and %d more\n", files - LISTED_MAX);
    if (lines) printf("left out: %" PRIu64 " line%s of jsonl whose text is not UTF-8\n", lines, lines == 1 ? "" : "s");
    if (run->marked)
        print_note("note: %d file%s with a byte order mark, which stays in the text; the first is %s", run->marked,
                   run->marked == 1 ? " begins" : "s begin", run->marks->path);
}

static int run_finish(Run *run, Error *e) {
    const TokenizeOptions *o = &run->options;
    const Split *splits = run->writer.splits;
    if (run->reader.stopped) {
        TRY(state_save(&run->writer, &run->written, e));
        return FAIL(e, ERR_STOPPED, "run the same command again to go on", "stopped by a signal");
    }
    if (splits[TRAIN].tokens + splits[VAL].tokens == 0)
        return FAIL(e, ERR_INPUT, "is this the right input?", "%s: no text in it", input_name(&run->inputs.all[0]));
    for (int i = 0; i < SPLITS; i++)
        if (splits[i].tokens == 0 && fills_split(o, i))
            return FAIL(e, ERR_INPUT, "give more documents, or another share for validation",
                        "no text fell into the %s split of %s", SPLIT_NAMES[i], o->out);
    TRY(writer_publish(&run->writer, &run->written, e));
    progress_show(&run->progress, run->written.taken, splits[TRAIN].tokens + splits[VAL].tokens, true);
    for (int i = 0; i < SPLITS; i++)
        if (splits[i].tokens)
            printf("%s_%s_*.bin: %" PRIu64 " tokens of %" PRIu64 " document%s in %d shard%s\n", o->out, SPLIT_NAMES[i],
                   splits[i].tokens, splits[i].documents, splits[i].documents == 1 ? "" : "s", splits[i].shards,
                   splits[i].shards == 1 ? "" : "s");
    say_exceptions(run, run->writer.left_out);
    return 0;
}

static int run_prepare_input(Run *run, char **names, int count, Error *e) {
    const TokenizeOptions *o = &run->options;
    bool known = true;
    if (!o->train_bpe) TRY(prefix_check(o, e));
    TRY(o->train_bpe ? tokenizer_new(&run->tokenizer, e) : tokenizer_load(&run->tokenizer, o->tokenizer, e));
    TRY(inputs_gather(run, names, count, e));
    TRY(reader_init(&run->reader, o, run->tokenizer, &run->inputs, &run->pool.refused, e));
    if (!strcmp(o->invalid, "skip")) TRY(reader_leave_out(&run->reader, &run->inputs, e));
    run->pool.o = o;
    run->pool.tokenizer = run->tokenizer;
    run->progress = (Progress){.start = clock_seconds(), .terminal = isatty(STDERR_FILENO)};
    for (int i = 0; i < run->inputs.count; i++) {
        if (!run->inputs.all[i].left_out) run->progress.total_bytes += run->inputs.all[i].bytes;
        known = known && !run->inputs.all[i].pipe;
    }
    if (o->max_bytes && (!known || o->max_bytes < run->progress.total_bytes)) run->progress.total_bytes = o->max_bytes;
    else if (!known) run->progress.total_bytes = 0;
    return 0;
}

static int run_prepare_output(Run *run, Error *e) {
    TokenizeOptions *o = &run->options;
    Reader *r = &run->reader;
    Writer *w = &run->writer;
    *w = (Writer){.o = o, .eot = tokenizer_eot(run->tokenizer)};
    w->fingerprint = state_fingerprint(o, run->tokenizer, &run->inputs);
    const char *unfit = NULL;
    char directory[PATH_MAX];
    r->resumed = !o->force && state_read(w, &run->inputs, &r->place, &unfit);
    if (!w->publishing) TRY(output_check(o, e));
    path_parent(o->out, directory, sizeof directory);
    TRY(directory_create(directory, e));
    if (r->resumed) {
        TRY(writer_resume(w, e));
        fprintf(stderr, "going on after %.1f MB\n", (double)r->place.taken / 1e6);
    } else {
        if (unfit) fprintf(stderr, "%s.state %s: starting over\n", o->out, unfit);
        state_remove(o); // first: a state without its shards would mislead
        writer_remove_partial(o);
    }
    run->written = r->place;
    run->progress.start_bytes = r->place.taken;
    run->saved = clock_seconds();
    return threads_start(run, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// Learning a vocabulary: from what would be training text, on one thread

static int learn_block(Run *run, BpeTrainer *trainer, TextBlock *b, Error *e) {
    b->code = pool_check(&run->pool, b, &b->error);
    TRY(run_look_at(run, b, e));
    run->writer.left_out += (uint64_t)b->left_out;
    for (int i = 0; i < b->piece_count && !run->pool.failed; i++) {
        const TextPiece *piece = &b->pieces[i];
        if (piece->split == TRAIN) TRY(bpe_add_text(trainer, run->tokenizer, b->text + piece->at, piece->bytes, e));
    }
    return 0;
}

static int learn_words(Run *run, BpeTrainer *trainer, Error *e) {
    TextBlock b = {0};
    bool got = true;
    int code = 0;
    while (got && !code) {
        code = reader_next(&run->reader, &b, &got, e);
        if (got && !code) code = learn_block(run, trainer, &b, e);
        progress_show(&run->progress, run->reader.place.taken, bpe_word_count(trainer), false);
    }
    block_free(&b);
    progress_show(&run->progress, run->reader.place.taken, bpe_word_count(trainer), true);
    if (!code) code = complaints_finish(&run->complaints, run->inputs.count, e);
    if (!code && run->reader.stopped) code = FAIL(e, ERR_STOPPED, "nothing was written", "stopped by a signal");
    return code;
}

static int learn(Run *run, Error *e) {
    const TokenizeOptions *o = &run->options;
    BpeTrainer *trainer = NULL;
    int code = 0;
    if (!o->force && tokenizer_exists(o->out))
        return FAIL(e, ERR_USAGE, "choose another --out, or --force to replace it", "%s: has a tokenizer", o->out);
    TRY_GOTO(bpe_create(&trainer, e));
    TRY_GOTO(learn_words(run, trainer, e));
    if (bpe_word_count(trainer) == 0) {
        code = FAIL(e, ERR_INPUT, "is this the right input?", "%s: no text in it", input_name(&run->inputs.all[0]));
        goto done;
    }
    fprintf(stderr, "%" PRIu32 " different words\n", bpe_word_count(trainer));
    TRY_GOTO(bpe_train(trainer, run->tokenizer, (int)o->train_bpe, e));
    TRY_GOTO(directory_create(o->out, e));
    TRY_GOTO(tokenizer_save(run->tokenizer, o->out, NULL, e));
    printf("%s: %d tokens, of them %d merges\n", o->out, run->tokenizer->vocab_size, run->tokenizer->merge_count);
    if ((uint64_t)run->tokenizer->vocab_size < o->train_bpe)
        fprintf(stderr, "the text has no pair left that occurs twice\n");
    say_exceptions(run, run->writer.left_out);
done:
    bpe_destroy(trainer);
    return code;
}

// ---------------------------------------------------------------------------------------------------------------------

// After a bad input nothing is left. After a signal, or a full disk, the same command goes on if it has got anywhere; and
// so it does after an input that is another than before, and where shards have got their names.
static void run_tidy(const Run *run, int code) {
    const TokenizeOptions *o = &run->options;
    bool bad_input = code == ERR_INPUT && !run->reader.resumed && !run->writer.publishing;
    if (code && !bad_input && state_exists(o)) return;
    if (code) state_remove(o);
    writer_remove_partial(o);
    state_remove(o); // last: should this break off, the same command does the rest
}

static int tokenize(int argc, char **argv, Error *e) {
    Run run = {0};
    int inputs, code;
    TRY(settings_parse(argc, argv, &run.options, &inputs, e));
    if (run.options.help) return settings_print_help(), 0;
    sigemptyset(&run.reader.signals); // blocked, and asked for between blocks: no handler, no global
    sigaddset(&run.reader.signals, SIGINT);
    sigaddset(&run.reader.signals, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &run.reader.signals, NULL);
    signal(SIGXFSZ, SIG_IGN); // a limit on file sizes is a failed write, like a full disk
    pthread_mutex_init(&run.pool.lock, NULL);
    pthread_cond_init(&run.pool.work, NULL);
    pthread_cond_init(&run.pool.done, NULL);
    bool started = false;
    TRY_GOTO(run_prepare_input(&run, argv, inputs, e));
    if (run.options.train_bpe) {
        code = learn(&run, e);
        goto done;
    }
    TRY_GOTO(run_prepare_output(&run, e));
    started = true;
    TRY_GOTO(run.writer.publishing ? run_expect_end(&run, e) : run_blocks(&run, e));
    TRY_GOTO(run_finish(&run, e));
done:
    threads_stop(&run);
    writer_close(&run.writer);
    if (started) run_tidy(&run, code);
    reader_free(&run.reader);
    inputs_free(&run.inputs);
    tokenizer_destroy(run.tokenizer);
    return code;
}

int main(int argc, char **argv) {
    Error e;
    int code = tokenize(argc, argv, &e);
    if (code) error_print(&e, 0, 1);
    return code;
}
