// Compares attention with plain loops in double: random shapes, guarded outputs, several threads. dev/oracle checks the
// gradient's formula.
#include "arrays.h"
#include "cpu/attention.h"

typedef struct {
    size_t B, T, NH, D;
} Shape;

// Set by a test; read by attention_create and by the references.
static Dropout dropout;
static uint16_t *position; // (B, T) positions in documents, or NULL

static Attention attention_create(int threads, size_t T, size_t D) {
    return (Attention){threads,    T,       D,        malloc(attention_scratch(threads, T, D) * sizeof(float)),
                       DTYPE_FP32, dropout, position, 0};
}

static double factor_of(size_t b, size_t h, size_t t, size_t j) {
    if (!dropout.below) return 1;
    Dropout d = dropout_at(dropout, dropout.example + b, dropout.layer);
    return (double)dropout_factor(d, DROPOUT_PROBABILITY, (uint32_t)h, (uint32_t)t, (uint32_t)j);
}

static const float *vector_of(const float *qkv, Shape s, size_t b, size_t t, size_t which, size_t h) {
    return qkv + ((b * s.T + t) * 3 + which) * s.NH * s.D + h * s.D;
}

static size_t first_key(Shape s, size_t b, size_t t) { return position ? t - position[b * s.T + t] : 0; }

// Writes p (t + 1), the softmax of row t of head (b, h). Returns the log-sum-exp of the row's scores.
static double reference_row(double *p, const float *qkv, Shape s, size_t b, size_t h, size_t t) {
    const float *q = vector_of(qkv, s, b, t, 0, h);
    double max = -INFINITY, sum = 0;
    for (size_t j = 0; j < first_key(s, b, t); j++) p[j] = 0;
    for (size_t j = first_key(s, b, t); j <= t; j++) {
        const float *k = vector_of(qkv, s, b, j, 1, h);
        p[j] = 0;
        for (size_t d = 0; d < s.D; d++) p[j] += (double)q[d] * k[d] / sqrt((double)s.D);
        max = fmax(max, p[j]);
    }
    for (size_t j = first_key(s, b, t); j <= t; j++) sum += exp(p[j] - max);
    double lse = max + log(sum);
    for (size_t j = first_key(s, b, t); j <= t; j++) p[j] = exp(p[j] - lse);
    return lse;
}

static void reference_forward(double *out, double *lse, const float *qkv, Shape s) {
    double *p = malloc(s.T * sizeof *p);
    for (size_t row = 0; row < s.B * s.NH * s.T; row++) {
        size_t b = row / s.T / s.NH, h = row / s.T % s.NH, t = row % s.T;
        double *o = out + (b * s.T + t) * s.NH * s.D + h * s.D;
        lse[row] = reference_row(p, qkv, s, b, h, t);
        for (size_t d = 0; d < s.D; d++) {
            o[d] = 0;
            for (size_t j = 0; j <= t; j++) o[d] += factor_of(b, h, t, j) * p[j] * vector_of(qkv, s, b, j, 2, h)[d];
        }
    }
    free(p);
}

static void reference_backward(double *dqkv, const float *dout, const float *qkv, Shape s) {
    double *p = malloc(s.T * sizeof *p), *dp = malloc(s.T * sizeof *dp);
    memset(dqkv, 0, s.B * s.T * 3 * s.NH * s.D * sizeof *dqkv);
    for (size_t row = 0; row < s.B * s.NH * s.T; row++) {
        size_t b = row / s.T / s.NH, h = row / s.T % s.NH, t = row % s.T;
        const float *go = dout + (b * s.T + t) * s.NH * s.D + h * s.D, *q = vector_of(qkv, s, b, t, 0, h);
        double *dq = dqkv + (q - qkv), mean = 0;
        reference_row(p, qkv, s, b, h, t);
        for (size_t j = 0; j <= t; j++) {
            const float *v = vector_of(qkv, s, b, j, 2, h);
            dp[j] = 0;
            for (size_t d = 0; d < s.D; d++) dp[j] += factor_of(b, h, t, j) * (double)go[d] * v[d];
            mean += p[j] * dp[j];
        }
        for (size_t j = 0; j <= t; j++) {
            const float *k = vector_of(qkv, s, b, j, 1, h);
            double *dk = dqkv + (k - qkv), *dv = dk + s.NH * s.D, ds = p[j] * (dp[j] - mean) / sqrt((double)s.D);
            double dropped = factor_of(b, h, t, j) * p[j];
            for (size_t d = 0; d < s.D; d++) dq[d] += ds * k[d], dk[d] += ds * q[d], dv[d] += dropped * go[d];
        }
    }
    free(p), free(dp);
}

static void check_near(const char *what, Shape s, const float *got, const double *want, size_t n, double tolerance) {
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        double error = fabs(got[i] - want[i]) / fmax(1, fabs(want[i]));
        if (!(error <= worst)) worst = isnan(error) ? 1e9 : error;
    }
    CHECK(worst <= tolerance, "%s B %zu T %zu NH %zu D %zu: error %g, tolerance %g", what, s.B, s.T, s.NH, s.D, worst,
          tolerance);
}

