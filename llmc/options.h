// options: THE OPTION TABLE. One row an option; the struct's fields, the parser, --help, the config file and run.json
// all come from it. What a row does not say stands in a few lists, which a new option may belong to:
//
//   option_needs.c       needs[]: what an option is of no use without; uses[]: what runs look at that do not train
//   run_state.c          passing[]: what may change without a word when a run goes on
//   modes.h, schedule.h  the enum of a CHOICE, in the order of its names, as dev/test/test_options.c checks
//   scripts/launch.sh    ALIASES: the flags of llm.c that the recipes' launchers must know
//
// Given as `--name value` or `--name=value`, at most once; or as `name = value` in the file of --config, at most once,
// where the command line wins. llm.c's short flags are accepted as aliases, with llm.c's meaning.
#ifndef GNS_OPTIONS_H
#define GNS_OPTIONS_H

#include "batch_ramp.h"
#include "common.h"
#include "modes.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { OPTION_TEXT = 4096 }; // bytes of a TEXT value, with its NUL

// X(type, field, alias, alias unit, default, values, unit, section, help)
//
//   type     INT (int64_t), REAL (double), TEXT (char[]), CHOICE (int, an index into values), FLAG (bool, no value)
//   field    of struct Options; the flag is --field with dashes for underscores
//   alias    llm.c's flag, or ""; AS_IS, or counted by llm.c in STEPS of the batch or in MICRO_BATCHES, made tokens here,
//            or in VALIDATIONS, made steps here
//   default  as one would type it; "" for none (0, empty or false)
//   values   of a number: its interval, "[" and "]" inclusive, "(" and ")" exclusive; of a choice: "first|second"
//
// Defaults are llm.c's or nanoGPT's where those are sensible. --weight-decay is nanoGPT's 0.1 and not llm.c's 0, which
// hardly anyone trains with; --final-lr-frac is nanoGPT's 0.1 too. The optimizer computes in fp32: the betas stop short
// of what rounds to 1 there, and eps of what rounds to 0.
// clang-format off
#define OPTIONS_TABLE(X)                                                                                               \
    X(TEXT,   train,           "-i", AS_IS,         "",          "",               "",       DATA,                     \
      "token shards to train on: a file, or a quoted pattern such as 'data/train_*.bin'")                              \
    X(TEXT,   val,             "-j", AS_IS,         "",          "",               "",       DATA,                     \
      "token shards to validate on; without it there is no validation")                                                \
    X(TEXT,   out,             "-o", AS_IS,         "runs/gpt2", "",               "",       DATA,                     \
      "run directory: run.json, metrics.jsonl, metrics.csv, samples.jsonl and the model go there")                     \
    X(FLAG,   tensorboard,     "",   AS_IS,         "",          "",               "",       DATA,                     \
      "write what metrics.jsonl and samples.jsonl say for TensorBoard as well: tensorboard --logdir RUN_DIRECTORY")    \
    X(INT,    seed,            "",   AS_IS,         "1337",      "[0, 9e18]",      "",       DATA,                     \
      "of the initial weights, the order of the data and the samples")                                                 \
    X(TEXT,   model,           "-e", AS_IS,         "gpt2-124M", "",               "",       MODEL,                    \
      "gpt2-124M, gpt2-350M, gpt2-774M, gpt2-1558M or dN (N layers) to start from scratch; or weights to start "     \
      "from: a directory with config.json and model.safetensors, or llm.c's .bin. For --eval-only and --sample-only "  \
      "also a run directory: its newest checkpoint")                                                                   \
    X(INT,    layers,          "",   AS_IS,         "",          "[1, 1000]",      "",       MODEL,                    \
      "instead of the preset's")                                                                                       \
    X(INT,    heads,           "",   AS_IS,         "",          "[1, 1000]",      "",       MODEL,                    \
      "instead of the preset's; must divide the channels")                                                             \
    X(INT,    channels,        "",   AS_IS,         "",          "[1, 65536]",     "",       MODEL,                    \
      "instead of the preset's")                                                                                       \
    X(INT,    vocab_size,      "",   AS_IS,         "",          "[2, 65536]",     "",       MODEL,                    \
      "entries of the vocabulary: 256 for bytes; otherwise 50257, or what the model's files say")                      \
    X(TEXT,   tokenizer,       "",   AS_IS,         "",          "",               "",       MODEL,                    \
      "directory with a tokenizer's files (data/gpt2), or the word bytes: for prompts, samples, HellaSwag's text "     \
      "and the checkpoints. Without it that of --model, or bytes where the vocabulary has 256")                        \
    X(INT,    micro_batch,     "-b", AS_IS,         "4",         "[1, 65536]",     "rows",   BATCH,                    \
      "rows of one forward and backward pass: as many as fit in memory; changes nothing else with --batch-tokens")    \
    X(CHOICE, recompute,       "-r", AS_IS,         "none",      "none|gelu|block", "",      BATCH,                    \
      "activations to compute again in the backward pass rather than to keep: GELU's output, or all but one tensor a " \
      "layer. Saves memory, costs time, changes no bit")                                                               \
    X(INT,    seq_len,         "-t", AS_IS,         "1024",      "[1, 65536]",     "tokens", BATCH,                    \
      "tokens of a row (T)")                                                                                           \
    X(INT,    batch_tokens,    "-d", AS_IS,         "0",         "[0, 1e12]",      "tokens", BATCH,                    \
      "batch of an optimizer step, over all ranks, a multiple of --seq-len; with a ramp, the batch that --lr is "      \
      "meant for. 0: --batch-min with a ramp, else one micro-batch, however many ranks there are")                     \
    X(INT,    steps,           "-x", AS_IS,         "",          "[1, 1e9]",       "steps",  BATCH,                    \
      "length of the run, in optimizer steps of --batch-tokens; not with a ramp")                                      \
    X(INT,    train_tokens,    "",   AS_IS,         "",          "[1, 1e15]",      "tokens", BATCH,                    \
      "length of the run, in tokens (10e9 will do), rounded down to whole rows")                                       \
    X(REAL,   lr,              "-l", AS_IS,         "3e-4",      "[0, 100]",       "",       OPTIMIZER,                \
      "learning rate after the warm-up, at the batch of --batch-tokens")                                               \
    X(CHOICE, lr_schedule,     "-k", AS_IS,         "cosine",    "constant|linear|cosine|inverse-sqrt|wsd", "",        \
      OPTIMIZER, "how the learning rate falls with the tokens done")                                                   \
    X(INT,    warmup_tokens,   "-u", STEPS,         "0",         "[0, 1e15]",      "tokens", OPTIMIZER,                \
      "over which the learning rate rises linearly from 0")                                                            \
    X(REAL,   final_lr_frac,   "-q", AS_IS,         "0.1",       "[0, 1]",         "",       OPTIMIZER,                \
      "learning rate at the end, as a share of --lr (linear, cosine and wsd)")                                         \
    X(REAL,   weight_decay,    "-c", AS_IS,         "0.1",       "[0, 100]",       "",       OPTIMIZER,                \
      "decoupled (AdamW), of matrices only")                                                                           \
    X(REAL,   beta1,           "",   AS_IS,         "0.9",       "[0, 0.9999999]", "",       OPTIMIZER,                \
      "decay of AdamW's first moment")                                                                                 \
    X(REAL,   beta2,           "",   AS_IS,         "0.95",      "[0, 0.9999999]", "",       OPTIMIZER,                \
      "decay of AdamW's second moment")                                                                                \
    X(REAL,   eps,             "",   AS_IS,         "1e-8",      "[1e-30, 1]",     "",       OPTIMIZER,                \
      "added to the root of AdamW's second moment")                                                                    \
    X(REAL,   grad_clip,       "",   AS_IS,         "1",         "[0, 1e9]",       "",       OPTIMIZER,                \
      "the gradient is scaled down to this norm where it is longer; 0: never")                                         \
    X(INT,    val_every,       "-v", AS_IS,         "250",       "[0, 1e9]",       "steps",  EVALUATION,               \
      "between validations, and one at the end; 0: never")                                                             \
    X(INT,    val_tokens,      "-m", MICRO_BATCHES, "131072",    "[1, 1e15]",      "tokens", EVALUATION,               \
      "to validate on, the same ones every time, spread over all of --val: whole rows, at least one")                  \
    X(TEXT,   hellaswag,       "",   AS_IS,         "data/hellaswag/hellaswag_val.jsonl", "", "",  EVALUATION,         \
      "HellaSwag's questions: the public jsonl (data/hellaswag.sh), or llm.c's hellaswag_val.bin")                     \
    X(INT,    hellaswag_every, "-h", VALIDATIONS,   "0",         "[0, 1e9]",       "steps",  EVALUATION,               \
      "between tests with HellaSwag, and one at the end; 0: never")                                                    \
    X(INT,    sample_every,    "-s", AS_IS,         "0",         "[0, 1e9]",       "steps",  EVALUATION,               \
      "between samples of what the model writes; 0: never")                                                            \
    X(INT,    sample_tokens,   "-g", AS_IS,         "64",        "[1, 1e6]",       "tokens", EVALUATION,               \
      "to write in a sample")                                                                                          \
    X(TEXT,   prompt,          "",   AS_IS,         "",          "",               "",       EVALUATION,               \
      "text that a sample continues")                                                                                  \
    X(REAL,   temperature,     "",   AS_IS,         "1",         "[0, 100]",       "",       EVALUATION,               \
      "of sampling: below 1 is tamer; 0: always the likeliest token")                                                  \
    X(INT,    top_k,           "",   AS_IS,         "0",         "[0, 65536]",     "tokens", EVALUATION,               \
      "sample among the k likeliest only; 0: among all")                                                               \
    X(FLAG,   sample_only,     "",   AS_IS,         "",          "",               "",       EVALUATION,               \
      "print a sample of --model and end")                                                                             \
    X(FLAG,   eval_only,       "",   AS_IS,         "",          "",               "",       EVALUATION,               \
      "print the loss and perplexity of --model on all of --val (or --val-tokens of it), HellaSwag's score where "     \
      "--hellaswag is given, and end. Writes no file")                                                                 \
    X(INT,    checkpoint_every,"-n", AS_IS,         "1000",      "[0, 1e9]",       "steps",  CHECKPOINT,               \
      "between checkpoints, written while training goes on, besides those at the end and when the run is told to "     \
      "stop; 0: only those. The same command goes on from the newest one that is whole")                               \
    X(INT,    keep,            "-nk",AS_IS,         "2",         "[0, 1e6]",       "",       CHECKPOINT,               \
      "checkpoints to keep, 2 at least: the newest ones; 0: all")                                                      \
    X(FLAG,   fresh,           "-y", AS_IS,         "",          "",               "",       CHECKPOINT,               \
      "start over, and move what --out holds aside, instead of going on from it")                                      \
    X(TEXT,   check,           "",   AS_IS,         "",          "",               "",       CHECKPOINT,               \
      "verify a checkpoint or one file of it, a run directory, a model or token shards, say what they hold, and end")  \
    X(REAL,   skip_loss_z,     "-sl",AS_IS,         "0",         "[0, 1e6]",       "",       CHECKPOINT,               \
      "make no update in a step whose loss lies more than so many standard deviations above those of the last 128 "    \
      "steps; 0: always update")                                                                                       \
    X(REAL,   skip_grad_z,     "-sg",AS_IS,         "0",         "[0, 1e6]",       "",       CHECKPOINT,               \
      "the same for the gradient norm")                                                                                \
    X(CHOICE, gns,             "",   AS_IS,         "ln",        "off|ln|exact",   "",       GNS,                      \
      "gradient noise scale from the LayerNorm parameters, at every step, for free (ln); exact: of every tensor as "   \
      "well, by layer and by type, at every step or at those that --gns-exact-every says")                             \
    X(INT,    gns_exact_every, "",   AS_IS,         "0",         "[0, 1e9]",       "steps",  GNS,                      \
      "between exact measurements, which calibrate ln. 0: at no step with --gns ln, at every step with --gns exact, "  \
      "at every 16th with --ramp gns where --gns-ratio does not settle the matter")                                    \
    X(INT,    gns_half_life,   "",   AS_IS,         "0",         "[0, 1e15]",      "tokens", GNS,                      \
      "of the running averages; 0: 0.5% of the run")                                                                   \
    X(REAL,   gns_ratio,       "",   AS_IS,         "0",         "[0, 1e6]",       "",       GNS,                      \
      "noise scale of the whole model over that of ln; 0: as measured at the exact steps")                             \
    X(TEXT,   ramp,            "",   AS_IS,         "fixed",     "fixed|linear|seesaw|gns|replay:FILE", "", RAMP,      \
      "how the batch grows: not at all, linearly in tokens, as the learning rate falls, with the measured noise "      \
      "scale, or as in an earlier run's metrics.jsonl")                                                                \
    X(INT,    batch_min,       "",   AS_IS,         "",          "[1, 1e9]",       "rows",   RAMP,                     \
      "batch that a ramp starts from")                                                                                 \
    X(INT,    batch_max,       "",   AS_IS,         "",          "[1, 1e9]",       "rows",   RAMP,                     \
      "batch that a ramp never exceeds")                                                                               \
    X(REAL,   ramp_kappa,      "",   AS_IS,         "1",         "(0, 1000]",      "",       RAMP,                     \
      "batch that --ramp gns aims at, in noise scales")                                                                \
    X(REAL,   ramp_lr_power,   "",   AS_IS,         "0.5",       "[0, 1]",         "",       RAMP,                     \
      "p: the learning rate is multiplied by (batch / --batch-tokens)^p")                                              \
    X(CHOICE, zero,            "-z", AS_IS,         "0",         "0|1|2",          "",       RANKS,                    \
      "ZeRO: a rank keeps all of the optimizer's state, its share (1), or its share of that and of the gradients (2). " \
      "Changes no bit of any result")                                                                                  \
    X(CHOICE, reduce,          "",   AS_IS,         "step",      "step|micro-step","",       RANKS,                    \
      "when gradients are summed over the ranks: once a step, or after every micro-step, without which --zero 2 keeps " \
      "whole gradients where a step has several. More traffic, and sums in another order")                             \
    X(CHOICE, comm_dtype,      "",   AS_IS,         "fp32",      "fp32|bf16",      "",       RANKS,                    \
      "what gradients are rounded to on their way between ranks")                                                      \
    X(INT,    compare_every,   "",   AS_IS,         "100",       "[0, 1e9]",       "steps",  RANKS,                    \
      "between checks that the weights of all ranks are the same to the bit, besides those at the start and before "   \
      "every checkpoint; 0: only those. A run whose weights are not the same ends (exit code 78)")                     \
    X(REAL,   deadline_setup,  "",   AS_IS,         "1800",      "(0, 1e9]",       "seconds",RANKS,                    \
      "that set-up may take without getting on before the run is ended (exit code 78)")                                \
    X(REAL,   deadline_step,   "",   AS_IS,         "300",       "(0, 1e9]",       "seconds",RANKS,                    \
      "the same for a micro-batch, or for waiting for another rank")                                                   \
    X(REAL,   deadline_checkpoint,"",AS_IS,         "900",       "(0, 1e9]",       "seconds",RANKS,                    \
      "the same for saving and sampling")                                                                              \
    X(FLAG,   dry_run,         "",   AS_IS,         "",          "",               "",       PLAN,                     \
      "check everything, say what the run would take in memory, time, disk and money, and end")                        \
    X(TEXT,   device,          "",   AS_IS,         "",          "",               "",       PLAN,                     \
      "plan for this GPU (H200, B200, A100, RTX 4090, ...) rather than for what this machine has")                     \
    X(INT,    ranks,           "",   AS_IS,         "",          "[1, 1000000]",   "",       PLAN,                     \
      "plan for so many processes, one a GPU, rather than for those that are running")                                 \
    X(REAL,   price,           "",   AS_IS,         "",          "(0, 1e6]",       "",       PLAN,                     \
      "of an hour of one GPU, in whatever currency")                                                                   \
    X(REAL,   link,            "",   AS_IS,         "",          "(0, 1e6]",       "GB/s",   PLAN,                     \
      "between machines, each way, for each GPU, instead of what such machines usually have")                          \
    X(FLAG,   tune,            "",   AS_IS,         "",          "",               "",       PROGRAM,                  \
      "on a GPU: before the first step, time the algorithms on offer for every matrix product, and keep to the "       \
      "fastest. The choice is in run.json and the checkpoints, and a run that goes on keeps to it")                    \
    X(INT,    threads,         "",   AS_IS,         "0",         "[0, 4096]",      "",       PROGRAM,                  \
      "of the CPU; 0: one a core. The results do not depend on it")                                                    \
    X(TEXT,   config,          "",   AS_IS,         "",          "",               "",       PROGRAM,                  \
      "file of options, one `name = value` a line; a # and what follows it is a comment, except in \"quotes\", which " \
      "keep blanks too; the command line wins")                                                                        \
    X(FLAG,   help,            "",   AS_IS,         "",          "",               "",       PROGRAM,                  \
      "print this and end")                                                                                            \
    X(FLAG,   version,         "",   AS_IS,         "",          "",               "",       PROGRAM,                  \
      "print the version and end")

