// timing: time and energy of kernels on a hot card.
//
// A training step runs at the card's power limit. So a kernel is called again and again on a warm card, at the clock
// that the power limit allows. A kernel that needs less energy gets a higher clock, which a few calls on a cool card do
// not show.
// 1. Calls are queued in batches, three of which are in flight. So the device never waits, not even while the host
//    queries NVML, for 4 ms each time.
// 2. The first SETTLE_SECONDS do not count, because the clock follows a change of power after 50 to 100 ms.
// 3. NVML's energy counter changes every 100 ms. Power is measured from the counter's first to its last change. A
//    call's energy is this power times the call's time.
#pragma once

#include "cuda/cuda_common.cuh"

#include <dlfcn.h>
#include <functional>
#include <math.h>
#include <stdlib.h>

static inline void bench_check(int code, const Error *e) {
    if (code == 0) return;
    error_print(e);
    exit(code);
}
static inline void cuda_check(cudaError_t code) {
    Error e = {};
    if (code != cudaSuccess) bench_check(FAIL(&e, ERR_INTERNAL, NULL, "CUDA: %s", cudaGetErrorString(code)), &e);
}

// ---- The card's energy counter, through the driver's own library ----------------------------------------------------

typedef struct {
    void *device; // NULL: no NVML, or no such counter
    int (*energy)(void *device, unsigned long long *millijoules);
    int (*clock)(void *device, int type, unsigned *mhz);
} Nvml;

static inline Nvml nvml_open(void) {
    Nvml nvml = {};
    char place[32];
    int ordinal;
    unsigned long long now;
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) return nvml;
    auto init = (int (*)(void))dlsym(library, "nvmlInit_v2");
    auto find = (int (*)(const char *, void **))dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2");
    nvml.energy = (decltype(nvml.energy))dlsym(library, "nvmlDeviceGetTotalEnergyConsumption");
    nvml.clock = (decltype(nvml.clock))dlsym(library, "nvmlDeviceGetClockInfo");
    if (!init || !find || !nvml.energy || !nvml.clock || init() != 0) return nvml;
    cuda_check(cudaGetDevice(&ordinal)); // NVML also numbers devices that CUDA_VISIBLE_DEVICES hides
    cuda_check(cudaDeviceGetPCIBusId(place, sizeof place, ordinal));
    if (find(place, &nvml.device) != 0 || nvml.energy(nvml.device, &now) != 0) nvml.device = NULL;
    return nvml;
}

// ---- Hot time -------------------------------------------------------------------------------------------------------

// Means over the timed calls. watts NAN: not measured.
typedef struct {
    double seconds, watts;
    unsigned mhz; // clock of the multiprocessors at the end; 0: not measured
} Timing;
static inline double timing_joules(Timing t) { return t.seconds * t.watts; }

typedef std::function<void(int)> BenchCall; // argument: number of the call, which selects one set of inputs

static const double SETTLE_SECONDS = 0.1, BATCH_SECONDS = 12e-3;

// Power between the first and the last change of the energy counter.
typedef struct {
    unsigned long long last, first_mj, last_mj;
    double first_at, last_at;
    int moves;
} EnergyWatch;

static inline void energy_look(EnergyWatch *w, const Nvml *nvml) {
    unsigned long long now;
    if (!nvml->device || nvml->energy(nvml->device, &now) != 0) return;
    const double at = clock_seconds();
    if (w->last && now != w->last) {
        if (w->moves++ == 0) w->first_mj = now, w->first_at = at;
        w->last_mj = now, w->last_at = at;
    }
    w->last = now;
}

// Waits for event `to`; returns the milliseconds between the two events.
static inline float batch_ms(cudaEvent_t from, cudaEvent_t to) {
    float ms;
    cuda_check(cudaEventSynchronize(to));
    cuda_check(cudaEventElapsedTime(&ms, from, to));
    return ms;
}

// Times the call over `seconds`, after SETTLE_SECONDS.
static inline Timing time_hot(const Nvml *nvml, double seconds, const BenchCall &call) {
    enum { EVENTS = 4 }; // three batches in flight
    cudaEvent_t event[EVENTS];
    EnergyWatch watch = {};
    Timing t = {0.0, NAN, 0};
    for (int i = 0; i < EVENTS; i++) cuda_check(cudaEventCreate(&event[i]));
    int number = 0, batch = 2;
    double timed_ms = 0.0;
    int64_t timed = 0;
    for (int i = 0; i < 2; i++) { // the second round gives the number of calls in a batch
        cuda_check(cudaEventRecord(event[0]));
        for (int k = 0; k < batch; k++) call(number++);
        cuda_check(cudaEventRecord(event[1]));
        const double one = batch_ms(event[0], event[1]) * 1e-3 / batch;
        if (i == 1) batch = (int)fmin(fmax(BATCH_SECONDS / one, 1.0), 2000.0);
    }
    const double begin = clock_seconds();
    cuda_check(cudaEventRecord(event[0]));
    for (int i = 1;; i++) {
        for (int k = 0; k < batch; k++) call(number++);
        cuda_check(cudaEventRecord(event[i % EVENTS]));
        if (i < EVENTS - 1) continue;
        const float ms = batch_ms(event[(i + 1) % EVENTS], event[(i + 2) % EVENTS]);
        const double now = clock_seconds() - begin;
        if (now < SETTLE_SECONDS) continue;
        energy_look(&watch, nvml);
        timed_ms += ms;
        timed += batch;
        if (now > SETTLE_SECONDS + seconds) break;
    }
    if (nvml->device && nvml->clock(nvml->device, 1, &t.mhz) != 0) t.mhz = 0; // 1: of the multiprocessors
    cuda_check(cudaDeviceSynchronize());
    for (int i = 0; i < EVENTS; i++) cuda_check(cudaEventDestroy(event[i]));
    t.seconds = timed_ms * 1e-3 / timed;
    if (watch.moves > 1) t.watts = (watch.last_mj - watch.first_mj) * 1e-3 / (watch.last_at - watch.first_at);
    return t;
}
