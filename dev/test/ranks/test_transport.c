// What the transport between CPU ranks refuses before it asks anything of MPI. That it carries what it should is
// test_ranks.sh's.
#include "ranks/transport.h"
#include "../test.h"

#include <limits.h>

// MPI counts in int: a bucket that is longer would be cut at wrong places.
static void test_too_large_a_bucket(void) {
    Comm comm = {.ranks = 2, .local_ranks = 2};
    Transport *t = NULL;
    Error e = {0};
    const TransportApi *api = TRANSPORT_OR_NULL(mpi_transport);
    if (!api) SKIP("a build without MPI has no transport");
    int code = api->create(&t, &comm, WIRE_FP32, (size_t)INT_MAX + 1, NULL, &e);
    CHECK_ERROR(code, &e, ERR_USAGE, "2147483648 elements");
    CHECK(comm.settled, "every rank would tell it");
    if (t) api->destroy(t);
}

int main(void) {
    RUN(test_too_large_a_bucket);
    return test_summary();
}
