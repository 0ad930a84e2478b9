#include "gns/ramp.h"

#include "base/files.h"

#include <assert.h>
#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const ramp_mode_names[RAMP_MODES] = {"fixed", "linear", "seesaw", "replay", "gns"};

#define RAMP_AIM_SES         1.0                 // standard errors from the target to the aim
#define RAMP_REPLAY_BYTES    ((size_t)1 << 30)   // larger than any metrics file
#define RAMP_REPLAY_MAX_ROWS ((double)(1 << 30)) // larger than any batch

int ramp_parse(const char *text, RampMode *mode, const char **replay_path, Error *e) {
    *replay_path = NULL;
    const char *colon = strchr(text, ':');
    size_t length = colon ? (size_t)(colon - text) : strlen(text);
    for (int m = 0; m < RAMP_MODES; m++) {
        if (strlen(ramp_mode_names[m]) != length || strncmp(text, ramp_mode_names[m], length) != 0) continue;
        bool has_path = colon && colon[1];
        if ((m == RAMP_REPLAY) != has_path || (colon && !has_path)) break;
        *mode = (RampMode)m;
        if (has_path) *replay_path = colon + 1;
        return 0;
    }
    return FAIL(e, ERR_USAGE, "use fixed, linear, seesaw, gns or replay:FILE", "--ramp %s: no such ramp", text);
}

// ---- Replay ---------------------------------------------------------------------------------------------------------

// Reads one line. *rows: the batch; 0: the line is no step (validation).
static int ramp_replay_line(const char *line, int64_t expected_step, int64_t *rows, Error *e) {
    *rows = 0;
    cJSON *object = cJSON_ParseWithOpts(line, NULL, true);
    int code = 0;
    if (!cJSON_IsObject(object)) {
        code = FAIL(e, ERR_INPUT, "give the metrics.jsonl of an earlier run", "not a JSON object");
        goto done;
    }
    const cJSON *step = cJSON_GetObjectItemCaseSensitive(object, "step");
    const cJSON *batch = cJSON_GetObjectItemCaseSensitive(object, "batch");
    if (!step || !batch) goto done;
    if (!cJSON_IsNumber(batch) || !(batch->valuedouble >= 1 && batch->valuedouble <= RAMP_REPLAY_MAX_ROWS) ||
        batch->valuedouble != floor(batch->valuedouble)) {
        code = FAIL(e, ERR_INPUT, "it must be a whole number of 1 or more", "`batch` is not a number of rows");
        goto done;
    }
    if (!cJSON_IsNumber(step) || step->valuedouble != (double)expected_step) {
        code = FAIL(e, ERR_INPUT, "the steps of a run must be complete and in order", "`step` is not %lld",
                    (long long)expected_step);
        goto done;
    }
    *rows = (int64_t)batch->valuedouble;
done:
    cJSON_Delete(object);
    return code;
}

// Fills r->replay from the text. Cuts the text into lines in place.
static int ramp_replay_parse(Ramp *r, char *text, const char *path, Error *e) {
    double tokens = 0;
    int64_t lines = 0;
    for (char *line = text, *next; *line; line = next) {
        lines++;
        char *end = strchr(line, '\n');
        next = end ? end + 1 : line + strlen(line);
        if (end) *end = 0;
        int64_t rows;
        if (ramp_replay_line(line, r->replay_steps + 1, &rows, e))
            return error_prefix(e, "%s line %lld", path, (long long)lines);
        if (rows == 0) continue;
        r->replay[r->replay_steps++] = rows;
        tokens += (double)rows * (double)r->config.seq_len;
    }
    if (tokens < r->config.train_tokens)
        return FAIL(e, ERR_INPUT, "shorten --train-tokens or replay a longer run",
                    "%s ends at line %lld after %.0f tokens, this run takes %.0f", path, (long long)lines, tokens,
                    r->config.train_tokens);
    return 0;
}

static size_t ramp_count_lines(const char *text) {
    size_t lines = 1; // the last one may lack its newline
    for (; *text; text++) lines += *text == '\n';
    return lines;
}

static int ramp_replay_read(Ramp *r, const char *path, Error *e) {
    char *text = NULL;
    size_t bytes;
    int code = 0;
    TRY_GOTO(file_read(path, RAMP_REPLAY_BYTES, &text, &bytes, e));
    if (strlen(text) != bytes) {
        code = FAIL(e, ERR_INPUT, "give the metrics.jsonl of an earlier run", "%s line %zu: a NUL byte", path,
                    ramp_count_lines(text));
        goto done;
    }
    TRY_GOTO(memory_alloc((void **)&r->replay, ramp_count_lines(text) * sizeof(int64_t), "batches to replay", e));
    TRY_GOTO(ramp_replay_parse(r, text, path, e));
done:
    memory_free(text);
    return code;
}

// ---- Create and destroy ---------------------------------------------------------------------------------------------

