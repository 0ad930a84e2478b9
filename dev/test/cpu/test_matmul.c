// test_matmul: every product against plain loops in double, on random shapes; edges, poison, guards, threads. Also the
// vector exp of vector_math.h and GELU, against libm in double.
#include "arrays.h"
#include "cpu/layers.h"
#include "cpu/matmul.h"
#include "cpu/vector_math.h"

#include <float.h>

static size_t random_below(size_t n) { return random_next() % n; }

// Random numbers between guards, as the operand of +=.
static float *guarded_random(size_t n) {
    float *x = guarded_array(n);
    for (size_t i = 0; i < n; i++) x[i] = random_float();
    return x;
}

static Matmul matmul_create(int threads) { return (Matmul){threads, malloc(matmul_scratch() * sizeof(float))}; }

// The largest error, in units of what rounding may do to a sum of K products of numbers up to 1; NaN counts as huge.
static double worst_error(const float *got, const float *want, size_t n, size_t K) {
    double worst = 0, unit = 6e-8 * (8 + sqrt((double)K));
    for (size_t i = 0; i < n; i++) {
        double error = fabs((double)got[i] - want[i]) / (unit * (1 + sqrt((double)K)));
        if (!(error <= worst)) worst = isnan(error) ? 1e9 : error;
    }
    return worst;
}

enum { NN, NT, TN, PRODUCTS };
static const char *const product_names[PRODUCTS] = {"nn", "nt", "tn"};

// C (M,N) as a sum over K.
typedef struct {
    int product;
    size_t M, N, K;
    bool accumulate, vector; // vector: nn's bias, tn's column sums
} Case;

static void run_product(Matmul mm, const Case *t, float *c, float *sums, const float *a, const float *b,
                        const float *bias) {
    switch (t->product) {
    case NN: matmul_nn(mm, c, a, b, t->vector ? bias : NULL, t->M, t->N, t->K); break;
    case NT: matmul_nt(mm, c, a, b, t->M, t->N, t->K); break;
    case TN: matmul_tn(mm, c, t->vector ? sums : NULL, a, b, t->M, t->N, t->K, t->accumulate); break;
    }
}

// The formulas of matmul.h in plain loops.
static void expect_product(const Case *t, float *c, float *sums, const float *a, const float *b, const float *bias) {
    size_t M = t->M, N = t->N, K = t->K;
    for (size_t i = 0; i < M; i++)
        for (size_t j = 0; j < N; j++) {
            double sum = (t->accumulate ? c[i * N + j] : 0) + (t->product == NN && t->vector ? bias[j] : 0);
            for (size_t k = 0; k < K; k++)
                sum +=
                    (double)a[t->product == TN ? k * M + i : i * K + k] * b[t->product == NT ? j * K + k : k * N + j];
            c[i * N + j] = (float)sum;
        }
    for (size_t j = 0; j < N && t->product == TN; j++) {
        double sum = t->accumulate ? sums[j] : 0;
        for (size_t k = 0; k < K; k++) sum += b[k * N + j];
        sums[j] = (float)sum;
    }
}

