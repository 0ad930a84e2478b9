// Derives values that depend on several options. Refuses or notes options without effect.
#include "options/options.h"

#include "math/schedule.h"
#include "model/model.h"

#include <math.h>
#include <string.h>

// Refuses an option without effect if the command line gives it by its own name. An llm.c flag (scripts set all flags)
// and a line of a file (runs may share a file) get a note instead. Without training or a plan, checks only the options
// of planning. Reads o->run.ramp_mode.
static int check_needs(Options *o, Error *e) {
#define CONDITION(name, met, text) [NEED_##name] = {met, text},
    const struct {
        bool met;
        const char *text;
    } conditions[] = {
        [NEED_NOTHING] = {.met = true},
#include "options/table.def"
    };
    OptionTable t = options_table(o);
    char idle[1024] = "";
    for (int id = 0; id < OPTION_COUNT; id++) {
        const OptionRow *row = &option_rows[id];
        const bool plans = option_is_of_planning(id), counts = options_train(o) || o->dry_run || plans;
        if (!o->given[id] || !counts || ((row->off_at_0 || row->type == TYPE_FLAG) && row_is_zero(&t, id))) continue;
        const Flag flag = row_flag(row);
        for (int k = 0; k < 2; k++) {
            const int need = row->needs[k];
            const bool refused = o->given[id] & OPTION_GIVEN_COMMAND_LINE && !(o->given[id] & OPTION_GIVEN_ALIAS);
            if (conditions[need].met) continue;
            if (refused && (options_train(o) || (plans && !o->print_options))) {
                FAIL(e, ERR_USAGE, NULL, "%s has no effect without %s", flag.s, conditions[need].text);
                return error_hint(e, "use %s%s, or leave %s out",
                                  strstr(conditions[need].text, " or ") ? "one of them" : "that",
                                  id == OPTION_ranks ? ", or mpirun -np to start processes" : "", flag.s);
            }
            size_t used = strlen(idle);
            snprintf(idle + used, sizeof idle - used, "%s%s%s without %s", used ? ", " : "", flag.s,
                     refused && o->dry_run ? " (the run refuses it)" : "", conditions[need].text);
        }
    }
    if (*idle) option_note(o, "no effect: %s", idle);
    return 0;
}

static int resolve_model(Options *o, Error *e) {
    static const OptionId shape[] = {OPTION_layers, OPTION_heads, OPTION_channels, OPTION_vocab_size};
    ModelConfig ignored;
    OptionTable t = options_table(o);
    bool preset = model_preset(&ignored, o->model);
    // The files of --model PATH give the shape, so PATH on the command line resets the config file's shape options.
    for (size_t i = 0; !preset && o->given[OPTION_model] & OPTION_GIVEN_COMMAND_LINE && i < 4; i++)
        if (o->given[shape[i]] == OPTION_GIVEN_CONFIG) row_reset(&t, shape[i]);
    if (preset && (o->sample_only || o->eval_only))
        return FAIL(e, ERR_USAGE, "give --model the directory of a trained model",
                    "--%s-only of the preset " SAID ", which is not trained", o->sample_only ? "sample" : "eval",
                    o->model);
    return 0;
}

static int resolve_batch(Options *o, Error *e) {
    if (o->micro_batch * o->seq_len > MICRO_BATCH_TOKENS_MAX) {
        FAIL(e, ERR_USAGE, NULL, "--micro-batch %lld x --seq-len %lld is %lld tokens, and %d are possible",
             (long long)o->micro_batch, (long long)o->seq_len, (long long)(o->micro_batch * o->seq_len),
             MICRO_BATCH_TOKENS_MAX);
        return error_hint(e, "use --micro-batch %lld or less", (long long)(MICRO_BATCH_TOKENS_MAX / o->seq_len));
    }
    if (o->batch_tokens % o->seq_len != 0) {
        FAIL(e, ERR_USAGE, NULL, "--batch-tokens %lld is not a multiple of --seq-len %lld", (long long)o->batch_tokens,
             (long long)o->seq_len);
        int64_t below = o->batch_tokens / o->seq_len * o->seq_len;
        return error_hint(e, "use %lld", (long long)(below ? below : o->seq_len));
    }
    bool ramp = o->run.ramp_mode != RAMP_FIXED;
    int64_t by_default = ramp && o->batch_min ? o->batch_min : o->micro_batch;
    o->run.batch_ref_rows = o->batch_tokens ? o->batch_tokens / o->seq_len : by_default;
    o->run.batch_min_rows = ramp && o->batch_min ? o->batch_min : o->run.batch_ref_rows;
    o->run.batch_max_rows = ramp && o->batch_max ? o->batch_max : o->run.batch_ref_rows;
    return 0;
}

