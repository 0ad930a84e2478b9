// Tests GELU and the gradients of biases (kernel_test.cuh).
#include "kernel_test.cuh"

#include "cuda/gelu.cuh"

static double gelu_slope(double x) { // a central difference: independent of the derivative's formula
    const double h = 1e-5;
    return (gelu_tanh(x + h) - gelu_tanh(x - h)) / (2.0 * h);
}

// Half the distance between two codes, or fp32's error.
static const double SLOPE_ERROR = sizeof(GeluSlope) == 1 ? 1.0 / 404 + 1e-6 : 1e-5;

static std::vector<double> slopes_from(const GeluSlope *p, size_t n) {
    std::vector<double> slopes;
    for (GeluSlope s : host_from(p, n))
        slopes.push_back(sizeof s > 1 ? s : s == int{GELU_CODE_NAN} ? NAN : (s - int{GELU_CODE_ZERO}) / 202.0);
    return slopes;
}

static void test_gelu(void) {
    for (size_t n : {(size_t)1, (size_t)7, (size_t)8, (size_t)5003, (size_t)random_int(1, 100000)}) {
        std::vector<real> x = random_vector<real>(n, 0.0, 2.0);
        const float extremes[] = {0.0f, -0.0f, 60.0f, -60.0f, 3e4f, -3e4f, -6.0f};
        for (size_t i = 0; i < n && i < 7; i++) x[i] = (real)extremes[i];
        real *d_x = device_from(x), *y = device_new<real>(n);
        GeluSlope *slope = device_new<GeluSlope>(n);
        run_twice(
            "gelu", [] {}, [&] { CALL_OK(gelu_forward(y, slope, d_x, n, 0, &e)); },
            {{y, n * sizeof(real)}, {slope, n * sizeof(GeluSlope)}});
        std::vector<double> want(n), want_slope(n);
        for (size_t i = 0; i < n; i++) {
            want[i] = gelu_tanh(value(x[i]));
            want_slope[i] = fabs(value(x[i])) > 50 ? value(x[i]) > 0 : gelu_slope(value(x[i]));
        }
        check_within("slope", slopes_from(slope, n), want_slope, std::vector<double>(n, SLOPE_ERROR));
        std::vector<real> got = host_from(y, n);
        std::vector<double> scaled(n);
        for (size_t i = 0; i < n; i++) { // a large value would raise the rms, and so every tolerance
            const double scale = fabs(value(x[i])) > 50 ? 1e-4 : 1.0;
            scaled[i] = scale * value(got[i]);
            want[i] *= scale;
        }
        check_close("gelu", scaled, want, REAL_RELATIVE, REAL_ABSOLUTE);
        case_end();
    }
}

// Every value of 16 bits, in place. NaN and infinities have no slope. A value whose cube exceeds fp32 may have none.
static void test_every_value(void) {
    if (sizeof(real) != 2) SKIP("fp32 has too many values");
    const size_t n = 1 << 16;
    std::vector<uint16_t> bits(n);
    std::iota(bits.begin(), bits.end(), 0);
    real *y = (real *)device_from(bits);
    const std::vector<double> x = as_doubles(host_from(y, n));
    GeluSlope *slope = device_new<GeluSlope>(n);
    CALL_OK(gelu_forward(y, slope, y, n, 0, &e));
    const std::vector<double> slopes = slopes_from(slope, n), got = as_doubles(host_from(y, n));
    for (size_t i = 0; i < n; i++) {
        const double v = x[i], want = fabs(v) > 50 ? v > 0 : gelu_slope(v);
        if (!isfinite(v)) CHECK(isnan(slopes[i]) && !isfinite(got[i]), "%g: slope %g, GELU %g", v, slopes[i], got[i]);
        else if (!(isnan(slopes[i]) && fabs(v) > 1e12))
            CHECK(fabs(slopes[i] - want) <= SLOPE_ERROR, "%g: slope %g, want %g", v, slopes[i], want);
    }
    case_end();
}

static void bias_case(Shape s, bool gelu) {
    const int B = s.B, T = s.T, C = s.C;
    const size_t n = (size_t)B * T * C;
    const std::vector<real> dy = random_vector<real>(n), x = random_vector<real>(n, 0.0, 1.5);
    real *d_dy = device_new<real>(n), *d_x = device_from(x);
    GeluSlope *slope = device_new<GeluSlope>(n);
    CALL_OK(gelu_forward(d_x, slope, d_x, n, 0, &e)); // writes the slopes
    Columns dbias = columns_new(B, C);
    ColumnJobs jobs = jobs_new(bias_backward_bytes(B, T, C));
    std::vector<Output> outputs;
    columns_outputs(outputs, dbias);
    run_twice(
        "bias", [&] { columns_reset(dbias), device_set(d_dy, dy); },
        [&] {
            CALL_OK(bias_backward(dbias.device, d_dy, gelu ? slope : NULL, B, T, C, &jobs, 0, &e));
            CALL_OK(column_finish(&jobs, 0, &e));
        },
        outputs);
    std::vector<double> rows(n);
    const std::vector<double> slopes = slopes_from(slope, n);
    for (size_t i = 0; i < n; i++) rows[i] = value(dy[i]) * (gelu ? slopes[i] : 1.0);
    if (gelu) {
        const std::vector<real> written = host_from(d_dy, n);
        check_close("dx", written, rows, REAL_RELATIVE, REAL_ABSOLUTE);
        for (size_t i = 0; i < n; i++) rows[i] = value(written[i]);
    }
    columns_check("dbias", dbias, rows, T);
    case_end();
}

static void test_bias_backward(void) {
    for (Shape s : random_shapes()) {
        bias_case(s, false);
        bias_case(s, true);
    }
}

int main(int argc, char **argv) {
    kernel_test_begin("test_gelu_cuda", argc, argv);
    RUN(test_gelu, test_every_value, test_bias_backward);
    return test_summary();
}
