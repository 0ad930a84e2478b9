// --dry-run: makes the plan of the run that the options ask for.
#define _POSIX_C_SOURCE 200809L
#include "base/files.h"
#include "plan/plan.h"
#include "run/run.h"

#include <stdlib.h>

// Cuts the path to the part that exists, where the run directory will be made.
static void existing_part(char *path) {
    while (!directory_exists(path)) {
        char *slash = strrchr(path, '/');
        if (!slash) strcpy(path, ".");
        else if (slash == path) path[1] = 0;
        else *slash = 0;
    }
}

// Rank 0's share of what `ranks` ranks keep; no rank is started.
static int plan_ownership(Run *r, int ranks, Error *e) {
    Comm comm = {.ranks = ranks, .local_ranks = 1};
    TRY(setup_shards(r, &comm, e));
    r->parallel.comm = NULL; // which ends here
    return 0;
}

// Rows of a validation; 0: none.
static int64_t val_rows(const Run *r) {
    int64_t T = r->shape.seq_len, rows = (r->options.val_tokens + T - 1) / T;
    if (!r->options.val[0]) return 0;
    return r->val && (int64_t)dataset_windows(r->val) < rows ? (int64_t)dataset_windows(r->val) : rows;
}

int run_dry(Run *r, Error *e) {
    const Options *o = &r->options;
    int ranks = o->ranks ? (int)o->ranks : r->comm->ranks;
    EngineDevice here;
    Error unknown;
    char disk[ARCHIVE_PATH];
    uint64_t free_bytes;
    bool trains = o->run.horizon_tokens > 0;
    TRY(setup_sampling(r, e));
    if (o->train[0]) TRY(setup_data(r, e));
    if (trains) TRY(setup_schedule(r, e));
    r->api->device(&r->shape, true, &here);
    bool cpu = here.flops > 0;
    if (o->tune && !o->device[0] && cpu) // the run would be refused
        return FAIL(e, ERR_USAGE, "leave it out, or plan for a GPU with --device",
                    "--tune is for GPUs, and this is a plan for %s", here.name);
    TRY(plan_ownership(r, ranks, e));
    snprintf(disk, sizeof disk, "%s", o->out);
    existing_part(disk);
    Plan plan = {
        .options = o,
        .engine = r->api,
        .shape = r->shape,
        .estimate_memory = o->device[0] && cpu,
        .ranks = ranks,
        .ramp = trains ? &r->ramp : NULL,
        .rows = trains ? ramp_largest(&r->ramp) : o->run.batch_ref_rows,
        .val_rows = val_rows(r),
        .train_tokens = r->train ? (double)dataset_windows(r->train) * r->shape.seq_len : 0,
        .host_bytes = may_save_aside(r) ? (double)(SAVER_ARRAYS * saver_copy_stride(&r->model) * sizeof(float)) : 0,
        .checkpoint_bytes = (double)saver_checkpoint_bytes(&r->model, r->tokenizer),
        .disk_free_bytes = disk_free(disk, &free_bytes, &unknown) ? -1 : (double)free_bytes,
        .disk = disk,
    };
    TRY(plan_device(&plan.device, o->device, &here, 1e9 * o->link, e));
    plan_print(stdout, &plan);
    return 0;
}
