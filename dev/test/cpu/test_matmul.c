// test_matmul: every product against the plain double reference, on random shapes; edges, poison, guards, threads.
// Also the vector exp and GELU of vector_math.h, against libm in double.
#define _POSIX_C_SOURCE 200809L
#include "../test.h"
#include "cpu/matmul.h"
#include "cpu/vector_math.h"

#include <float.h>

enum { GUARD = 64 }; // floats before and behind every output that nothing may touch

static uint64_t random_state = 0x9e3779b97f4a7c15u;

static uint32_t random_next(void) { // xorshift64*: Vigna 2016
    random_state ^= random_state >> 12, random_state ^= random_state << 25, random_state ^= random_state >> 27;
    return (uint32_t)(random_state * 0x2545f4914f6cdd1du >> 32);
}
static float random_float(void) { return (float)random_next() * 0x1p-31f - 1; } // [-1, 1]
static size_t random_below(size_t n) { return random_next() % n; }

static float *random_array(size_t n) {
    float *x = malloc(n * sizeof *x + 1);
    for (size_t i = 0; i < n; i++) x[i] = random_float();
    return x;
}

// An output between two guards. Poisoned with NaN, or with random numbers when it will be added to.
typedef struct {
    float *base, *data;
    size_t n;
} Output;

static const uint32_t GUARD_BITS = 0x7fc0beefu; // a NaN that no arithmetic makes

static Output output_create(size_t n, bool accumulate) {
    Output o = {malloc((n + 2 * GUARD) * sizeof(float)), NULL, n};
    o.data = o.base + GUARD;
    for (size_t i = 0; i < n + 2 * GUARD; i++) memcpy(o.base + i, &GUARD_BITS, sizeof GUARD_BITS);
    for (size_t i = 0; i < n; i++) o.data[i] = accumulate ? random_float() : NAN;
    return o;
}

static bool output_guards_intact(const Output *o) {
    for (size_t i = 0; i < GUARD; i++)
        if (memcmp(o->base + i, &GUARD_BITS, 4) || memcmp(o->data + o->n + i, &GUARD_BITS, 4)) return false;
    return true;
}

// The largest error, in units of what rounding may do to a sum of K products of numbers up to 1; NaN counts as huge.
static double worst_error(const float *got, const float *want, size_t n, size_t K) {
    double worst = 0, unit = 6e-8 * (8 + sqrt((double)K));
    for (size_t i = 0; i < n; i++) {
        double error = fabs((double)got[i] - want[i]) / (unit * (1 + sqrt((double)K)));
        if (!(error <= worst)) worst = isnan(error) ? 1e9 : error;
    }
    return worst;
}

enum { FORWARD, DINPUT, DWEIGHT, HEAD_FORWARD, HEAD_DINPUT, HEAD_DWEIGHT, PRODUCTS };
static const char *product_names[] = {"forward", "dinput", "dweight", "head_forward", "head_dinput", "head_dweight"};

typedef struct {
    int product;
    size_t M, K, N; // of the forward product y (M,N) = x (M,K) w
    bool accumulate, bias;
    float *x, *y, *w, *b; // operands; the product writes into c instead of one of them
} Case;

static void run_product(Matmul *mm, const Case *t, float *c, float *dbias) {
    size_t M = t->M, K = t->K, N = t->N;
    switch (t->product) {
    case FORWARD: matmul_forward(mm, c, t->x, t->w, t->bias ? t->b : NULL, M, K, N); break;
    case DINPUT: matmul_dinput(mm, c, t->y, t->w, M, K, N, t->accumulate); break;
    case DWEIGHT: matmul_dweight(mm, c, t->bias ? dbias : NULL, t->x, t->y, M, K, N, t->accumulate); break;
    case HEAD_FORWARD: matmul_head_forward(mm, c, t->x, t->w, M, K, N); break;
    case HEAD_DINPUT: matmul_head_dinput(mm, c, t->y, t->w, M, K, N, t->accumulate); break;
    case HEAD_DWEIGHT: matmul_head_dweight(mm, c, t->y, t->x, M, K, N, t->accumulate); break;
    }
}

static size_t output_floats(const Case *t) {
    if (t->product == FORWARD || t->product == HEAD_FORWARD) return t->M * t->N;
    return t->product == DINPUT || t->product == HEAD_DINPUT ? t->M * t->K : t->K * t->N;
}

static size_t sum_length(const Case *t) {
    if (t->product == FORWARD || t->product == HEAD_FORWARD) return t->K;
    return t->product == DINPUT || t->product == HEAD_DINPUT ? t->N : t->M;
}