// What options_resolve works out: R(type, field). All of it is in run.json too.
#define OPTIONS_RESOLVED(R)                                                                                            \
    R(INT,  horizon_tokens)       /* the run ends here: a multiple of seq_len; 0 where nothing is trained */           \
    R(INT,  batch_ref_rows)       /* B_ref: the constant batch, and the batch that lr is meant for */                  \
    R(INT,  batch_min_rows)       /* first batch of a ramp; batch_ref_rows without one */                              \
    R(INT,  batch_max_rows)       /* largest batch of a ramp; batch_ref_rows without one */                            \
    R(INT,  gns_exact_interval)   /* steps from one exact measurement to the next; 0: none */                          \
    R(REAL, gns_half_life_tokens)
// clang-format on

#define OPTION_FIELD_INT(field)    int64_t field;
#define OPTION_FIELD_REAL(field)   double field;
#define OPTION_FIELD_TEXT(field)   char field[OPTION_TEXT];
#define OPTION_FIELD_CHOICE(field) int field;
#define OPTION_FIELD_FLAG(field)   bool field;

// OPTION_train, OPTION_val, ...: the rows' numbers.
#define X(type, field, alias, alias_unit, fallback, values, unit, section, help) OPTION_##field,
typedef enum { OPTIONS_TABLE(X) OPTION_COUNT } OptionId;
#undef X

