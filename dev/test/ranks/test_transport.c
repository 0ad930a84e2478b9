// What the MPI transport refuses before it calls MPI, and how whole matrices and rows are divided among ranks.
// test_ranks.sh tests its transfers.
#include "ranks/parallel.h"
#include "../test.h"

#include <limits.h>

// MPI counts in int: a longer bucket would be cut at wrong places.
static void test_too_large_a_bucket(void) {
    Comm comm = {.ranks = 2, .local_ranks = 2};
    Transport *t = NULL;
    Error e = {0};
    const TransportApi *api = TRANSPORT_OR_NULL(mpi_transport);
    if (!api) SKIP("a build without MPI has no transport");
    int code = api->create(&t, &comm, 1, WIRE_FP32, (size_t)INT_MAX + 1, NULL, NULL, &e);
    CHECK_ERROR(code, &e, ERR_USAGE, "2147483648 elements");
    CHECK(comm.settled, "every rank would tell it");
    if (t) api->destroy(t);
}

// Checks that the parts of a bucket are contiguous and cover it. Returns the number of cuts within a matrix.
static size_t check_parts(const Model *model, int bucket, int ranks, size_t *shares) {
    Range whole = model_bucket(model, bucket);
    size_t end = whole.begin, cut = 0;
    for (int r = 0; r < ranks; r++) {
        Range part = transport_whole_part(model, bucket, r, ranks);
        CHECK(part.begin == end && part.end >= part.begin, "%d ranks, bucket %d: part %d begins at %zu, not %zu", ranks,
              bucket, r, part.begin, end);
        end = part.end;
        shares[r] += range_length(part);
        for (int k = 0; k < model->tensor_count; k++) {
            size_t here = range_length(range_overlap(part, tensor_range(&model->tensors[k])));
            cut += tensor_muon_matrices(&model->tensors[k]) && here && here < model->tensors[k].count;
        }
    }
    CHECK(end == whole.end, "%d ranks, bucket %d: ends at %zu, not %zu", ranks, bucket, end, whole.end);
    return cut;
}

static void test_whole_matrices(void) {
    enum { RANKS = 20, LAYERS = 12 };
    // The largest share of the blocks over the mean share, by number of ranks: the least that whole matrices allow.
    static const double uneven[RANKS + 1] = {[1] = 1, [2] = 1, [3] = 1, [4] = 4.0 / 3, [8] = 4.0 / 3, [5] = 1.25};
    for (int layers = 1; layers <= LAYERS; layers++) {
        Model model;
        Error e = {0};
        CHECK_OK(model_create(&model, &(ModelConfig){layers, 2, 128, 61, 13}, &e), &e);
        for (int ranks = 1; ranks <= RANKS; ranks++) {
            size_t shares[RANKS] = {0}, embeddings[RANKS] = {0}, most = 0;
            check_parts(&model, 0, ranks, embeddings);
            for (int i = 1; i <= layers; i++)
                CHECK(check_parts(&model, i, ranks, shares) == 0, "%d ranks, block %d: a matrix is cut", ranks, i - 1);
            int fullest = transport_fullest_rank(&model, ranks);
            for (int r = 0; r < ranks; r++) most = size_max(most, shares[r]);
            for (int r = 0; r < ranks; r++)
                CHECK(shares[r] + embeddings[r] <= shares[fullest] + embeddings[fullest], "%d is fuller than %d", r,
                      fullest);
            double mean = (double)(model.flat_count - model_bucket(&model, 0).end) / ranks;
            if (layers == LAYERS && uneven[ranks] > 0)
                CHECK((double)most / mean < uneven[ranks] + 0.02, "%d ranks: %.3f", ranks, (double)most / mean);
        }
        model_destroy(&model);
    }
}

// With --tensor each micro-step's rows are dealt anew: rank t of K owns n / K rows, and one more if t < n % K.
static void test_rows_of_a_rank(void) {
    for (int i = 0; i < 4 * 3 * 5 * 20; i++) {
        const int K = 1 + i % 4, groups = 1 + i / 4 % 3, most = 1 + i / 12 % 5, rows = 1 + i / 60;
        const Parallel p = {.config = {.tensor = K, .micro_batch = most}, .groups = groups};
        for (int r = 0; r < K * groups; r++) {
            const int share = rows / groups + (r / K < rows % groups);
            int own = K == 1 ? share : 0;
            for (int at = 0, n; at < share && K > 1; at += n) {
                n = share - at < most ? share - at : most;
                own += n / K + (r % K < n % K);
            }
            const int64_t got = parallel_rows(&p, rows, r);
            CHECK(got == own, "rank %d of %d x %d: %lld of %d rows, not %d", r, groups, K, (long long)got, rows, own);
        }
    }
}

int main(void) {
    RUN(test_whole_matrices);
    RUN(test_too_large_a_bucket);
    RUN(test_rows_of_a_rank);
    return test_summary();
}
