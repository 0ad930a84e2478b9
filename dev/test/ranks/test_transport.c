// Checks what the MPI transport refuses before it calls MPI, and how ranks divide blocks with Muon. test_ranks.sh tests
// transfers.
#include "ranks/parallel.h"
#include "../test.h"

#include <limits.h>

// MPI counts in int, so a longer bucket would be cut in the wrong places.
static void test_too_large_a_bucket(void) {
    const TransportApi *api = TRANSPORT_OR_NULL(mpi_transport);
    if (!api) SKIP("a build without MPI has no transport");
    for (int i = 0; i < 2; i++) {
        const WireType wire = i ? WIRE_BF16 : WIRE_FP32;
        const size_t most = i ? INT_MAX / 2 : INT_MAX;
        Comm comm = {.ranks = 2, .local_ranks = 2};
        Transport *t = NULL;
        Error e = {0};
        char said[80];
        snprintf(said, sizeof said, "%zu elements, but MPI transfers at most %zu", most + 1, most);
        CHECK_ERROR(api->create(&t, &comm, &(Division){0, 2, 1, NULL}, wire, most + 1, NULL, &e), &e, ERR_USAGE, said);
        CHECK(comm.settled, "every rank would tell it");
        if (t) api->destroy(t);
    }
}

// With Muon a bucket's parts follow one another and cover it; no matrix is cut. Rank 0 owns ceil(12 / ranks) blocks; no
// rank owns more.
static void test_whole_matrices(void) {
    Model model;
    Error e = {0};
    CHECK_OK(model_create(&model, &(ModelConfig){12, 2, 128, 61, 13}, &e), &e);
    for (int ranks = 1; ranks <= 20; ranks++) {
        size_t share[20] = {0};
        for (int i = 0; i <= 12; i++) {
            const Range bucket = model_bucket(&model, i);
            size_t end = bucket.begin;
            for (int r = 0; r < ranks; r++) {
                const Range part = division_part(&(Division){0, ranks, 1, &model}, bucket, r);
                CHECK(part.begin == end && part.end >= part.begin, "%d ranks, bucket %d: part %d", ranks, i, r);
                end = part.end;
                if (i > 0) share[r] += range_length(part);
                for (int k = 0; k < model.tensor_count; k++) {
                    const size_t here = range_length(range_overlap(part, tensor_range(&model.tensors[k])));
                    CHECK(!tensor_muon_matrices(&model.tensors[k]) || !here || here == model.tensors[k].count,
                          "%d ranks, block %d: a matrix is cut", ranks, i - 1);
                }
            }
            CHECK(end == bucket.end, "%d ranks, bucket %d: ends at %zu, not %zu", ranks, i, end, bucket.end);
        }
        const size_t block = range_length(model_bucket(&model, 1)), most = (size_t)((12 + ranks - 1) / ranks) * block;
        for (int r = 0; r < ranks; r++) CHECK(share[r] < most + block / 100, "rank %d of %d: %zu", r, ranks, share[r]);
        CHECK(share[0] >= most, "rank 0 of %d: %zu, not %zu", ranks, share[0], most);
    }
    model_destroy(&model);
}

int main(void) {
    RUN(test_whole_matrices, test_too_large_a_bucket);
    return test_summary();
}
