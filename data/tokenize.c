// tokenize: text in, token shards out (llmc/data.h has their format).
//
//     data/tokenize --tokenizer bytes|DIR --out PREFIX [options] INPUT...
//
// One thread, the coordinator, reads the inputs in blocks and writes tokens in the order of the blocks; the others encode
// blocks in any order. Where a block ends depends on the input alone, so the shards do not depend on the number of
// threads. Memory is a fixed number of blocks. shards.h says how a run survives an interruption.
#define _POSIX_C_SOURCE 200809L
#include "reader.h"
#include "report.h"
#include "shards.h"

#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    BLOCKS_PER_THREAD = 3, // one in work, one waiting, one to be written
    SAVE_SECONDS = 20      // between two saves of the state
};

// ---------------------------------------------------------------------------------------------------------------------
// The workers and their ring of blocks

typedef struct {
    const TokenizeOptions *o;
    const Tokenizer *tokenizer;
    TextBlock *blocks; // a ring
    uint64_t block_count;
    uint64_t filled, taken, written; // blocks so far
    atomic_bool refused;             // some input cannot be taken: no block is encoded or written from here on
    bool over;
    pthread_mutex_t lock;
    pthread_cond_t work, done; // there is a block to encode; one is done
    pthread_t *threads;
    int thread_count;
} Pool;

static int worker_handle(Pool *pool, TextBlock *b, Encoder *encoder, Error *e) {
    int code = block_check(b, pool->o, e);
    if (code) atomic_store(&pool->refused, true);
    return code || atomic_load(&pool->refused) ? code : block_encode(b, encoder, e);
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
        TextBlock *b = &pool->blocks[pool->taken++ % pool->block_count];
        pthread_mutex_unlock(&pool->lock);
        b->error = error;
        b->code = code ? code : worker_handle(pool, b, encoder, &b->error);
        pthread_mutex_lock(&pool->lock);
        b->done = true;
        pthread_cond_signal(&pool->done);
    }
    pthread_mutex_unlock(&pool->lock);
    encoder_destroy(encoder);
    return NULL;
}

static void pool_init(Pool *pool, const TokenizeOptions *o) {
    pool->o = o;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
}

static int pool_start(Pool *pool, const Tokenizer *tokenizer, Error *e) {
    int count = (int)pool->o->threads;
    pool->tokenizer = tokenizer;
    pool->block_count = BLOCKS_PER_THREAD * pool->o->threads;
    TRY(memory_alloc_zero((void **)&pool->blocks, pool->block_count * sizeof(TextBlock), "blocks", e));
    TRY(memory_alloc_zero((void **)&pool->threads, (size_t)count * sizeof(pthread_t), "threads", e));
    for (; pool->thread_count < count; pool->thread_count++) {
        int code = pthread_create(&pool->threads[pool->thread_count], NULL, worker_main, pool);
        if (code) return FAIL(e, ERR_MEMORY, "use fewer --threads", "cannot start a thread: %s", strerror(code));
    }
    return 0;
}

static void pool_stop(Pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->over = true;
    pool->filled = pool->taken; // blocks that no worker has taken are dropped
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->thread_count; i++) pthread_join(pool->threads[i], NULL);
    for (uint64_t i = 0; pool->blocks && i < pool->block_count; i++) block_free(&pool->blocks[i]);
    memory_free(pool->blocks);
    memory_free(pool->threads);
}

// The block to fill next, or NULL while all are in use.
static TextBlock *pool_next_free(Pool *pool) {
    return pool->filled - pool->written < pool->block_count ? &pool->blocks[pool->filled % pool->block_count] : NULL;
}