static int resolve_ramp(Options *o, Error *e) {
    TRY(ramp_parse(o->ramp, &o->run.ramp_mode, &o->run.ramp_argument, e));
    bool follows = o->run.ramp_mode == RAMP_GNS || o->run.ramp_mode == RAMP_REPLAY;
    if (!o->given[OPTION_ramp_lr_power]) o->ramp_lr_power = follows ? RAMP_LR_POWER : 0.5;
    if (o->run.ramp_mode == RAMP_FIXED) return 0;
    if (o->run.ramp_mode == RAMP_STEPS) TRY(ramp_check_list(o->run.ramp_argument, &o->batch_min, &o->batch_max, e));
    if (o->given[OPTION_steps] || (o->run.ramp_mode == RAMP_REPLAY && o->train_hours))
        return FAIL(e, ERR_USAGE, "use --train-tokens", "%s does not give the length of a run with --ramp " SAID,
                    o->given[OPTION_steps] ? "--steps" : "--train-hours", o->ramp);
    if (o->run.ramp_mode == RAMP_GNS && o->with_optimizer && o->ramp_step_rows == 0)
        return FAIL(e, ERR_USAGE, "add --ramp-step-rows X, from the other run's run.json",
                    "--ramp gns measures a step's cost without moments, but --with-optimizer loads moments");
    if (o->run.ramp_mode != RAMP_REPLAY && (!o->batch_min || !o->batch_max))
        return FAIL(e, ERR_USAGE, "give it a number of rows", "--ramp " SAID " needs --batch-%s", o->ramp,
                    o->batch_min ? "max" : "min");
    if (o->batch_min && o->batch_max && o->batch_min > o->batch_max)
        return FAIL(e, ERR_USAGE, "swap them", "--batch-min %lld is above --batch-max %lld", (long long)o->batch_min,
                    (long long)o->batch_max);
    if (o->run.ramp_mode == RAMP_GNS && o->batch_min < 2)
        return FAIL(e, ERR_USAGE, "use --batch-min 2 or more", "--ramp gns cannot measure noise in a batch of 1 row");
    if (o->run.ramp_mode == RAMP_SEESAW && o->lr == 0)
        return FAIL(e, ERR_USAGE, "use a larger --lr, or --ramp linear",
                    "--ramp seesaw follows the learning rate, and --lr is 0");
    return 0;
}

// Converts llm.c's units: steps and micro-batches to tokens, validations to steps.
static int resolve_aliases(Options *o, Error *e) {
    const int64_t one[] = {[ALIAS_STEPS] = o->run.batch_ref_rows * o->seq_len,
                           [ALIAS_MICRO_BATCHES] = o->micro_batch * o->seq_len,
                           [ALIAS_VALIDATIONS] = o->val_every};
    for (int id = 0; id < OPTION_COUNT; id++) {
        const OptionRow *row = &option_rows[id];
        if (!(o->given[id] & OPTION_GIVEN_ALIAS) || row->alias_unit == ALIAS_AS_IS) continue;
        int64_t *count = option_field(o, (OptionId)id);
        if (__builtin_mul_overflow(*count, one[row->alias_unit], count) || !option_range_contains(row, (double)*count))
            return FAIL(e, ERR_USAGE, "use a smaller number", "%s means too many %s", row->alias, row->unit);
    }
    return 0;
}

// Sets the horizon. With --epochs it depends on the data, so options_resolve_epochs sets it.
static int resolve_horizon(Options *o, Error *e) {
    o->run.horizon_tokens = 0;
    if (o->epochs || (o->train_hours && o->dry_run)) return 0;
    int64_t tokens = o->train_hours ? HORIZON_UNDECIDED : o->train_tokens; // until run_set_horizon decides
    if (!o->steps && !tokens) {
        if (!options_train(o)) return 0;
        return FAIL(e, ERR_USAGE, "give one of them",
                    "neither --train-tokens nor --steps nor --epochs nor --train-hours is given");
    }
    if (o->steps && __builtin_mul_overflow(o->steps, o->run.batch_ref_rows * o->seq_len, &tokens))
        return FAIL(e, ERR_USAGE, "use fewer steps", "--steps %lld means too many tokens", (long long)o->steps);
    o->run.horizon_tokens = tokens / o->seq_len * o->seq_len;
    if (!o->run.horizon_tokens)
        return FAIL(e, ERR_USAGE, "train on at least one row", "--train-tokens %lld is less than --seq-len %lld",
                    (long long)tokens, (long long)o->seq_len);
    return 0;
}

