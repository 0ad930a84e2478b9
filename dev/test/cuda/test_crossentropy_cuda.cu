// Tests cross-entropy and its gradient (kernel_test.cuh).
#include "kernel_test.cuh"

#include "cuda/crossentropy.cuh"

// Bound on the error of fp32 arithmetic before the result is rounded. |x| + log T reaches 64, or 92 in base 2. Half a
// unit in the last place is 2^-19 up to 64, 2^-18 up to 92. p = softmax scale / T has these relative errors:
//   2 x 2^-19             of the exponent: logsumexp = max + log(sum), shift = logsumexp + log T
//   3 x 2^-18 ln 2        of the exponent: max log2 e, shift log2 e, x log2 e - shift log2 e
//   1.3e-6                of the exponent: log2 e as a float, times 64
//   100 x 2^-24 = 6.0e-6  the sum: V / 768 terms per thread, then the threads' sums
//   2 x 2^-22             the GPU's 2^x, in the sum and for p
// The total is 2.0e-5 of p. A loss has a smaller absolute error. The test allows twice the total.
static const double ARITHMETIC = 4e-5;
static const double SMALLEST = 1.2e-38; // smallest normal number; a smaller p becomes 0

static void crossentropy_case(int B, int T, int V, int Vp, double smoothing) {
    const float scale = (float)(1 << random_int(0, 10));                           // loss scale
    const int N = B * T, row0 = random_int(0, N - 1), R = random_int(1, N - row0); // a chunk of the positions
    const size_t n = (size_t)R * Vp;
    const std::vector<uint16_t> tokens = random_tokens(B, T, V);
    std::vector<real> logits = random_vector<real>(n, -1.0, 4.0);
    for (int r = 0; r < R; r++) {
        for (int v = V; v < Vp; v++) logits[(size_t)r * Vp + v] = (real)NAN;
        if (random_int(0, 3) == 0) logits[(size_t)r * Vp + random_int(0, V - 1)] = (real)60.0f; // a sharp softmax
    }
    uint16_t *d_tokens = device_from(tokens);
    real *d_logits = device_from(logits);
    float *losses = device_new<float>(R), *losses_only = device_new<float>(R);
    float *smoothed = smoothing > 0 ? device_new<float>(R) : NULL, s = (float)smoothing;
    CALL_OK(crossentropy({losses_only, NULL, 0, 0, 0, d_logits, d_tokens, R, row0, T, V, Vp}, 0, &e));
    CHECK(memcmp(host_from(d_logits, n).data(), logits.data(), n * sizeof(real)) == 0, "the loss changed the logits");
    run_twice(
        "crossentropy", [&] { device_set(d_logits, logits); },
        [&] {
            CALL_OK(crossentropy({losses, smoothed, s, 0, 0, d_logits, d_tokens, R, row0, T, V, Vp, scale}, 0, &e));
        },
        {{d_logits, n * sizeof(real)}, {losses, R * sizeof(float)}, {smoothed, smoothed ? R * sizeof(float) : 0}});
    std::vector<double> want_losses(R), want_smoothed(R), want(n, 0.0), tolerance(n, 0.0);
    for (int r = 0; r < R; r++) {
        const int target = tokens[(size_t)((row0 + r) / T) * (T + 1) + (row0 + r) % T + 1];
        const real *row = logits.data() + (size_t)r * Vp;
        double max = -INFINITY, sum = 0.0, mean = 0.0;
        for (int v = 0; v < V; v++) max = fmax(max, value(row[v]));
        for (int v = 0; v < V; v++) sum += exp(value(row[v]) - max), mean += value(row[v]) / V;
        want_losses[r] = max + log(sum) - value(row[target]);
        want_smoothed[r] = max + log(sum) - (1 - smoothing) * value(row[target]) - smoothing * mean;
        for (int v = 0; v < V; v++) {
            const double p = exp(value(row[v]) - max) / sum * scale / T, even = smoothing / V * scale / T;
            const double d = p - (1 - smoothing) * (v == target) * scale / T - even;
            want[(size_t)r * Vp + v] = d;
            const double onehot = v == target ? 0x1p-22 * scale / T : 0.0; // rounding of scale / T and of p - scale / T
            tolerance[(size_t)r * Vp + v] = ROUNDING * fabs(d) + ARITHMETIC * p + onehot + even * 0x1p-22 + SMALLEST;
        }
    }
    const std::vector<double> of_losses(R, ARITHMETIC);
    check_within("losses", host_from(losses, R), want_losses, of_losses);
    if (smoothed) check_within("smoothed", host_from(smoothed, R), want_smoothed, of_losses);
    check_within("losses only", host_from(losses_only, R), want_losses, of_losses);
    check_within("dlogits", host_from(d_logits, n), want, tolerance);
    case_end();
}

static void test_crossentropy(void) {
    for (double smoothing : {0.0, 0.1, 0.9}) {
        crossentropy_case(1, 1, 1, 8, smoothing);
        crossentropy_case(2, 3, 7, 8, smoothing);
        crossentropy_case(3, 4, 64, 64, smoothing);
        crossentropy_case(2, 5, 1000, 1024, smoothing);
        crossentropy_case(1, small_shapes_only ? 1 : 3, 50257, 50304, smoothing);
        crossentropy_case(1, small_shapes_only ? 1 : 2, 65535, 65536, smoothing);
    }
    crossentropy_case(3, 200, 50257, 50304, 0.1);
    for (int i = 0; i < 12; i++) {
        const int V = random_int(2, 9000);
        crossentropy_case(random_int(1, 3), random_int(1, 9), V, (int)round_up(V, i % 2 ? 8 : 128), i / 6 * 0.3);
    }
}

static void test_crossentropy_nan(void) {
    const int V = 4001, Vp = 4008;
    std::vector<real> logits = random_vector<real>((size_t)4 * Vp);
    logits[1234] = (real)NAN;
    logits[Vp + 77] = (real)INFINITY;
    for (int v = 0; v < V; v++) logits[2 * (size_t)Vp + v] = (real)NAN;
    float *losses = device_new<float>(4);
    uint16_t *tokens = device_from(random_tokens(1, 4, V));
    CALL_OK(crossentropy({losses, NULL, 0, 0, 0, device_from(logits), tokens, 4, 0, 4, V, Vp}, 0, &e));
    const std::vector<float> got = host_from(losses, 4);
    for (int i = 0; i < 3; i++) CHECK(!isfinite(got[i]), "loss %d is %g, though a logit is not finite", i, got[i]);
    CHECK(isfinite(got[3]), "the clean row's loss is %g", got[3]);
    case_end();
}

int main(int argc, char **argv) {
    kernel_test_begin("test_crossentropy_cuda", argc, argv);
    RUN(test_crossentropy, test_crossentropy_nan);
    return test_summary();
}
