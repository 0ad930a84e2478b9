#include "gns/ramp.h"

#include "base/files.h"
#include "base/text.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const mode_names[RAMP_MODES] = {"fixed", "linear", "seesaw", "steps", "replay", "gns"};

#define RAMP_AIM_SES      1.0                 // standard errors from the target to the aim
#define RAMP_REPLAY_BYTES ((size_t)1 << 30)   // larger than any metrics file
#define RAMP_MOST_ROWS    ((double)(1 << 30)) // larger than any batch

int ramp_parse(const char *text, RampMode *mode, const char **argument, Error *e) {
    const size_t length = strcspn(text, ":");
    *argument = text[length] ? text + length + 1 : NULL;
    for (int m = 0; m < RAMP_MODES; m++) {
        const bool named = strlen(mode_names[m]) == length && strncmp(text, mode_names[m], length) == 0;
        const bool wants_argument = m == RAMP_REPLAY || m == RAMP_STEPS;
        if (named && (wants_argument ? *argument && **argument : !*argument)) return *mode = (RampMode)m, 0;
    }
    return FAIL(e, ERR_USAGE, "use fixed, linear, seesaw, gns, steps:LIST or replay:FILE", "--ramp %s: no such ramp",
                text);
}

// Reads TOKENS:ROWS at *list, and moves *list past the pair and its comma. Returns false if there is no pair.
static bool ramp_pair(const char **list, double *tokens, double *rows) {
    char *colon, *end;
    *tokens = strtod(*list, &colon);
    *rows = strtod(colon + (*colon == ':'), &end);
    if (colon == *list || *colon != ':' || end == colon + 1 || (*end && (*end != ',' || !end[1]))) return false;
    *list = end + (*end == ',');
    return *rows >= 1 && *rows <= RAMP_MOST_ROWS && *rows == floor(*rows);
}

int ramp_check_list(const char *list, int64_t *fewest, int64_t *most, Error *e) {
    double tokens, rows, before = -1;
    *fewest = INT64_MAX, *most = 0;
    for (const char *rest = list; *rest; before = tokens) {
        if (!ramp_pair(&rest, &tokens, &rows) || !(before < 0 ? tokens == 0 : tokens > before))
            return FAIL(e, ERR_USAGE,
                        "use TOKENS:ROWS,TOKENS:ROWS,... from 0 tokens upwards, such as steps:0:64,1e9:128",
                        "--ramp steps:%s: no list of batches", list);
        if (rows < (double)*fewest) *fewest = (int64_t)rows;
        if (rows > (double)*most) *most = (int64_t)rows;
    }
    return 0;
}

// ---- Create and destroy ---------------------------------------------------------------------------------------------

// Fills r->replay with the `batch` of every line that has a `step` and a `batch` (lines of validations have no batch).
// Sets batch_min and batch_max to the fewest and the most rows. A step that reaches the horizon does not count for
// batch_min: the earlier run's horizon may have cut it short.
static int ramp_replay_read(Ramp *r, const char *path, Error *e) {
    RampConfig *c = &r->config;
    const char *const hint =
        "give the metrics.jsonl of an earlier run; the steps of a run must be complete and in order";
    char *text = NULL;
    size_t bytes, lines = 0, most = 1; // the last line may lack its newline
    double tokens = 0;
    int code = file_read(IN_PATH, path, RAMP_REPLAY_BYTES, &text, &bytes, e);
    for (size_t i = 0; !code && i < bytes; i++) most += text[i] == '\n';
    if (!code) code = memory_alloc((void **)&r->replay, most * sizeof *r->replay, "batches to replay", e);
    for (char *rest = text, *line; !code && rest && *rest && (line = strsep(&rest, "\n")); lines++) {
        const double expected = (double)r->replay_steps + 1;
        cJSON *object = cJSON_ParseWithOpts(line, NULL, true);
        const cJSON *step = json_get(object, "step"), *batch = json_get(object, "batch");
        const bool is_step = step && batch;
        if (!cJSON_IsObject(object)) code = FAIL(e, ERR_INPUT, hint, "%s line %zu: not a JSON object", path, lines + 1);
        else if (is_step && !(json_whole(step, expected, expected) && json_whole(batch, 1, RAMP_MOST_ROWS)))
            code = FAIL(e, ERR_INPUT, hint, "%s line %zu: not the rows of step %.0f", path, lines + 1, expected);
        else if (is_step) {
            const int64_t rows = (int64_t)batch->valuedouble;
            tokens += batch->valuedouble * (double)c->seq_len;
            if (expected == 1 || (rows < c->batch_min && tokens < c->schedule.train_tokens)) c->batch_min = rows;
            if (expected == 1 || rows > c->batch_max) c->batch_max = rows;
            r->replay[r->replay_steps++] = rows;
        }
        cJSON_Delete(object);
    }
    memory_free(text);
    if (code || tokens >= c->schedule.train_tokens) return code;
    return FAIL(e, ERR_INPUT, "shorten --train-tokens or replay a longer run",
                "%s ends at line %zu after %.0f tokens, this run takes %.0f", path, lines, tokens,
                c->schedule.train_tokens);
}

int ramp_create(Ramp *r, const RampConfig *config, const char *argument, Error *e) {
    *r = (Ramp){.config = *config, .argument = argument};
    assert(config->batch_ref > 0 && config->seq_len > 0 && config->schedule.train_tokens > 0);
    if (config->mode == RAMP_GNS) r->rows = (double)config->batch_min;
    int code = config->mode == RAMP_REPLAY ? ramp_replay_read(r, argument, e) : 0;
    if (code) ramp_destroy(r);
    return code;
}