// The formulas of matmul.h once more, in plain loops. w(k, n) is w[k * N + n], or the head's wte[n * K + k].
static void expect_product(const Case *t, float *c, float *dbias) {
    size_t M = t->M, K = t->K, N = t->N, head = t->product >= HEAD_FORWARD;
    size_t wk = head ? 1 : N, wn = head ? K : 1;
    MatmulResult r = {.data = c, .accumulate = t->accumulate};
    switch (t->product % HEAD_FORWARD) {
    case FORWARD:
        r.row = N, r.bias = t->bias && !head ? t->b : NULL;
        matmul_reference(r, (MatmulOperand){t->x, K, 1}, (MatmulOperand){t->w, wk, wn}, M, N, K);
        break;
    case DINPUT:
        r.row = K;
        matmul_reference(r, (MatmulOperand){t->y, N, 1}, (MatmulOperand){t->w, wn, wk}, M, K, N);
        break;
    default: // dw(k, n) = sum_m x(m, k) y(m, n), and its column sums
        for (size_t k = 0; k < K; k++)
            for (size_t n = 0; n < N; n++) {
                double sum = t->accumulate ? c[k * wk + n * wn] : 0;
                for (size_t m = 0; m < M; m++) sum += (double)t->x[m * K + k] * t->y[m * N + n];
                c[k * wk + n * wn] = (float)sum;
            }
        for (size_t n = 0; n < N; n++) {
            double sum = t->accumulate ? dbias[n] : 0;
            for (size_t m = 0; m < M; m++) sum += t->y[m * N + n];
            dbias[n] = (float)sum;
        }
    }
}

static void check_case(Matmul *one, Matmul *two, Case t) {
    t.x = random_array(t.M * t.K), t.y = random_array(t.M * t.N), t.w = random_array(t.K * t.N);
    t.b = random_array(t.N);
    size_t n = output_floats(&t), K = sum_length(&t);
    Output c = output_create(n, t.accumulate), dbias = output_create(t.N, t.accumulate);
    Output c2 = output_create(n, t.accumulate), dbias2 = output_create(t.N, t.accumulate);
    Output want = output_create(n, false), want_dbias = output_create(t.N, false);
    memcpy(want.data, c.data, n * sizeof(float)), memcpy(c2.data, c.data, n * sizeof(float));
    memcpy(want_dbias.data, dbias.data, t.N * 4), memcpy(dbias2.data, dbias.data, t.N * 4);
    expect_product(&t, want.data, want_dbias.data);
    run_product(one, &t, c.data, dbias.data);
    run_product(two, &t, c2.data, dbias2.data);
    const char *name = product_names[t.product];
    double error = worst_error(c.data, want.data, n, K);
    CHECK(error < 1, "%s M %zu K %zu N %zu accumulate %d: error %g", name, t.M, t.K, t.N, t.accumulate, error);
    CHECK(!memcmp(c.data, c2.data, n * sizeof(float)), "%s M %zu K %zu N %zu: threads differ", name, t.M, t.K, t.N);
    CHECK(output_guards_intact(&c) && output_guards_intact(&c2), "%s M %zu K %zu N %zu wrote beyond C", name, t.M, t.K,
          t.N);
    if (t.product == DWEIGHT && t.bias) {
        error = worst_error(dbias.data, want_dbias.data, t.N, t.M);
        CHECK(error < 1, "dbias M %zu N %zu: error %g", t.M, t.N, error);
        CHECK(!memcmp(dbias.data, dbias2.data, t.N * 4), "dbias M %zu N %zu: threads differ", t.M, t.N);
        CHECK(output_guards_intact(&dbias), "dbias M %zu N %zu wrote beyond", t.M, t.N);
    }
    Output *outputs[] = {&c, &c2, &dbias, &dbias2, &want, &want_dbias};
    for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) free(outputs[i]->base);
    free(t.x), free(t.y), free(t.w), free(t.b);
}

static void check_shapes(const size_t (*shapes)[3], size_t count) {
    Error e;
    Matmul *one, *many;
    CHECK_OK(matmul_create(&one, 1, &e), &e);
    for (size_t i = 0; i < count; i++) {
        CHECK_OK(matmul_create(&many, i % 2 ? 2 : 5, &e), &e);
        for (int variant = 0; variant < 4 * PRODUCTS; variant++) {
            bool accumulate = variant & 1, bias = variant & 2;
            int product = variant / 4;
            if (accumulate && product % HEAD_FORWARD == FORWARD) continue;
            check_case(one, many,
                       (Case){.product = product,
                              .M = shapes[i][0],
                              .K = shapes[i][1],
                              .N = shapes[i][2],
                              .accumulate = accumulate,
                              .bias = bias});
        }
        matmul_free(many);
    }
    matmul_free(one);
}

