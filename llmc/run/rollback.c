// Numbers in comments refer to the list in rollback.h.
#include "run/rollback.h"

#include "base/files.h"
#include "run/run.h"

int rollback_check(Run *r, const StepMetrics *m, int code, Error *e) {
    const Options *o = &r->setup.options;
    Spikes *s = &r->position.at.spikes;
    const int64_t now = s->z.count, window = 2 * o->spike_steps, steps = now < window ? now + 1 : window;
    const cJSON *row;
    int64_t spikes = 0;
    if (!o->on_spike || (code && code != ERR_NONFINITE)) return code;
    s->z.value[s->z.count++ % OUTLIERS_WINDOW] = r->position.z;
    s->first[now % OUTLIERS_WINDOW] = m->examples - m->batch;
    for (int64_t i = now; i > now - steps; i--) spikes += s->z.value[i % OUTLIERS_WINDOW] > o->spike_z;
    if (!code && spikes < o->spike_steps) return 0;
    if (!code) {
        comm_settle(r->setup.comm); // (1)
        FAIL(e, ERR_NONFINITE, "try a lower --lr, a longer --warmup-tokens or --grad-clip 1; or a higher --spike-z",
             "step %lld: %lld of the last %lld steps are spikes (loss %.4g, gradient norm %.4g, z %.3g)",
             (long long)m->step, (long long)spikes, (long long)steps, m->loss, m->grad_norm, r->position.z);
    }
    if (s->rollbacks == ROLLBACKS_MAX) return error_prefix(e, "after %d rollbacks", ROLLBACKS_MAX);
    const int64_t first = s->first[(now + 1 - steps) % OUTLIERS_WINDOW];
    s->skipped[s->rollbacks].first = first;
    s->skipped[s->rollbacks++].rows = m->examples - first;
    // Name the window's farthest rows of each kind (--outliers). Only rank 0 has them.
    const int64_t latest = m->step - steps, most = 3;
    for (int k = 0, n = 0; k < ROW_KINDS; k++, n = 0) cJSON_ArrayForEach(row, r->position.outliers.list[k]) {
            const size_t used = strlen(e->what);
            const char *shard = cJSON_GetStringValue(json_get(row, "shard"));
            if (row_number(row, "step") > (double)latest && shard && n++ < most)
                snprintf(e->what + used, sizeof e->what - used, "; %s %s:%.0f", row_kinds[k], path_name(shard),
                         row_number(row, "offset"));
        }
    r->rollback = (Rollback){.spikes = *s, .latest = latest, .why = *e};
    return e->code;
}

int rollback_skip(Run *r, Error *e) {
    Spikes *s = &r->position.at.spikes;
    const Rollback *back = &r->rollback;
    if (rollback_under_way(back)) {
        s->rollbacks = back->spikes.rollbacks;
        memcpy(s->skipped, back->spikes.skipped, sizeof s->skipped);
        const int64_t first = s->skipped[s->rollbacks - 1].first, rows = s->skipped[s->rollbacks - 1].rows;
        if (is_rank0(&r->setup))
            fprintf(stderr, "%s: back to %s, without examples %lld to %lld\n", back->why.what, r->saving.saved,
                    (long long)first, (long long)(first + rows - 1));
    }
    for (int i = 0; i < s->rollbacks; i++)
        TRY(dataset_exclude(r->data.train, (uint64_t)s->skipped[i].first, (uint64_t)s->skipped[i].rows, e));
    return 0;
}