static int resolve_gns(Options *o, Error *e) {
    bool ramp = o->run.ramp_mode == RAMP_GNS, ratio_open = ramp && o->gns_ratio == 0;
    if (o->gns == GNS_OFF && ramp)
        return FAIL(e, ERR_USAGE, "use --gns ln", "--ramp gns needs the noise scale that --gns off does not measure");
    if (ratio_open && o->gns == GNS_LN && o->given[OPTION_gns_exact_every] && !o->gns_exact_every)
        return FAIL(e, ERR_USAGE, "give --gns-ratio, or --gns-exact-every above 0",
                    "--ramp gns with --gns-exact-every 0 has no ratio of the model's noise scale to ln's");
    int64_t by_default = o->gns == GNS_EXACT ? 1 : 0;
    o->run.gns_exact_interval = o->gns == GNS_OFF ? 0 : o->gns_exact_every ? o->gns_exact_every : by_default;
    o->run.gns_calibrates = ratio_open && !o->run.gns_exact_interval;
    const double horizon_share = 0.005; // the default of --gns-half-life, as a share of the run
    o->run.gns_half_life_tokens =
        o->gns_half_life ? (double)o->gns_half_life : horizon_share * (double)o->run.horizon_tokens;
    return 0;
}

// Turns "runs/a/" into "runs/a", which path_parent and path_name need.
static void strip_trailing_slashes(char *path) {
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') path[--n] = 0;
}

int options_resolve(Options *o, Error *e) {
    if (!o->given[OPTION_gns]) o->gns = GNS_LN; // options_resolve_gns sets the final mode
    strip_trailing_slashes(o->out);
    strip_trailing_slashes(o->model);
    if (!o->given[OPTION_lr_hold_frac]) o->lr_hold_frac = o->lr_schedule == SCHEDULE_WSD ? SCHEDULE_WSD_HOLD_FRAC : 0;
    TRY(resolve_model(o, e));
    TRY(resolve_ramp(o, e));
    TRY(resolve_batch(o, e));
    TRY(resolve_aliases(o, e));
    TRY(check_needs(o, e));
    if (!*o->train && options_train(o))
        return FAIL(e, ERR_USAGE, "give token shards, made by data/tokenize, and a length; --help lists the options",
                    "--train is missing");
    TRY(resolve_horizon(o, e));
    TRY(resolve_gns(o, e));
    const bool fp8 = dtype_is_fp8((Dtype)o->dtype);
    const char *not_with = fp8 ? "dtype fp8 or fp8-dw" : o->optimizer == OPTIMIZER_MUON ? "optimizer muon" : "tune";
    if (o->tensor > 1 && (fp8 || o->optimizer == OPTIMIZER_MUON || o->tune))
        return FAIL(e, ERR_USAGE, "use --zero 3 instead of --tensor, or leave the other option out",
                    "--tensor %lld cannot train with --%s", (long long)o->tensor, not_with);
    if (o->eval_only && !*o->val && !o->given[OPTION_hellaswag])
        return FAIL(e, ERR_USAGE, "give --val, --hellaswag or both", "--eval-only has nothing to evaluate on");
    if (o->reduce == REDUCE_MICRO_STEP && o->zero < ZERO_2)
        return FAIL(e, ERR_USAGE, "leave it out, or use --zero 2 or 3",
                    "--reduce micro-step is only useful with --zero 2 or 3, not with --zero %d", o->zero);
    return 0;
}

int options_resolve_epochs(Options *o, int64_t windows, Error *e) {
    const double most = 1e15; // tokens, as for --train-tokens
    double rows = round(o->epochs * (double)windows), tokens = rows * (double)o->seq_len;
    if (!o->epochs) return 0;
    if (!(rows >= 1) || tokens > most)
        return FAIL(e, ERR_USAGE, rows < 1 ? "train on at least one row" : "use fewer",
                    "--epochs %g of %lld rows of --train means %g rows", o->epochs, (long long)windows, rows);
    o->run.horizon_tokens = (int64_t)tokens;
    return resolve_gns(o, e);
}

int options_resolve_gns(Options *o, GnsMode mode, Error *e) {
    o->gns = mode;
    TRY(check_needs(o, e));
    return resolve_gns(o, e);
}