void ramp_destroy(Ramp *r) {
    memory_free(r->replay);
    *r = (Ramp){0};
}

// ---- The step -------------------------------------------------------------------------------------------------------

// Limits rows to [batch_min, batch_max]. rows may be infinite; NaN gives batch_min.
static double ramp_limit(const RampConfig *c, double rows) {
    return fmin(fmax(rows, (double)c->batch_min), (double)c->batch_max);
}

int64_t ramp_batch(const Ramp *r, int64_t step, double tokens) {
    const RampConfig *c = &r->config;
    double rows = (double)c->batch_min, from, next;
    switch (c->mode) {
    case RAMP_LINEAR: rows += (double)(c->batch_max - c->batch_min) * tokens / c->schedule.train_tokens; break;
    case RAMP_SEESAW:
        if (tokens >= c->schedule.warmup_tokens) rows = rows * c->schedule.lr / schedule_lr(&c->schedule, tokens);
        break;
    case RAMP_GNS: rows = r->rows; break;
    case RAMP_STEPS:
        for (const char *rest = r->argument; *rest && ramp_pair(&rest, &from, &next) && from <= tokens;) rows = next;
        break;
    case RAMP_REPLAY: // after the file's end: the last batch but one, as a horizon may have cut the last one
        assert(step >= 0);
        return r->replay[step < r->replay_steps ? step : r->replay_steps > 1 ? r->replay_steps - 2 : 0];
    default: return c->batch_ref;
    }
    return (int64_t)llround(ramp_limit(c, rows));
}

int64_t ramp_next(const Ramp *r, int64_t step, int64_t tokens) {
    int64_t left = ((int64_t)r->config.schedule.train_tokens - tokens) / r->config.seq_len;
    if (left <= 0) return 0;
    int64_t batch = ramp_batch(r, step, (double)tokens);
    return batch < left ? batch : left;
}

int ramp_settle(Ramp *r, int64_t step, int64_t tokens, Error *e) {
    const RampConfig *c = &r->config;
    if (c->mode == RAMP_GNS) r->rows = ramp_limit(c, r->rows);
    if (c->mode != RAMP_REPLAY || (double)tokens >= c->schedule.train_tokens) return 0; // a complete run needs no check
    int64_t known = step < r->replay_steps ? step : r->replay_steps, rows = 0;
    for (int64_t i = 0; i < known; i++) rows += r->replay[i];
    double replayed = (double)rows * (double)c->seq_len;
    if (replayed == (double)tokens) return 0;
    return FAIL(
        e, ERR_INPUT, "replay the file that this run has followed, or use another --ramp, or --fresh to start over",
        "--ramp replay:%s: the file has %.0f tokens up to step %lld, but this run has done %lld tokens in %lld steps",
        r->argument, replayed, (long long)known, (long long)tokens, (long long)step);
}

// Returns the best batch for a critical batch of `critical` rows. The result rises with `critical`, so a lower bound of
// `critical` gives a lower bound of the result.
static double ramp_best(const Ramp *r, double critical) {
    return fmin(sqrt(r->config.step_rows * critical), r->config.waste * critical);
}

RampTarget ramp_target(const Ramp *r, const GnsTracker *tracker, GnsFactor c) {
    c.value *= r->config.kappa;
    const double critical = c.value * gns_estimate(tracker).scale, x = r->config.step_rows, B = r->rows;
    return (RampTarget){
        .target = ramp_best(r, critical),
        .aim = ramp_best(r, gns_scaled_lower(tracker, c, RAMP_AIM_SES, 0)),
        .lower = ramp_best(r, gns_scaled_lower(tracker, c, GNS_LOWER_SES, GNS_FEW_SES)),
        .waste = B / critical,
        .extra = (x + B) * (1 / B + 1 / critical) / pow(1 + sqrt(x / critical), 2) - 1, // J(B) / min J - 1: ramp.h
    };
}

double ramp_step_rows(const int64_t *rows, const double *seconds, int count) {
    double u2 = 0, uv = 0, v2 = 0, u1 = 0, v1 = 0; // least squares: a u + b v = 1, u = 1 / seconds, v = rows / seconds
    for (int i = 0; i < count; i++) {
        const double u = 1 / seconds[i], v = (double)rows[i] / seconds[i];
        u2 += u * u, uv += u * v, v2 += v * v, u1 += u, v1 += v;
    }
    const double a = u1 * v2 - v1 * uv, b = v1 * u2 - u1 * uv; // Cramer's rule, both multiplied by the determinant
    const double x = fmin(b > 0 ? a / b : INFINITY, RAMP_MOST_STEP_ROWS);
    char digits[16];
    snprintf(digits, sizeof digits, "%.1e", fmax(x, RAMP_LEAST_STEP_ROWS));
    return strtod(digits, NULL);
}

void ramp_observe(Ramp *r, double step_tokens, double half_life, double aim) {
    const RampConfig *c = &r->config;
    if (c->mode != RAMP_GNS || isnan(aim)) return;
    double factor = exp2(step_tokens / half_life), rows = r->rows;
    r->rows = ramp_limit(c, fmin(fmax(aim, rows / factor), rows * factor));
}

double ramp_lr(const Ramp *r, double schedule_lr, int64_t batch) {
    const RampConfig *c = &r->config;
    double end = fmin(c->lr_power, RAMP_LR_POWER_END), rate = c->schedule.lr > 0 ? schedule_lr / c->schedule.lr : 0;
    return schedule_lr * pow((double)batch / (double)c->batch_ref, end + (c->lr_power - end) * rate);
}