static int ramp_check(const RampConfig *c, Error *e) {
    if (c->batch_ref < 1 || c->seq_len < 1 || !(c->train_tokens > 0))
        return FAIL(e, ERR_USAGE, "set --batch-tokens, --seq-len and --train-tokens",
                    "a ramp needs a reference batch, a row length and a horizon");
    if (c->mode != RAMP_FIXED && c->mode != RAMP_REPLAY && !(1 <= c->batch_min && c->batch_min <= c->batch_max))
        return FAIL(e, ERR_USAGE, "use 1 <= --batch-min <= --batch-max", "--batch-min %lld, --batch-max %lld: no range",
                    (long long)c->batch_min, (long long)c->batch_max);
    if (c->mode == RAMP_SEESAW && !(c->schedule.lr > 0))
        return FAIL(e, ERR_USAGE, "use a larger --lr, or --ramp linear",
                    "--ramp seesaw follows the learning rate, and --lr is %g", c->schedule.lr);
    if (c->mode != RAMP_GNS) return 0;
    if (c->batch_min < 2)
        return FAIL(e, ERR_USAGE, "use --batch-min 2 or more", "--ramp gns cannot measure noise in a batch of 1 row");
    if (!(c->kappa > 0 && c->waste > 0))
        return FAIL(e, ERR_USAGE, "leave them out for the defaults",
                    "--ramp-kappa %g, --ramp-waste %g: both must be above 0", c->kappa, c->waste);
    if (!(c->half_life_tokens > 0))
        return FAIL(e, ERR_USAGE, "leave it out for the default, 0.5% of --train-tokens",
                    "--gns-half-life %g is not above 0", c->half_life_tokens);
    return 0;
}

int ramp_create(Ramp *r, const RampConfig *config, const char *replay_path, Error *e) {
    *r = (Ramp){.config = *config, .replay_path = replay_path};
    TRY(ramp_check(config, e));
    if (config->mode == RAMP_GNS) r->state.rows = (double)config->batch_min;
    if (config->mode != RAMP_REPLAY) return 0;
    if (!replay_path) return FAIL(e, ERR_USAGE, "use --ramp replay:FILE", "--ramp replay names no file");
    int code = ramp_replay_read(r, replay_path, e);
    if (code) ramp_destroy(r);
    return code;
}

void ramp_destroy(Ramp *r) {
    memory_free(r->replay);
    *r = (Ramp){0};
}

// ---- The step -------------------------------------------------------------------------------------------------------

// Rounds to whole rows within [batch_min, batch_max]. rows may be infinite; NaN gives batch_min.
static int64_t ramp_clamp(const RampConfig *c, double rows) {
    if (rows >= (double)c->batch_max) return c->batch_max;
    if (!(rows > (double)c->batch_min)) return c->batch_min;
    return (int64_t)llround(rows);
}

static int64_t ramp_seesaw(const RampConfig *c, double tokens) {
    if (tokens < c->schedule.warmup_tokens) return c->batch_min;
    return ramp_clamp(c, (double)c->batch_min * c->schedule.lr / schedule_lr(&c->schedule, tokens));
}

int64_t ramp_batch(const Ramp *r, int64_t step, double tokens) {
    const RampConfig *c = &r->config;
    switch (c->mode) {
    case RAMP_LINEAR: {
        double grown = (double)(c->batch_max - c->batch_min) * tokens / c->train_tokens;
        return ramp_clamp(c, (double)c->batch_min + grown);
    }
    case RAMP_SEESAW: return ramp_seesaw(c, tokens);
    case RAMP_REPLAY: assert(step >= 0); return step < r->replay_steps ? r->replay[step] : ramp_largest(r);
    case RAMP_GNS: return ramp_clamp(c, r->state.rows);
    default: return c->batch_ref;
    }
}

int64_t ramp_next(const Ramp *r, int64_t step, int64_t tokens) {
    int64_t left = ((int64_t)r->config.train_tokens - tokens) / r->config.seq_len;
    if (left <= 0) return 0;
    int64_t batch = ramp_batch(r, step, (double)tokens);
    return batch < left ? batch : left;
}

int64_t ramp_largest(const Ramp *r) {
    int64_t most = r->config.mode == RAMP_FIXED ? r->config.batch_ref : r->config.batch_max;
    for (int64_t i = 0; i < r->replay_steps; i++) most = i == 0 || r->replay[i] > most ? r->replay[i] : most;
    return most;
}

int64_t ramp_smallest(const Ramp *r) {
    const RampConfig *c = &r->config;
    if (c->mode == RAMP_FIXED) return c->batch_ref;
    if (c->mode != RAMP_REPLAY) return c->batch_min;
    int64_t fewest = r->replay[0];
    double tokens = 0;
    for (int64_t i = 0; i < r->replay_steps; i++) {
        tokens += (double)r->replay[i] * (double)c->seq_len;
        if (tokens >= c->train_tokens) break; // skip the last step: a horizon may have cut it in the file too
        if (r->replay[i] < fewest) fewest = r->replay[i];
    }
    return fewest;
}

