// Numbers in comments refer to the list in rollback.h.
#include "run/rollback.h"

#include "base/files.h"
#include "run/run.h"

int rollback_check(Run *r, const StepMetrics *m, int code, Error *e) {
    const Options *o = &r->setup.options;
    RunPoint *at = &r->position.at;
    Rollback *back = &r->rollback;
    const int64_t now = at->spikes.count, window = 2 * o->spike_steps, steps = now < window ? now + 1 : window;
    const cJSON *row;
    int64_t spikes = 0;
    if (!o->on_spike || (code && code != ERR_NONFINITE)) return code;
    at->spikes.value[at->spikes.count++ % OUTLIERS_WINDOW] = r->position.z;
    at->first[now % OUTLIERS_WINDOW] = m->examples - m->batch;
    for (int64_t i = now; i > now - steps; i--) spikes += at->spikes.value[i % OUTLIERS_WINDOW] > o->spike_z;
    if (!code && spikes < o->spike_steps) return 0;
    if (!code) {
        comm_settle(r->setup.comm); // (1)
        FAIL(e, ERR_NONFINITE, "try a lower --lr, a longer --warmup-tokens or --grad-clip 1; or a higher --spike-z",
             "step %lld: %lld of the last %lld steps are spikes (loss %.4g, gradient norm %.4g, z %.3g)",
             (long long)m->step, (long long)spikes, (long long)steps, m->loss, m->grad_norm, r->position.z);
    }
    if (back->made == ROLLBACKS_MAX) return error_prefix(e, "after %d rollbacks", ROLLBACKS_MAX);
    const int64_t first = at->first[(now + 1 - steps) % OUTLIERS_WINDOW];
    back->skipped[back->made].first = first;
    back->skipped[back->made++].rows = m->examples - first;
    back->latest = m->step - steps;
    // Name the window's farthest rows of each kind (--outliers). Only rank 0 has them.
    const int most = 3;
    for (int k = 0, n = 0; k < ROW_KINDS; k++, n = 0) cJSON_ArrayForEach(row, r->position.outliers.list[k]) {
            const size_t used = strlen(e->what);
            const char *shard = cJSON_GetStringValue(json_get(row, "shard"));
            if (cJSON_GetNumberValue(json_get(row, "step")) > (double)back->latest && shard && n++ < most)
                snprintf(e->what + used, sizeof e->what - used, "; %s %s:%.0f", row_kinds[k], path_name(shard),
                         cJSON_GetNumberValue(json_get(row, "offset")));
        }
    back->why = *e;
    return e->code;
}
