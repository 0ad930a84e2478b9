#include "run/program.h"

#include "base/hash.h"
#include "base/signals.h"
#include "run/run.h"

#include <fcntl.h>
#include <limits.h>
#include <omp.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

// Trains; after each rollback, trains again from the checkpoint that train.c chooses.
static int train(Run *r, Error *e) {
    const Options *o = &r->options, resolved = *o; // training changes some options: --gns, --train-hours
    const long long K = o->tensor, groups = r->comm->ranks / K;
    r->at = (RunPoint){.val_loss = NAN, .best.loss = INFINITY};
    memset(r->at.exponents, FP8_UNSET, sizeof r->at.exponents);
    r->position = (Position){0};
    // First make all checks that need no engine.
    int code = setup_data(r, e);
    if (!code) code = setup_schedule(r, e);
    if (!code && r->position.ramp.config.batch_min < groups) {
        FAIL(e, ERR_USAGE, NULL, "a batch of %lld rows is too small for %lld %s",
             (long long)r->position.ramp.config.batch_min, groups, K > 1 ? "groups of ranks (--tensor)" : "ranks");
        code = error_hint(e, "use mpirun -np %lld, or larger batches (--batch-tokens, --batch-min, --ramp)",
                          (long long)r->position.ramp.config.batch_min * K);
    }
    TRY(comm_agree(r->comm, code, e));
    TRY(setup_same_data(r, e));
    TRY(setup_resume(r, e));
    if (r->saving.saved[0] && (r->at.tokens >= o->run.horizon_tokens || ends_early(r))) {
        if (!is_rank0(r)) return 0;
        printf("this run is complete: %lld steps, %lld tokens are done, and the command asks for %lld. The model is "
               "in %s. %s resumes, --fresh starts over\n",
               (long long)r->at.step, (long long)r->at.tokens, (long long)o->run.horizon_tokens, r->saving.saved,
               ends_early(r) ? "A lower --stop-at-loss or a larger --patience" : "A longer run");
        if (r->metrics) TRY(metrics_begin(r->metrics, r->at.step, r->at.metrics_bytes, false, e)); // cuts undone steps
        return archive_tidy(&r->archive, false, stderr, e); // removes what a killed run left
    }
    TRY(comm_agree(r->comm, setup_room(r, e), e));
    // --shard machine needs equally many ranks on every machine, in order.
    const int local = r->comm->local_rank, locals = r->comm->local_ranks;
    const uint64_t place = local == r->comm->rank % locals ? (uint64_t)locals : 0;
    if (o->shard)
        TRY(comm_same(r->comm, place, 1, ERR_USAGE, "another number or order of ranks on its machine (--shard machine)",
                      "start equally many ranks on every machine, in order (mpirun --map-by slot)", e));
    TRY(setup_device(r, e));
    TRY(setup_gns(r, e));
    code = setup_buffers(r, e);
    if (!code) code = setup_engine(r, e);
    TRY(comm_agree(r->comm, code, e));
    TRY(setup_tuning(r, e));
    TRY(comm_agree(r->comm, setup_output(r, e), e));
    const int64_t made = r->back.made;
    code = train_run(r, e);
    if (r->back.made == made || !(r->comm->settled || r->comm->ranks == 1)) return code;
    progress_break(&r->progress);
    run_end_training(r);
    r->comm->settled = false;
    comm_phase(r->comm, PHASE_SETUP, 0);
    r->options = resolved;
    return train(r, e);
}

