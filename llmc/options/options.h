// options: THE OPTION TABLE. One row an option; the struct's fields, the parser, --help, the config file and run.json
// all come from it. What a row does not say stands in a few lists, which a new option may belong to:
//
//   option_needs.c       needs[]: what an option is of no use without; uses[]: what runs look at that do not train
//   run_state.c          passing[]: what may change without a word when a run goes on
//   modes.h, schedule.h  the enum of a CHOICE, in the order of its names, as dev/test/options/test_options.c checks
//   scripts/launch.sh    ALIASES: the flags of llm.c that the recipes' launchers must know
//
// Given as `--name value` or `--name=value`, at most once; or as `name = value` in the file of --config, at most once,
// where the command line wins, also over what excludes what it says (--steps and --train-tokens). llm.c's short flags are
// accepted as aliases, with llm.c's meaning.
#ifndef GNS_OPTIONS_H
#define GNS_OPTIONS_H

#include "gns/ramp.h"
#include "base/common.h"
#include "model/modes.h"

enum { OPTION_TEXT = 4096 }; // bytes of a TEXT value, with its NUL

// X(type, field, alias, alias unit, default, values, unit, section, help)
//
//   type     INT (int64_t), REAL (double), TEXT (char[]), CHOICE (int, an index into values), FLAG (bool, no value)
//   field    of struct Options; the flag is --field with dashes for underscores
//   alias    llm.c's flag, or ""; AS_IS, or counted by llm.c in STEPS of the batch or in MICRO_BATCHES, made tokens
//            here, or in VALIDATIONS, made steps here
//   default  as one would type it; "" for none (0, empty or false)
//   values   of a number: its interval, "[" and "]" inclusive, "(" and ")" exclusive; of a choice: "first|second"
//   unit     of a number; of the other types what is to be given: --help writes it behind the flag
//   help     a whole phrase that says what the option is or does, not one that goes on from the operand's name
//
// Defaults are llm.c's or nanoGPT's where those are sensible. --weight-decay is nanoGPT's 0.1 and not llm.c's 0, which
// hardly anyone trains with; --final-lr-frac is nanoGPT's 0.1 too. The optimizer computes in fp32: the betas stop short
// of what rounds to 1 there, and eps of what rounds to 0.
// clang-format off
#define OPTIONS_TABLE(X)                                                                                               \
    X(TEXT,   train,           "-i", AS_IS,         "",          "",               "files",  DATA,                     \
      "token shards to train on: a file, or a quoted pattern such as 'data/train_*.bin'")                              \
    X(TEXT,   val,             "-j", AS_IS,         "",          "",               "files",  DATA,                     \
      "token shards to validate on; without them there is no validation")                                              \
    X(TEXT,   out,             "-o", AS_IS,         "runs/gpt2", "",               "dir",    DATA,                     \
      "run directory: run.json, metrics.jsonl, samples.jsonl and the model are written there")                         \
    X(INT,    seed,            "",   AS_IS,         "1337",      "[0, 9e18]",      "",       DATA,                     \
      "seed of the initial weights, of the order of the data and of the samples")                                      \
    X(TEXT,   model,           "-e", AS_IS,         "gpt2-124M", "",               "name|path", MODEL,                 \
      "gpt2-124M, gpt2-350M, gpt2-774M, gpt2-1558M or dN (N layers): a shape, to start from scratch. Or weights to "   \
      "start from: a directory with config.json and model.safetensors, a run directory, whose newest checkpoint is "   \
      "taken, or llm.c's .bin")                                                                                        \
    X(INT,    layers,          "",   AS_IS,         "",          "[1, 1000]",      "",       MODEL,                    \
      "number of layers (L), if not the preset's")                                                                     \
    X(INT,    heads,           "",   AS_IS,         "",          "[1, 1000]",      "",       MODEL,                    \
      "number of attention heads (NH), if not the preset's; must divide the channels")                                 \
    X(INT,    channels,        "",   AS_IS,         "",          "[1, 65536]",     "",       MODEL,                    \
      "number of channels (C), if not the preset's")                                                                   \
    X(INT,    vocab_size,      "",   AS_IS,         "",          "[2, 65536]",     "",       MODEL,                    \
      "size of the vocabulary (V): 256 for bytes. If not given, what the model's files say, or the size of "           \
      "--tokenizer, or 50257")                                                                                         \
    X(TEXT,   tokenizer,       "",   AS_IS,         "",          "",               "dir",    MODEL,                    \
      "directory with a tokenizer's files (data/gpt2), or the word bytes: used for prompts, samples, HellaSwag's "     \
      "text and the checkpoints. If not given, the tokenizer of --model, or bytes if the size of the vocabulary is "   \
      "256")                                                                                                           \
    X(INT,    micro_batch,     "-b", AS_IS,         "4",         "[1, 65536]",     "rows",   BATCH,                    \
      "rows of one forward and backward pass: as many as fit into memory. If --batch-tokens is given, this changes "   \
      "nothing else")                                                                                                  \
    X(CHOICE, recompute,       "-r", AS_IS,         "none",      "none|gelu|block", "",      BATCH,                    \
      "activations to compute again in the backward pass instead of keeping them: GELU's output (gelu), or all but "   \
      "one tensor per layer (block). Saves memory, costs time, changes no bit of any result")                          \
    X(INT,    seq_len,         "-t", AS_IS,         "1024",      "[1, 65536]",     "tokens", BATCH,                    \
      "length of a row (T)")                                                                                           \
    X(INT,    batch_tokens,    "-d", AS_IS,         "0",         "[0, 1e12]",      "tokens", BATCH,                    \
      "batch of an optimizer step, over all ranks: a multiple of --seq-len. With a ramp, the batch that --lr is "      \
      "meant for. 0: --batch-min with a ramp, otherwise one micro-batch, however many ranks there are")                \
    X(INT,    steps,           "-x", AS_IS,         "",          "[1, 1e9]",       "steps",  BATCH,                    \
      "length of the run, in optimizer steps of --batch-tokens; not with a ramp")                                      \
    X(INT,    train_tokens,    "",   AS_IS,         "",          "[1, 1e15]",      "tokens", BATCH,                    \
      "length of the run in tokens, for example 10e9; rounded down to whole rows")                                     \
    X(REAL,   lr,              "-l", AS_IS,         "3e-4",      "[0, 100]",       "",       OPTIMIZER,                \
      "learning rate after the warm-up, at the batch of --batch-tokens")                                               \
    X(CHOICE, lr_schedule,     "-k", AS_IS,         "cosine",    "constant|linear|cosine|inverse-sqrt|wsd", "",        \
      OPTIMIZER,                                                                                                       \
      "how the learning rate falls with the tokens done")                                                              \
    X(INT,    warmup_tokens,   "-u", STEPS,         "0",         "[0, 1e15]",      "tokens", OPTIMIZER,                \
      "length of the warm-up, in which the learning rate rises linearly from 0")                                       \
    X(REAL,   final_lr_frac,   "-q", AS_IS,         "0.1",       "[0, 1]",         "",       OPTIMIZER,                \
      "learning rate at the end, as a fraction of --lr (with linear, cosine and wsd)")                                 \
    X(REAL,   weight_decay,    "-c", AS_IS,         "0.1",       "[0, 100]",       "",       OPTIMIZER,                \
      "weight decay, decoupled (AdamW), of matrices only")                                                             \
    X(REAL,   beta1,           "",   AS_IS,         "0.9",       "[0, 0.9999999]", "",       OPTIMIZER,                \
      "decay of AdamW's first moment")                                                                                 \
    X(REAL,   beta2,           "",   AS_IS,         "0.95",      "[0, 0.9999999]", "",       OPTIMIZER,                \
      "decay of AdamW's second moment")                                                                                \
    X(REAL,   eps,             "",   AS_IS,         "1e-8",      "[1e-30, 1]",     "",       OPTIMIZER,                \
      "AdamW's epsilon, which is added to the root of the second moment")                                              \
    X(REAL,   grad_clip,       "",   AS_IS,         "1",         "[0, 1e9]",       "",       OPTIMIZER,                \
      "largest norm of the gradient: where it is longer, it is scaled down to this norm; 0: never")                    \
    X(INT,    val_every,       "-v", AS_IS,         "250",       "[0, 1e9]",       "steps",  EVALUATION,               \
      "validate every so many steps, and at the end; 0: never")                                                        \
    X(INT,    val_tokens,      "-m", MICRO_BATCHES, "131072",    "[1, 1e15]",      "tokens", EVALUATION,               \
      "number of tokens to validate on: the same ones every time, spread over all of --val; whole rows, at least one") \
    X(TEXT,   hellaswag,       "",   AS_IS,         "data/hellaswag/hellaswag_val.jsonl", "", "file", EVALUATION,      \
      "HellaSwag's questions: the public .jsonl (data/hellaswag.sh), or llm.c's hellaswag_val.bin")                    \
    X(INT,    hellaswag_every, "-h", VALIDATIONS,   "0",         "[0, 1e9]",       "steps",  EVALUATION,               \
      "test with HellaSwag every so many steps, and at the end; 0: never")                                             \
    X(INT,    sample_every,    "-s", AS_IS,         "0",         "[0, 1e9]",       "steps",  EVALUATION,               \
      "print a sample of what the model writes every so many steps, and at the end; 0: never")                         \
    X(INT,    samples,         "",   AS_IS,         "1",         "[1, 1000]",      "",       EVALUATION,               \
      "number of samples to print at a time")                                                                          \
    X(INT,    sample_tokens,   "-g", AS_IS,         "64",        "[1, 1e6]",       "tokens", EVALUATION,               \
      "length of a sample")                                                                                            \
    X(TEXT,   prompt,          "",   AS_IS,         "",          "",               "",       EVALUATION,               \
      "text that a sample continues; @FILE: that of a file, as it is")                                                 \
    X(REAL,   temperature,     "",   AS_IS,         "1",         "[0, 100]",       "",       EVALUATION,               \
      "temperature of sampling: below 1: less random; 0: always the likeliest token")                                  \
    X(INT,    top_k,           "",   AS_IS,         "0",         "[0, 65536]",     "tokens", EVALUATION,               \
      "sample among the k likeliest tokens only; 0: among all")                                                        \
    X(FLAG,   sample_only,     "",   AS_IS,         "",          "",               "",       EVALUATION,               \
      "print a sample of --model, and end")                                                                            \
    X(FLAG,   eval_only,       "",   AS_IS,         "",          "",               "",       EVALUATION,               \
      "print the loss and perplexity of --model on all of --val (or on --val-tokens of it), HellaSwag's score if "     \
      "--hellaswag is given, and end. Writes no file")                                                                 \
    X(INT,    checkpoint_every, "-n",AS_IS,         "1000",      "[0, 1e9]",       "steps",  CHECKPOINT,               \
      "write a checkpoint every so many steps, while training goes on, besides those at the end and when the run is "  \
      "told to stop; 0: only those. The same command goes on from the newest one that is whole")                       \
    X(INT,    keep,            "-nk",AS_IS,         "2",         "[0, 1e6]",       "",       CHECKPOINT,               \
      "number of checkpoints to keep, the newest ones: 2 at least; 0: all")                                            \
    X(FLAG,   keep_best,       "",   AS_IS,         "",          "",               "",       CHECKPOINT,               \
      "also write a checkpoint whenever a validation loss is the lowest so far, and keep the newest such one besides "  \
      "those of --keep")                                                                                               \
    X(FLAG,   fresh,           "-y", AS_IS,         "",          "",               "",       CHECKPOINT,               \
      "start over instead of going on from what --out holds, which is moved aside")                                    \
    X(TEXT,   check,           "",   AS_IS,         "",          "",               "path",   CHECKPOINT,               \
      "verify a checkpoint or one file of it, a run directory, a model or token shards; print what they hold, and "    \
      "end")                                                                                                           \
    X(REAL,   skip_loss_z,     "-sl",AS_IS,         "0",         "[0, 1e6]",       "",       CHECKPOINT,               \
      "make no update in a step whose loss lies more than so many standard deviations above those of the last 128 "    \
      "steps; 0: always update")                                                                                       \
    X(REAL,   skip_grad_z,     "-sg",AS_IS,         "0",         "[0, 1e6]",       "",       CHECKPOINT,               \
      "the same for the norm of the gradient")                                                                         \
    X(CHOICE, gns,             "",   AS_IS,         "ln",        "off|ln|exact",   "",       GNS,                      \
      "how to measure the gradient noise scale. ln: from the LayerNorm parameters, at every step, for free. exact: "   \
      "from every tensor as well, by layer and by type, at every step or at those that --gns-exact-every says")        \
    X(INT,    gns_exact_every, "",   AS_IS,         "0",         "[0, 1e9]",       "steps",  GNS,                      \
      "measure exactly every so many steps, which calibrates ln. 0: at no step with --gns ln, at every step with "     \
      "--gns exact, at every 16th with --ramp gns if no --gns-ratio is given")                                         \
    X(INT,    gns_half_life,   "",   AS_IS,         "0",         "[0, 1e15]",      "tokens", GNS,                      \
      "half-life of the running averages; 0: 0.5% of the run")                                                         \
    X(REAL,   gns_ratio,       "",   AS_IS,         "0",         "[0, 1e6]",       "",       GNS,                      \
      "noise scale of the whole model divided by that of ln, for --ramp gns; 0: as measured at the exact steps")       \
    X(TEXT,   ramp,            "",   AS_IS,         "fixed",     "fixed|linear|seesaw|gns|replay:FILE", "mode", RAMP,  \
      "how the batch grows. fixed: not at all; linear: linearly in tokens; seesaw: as the learning rate falls; gns: "  \
      "with the measured noise scale; replay: as in an earlier run's metrics.jsonl")                                   \
    X(INT,    batch_min,       "",   AS_IS,         "",          "[1, 1e9]",       "rows",   RAMP,                     \
      "batch that a ramp starts from")                                                                                 \
    X(INT,    batch_max,       "",   AS_IS,         "",          "[1, 1e9]",       "rows",   RAMP,                     \
      "batch that a ramp never exceeds")                                                                               \
    X(REAL,   ramp_kappa,      "",   AS_IS,         "1",         "(0, 1000]",      "",       RAMP,                     \
      "batch that --ramp gns aims at, as a multiple of the noise scale")                                               \
    X(REAL,   ramp_lr_power,   "",   AS_IS,         "0.5",       "[0, 1]",         "",       RAMP,                     \
      "exponent p of the factor (batch / --batch-tokens)^p on the learning rate")                                      \
    X(CHOICE, zero,            "-z", AS_IS,         "1",         "0|1|2",          "stage",  RANKS,                    \
      "stage of ZeRO. A rank keeps all of the optimizer's state (0), its share of it (1), or its share of it and of "  \
      "the gradients (2). Changes no bit of any result")                                                               \
    X(CHOICE, reduce,          "",   AS_IS,         "step",      "step|micro-step", "",      RANKS,                    \
      "when gradients are summed over the ranks. step: once a step. micro-step: after each micro-step, which lets "    \
      "--zero 2 save memory when a step has several; more traffic, and sums in another order")                         \
    X(CHOICE, comm_dtype,      "",   AS_IS,         "fp32",      "fp32|bf16",      "type",   RANKS,                    \
      "type that gradients are rounded to on their way between ranks")                                                 \
    X(INT,    compare_every,   "",   AS_IS,         "100",       "[0, 1e9]",       "steps",  RANKS,                    \
      "check every so many steps that the weights of all ranks are the same to the bit, besides the checks at the "    \
      "start and before every checkpoint; 0: only those. A run whose weights are not the same ends (exit code 78)")    \
    X(REAL,   deadline_setup,  "",   AS_IS,         "1800",      "(0, 1e9]",       "seconds", RANKS,                   \
      "end the run (exit code 78) if set-up makes no progress for so long")                                            \
    X(REAL,   deadline_step,   "",   AS_IS,         "300",       "(0, 1e9]",       "seconds", RANKS,                   \
      "the same for one micro-batch, and for waiting for another rank")                                                \
    X(REAL,   deadline_checkpoint, "",AS_IS,        "900",       "(0, 1e9]",       "seconds", RANKS,                   \
      "the same for a piece of saving or sampling: 4 MiB written or read back, a file brought to the disk, a token")   \
    X(FLAG,   dry_run,         "",   AS_IS,         "",          "",               "",       PLAN,                     \
      "check everything, print what the run would take in memory, time, disk and money, and end")                      \
    X(TEXT,   device,          "",   AS_IS,         "",          "",               "name",   PLAN,                     \
      "plan for this GPU (H200, B200, A100, RTX 4090, ...), if not for what this machine has")                         \
    X(INT,    ranks,           "",   AS_IS,         "",          "[1, 1000000]",   "",       PLAN,                     \
      "plan for so many processes, one per GPU, if not for those that are running")                                    \
    X(REAL,   price,           "",   AS_IS,         "",          "(0, 1e6]",       "",       PLAN,                     \
      "price of an hour of one GPU, in any currency")                                                                  \
    X(REAL,   link,            "",   AS_IS,         "",          "(0, 1e6]",       "GB/s",   PLAN,                     \
      "bandwidth between machines, per GPU and direction, if not the usual one")                                       \
    X(FLAG,   tune,            "",   AS_IS,         "",          "",               "",       PROGRAM,                  \
      "on a GPU: before the first step, time the algorithms on offer for every matrix product, and keep the "          \
      "fastest. The choice is in run.json and the checkpoints, and a run that goes on keeps to it")                    \
    X(INT,    threads,         "",   AS_IS,         "0",         "[0, 4096]",      "",       PROGRAM,                  \
      "number of CPU threads; 0: one per core. The results do not depend on it")                                       \
    X(TEXT,   config,          "",   AS_IS,         "",          "",               "file",   PROGRAM,                  \
      "file of options, one `name = value` per line; a # and what follows it is a comment, except in \"quotes\", "     \
      "which keep blanks too. The command line wins")                                                                  \
    X(FLAG,   help,            "",   AS_IS,         "",          "",               "",       PROGRAM,                  \
      "print this, and end; -h does the same")                                                                                           \
    X(FLAG,   version,         "",   AS_IS,         "",          "",               "",       PROGRAM,                  \
      "print the version, and end")

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

// One JSON object: every option but those of planning under its field's name, and "resolved". `indent` is how many
// spaces stand before the lines after the first. No newline at the end.
void options_write_json(FILE *f, const Options *o, int indent);

// The same of those options alone whose `which` is true, on one line.
void options_write_json_some(FILE *f, const Options *o, const bool which[OPTION_COUNT]);

// The parts of options_parse, apart for tests and the fuzzer. text: bytes with a NUL behind them; name: for messages.
void options_defaults(Options *o);
int options_parse_config(Options *o, char *text, size_t bytes, const char *name, Error *e);
#endif
