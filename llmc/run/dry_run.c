// --dry-run: everything that a plan needs, taken together from the options.
#define _POSIX_C_SOURCE 200809L
#include "base/files.h"
#include "plan/print.h"
#include "run/run.h"

#include <stdlib.h>

// The part of the path that is there already: where the run directory will be made.
static void existing_part(char *path) {
    while (!directory_exists(path)) {
        char *slash = strrchr(path, '/');
        if (!slash) strcpy(path, ".");
        else if (slash == path) path[1] = 0;
        else *slash = 0;
    }
}

// What a rank of so many keeps, without starting any: rank 0's share.
static int plan_ownership(Run *r, int ranks, Error *e) {
    Comm comm = {.ranks = ranks, .local_ranks = 1};
    TRY(setup_shards(r, &comm, e));
    r->parallel.comm = NULL; // which ends here
    return 0;
}

static int plan_of(Run *r, Plan *plan, Error *e) {
    const Options *o = &r->options;
    int ranks = o->ranks ? (int)o->ranks : r->comm->ranks;
    EngineDevice here;
    r->api->device(&r->shape, true, &here);
    if (o->tune && !o->device[0] && here.flops > 0) // a CPU, where the run would be refused
        return FAIL(e, ERR_USAGE, "leave it out, or plan for a GPU with --device",
                    "--tune is for GPUs, and this is a plan for %s", here.name);
    TRY(plan_ownership(r, ranks, e));
    *plan = (Plan){
        .engine = r->api,
        .model = &r->model,
        .shape = r->shape,
        .estimate_memory = o->device[0] && here.flops > 0,
        .ranks = ranks,
        .zero = o->zero,
        .every_micro_step = o->reduce == REDUCE_MICRO_STEP,
        .wire = o->comm_dtype == WIRE_BF16 ? 2 : sizeof(float),
        .exact_part = o->run.gns_exact_interval > 0 ? 1.0 / (double)o->run.gns_exact_interval : 0,
    };
    return plan_device(&plan->device, o->device, &here, 1e9 * o->link, e);
}

int run_dry(Run *r, Error *e) {
    const Options *o = &r->options;
    Plan plan;
    Error unknown;
    char disk[ARCHIVE_PATH];
    uint64_t free_bytes;
    bool trains = o->run.horizon_tokens > 0;
    TRY(setup_sampling(r, e));
    if (o->train[0]) TRY(setup_data(r, e));
    if (trains) TRY(setup_schedule(r, e));
    TRY(plan_of(r, &plan, e));
    int64_t T = r->shape.seq_len, val_rows = (o->val_tokens + T - 1) / T;
    if (r->val && (int64_t)dataset_windows(r->val) < val_rows) val_rows = (int64_t)dataset_windows(r->val);
    PlanReport report = {
        .plan = &plan,
        .ramp = trains ? &r->ramp : NULL,
        .rows = trains ? ramp_largest(&r->ramp) : o->run.batch_ref_rows,
        .price = o->price,
        .train_tokens = r->train ? (double)dataset_windows(r->train) * (double)T : 0,
        .host_bytes = may_save_aside(r) ? (double)(SAVER_ARRAYS * saver_copy_stride(&r->model) * sizeof(float)) : 0,
        .val_every = o->val[0] ? o->val_every : 0,
        .val_rows = val_rows,
        .checkpoint_every = o->checkpoint_every,
        .best_every = best_every(o),
        .keep = o->keep,
        .checkpoint_bytes = (double)saver_checkpoint_bytes(&r->model, r->tokenizer),
        .disk = disk,
    };
    snprintf(disk, sizeof disk, "%s", o->out);
    existing_part(disk);
    report.disk_free_bytes = disk_free(disk, &free_bytes, &unknown) ? -1 : (double)free_bytes;
    plan_print(stdout, &report);
    return 0;
}