static int run_program(Run *r, Error *e) {
    const Options *o = &r->options;
    Error usage; // reported after comm_create, which needs an option (--deadline)
    int code = options_parse(&r->options, r->argc, r->argv, &usage);
    const bool evaluates = o->eval_only && !(o->help || o->version || o->print_options || o->dry_run || *o->check);
    if (options_train(o)) signals_install(); // a stop may be requested while the ranks still connect
    TRY(comm_create(r->comm, o->deadline, e));
    if (options_train(o)) open_mpi_survive();
    if (code) *e = usage;
    else if (options_train(o) || evaluates) code = comm_check_launch(r->comm, e);
    if (!code && !(o->help || o->version)) {
        code = options_resolve(&r->options, e);
        if (!code && r->comm->ranks > 1 && (*o->check || (o->sample_only && !o->dry_run)))
            code = FAIL(e, ERR_USAGE, "start it without mpirun", "%s is for one process, not %d",
                        *o->check ? "--check" : "--sample-only", r->comm->ranks);
        if (!code && is_rank0(r) && !o->print_options) fputs(o->notes, stderr);
    }
    TRY(comm_agree(r->comm, code, e));
    const uint64_t given = hash_bytes(HASH_START, o, offsetof(Options, run)); // `run` follows the table's options
    TRY(comm_same(r->comm, given, 1, ERR_USAGE, "other options",
                  "start all ranks with one command line, and the same --config file", e));
    FileDigest program = {0};
    if (r->comm->ranks > 1) TRY(comm_agree(r->comm, file_digest("/proc/self/exe", &program, e), e));
    const uint64_t build = hash_bytes(HASH_START, program.hash, sizeof program.hash);
    TRY(comm_same(r->comm, build, 1, ERR_INPUT, "another build", "install the same program on every machine", e));
    if (is_rank0(r) && o->help) options_print_help(stdout, o, r->argv[0]);
    else if (is_rank0(r) && o->version) printf("%s\n", version_text());
    else if (is_rank0(r) && o->print_options) TRY(options_print(stdout, o, e));
    if (o->help || o->version || o->print_options) return 0;
    // Training shows progress on standard output. With several ranks it is plain lines, as mpirun's pseudo-terminal is
    // often logged. Other work shows it on standard error, as a program may read the result from standard output.
    if (is_rank0(r) && !(o->dry_run || *o->check)) {
        progress_create(&r->progress, options_train(o) ? stdout : stderr, r->comm->ranks > 1);
        code = ticker_start(&r->progress.ticker, "the progress", e);
    }
    TRY(comm_agree(r->comm, code, e));
    r->shape.threads = o->threads ? (int)o->threads : comm_threads(r->comm);
    if (r->shape.threads > 0) omp_set_num_threads(r->shape.threads);
    if (!*o->check) TRY(setup_source(r, e));
    if (!*o->check) TRY(comm_agree(r->comm, setup_shape(r, e), e));
    if (options_train(o)) return train(r, e);
    if (evaluates) return evaluate_model(r, e);
    if (!is_rank0(r)) return 0;
    if (*o->check) return inspect(o->check, e);
    if (o->dry_run) return run_dry(r, e);
    TRY(setup_engine(r, e));
    code = o->interactive ? print_answers(r, e) : print_samples(r, e);
    return code == ERR_NONFINITE ? error_prefix(e, "--model %s", o->model) : code;
}

void program_begin(char **argv) {
    process_begin();
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    char program[PATH_MAX]; // the real path: with /proc/self/exe, ps and killall would show "exe"
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    if (n <= 0 || setenv("GOMP_SPINCOUNT", "1000", 1) != 0) return;
    program[n] = 0;
    execv(program, argv); // if it fails, the program continues with long spins
}

// How the program ends, if all ranks know the outcome:
//   1. No transfer between ranks is in flight, and no save: train_run waits for both.
//   2. The threads of this rank end before anything they use is freed: run_destroy. Only the watchdog still runs.
//   3. The error is printed before any rank exits: mpirun kills all ranks as soon as one returns a code.
//   4. The ranks pass a barrier: no rank exits while another still needs it.
//   5. Open MPI's own threads have nothing left to do before MPI_Finalize unloads their code (open_mpi_settle).
//   6. The watchdog, which has watched 4 and 5, ends.
//   7. The process exits. If MPI could not end, its threads still run, so exit handlers are skipped (comm_finish).
// An error that only one rank knows ends the job at 3, by MPI_Abort: nothing is freed, and threads run until then.
int program_main(int argc, char **argv, const EngineApi *engine, const TransportApi *transport) {
    Error e = {0}, closing = {0};
    struct stat st;
    // If standard output is a terminal, a pipe or a socket, its reader may go away. A training run continues without a
    // reader. Ask at the start, as isatty does not recognise a terminal that was closed.
    bool written_to = fstat(STDOUT_FILENO, &st) == 0 && (fcntl(STDOUT_FILENO, F_GETFL) & O_ACCMODE) != O_RDONLY;
    bool may_close = !written_to || isatty(STDOUT_FILENO) || S_ISFIFO(st.st_mode) || S_ISSOCK(st.st_mode);
    Comm comm = {.ranks = 1, .local_ranks = 1};
    Run r = {.argc = argc, .argv = argv, .engine_api = engine, .transport_api = transport, .comm = &comm};
    r.begun = r.started = clock_seconds();
    int code = e.code = run_program(&r, &e);
    if (code) progress_break(&r.progress);
    // An error that only this rank knows ends the job at once. run_destroy would wait for a running save; other ranks
    // would report a lost connection first.
    if (code && comm.ranks > 1 && !comm.settled) return comm_finish(&comm, &e);
    int closed = run_destroy(&r, &closing);
    if (closed && code) fprintf(stderr, "warning: %s: its last lines are lost\n", closing.what);
    else if (closed) code = (e = closing).code;
    const bool unread_is_fine = options_train(&r.options) && may_close;
    if (!code && process_end(&closing) && !unread_is_fine) code = (e = closing).code;
    e.code = code;
    return comm_finish(&comm, &e);
}