// ERR_INPUT unless the file has `tokens` tokens by `step`. A complete run is not checked.
static int ramp_check_replay(const Ramp *r, int64_t step, int64_t tokens, Error *e) {
    int64_t known = step < r->replay_steps ? step : r->replay_steps, rows = 0;
    for (int64_t i = 0; i < known; i++) rows += r->replay[i];
    double replayed = (double)rows * (double)r->config.seq_len;
    if ((double)tokens >= r->config.train_tokens || replayed == (double)tokens) return 0;
    return FAIL(
        e, ERR_INPUT, "replay the file that this run has followed, or use another --ramp, or --fresh to start over",
        "--ramp replay:%s: the file has %.0f tokens up to step %lld, but this run has done %lld tokens in %lld steps",
        r->replay_path, replayed, (long long)known, (long long)tokens, (long long)step);
}

// Limits rows to today's range; NaN gives batch_min.
static double ramp_limit(const RampConfig *c, double rows) {
    return fmin(fmax(rows, (double)c->batch_min), (double)c->batch_max);
}

int ramp_settle(Ramp *r, int64_t step, int64_t tokens, Error *e) {
    if (r->config.mode == RAMP_GNS) r->state.rows = ramp_limit(&r->config, r->state.rows);
    return r->config.mode == RAMP_REPLAY ? ramp_check_replay(r, step, tokens, e) : 0;
}

// The best batch for a critical batch of `critical` rows. It rises with `critical`, so a bound of one bounds the other.
static double ramp_best(const Ramp *r, double critical) {
    return fmin(sqrt(r->config.step_rows * critical), r->config.waste * critical);
}

RampTarget ramp_target(const Ramp *r, const GnsTracker *tracker, GnsFactor c) {
    c.value *= r->config.kappa;
    const double critical = c.value * gns_estimate(tracker).scale, x = r->config.step_rows, B = r->state.rows;
    return (RampTarget){
        .target = ramp_best(r, critical),
        .aim = ramp_best(r, gns_scaled_lower(tracker, c, RAMP_AIM_SES, 0)),
        .lower = ramp_best(r, gns_scaled_lower(tracker, c, GNS_LOWER_SES, GNS_FEW_SES)),
        .waste = B / critical,
        .extra = (x + B) * (1 / B + 1 / critical) / pow(1 + sqrt(x / critical), 2) - 1, // J(B) / min J - 1
    };
}

double ramp_step_rows(const int64_t *rows, const double *seconds, int count) {
    double u2 = 0, uv = 0, v2 = 0, u1 = 0, v1 = 0; // sums for a u + b v = 1, u = 1 / seconds, v = rows / seconds
    for (int i = 0; i < count; i++) {
        const double u = 1 / seconds[i], v = (double)rows[i] / seconds[i];
        u2 += u * u, uv += u * v, v2 += v * v, u1 += u, v1 += v;
    }
    const double a = u1 * v2 - v1 * uv, b = v1 * u2 - u1 * uv; // Cramer's rule, both times its determinant
    const double x = fmin(b > 0 ? a / b : INFINITY, RAMP_MOST_STEP_ROWS);
    char digits[16];
    snprintf(digits, sizeof digits, "%.1e", fmax(x, RAMP_LEAST_STEP_ROWS));
    return strtod(digits, NULL);
}

void ramp_observe(Ramp *r, double step_tokens, double aim) {
    const RampConfig *c = &r->config;
    if (c->mode != RAMP_GNS || isnan(aim)) return;
    double factor = exp2(step_tokens / c->half_life_tokens), rows = r->state.rows;
    r->state.rows = ramp_limit(c, fmin(fmax(aim, rows / factor), rows * factor));
}

void ramp_why(const Ramp *r, double aim, char out[RAMP_WHY_BYTES]) {
    const RampConfig *c = &r->config;
    double rows = r->state.rows;
    bool low = aim <= (double)c->batch_min, high = aim >= (double)c->batch_max;
    out[0] = 0;
    if (c->mode != RAMP_GNS) return;
    if (isnan(aim)) snprintf(out, RAMP_WHY_BYTES, ", aim unknown");
    else if (low && rows == (double)c->batch_min) snprintf(out, RAMP_WHY_BYTES, ", least: aim %.3g", aim);
    else if (high && rows == (double)c->batch_max) snprintf(out, RAMP_WHY_BYTES, ", most: aim %.3g", aim);
    else if (rows == aim) snprintf(out, RAMP_WHY_BYTES, ", aim %.3g", aim);
    else snprintf(out, RAMP_WHY_BYTES, ", %s: aim %.3g", rows < aim ? "up" : "down", aim);
}

double ramp_lr(const Ramp *r, double schedule_lr, int64_t batch) {
    const RampConfig *c = &r->config;
    double end = fmin(c->lr_power, RAMP_LR_POWER_END), rate = c->schedule.lr > 0 ? schedule_lr / c->schedule.lr : 0;
    double power = end + (c->lr_power - end) * rate;
    return schedule_lr * pow((double)batch / (double)c->batch_ref, power);
}
