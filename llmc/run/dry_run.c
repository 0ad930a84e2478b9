// --dry-run: plans the run of these options.
#include "base/files.h"
#include "plan/plan.h"
#include "run/run.h"

// Sets *device to the plan's device, and --gns, if not given, to its default on that device.
static int plan_on_device(PlanDevice *device, Setup *setup, const EngineDevice *here, Error *e) {
    const Options *o = &setup->options;
    TRY(plan_device(device, o, here, e));
    if (dtype_is_fp8(setup->shape.dtype) && !device->measured && *device->name && !device->fuses_exact)
        return FAIL(e, ERR_USAGE, "use --dtype bf16", "--dtype %s needs a Hopper GPU (H100, H200), not %s",
                    dtype_names[setup->shape.dtype], device->name);
    setup->shape.plan_fused = plan_fuses_exact(device, &setup->model.config);
    if (o->given[OPTION_gns]) return 0;
    return options_resolve_gns(&setup->options, setup->shape.plan_fused ? GNS_EXACT : GNS_LN, e);
}

int run_dry(Run *r, Error *e) {
    Setup *setup = &r->setup;
    const Options *o = &setup->options;
    int ranks = o->ranks ? (int)o->ranks : setup->comm->ranks;
    EngineDevice here;
    PlanDevice device;
    char disk[ARCHIVE_PATH];
    uint64_t free_bytes;
    if (o->train[0]) TRY(setup_data(r, e));
    const Ramp *ramp = o->run.horizon_tokens > 0 ? &r->position.ramp : NULL;
    if (ramp) TRY(setup_schedule(r, e));
    setup->engine_api->device(&setup->shape, !o->device[0], &here);
    TRY(plan_on_device(&device, setup, &here, e));
    // Plan for rank 0 only, and start no ranks. Each other rank needs less than 1% more memory.
    Comm comm = {.ranks = ranks, .local_ranks = plan_machine(&device, ranks)};
    if (o->shard && ranks % comm.local_ranks)
        return FAIL(e, ERR_USAGE, "use a multiple, or --device-count", "--shard machine: --ranks %d on machines of %d",
                    ranks, comm.local_ranks);
    TRY(setup_shards(setup, &r->position, &comm, e));
    setup->parallel.comm = NULL; // the variable `comm` ends with this function
    EngineConfig shape = setup->shape;
    shape.model = &setup->model;

    path_existing(o->out, disk, sizeof disk);
    TRY(disk_free(IN_PATH, disk, &free_bytes, e));
    Plan plan = {
        .options = o,
        .engine = setup->engine_api,
        .shape = shape,
        .device = device,
        .estimate_memory = o->device[0] && here.is_cpu,
        .ranks = ranks,
        .sharing = setup->parallel.config,
        .ramp = ramp,
        .rows = ramp ? ramp->config.batch_max : o->run.batch_ref_rows,
        .train = r->data.train,
        .val = r->data.val,
        .copies = saves_in_background(setup, &r->position),
        .checkpoint_bytes = (double)saver_checkpoint_bytes(&setup->model, setup->tokenizer),
        .disk_free_bytes = (double)free_bytes,
        .disk = disk,
    };
    plan_print(stdout, &plan);
    int code = plan_check_fits(&plan, e);
    if (!code || !o->device[0]) return code;
    printf("note: %s. %s\n", e->what, e->hint); // not an error: another machine may run the plan
    return 0;
}
