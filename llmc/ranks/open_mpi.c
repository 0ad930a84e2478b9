// open_mpi: works around two actions of Open MPI's threads, with calls of PMIx, the library below Open MPI. MPI itself
// has no such calls. No-ops without libpmix (GNS_PMIX). Without effect where Open MPI uses a PMIx of its own.
#include "base/signals.h"
#include "ranks/comm.h"

#ifdef GNS_PMIX
#    include <errno.h>
#    include <pmix.h>
#    include <semaphore.h>
#    include <string.h>
#    include <time.h>

static const char our_model[] = "gns.c";
static sem_t settled;

// PMIx's thread calls on_event for notifications of programming models (MPI is one), and for a lost connection. The
// answer "complete" hides a lost connection from Open MPI's handler, which would end the process.
static void on_event(size_t id, pmix_status_t status, const pmix_proc_t *source, pmix_info_t *info, size_t infos,
                     pmix_info_t *results, size_t result_count, pmix_event_notification_cbfunc_fn_t answer,
                     void *context) {
    const bool model = status == PMIX_MODEL_DECLARED || status == PMIX_MODEL_RESOURCES;
    for (size_t i = 0; i < infos && model; i++)
        if (PMIX_CHECK_KEY(&info[i], PMIX_PROGRAMMING_MODEL) && strcmp(info[i].value.data.string, our_model) == 0)
            sem_post(&settled);
    if (!model) signals_orphaned("the connection to mpirun is lost");
    answer(model ? PMIX_SUCCESS : PMIX_EVENT_ACTION_COMPLETE, NULL, 0, NULL, NULL, context);
}

void open_mpi_survive(void) {
    pmix_status_t lost[] = {
#    ifdef PMIX_ERR_LOST_CONNECTION_TO_SERVER // PMIx 3
        PMIX_ERR_LOST_CONNECTION_TO_SERVER,
#    endif
#    ifdef PMIX_ERR_LOST_CONNECTION
        PMIX_ERR_LOST_CONNECTION,
#    endif
        PMIX_ERR_UNREACH,
    };
    if (!PMIx_Initialized()) return;
    PMIx_Register_event_handler(lost, sizeof lost / sizeof *lost, NULL, 0, on_event, NULL, NULL);
}

// MPI_Init may return before PMIx's thread has handled MPI_Init's own notification, PMIX_MODEL_DECLARED. Sends a second
// notification and awaits it. The thread handles notifications in order. It calls handlers registered for several
// codes, such as on_event, after all others. So when on_event gets the second one, Open MPI's handler is done.
void open_mpi_settle(void) {
    pmix_status_t models[] = {PMIX_MODEL_DECLARED, PMIX_MODEL_RESOURCES};
    pmix_info_t info[2];
    struct timespec until;
    bool only_ours = true;
    if (!PMIx_Initialized()) return;
    sem_init(&settled, 0, 0);
    PMIx_Register_event_handler(models, sizeof models / sizeof *models, NULL, 0, on_event, NULL, NULL);
    PMIX_INFO_LOAD(&info[0], PMIX_PROGRAMMING_MODEL, our_model, PMIX_STRING);
    PMIX_INFO_LOAD(&info[1], PMIX_EVENT_NON_DEFAULT, &only_ours, PMIX_BOOL);
    pmix_status_t sent = PMIx_Notify_event(PMIX_MODEL_DECLARED, NULL, PMIX_RANGE_PROC_LOCAL, info, 2, NULL, NULL);
    if (sent != PMIX_SUCCESS && sent != PMIX_OPERATION_SUCCEEDED) return;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 10;
    while (sem_timedwait(&settled, &until) != 0 && errno == EINTR) continue;
}
#else
void open_mpi_survive(void) {}
void open_mpi_settle(void) {}
#endif
