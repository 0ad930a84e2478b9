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
static int plan_ownership(Setup *setup, const Position *position, int ranks, Error *e) {
    Comm comm = {.ranks = ranks, .local_ranks = 1};
    TRY(setup_shards(setup, position, &comm, e));
    setup->parallel.comm = NULL; // which ends here
    return 0;
}

static int plan_of(Setup *setup, const Position *position, Plan *plan, Error *e) {
    const Options *o = &setup->options;
    int ranks = o->ranks ? (int)o->ranks : setup->comm->ranks;
    EngineDevice here;
    setup->engine_api->device(&setup->shape, true, &here);
    if (o->tune && !o->device[0] && here.flops > 0) // a CPU, where the run would be refused
        return FAIL(e, ERR_USAGE, "leave it out, or plan for a GPU with --device",
                    "--tune is for GPUs, and this is a plan for %s", here.name);
    TRY(plan_ownership(setup, position, ranks, e));
    *plan = (Plan){
        .engine = setup->engine_api,
        .model = &setup->model,
        .shape = setup->shape,
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
    const Options *o = &r->setup.options;
    Plan plan;
    Error unknown;
    char disk[ARCHIVE_PATH];
    uint64_t free_bytes;
    bool trains = o->run.horizon_tokens > 0;
    TRY(setup_sampling(&r->setup, e));
    if (o->train[0]) TRY(setup_data(r, e));
    if (trains) TRY(setup_schedule(&r->setup, &r->position, e));
    TRY(plan_of(&r->setup, &r->position, &plan, e));
    int64_t T = r->setup.shape.seq_len, val_rows = (o->val_tokens + T - 1) / T;
    if (r->data.val && (int64_t)dataset_windows(r->data.val) < val_rows)
        val_rows = (int64_t)dataset_windows(r->data.val);
    PlanReport report = {
        .plan = &plan,
        .ramp = trains ? &r->position.ramp : NULL,
        .rows = trains ? ramp_largest(&r->position.ramp) : o->run.batch_ref_rows,
        .price = o->price,
        .train_tokens = r->data.train ? (double)dataset_windows(r->data.train) * (double)T : 0,
        .host_bytes = may_save_aside(&r->setup, &r->position)
                          ? (double)(SAVER_ARRAYS * saver_copy_stride(&r->setup.model) * sizeof(float))
                          : 0,
        .val_every = o->val[0] ? o->val_every : 0,
        .val_rows = val_rows,
        .checkpoint_every = o->checkpoint_every,
        .best_every = best_every(o),
        .keep = o->keep,
        .checkpoint_bytes = (double)saver_checkpoint_bytes(&r->setup.model, r->setup.tokenizer),
        .disk = disk,
    };
    snprintf(disk, sizeof disk, "%s", o->out);
    existing_part(disk);
    report.disk_free_bytes = disk_free(disk, &free_bytes, &unknown) ? -1 : (double)free_bytes;
    plan_print(stdout, &report);
    return 0;
}