static void test_small_shapes(void) { // every size from 1 to past a tile, in every place
    size_t shapes[80][3];
    for (size_t i = 0; i < 80; i++)
        for (int j = 0; j < 3; j++) shapes[i][j] = 1 + (i < 40 ? (i * (size_t)(j * 2 + 1)) % 40 : random_below(80));
    check_shapes((const size_t(*)[3])shapes, 80);
}

static void test_blocked_shapes(void) { // beyond one block of K or N, with and without a remainder
    const size_t shapes[][3] = {{1, 1000, 1},    {1, 1, 1100},   {1100, 1, 1},  {13, 769, 33}, {37, 385, 513},
                                {24, 384, 1024}, {70, 128, 384}, {64, 9, 1537}, {1025, 5, 47}, {12, 1153, 32}};
    check_shapes(shapes, sizeof shapes / sizeof *shapes);
}

static void test_bits_do_not_depend_on_m_or_n(void) { // one row alone gives the bits that it has among others
    Error e;
    Matmul *mm;
    CHECK_OK(matmul_create(&mm, 2, &e), &e);
    enum { M = 29, K = 801, N = 83 };
    float *x = random_array(M * K), *w = random_array(K * N), *y = malloc(M * N * 4), *row = malloc(N * 4);
    matmul_forward(mm, y, x, w, NULL, M, K, N);
    for (size_t i = 0; i < M; i++) {
        matmul_forward(mm, row, x + i * K, w, NULL, 1, K, N);
        CHECK(!memcmp(row, y + i * N, N * 4), "row %zu differs", i);
    }
    free(x), free(w), free(y), free(row);
    matmul_free(mm);
}

static void test_empty_sum(void) { // K = 0: the bias, or C as it was
    Error e;
    Matmul *mm;
    CHECK_OK(matmul_create(&mm, 2, &e), &e);
    float y[6] = {NAN, NAN, NAN, NAN, NAN, NAN}, bias[3] = {1, 2, 3}, none[1] = {0};
    matmul_forward(mm, y, none, none, bias, 2, 0, 3);
    for (size_t i = 0; i < 6; i++) CHECK(y[i] == bias[i % 3], "y[%zu] = %g", i, y[i]);
    matmul_forward(mm, NULL, none, none, NULL, 0, 5, 3);
    matmul_free(mm);
}

static void test_nan_and_infinity_pass_through(void) {
    Error e;
    Matmul *mm;
    CHECK_OK(matmul_create(&mm, 1, &e), &e);
    enum { M = 14, K = 40, N = 35 };
    float *x = random_array(M * K), *w = random_array(K * N), *y = malloc(M * N * 4);
    x[3 * K + 7] = NAN, x[9 * K + 2] = INFINITY;
    matmul_forward(mm, y, x, w, NULL, M, K, N);
    for (size_t i = 0; i < M * N; i++)
        CHECK(!isfinite(y[i]) == (i / N == 3 || i / N == 9), "row %zu column %zu: %g", i / N, i % N, y[i]);
    free(x), free(w), free(y);
    matmul_free(mm);
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
        volatile float x = exact[i][0]; // not worked out by the compiler, where no sanitizer looks
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
    enum { CHUNKS = 70001 }; // several chunks and a tail
    Output y = output_create(CHUNKS, false), dx = output_create(CHUNKS, false);
    float *x = random_array(CHUNKS), *dy = random_array(CHUNKS);
    for (size_t i = 0; i < CHUNKS; i++) x[i] *= i % 2 ? 8 : 1;
    gelu_forward(y.data, x, CHUNKS);
    gelu_backward(dx.data, dy, x, CHUNKS);
    for (size_t i = 0; i < CHUNKS; i++) {
        CHECK_CLOSE(y.data[i], gelu_reference(x[i]), 1e-6, 0.02);
        double h = 1e-5, slope = (gelu_reference(x[i] + h) - gelu_reference(x[i] - h)) / (2 * h);
        CHECK_CLOSE(dx.data[i], dy[i] * slope, 1e-6, 0.1 + fabs(dy[i]));
    }
    CHECK(output_guards_intact(&y) && output_guards_intact(&dx), "wrote beyond");
    for (size_t n = 0; n < 70; n++) { // short arrays and in place: the same bits as in the long one
        memcpy(dx.data, x, n * 4);
        gelu_forward(dx.data, dx.data, n);
        CHECK(!memcmp(dx.data, y.data, n * 4), "n %zu differs", n);
    }
    float large[2] = {50, -50}, result[2];
    gelu_forward(result, large, 2);
    CHECK(result[0] == 50 && result[1] == 0, "gelu(+-50) = %g, %g", result[0], result[1]);
    free(y.base), free(dx.base), free(x), free(dy);
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