static void pool_submit(Pool *pool, TextBlock *b) {
    pthread_mutex_lock(&pool->lock);
    b->done = false;
    pool->filled++;
    pthread_cond_signal(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

// Waits for the oldest block.
static TextBlock *pool_wait_oldest(Pool *pool) {
    TextBlock *b = &pool->blocks[pool->written % pool->block_count];
    pthread_mutex_lock(&pool->lock);
    while (!b->done) pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    return b;
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

typedef struct {
    TokenizeOptions options;
    Inputs inputs;
    Tokenizer *tokenizer;
    Reader reader;
    Pool pool;
    Writer writer;
    Progress progress;
    Complaints complaints;
    int marked;         // text files that begin with a byte order mark
    const Input *marks; // the first of them
    double saved;       // when the state was, in seconds
} Run;

static void run_show(Run *run, uint64_t bytes, bool last) {
    progress_show(&run->progress, bytes, run->writer.state.split[TRAIN].tokens + run->writer.state.split[VAL].tokens,
                  last);
}

static int run_write_oldest(Run *run, Error *e) {
    TextBlock *b = pool_wait_oldest(&run->pool);
    if (b->code && b->code != ERR_INPUT) {
        *e = b->error;
        return b->code;
    }
    if (b->code) {
        complaints_add(&run->complaints, b->start.file, &b->error);
        reader_pass_over(&run->reader, b->start.file);
    }
    if (!b->input->jsonl && b->start.offset == 0 && byte_order_mark(b->text, b->bytes) && !run->marked++)
        run->marks = b->input;
    bool refused = atomic_load(&run->pool.refused);
    if (!refused) TRY(writer_block(&run->writer, b, e));
    run->pool.written++;
    run_show(run, b->end.taken, false);
    if (refused || clock_seconds() - run->saved < SAVE_SECONDS) return 0;
    run->saved = clock_seconds();
    return state_save(&run->writer, e);
}

// Keeps the ring full and writes from its other end. An error is reported after everything before it has been written, so
// of several errors it is always the first in the input. After an input that cannot be taken the other files are checked as
// well, but not its own rest, and not pipes, which may take any time.
static int run_blocks(Run *run, Error *e) {
    Pool *pool = &run->pool;
    Error reader_error;
    int reader_code = 0;
    for (bool more = true; more || pool->written < pool->filled;) {
        TextBlock *b = more ? pool_next_free(pool) : NULL;
        if (!b) {
            TRY(run_write_oldest(run, e));
            continue;
        }
        reader_code = reader_next(&run->reader, b, &more, &reader_error);
        if (!reader_code && more && run->writer.state.publishing)
            reader_code = FAIL(&reader_error, ERR_INPUT, HINT_SAME_INPUT, "%s: longer than when this was interrupted",
                               input_name(b->input));
        more = more && !reader_code;
        if (more) pool_submit(pool, b);
    }
    if (run->complaints.files == 0) {
        if (reader_code) *e = reader_error;
        return reader_code;
    }
    if (reader_code) complaints_add(&run->complaints, run->reader.place.file, &reader_error);
    return complaints_finish(&run->complaints, run->inputs.count, e);
}

static void print_left_out(const Run *run) {
    const Inputs *in = &run->inputs;
    uint64_t files = 0, lines = run->writer.state.left_out;
    for (int i = 0; i < in->count; i++) files += in->all[i].left_out;
    if (files) printf("left out: %" PRIu64 " file%s not UTF-8\n", files, files == 1 ? " that is" : "s that are");
    for (int i = 0, listed = 0; i < in->count && listed < LISTED_MAX; i++)
        if (in->all[i].left_out) printf("  %s\n", in->all[i].path), listed++;
    if (files > LISTED_MAX) printf("  and %" PRIu64 " more\n", files - LISTED_MAX);
    if (lines) printf("left out: %" PRIu64 " line%s of jsonl whose text is not UTF-8\n", lines, plural(lines));
    if (run->marked)
        print_note("note: %d file%s with a byte order mark, which stays in the text; the first is %s", run->marked,
                   run->marked == 1 ? " begins" : "s begin", run->marks->path);
}

// Whether the run must put something into a split.
static bool fills_split(const TokenizeOptions *o, int split) {
    return o->val_fraction > 0 || o->val_every_file || split == (o->split == SPLITS ? TRAIN : o->split);
}

static int run_finish(Run *run, Error *e) {
    const TokenizeOptions *o = &run->options;
    const struct SplitState *splits = run->writer.state.split;
    if (run->reader.stopped) {
        TRY(state_save(&run->writer, e));
        return FAIL(e, ERR_STOPPED, "run the same command again to resume", "stopped by a signal");
    }
    if (splits[TRAIN].tokens + splits[VAL].tokens == 0)
        return FAIL(e, ERR_INPUT, "is this the right input?", "%s: no text in it", input_name(&run->inputs.all[0]));
    for (int i = 0; i < SPLITS; i++)
        if (splits[i].tokens == 0 && fills_split(o, i))
            return FAIL(e, ERR_INPUT, "give more documents, or another share for validation",
                        "no text fell into the %s split of %s", SPLIT_NAMES[i], o->out);
    TRY(writer_publish(&run->writer, e));
    run_show(run, run->writer.state.place.taken, true);
    for (int i = 0; i < SPLITS; i++)
        if (splits[i].tokens)
            printf("%s_%s_*.bin: %" PRIu64 " tokens of %" PRIu64 " document%s in %d shard%s\n", o->out, SPLIT_NAMES[i],
                   splits[i].tokens, splits[i].documents, plural(splits[i].documents), splits[i].shards,
                   plural((uint64_t)splits[i].shards));
    print_left_out(run);
    return 0;
}

static int run_prepare_input(Run *run, char **names, int count, Error *e) {
    const TokenizeOptions *o = &run->options;
    Progress *p = &run->progress;
    bool known = true;
    TRY(tokenizer_load(&run->tokenizer, o->tokenizer, e));
    TRY(inputs_gather(&run->inputs, o, names, count, e));
    run->reader.tokenizer = run->tokenizer;
    TRY(reader_init(&run->reader, e));
    if (o->invalid == INVALID_SKIP) TRY(reader_leave_out(&run->reader, e));
    *p = (Progress){.start = clock_seconds(), .terminal = isatty(STDERR_FILENO)};
    for (int i = 0; i < run->inputs.count; i++) {
        const Input *input = &run->inputs.all[i];
        if (!input->left_out) p->total_bytes += input->bytes;
        known = known && !input->pipe;
    }
    if (o->max_bytes && (!known || o->max_bytes < p->total_bytes)) p->total_bytes = o->max_bytes;
    else if (!known) p->total_bytes = 0;
    return 0;
}

static int run_prepare_output(Run *run, Error *e) {
    const TokenizeOptions *o = &run->options;
    Reader *r = &run->reader;
    Writer *w = &run->writer;
    const char *unfit = NULL;
    char directory[PATH_MAX];
    *w = writer_create(o, run->tokenizer, &run->inputs);
    w->state.place = r->place;
    r->resumed = !o->force && state_read(w, &unfit);
    if (!w->state.publishing) TRY(writer_check_free(w, e));
    path_parent(o->out, directory, sizeof directory);
    TRY(directory_create(directory, e));
    if (r->resumed) {
        r->place = w->state.place;
        TRY(writer_resume(w, e));
        fprintf(stderr, "resuming after %.1f MB\n", (double)r->place.taken / 1e6);
    } else {
        if (unfit) fprintf(stderr, "%s.state %s: starting over\n", o->out, unfit);
        state_remove(w); // first: a state without its shards would mislead
        writer_remove_partial(w);
    }
    run->progress.start_bytes = r->place.taken;
    run->saved = clock_seconds();
    return pool_start(&run->pool, run->tokenizer, e);
}

// After success the state goes. After bad input nothing stays, unless it interrupts a run that was resumed. After anything
// else (a signal, a full disk) the same command resumes, if there is a state.
static void run_clean_up(const Run *run, int code) {
    const Writer *w = &run->writer;
    bool bad_input = code == ERR_INPUT && !run->reader.resumed && !w->state.publishing;
    if (code && !bad_input && state_exists(w)) return;
    state_remove(w);
    if (code) writer_remove_partial(w);
}

static int tokenize(int argc, char **argv, Error *e) {
    Run run = {0};
    int inputs, code;
    bool started = false;
    TRY(settings_parse(argc, argv, &run.options, &inputs, e));
    if (run.options.help) return settings_print_help(), 0;
    run.reader = (Reader){.o = &run.options, .inputs = &run.inputs, .refused = &run.pool.refused, .fd = -1};
    sigemptyset(&run.reader.signals); // blocked, and asked for between blocks: no handler, no global
    sigaddset(&run.reader.signals, SIGINT);
    sigaddset(&run.reader.signals, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &run.reader.signals, NULL);
    signal(SIGXFSZ, SIG_IGN); // a limit on file sizes is a failed write, like a full disk
    pool_init(&run.pool, &run.options);
    TRY_GOTO(run_prepare_input(&run, argv, inputs, e));
    TRY_GOTO(run_prepare_output(&run, e));
    started = true;
    TRY_GOTO(run_blocks(&run, e));
    TRY_GOTO(run_finish(&run, e));
done:
    pool_stop(&run.pool);
    writer_close(&run.writer);
    if (started) run_clean_up(&run, code);
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