typedef struct {
#define X(type, field, alias, alias_unit, fallback, values, unit, section, help) OPTION_FIELD_##type(field)
    OPTIONS_TABLE(X)
#undef X

    struct { // filled by options_resolve
#define R(type, field) OPTION_FIELD_##type(field)
        OPTIONS_RESOLVED(R)
#undef R
        RampMode ramp_mode;
        const char *ramp_replay; // path within `ramp`; NULL unless replaying
    } run;

    uint8_t given[OPTION_COUNT];      // where an option was given: OPTION_GIVEN_* bits
    uint8_t alias_unit[OPTION_COUNT]; // still to be made tokens by options_resolve
    char notes[2048];                 // whole lines for stderr: of options that were given and do nothing
} Options;

enum { OPTION_GIVEN_CONFIG = 1, OPTION_GIVEN_COMMAND_LINE = 2, OPTION_GIVEN_ALIAS = 4 /* there, as llm.c's flag */ };

// Defaults, then the config file, then the command line. After --help or --version nothing else is looked at.
// Usage errors are ERR_USAGE; a config file that cannot be read is ERR_INPUT.
int options_parse(Options *o, int argc, char **argv, Error *e);

// Cross-checks that need no files, and o->run; o->notes says which options do nothing. Not after --help or --version.
int options_resolve(Options *o, Error *e);

// Is a model to be trained? Otherwise one of the options that do something else and end was given.
bool options_train(const Options *o);

// Was "--layers" given, on the command line or in the config file?
bool options_given(const Options *o, const char *flag);

// --help, at most 100 columns wide.
void options_print_help(FILE *f, const char *program);

// One JSON object: every option but those of planning under its field's name, and "resolved". `indent` is how many spaces stand before the
// lines after the first. No newline at the end.
void options_write_json(FILE *f, const Options *o, int indent);

// The parts of options_parse, apart for tests and the fuzzer. text: bytes with a NUL behind them; name: for messages.
void options_defaults(Options *o);
int options_parse_config(Options *o, char *text, size_t bytes, const char *name, Error *e);

#ifdef __cplusplus
}
#endif
#endif