static void check_case(Matmul one, Matmul many, Case t) {
    size_t n = t.M * t.N;
    float *a = random_array(t.M * t.K, 1), *b = random_array(t.K * t.N, 1), *bias = random_array(t.N, 1);
    float *c[3], *sums[3]; // expected, of one thread, of many
    for (int i = 0; i < 3; i++) {
        c[i] = t.accumulate ? guarded_random(n) : guarded_array(n);
        sums[i] = t.accumulate ? guarded_random(t.N) : guarded_array(t.N);
        if (i > 0) memcpy(c[i], c[0], n * sizeof(float)), memcpy(sums[i], sums[0], t.N * sizeof(float));
    }
    expect_product(&t, c[0], sums[0], a, b, bias);
    run_product(one, &t, c[1], sums[1], a, b, bias);
    run_product(many, &t, c[2], sums[2], a, b, bias);
    const char *name = product_names[t.product];
    double error = worst_error(c[1], c[0], n, t.K);
    CHECK(error < 1, "%s M %zu N %zu K %zu accumulate %d: error %g", name, t.M, t.N, t.K, t.accumulate, error);
    CHECK(!memcmp(c[1], c[2], n * sizeof(float)), "%s M %zu N %zu K %zu: threads differ", name, t.M, t.N, t.K);
    CHECK(guards_intact(c[1], n) && guards_intact(c[2], n), "%s M %zu N %zu K %zu wrote beyond C", name, t.M, t.N, t.K);
    if (t.product == TN && t.vector) {
        error = worst_error(sums[1], sums[0], t.N, t.K);
        CHECK(error < 1, "column sums N %zu K %zu: error %g", t.N, t.K, error);
        CHECK(!memcmp(sums[1], sums[2], t.N * sizeof(float)), "column sums N %zu K %zu: threads differ", t.N, t.K);
        CHECK(guards_intact(sums[1], t.N), "column sums N %zu K %zu wrote beyond", t.N, t.K);
    }
    for (int i = 0; i < 3; i++) guarded_free(c[i]), guarded_free(sums[i]);
    free(a), free(b), free(bias);
}

static void check_shapes(const size_t (*shapes)[3], size_t count) {
    Matmul one = matmul_create(1), two = matmul_create(2), five = matmul_create(5);
    for (size_t i = 0; i < count; i++)
        for (int variant = 0; variant < 4 * PRODUCTS; variant++) {
            Case t = {variant / 4, shapes[i][0], shapes[i][1], shapes[i][2], variant & 1, variant & 2};
            if (!t.accumulate || t.product == TN) check_case(one, i % 2 ? two : five, t);
        }
    free(one.scratch), free(two.scratch), free(five.scratch);
}

static void test_small_shapes(void) { // every size from 1 to past a tile, in every place
    size_t shapes[80][3];
    for (size_t i = 0; i < 80; i++)
        for (int j = 0; j < 3; j++) shapes[i][j] = 1 + (i < 40 ? (i * (size_t)(j * 2 + 1)) % 40 : random_below(80));
    check_shapes((const size_t(*)[3])shapes, 80);
}

static void test_blocked_shapes(void) { // beyond one block of K or N, with and without a remainder
    const size_t shapes[][3] = {{1, 1, 1000},    {1, 1100, 1},   {1100, 1, 1},   {13, 33, 769}, {37, 513, 385},
                                {24, 1024, 384}, {70, 384, 128}, {64, 1537, 9},  {1025, 47, 5}, {12, 32, 1153},
                                {769, 33, 13},   {385, 513, 37}, {1024, 24, 384}};
    check_shapes(shapes, sizeof shapes / sizeof *shapes);
}

static void test_bits_do_not_depend_on_m_or_n(void) { // a row gives the same bits alone as among others
    Matmul mm = matmul_create(2);
    enum { M = 29, K = 801, N = 83 };
    float *x = random_array(M * K, 1), *w = random_array(K * N, 1), *y = malloc(M * N * 4), *row = malloc(N * 4);
    matmul_nn(mm, y, x, w, NULL, M, N, K);
    for (size_t i = 0; i < M; i++) {
        matmul_nn(mm, row, x + i * K, w, NULL, 1, N, K);
        CHECK(!memcmp(row, y + i * N, N * 4), "row %zu differs", i);
    }
    free(x), free(w), free(y), free(row);
    free(mm.scratch);
}

static void test_empty_sum(void) { // K = 0: the bias, or C as it was
    Matmul mm = matmul_create(2);
    float y[6] = {NAN, NAN, NAN, NAN, NAN, NAN}, bias[3] = {1, 2, 3}, none[1] = {0};
    matmul_nn(mm, y, none, none, bias, 2, 3, 0);
    for (size_t i = 0; i < 6; i++) CHECK(y[i] == bias[i % 3], "y[%zu] = %g", i, y[i]);
    matmul_nn(mm, NULL, none, none, NULL, 0, 3, 5);
    free(mm.scratch);
}

