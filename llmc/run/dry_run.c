// --dry-run: plans the run of these options.
#include "base/files.h"
#include "plan/plan.h"
#include "run/run.h"

int run_dry(Run *r, Error *e) {
    const Options *o = &r->options;
    int ranks = o->ranks ? (int)o->ranks : r->comm->ranks;
    EngineDevice here;
    PlanDevice device;
    uint64_t free_bytes;
    if (o->train[0]) TRY(setup_data(r, e));
    if (o->with_optimizer) TRY(setup_moments(r, e));
    const Ramp *ramp = o->run.horizon_tokens > 0 ? &r->position.ramp : NULL;
    if (ramp) TRY(setup_schedule(r, e));
    r->engine_api->device(&r->shape, !o->device[0], &here);
    TRY(plan_device(&device, o, &here, e));
    if (dtype_is_fp8(r->shape.dtype) && !device.measured && *device.name && !device.fuses_exact)
        return FAIL(e, ERR_USAGE, "use --dtype bf16", "--dtype %s needs a Hopper GPU (H100, H200), not %s",
                    dtype_names[r->shape.dtype], device.name);
    r->shape.plan_fused = plan_fuses_exact(&device, &r->model.config);
    if (!o->given[OPTION_gns]) TRY(options_resolve_gns(&r->options, r->shape.plan_fused ? GNS_EXACT : GNS_LN, e));
    // Plan for rank 0 only, and start no ranks. Each other rank needs less than 1% more memory.
    Comm comm = {.ranks = ranks, .local_ranks = plan_machine(&device, ranks)};
    if (o->shard && ranks % comm.local_ranks)
        return FAIL(e, ERR_USAGE, "use a multiple, or --device-count", "--shard machine: --ranks %d on machines of %d",
                    ranks, comm.local_ranks);
    TRY(setup_shards(r, &comm, e));
    r->parallel.comm = NULL; // the variable `comm` ends with this function
    EngineConfig shape = r->shape;
    shape.model = &r->model;

    TRY(disk_free(IN_PATH, o->out, &free_bytes, e));
    Plan plan = {
        .options = o,
        .engine = r->engine_api,
        .shape = shape,
        .device = device,
        .estimate_memory = o->device[0] && here.is_cpu,
        .ranks = ranks,
        .sharing = r->parallel.config,
        .ramp = ramp,
        .rows = ramp ? ramp->config.batch_max : o->run.batch_ref_rows,
        .train = r->data.train,
        .val = r->data.val,
        .copies = saves_in_background(r),
        .checkpoint_bytes = (double)saver_checkpoint_bytes(&r->model, r->tokenizer),
        .disk_free_bytes = (double)free_bytes,
    };
    plan_print(&plan);
    int code = plan_check_fits(&plan, e);
    if (!code || !o->device[0]) return code;
    printf("note: %s. %s\n", e->what, e->hint); // not an error: another machine may run the plan
    return 0;
}