static void check_shape(Shape s, float size) {
    Attention one = attention_create(1, s.T, s.D);
    Attention two = attention_create(2, s.T + 37, s.D + 5); // made for larger shapes
    size_t C = s.NH * s.D, n = s.B * s.T * C, rows = s.B * s.NH * s.T;
    float *qkv = random_array(3 * n, size), *dout = random_array(n, 1);
    float *out[2], *lse[2], *dqkv[2];
    double *want_out = malloc(n * sizeof(double)), *want_lse = malloc(rows * sizeof(double));
    double *want_dqkv = malloc(3 * n * sizeof(double));
    for (int i = 0; i < 2; i++) {
        out[i] = guarded_array(n), lse[i] = guarded_array(rows), dqkv[i] = guarded_array(3 * n);
        attention_forward(i ? &two : &one, out[i], lse[i], qkv, s.B, s.T, 0, s.NH, s.D);
        attention_backward(i ? &two : &one, dqkv[i], dout, qkv, out[i], lse[i], s.B, s.T, s.NH, s.D);
        CHECK(guards_intact(out[i], n) && guards_intact(lse[i], rows) && guards_intact(dqkv[i], 3 * n),
              "B %zu T %zu NH %zu D %zu wrote beyond", s.B, s.T, s.NH, s.D);
    }
    reference_forward(want_out, want_lse, qkv, s);
    reference_backward(want_dqkv, dout, qkv, s);
    double scores = 1 + size * size * sqrt((double)s.D); // bound of the scores, whose rounding error every p inherits
    check_near("out", s, out[0], want_out, n, 1e-6 * scores);
    check_near("lse", s, lse[0], want_lse, rows, 5e-7 * scores);
    check_near("dqkv", s, dqkv[0], want_dqkv, 3 * n, 1e-6 * scores * scores);
    CHECK(!memcmp(out[0], out[1], n * 4) && !memcmp(lse[0], lse[1], rows * 4) && !memcmp(dqkv[0], dqkv[1], 12 * n),
          "B %zu T %zu NH %zu D %zu: threads differ", s.B, s.T, s.NH, s.D);
    for (int i = 0; i < 2; i++) guarded_free(out[i]), guarded_free(lse[i]), guarded_free(dqkv[i]);
    free(qkv), free(dout), free(want_out), free(want_lse), free(want_dqkv);
    free(one.scratch), free(two.scratch);
}

static void test_every_length(void) {
    for (size_t T = 1; T <= 80; T++) check_shape((Shape){1 + T % 2, T, 1 + T % 3, 1 + T * 7 % 40}, 1);
}

static void test_shapes(void) {
    static const struct {
        Shape shape;
        float size;
    } cases[] = {
        {{3, 64, 4, 32}, 1},  {{1, 64, 2, 64}, 1},
        {{1, 33, 1, 128}, 1}, {{1, 100, 2, 80}, 1}, // head sizes of real models
        {{1, 17, 1, 150}, 1}, {{1, 257, 1, 16}, 1},
        {{1, 512, 1, 8}, 1}, // T > 256: several blocks of keys, with and without a remainder
        {{1, 601, 2, 20}, 1}, {{1, 1024, 1, 64}, 1},
        {{2, 40, 2, 16}, 6},  {{1, 70, 1, 64}, 12}, // nearly one-hot: exp must neither overflow nor lose the maximum
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_shape(cases[i].shape, cases[i].size);
}

// Checks documents of 1 to `longest` tokens; each row begins a document.
static void check_documents(Shape s, int longest) {
    position = malloc(s.B * s.T * sizeof *position);
    for (size_t i = 0, left = 0; i < s.B * s.T; i++) {
        position[i] = (uint16_t)(i % s.T == 0 || left == 0 ? 0 : position[i - 1] + 1);
        left = left == 0 ? (size_t)(rand() % longest) : left - 1;
    }
    check_shape(s, 1);
    free(position);
    position = NULL;
}

static void test_documents(void) {
    for (size_t T = 1; T <= 80; T += 3) check_documents((Shape){1 + T % 2, T, 1 + T % 3, 1 + T * 7 % 40}, 1 + (int)T);
    check_documents((Shape){2, 257, 1, 16}, 20);
    check_documents((Shape){1, 601, 2, 20}, 300);
    check_documents((Shape){1, 601, 2, 20}, 1);
    dropout = dropout_at(dropout_of(0.3, 5), 100, 3);
    check_documents((Shape){2, 601, 1, 20}, 200);
    dropout = dropout_of(0, 0);
}

static void test_dropout(void) {
    dropout = dropout_at(dropout_of(0.3, 5), 100, 3);
    check_shape((Shape){3, 40, 3, 16}, 1);
    check_shape((Shape){2, 150, 2, 20}, 1);
    check_shape((Shape){1, 601, 1, 12}, 1);
    dropout = dropout_of(0, 0);
}

int main(void) {
    RUN(test_every_length, test_shapes, test_dropout, test_documents);
    return test_summary();
}