static void test_nan_and_infinity_pass_through(void) {
    Matmul mm = matmul_create(1);
    enum { M = 14, K = 40, N = 35 };
    float *x = random_array(M * K, 1), *w = random_array(K * N, 1), *y = malloc(M * N * 4);
    x[3 * K + 7] = NAN, x[9 * K + 2] = INFINITY;
    matmul_nn(mm, y, x, w, NULL, M, N, K);
    for (size_t i = 0; i < M * N; i++)
        CHECK(!isfinite(y[i]) == (i / N == 3 || i / N == 9), "row %zu column %zu: %g", i / N, i % N, y[i]);
    free(x), free(w), free(y);
    free(mm.scratch);
}

static void test_exp(void) {
    double worst = 0;
    for (int i = 0; i < 400000; i++) {
        float x = random_float() * 87.3f;
        double want = exp((double)x), ulps = fabs(vec_exp(vec_set(x))[VEC - 1] - want) / ldexp(1, ilogb(want) - 23);
        if (!(ulps <= worst)) worst = ulps;
    }
    CHECK(worst < 1.1, "%g ulp", worst);
    const float exact[][2] = {
        {0, 1},        {-0.0f, 1},           {-INFINITY, 0}, {-1000, 0},        {-1e13f, 0},
        {-FLT_MAX, 0}, {INFINITY, INFINITY}, {89, INFINITY}, {1e13f, INFINITY}, {FLT_MAX, INFINITY}};
    for (size_t i = 0; i < sizeof exact / sizeof *exact; i++) {
        volatile float x = exact[i][0]; // computed at run time, where sanitizers see it
        float got = vec_exp(vec_set(x))[0];
        CHECK(got == exact[i][1], "exp(%g) = %g", exact[i][0], got);
    }
    CHECK(isnan(vec_exp(vec_set(NAN))[0]), "exp(NaN) is not NaN");
    CHECK(isfinite(vec_exp(vec_set(88.72f))[0]), "exp(88.72) overflowed");
}

// GELU's formula with tanh, in double.
static double gelu_reference(double x) {
    return 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

static void test_gelu(void) {
    enum { FLOATS = 70001 }; // several threads and a tail
    float *y = guarded_array(FLOATS), *dx = guarded_array(FLOATS);
    float *x = random_array(FLOATS, 1), *dy = random_array(FLOATS, 1);
    for (size_t i = 0; i < FLOATS; i++) x[i] *= i % 2 ? 8 : 1;
    gelu_forward(y, x, FLOATS);
    gelu_backward(dx, dy, x, FLOATS);
    for (size_t i = 0; i < FLOATS; i++) {
        CHECK_CLOSE(y[i], gelu_reference(x[i]), 1e-6, 0.02);
        double h = 1e-5, slope = (gelu_reference(x[i] + h) - gelu_reference(x[i] - h)) / (2 * h);
        CHECK_CLOSE(dx[i], dy[i] * slope, 1e-6, 0.1 + fabs(dy[i]));
    }
    CHECK(guards_intact(y, FLOATS) && guards_intact(dx, FLOATS), "wrote beyond");
    for (size_t n = 0; n < 70; n++) { // short arrays and in place: the same bits as in the long one
        memcpy(dx, x, n * 4);
        gelu_forward(dx, dx, n);
        CHECK(!memcmp(dx, y, n * 4), "n %zu differs", n);
    }
    float large[2] = {50, -50}, result[2];
    gelu_forward(result, large, 2);
    CHECK(result[0] == 50 && result[1] == 0, "gelu(+-50) = %g, %g", result[0], result[1]);
    guarded_free(y), guarded_free(dx), free(x), free(dy);
}

int main(void) {
    RUN(test_small_shapes);
    RUN(test_blocked_shapes);
    RUN(test_bits_do_not_depend_on_m_or_n);
    RUN(test_empty_sum);
    RUN(test_nan_and_infinity_pass_through);
    RUN(test_exp);
    RUN(test_gelu);
    return test_summary();
}
