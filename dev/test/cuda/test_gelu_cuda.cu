// GELU and the gradients of biases (kernel_test.cuh).
#include "kernel_test.cuh"

#include "cuda/gelu.cuh"

static double gelu_tanh(double x) { return 0.5 * x * (1.0 + tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x))); }
static double gelu_slope(double x) { // by a central difference: independent of the derivative's formula
    const double h = 1e-5;
    return (gelu_tanh(x + h) - gelu_tanh(x - h)) / (2.0 * h);
}

static void test_gelu(void) {
    for (size_t n : {(size_t)1, (size_t)7, (size_t)8, (size_t)5003, (size_t)random_int(1, 100000)}) {
        std::vector<real> x = random_vector<real>(n, 0.0, 2.0), dy = random_vector<real>(n);
        const float extremes[] = {0.0f, -0.0f, 60.0f, -60.0f, 3e4f, -3e4f, -6.0f};
        for (size_t i = 0; i < n && i < 7; i++) x[i] = (real)extremes[i];
        real *d_x = device_from(x), *d_dy = device_new<real>(n), *y = device_new<real>(n);
        run_twice(
            "gelu", [&] { device_set(d_dy, dy); },
            [&] {
                CALL_OK(gelu_forward(y, d_x, n, 0, &e));
                CALL_OK(gelu_backward(d_dy, d_x, n, 0, &e));
            },
            {{y, n * sizeof(real)}, {d_dy, n * sizeof(real)}});
        std::vector<double> want(n), want_dx(n);
        for (size_t i = 0; i < n; i++) {
            want[i] = gelu_tanh(value(x[i]));
            want_dx[i] = value(dy[i]) * (fabs(value(x[i])) > 50 ? value(x[i]) > 0 : gelu_slope(value(x[i])));
        }
        std::vector<real> got = host_from(y, n);
        std::vector<double> scaled(n);
        for (size_t i = 0; i < n; i++) { // large values would raise the rms, and the tolerance of all others with it
            const double scale = fabs(value(x[i])) > 50 ? 1e-4 : 1.0;
            scaled[i] = scale * value(got[i]);
            want[i] *= scale;
        }
        check_close("gelu", scaled, want, REAL_RELATIVE, REAL_ABSOLUTE);
        check_close("dgelu", host_from(d_dy, n), want_dx, REAL_RELATIVE, REAL_ABSOLUTE);
        case_end();
    }
}

static void bias_case(Shape s) {
    const int B = s.B, T = s.T, C = s.C;
    const std::vector<real> dy = random_vector<real>((size_t)B * T * C);
    real *d_dy = device_from(dy);
    Columns dbias = columns_new(B, C);
    ColumnJobs jobs = jobs_new(bias_backward_bytes(B, T, C));
    std::vector<Output> outputs;
    columns_outputs(outputs, dbias);
    run_twice(
        "bias", [&] { columns_reset(dbias); },
        [&] {
            CALL_OK(bias_backward(dbias.device, d_dy, B, T, C, &jobs, 0, &e));
            CALL_OK(column_finish(&jobs, 0, &e));
        },
        outputs);
    columns_check("dbias", dbias, as_doubles(dy), T);
    case_end();
}

static void test_bias_backward(void) {
    for (Shape s : random_shapes()) bias_case(s);
}

// Stage two of several at once, of other shapes.
static void test_together(void) {
    const Shape shapes[] = {{3, 33, 40}, {1, 5, 7}, {2, random_int(1, 300), 1028}, {random_int(1, 40), 9, 132}};
    ColumnJobs jobs = jobs_new(0);
    size_t bytes = 0;
    for (const Shape &s : shapes) bytes += bias_backward_bytes(s.B, s.T, s.C);
    jobs.memory = workspace_new(bytes);
    std::vector<Columns> biases;
    std::vector<std::vector<real>> dy;
    std::vector<Output> outputs;
    for (const Shape &s : shapes) {
        biases.push_back(columns_new(s.B, s.C));
        dy.push_back(random_vector<real>((size_t)s.B * s.T * s.C));
        columns_outputs(outputs, biases.back());
    }
    static_assert(sizeof shapes / sizeof *shapes == COLUMN_JOBS_MAX, "the list is full");
    std::vector<real *> d_dy;
    for (const auto &values : dy) d_dy.push_back(device_from(values));
    run_twice(
        "together",
        [&] {
            for (const Columns &c : biases) columns_reset(c);
        },
        [&] {
            for (int i = 0; i < COLUMN_JOBS_MAX; i++)
                CALL_OK(bias_backward(biases[i].device, d_dy[i], shapes[i].B, shapes[i].T, shapes[i].C, &jobs, 0, &e));
            CALL_OK(column_finish(&jobs, 0, &e));
        },
        outputs);
    for (int i = 0; i < COLUMN_JOBS_MAX; i++) columns_check("dbias", biases[i], as_doubles(dy[i]), shapes[i].T);
    case_end();
}

int main(int argc, char **argv) {
    int code = kernel_test_begin("test_gelu_cuda", argc, argv);
    if (code) return code;
    RUN(test_gelu);
    RUN(test_bias_backward);
    RUN(test_together);
    return test_summary();
}
