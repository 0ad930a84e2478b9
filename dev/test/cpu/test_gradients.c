// The engine's gradient against central differences of its own loss: needs no Python and no formula of a gradient.
//
// For a tensor's gradient g and a direction d in that tensor, the slope of the loss along d must be <g, d>. The engine
// is fp32: a loss near 4 is known to about 1e-7 (its mean over all positions is taken in double), so only a large slope
// can be measured, and a random direction is almost orthogonal to g. So d is the sum of two parts: g itself on a random
// half of its elements, which gives a slope near |g| / 2 and shows errors in that half; and noise on all elements, which
// shows gradients that the engine lacks. The step changes the loss by about 1e-2, where rounding and curvature matter
// least, and the four-point formula removes the curvature (Abramowitz and Stegun 1964, 25.3.6):
//     f'(0) = (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12 h + O(h^4)
#include "world.h"

enum { DIRECTIONS = 4 };
static const double loss_change = 1e-2;  // nats, of a step
static const double longest_step = 5e-2; // |h d| at most, where the slope is small
static const double tolerance = 2e-4;    // of |g| |d|; 4e-5 is the worst seen

typedef struct {
    World w;
    Engine *engine;
    int rows;
    float *moved, *direction, *token_loss;
    Outcome at; // grad: the gradient
} Setup;

// The sum over the rows of L_b, whose gradient the engine holds, with a tensor moved by h along the direction.
static double loss_at(Setup *s, const Tensor *t, double h) {
    Error e = {0};
    int T = s->w.seq_len, rows = s->rows;
    Range range = {t->offset, t->offset + t->count};
    for (size_t i = range.begin; i < range.end; i++) s->moved[i] = (float)(s->w.param[i] + h * s->direction[i]);
    int code = engine_load(s->engine, STATE_PARAM, range, s->moved + range.begin, &e);
    for (int i = 0; i < rows * T; i++) s->token_loss[i] = NAN;
    if (!code) code = engine_eval(s->engine, s->w.tokens, rows, T, s->token_loss, &e);
    CHECK(code == 0, "%s", e.what);
    double sum = 0;
    for (int i = 0; i < rows * T; i++) sum += (double)s->token_loss[i] / T;
    return sum;
}

// direction = half of g, by chance, to length 1, plus noise of length 1.
static void direction_draw(Setup *s, const Tensor *t, uint64_t stream) {
    float *d = s->direction + t->offset;
    const float *g = s->at.grad + t->offset;
    double half = 0, noise = 0;
    for (int pass = 0; pass < 2; pass++) // lengths first
        for (size_t i = 0; i < t->count; i++) {
            double a = rng_u32(1, stream, i) & 1 ? (double)g[i] : 0, b = rng_normal(1, stream + 1, i);
            if (pass == 0) half += a * a, noise += b * b;
            else d[i] = (float)(a / sqrt(half + 1e-30) + b / sqrt(noise));
        }
}

// Error of one direction, relative to |g| |d|.
static double direction_error(Setup *s, const Tensor *t, uint64_t stream) {
    direction_draw(s, t, stream);
    const float *g = s->at.grad + t->offset, *d = s->direction + t->offset;
    double slope = 0, length = 0, norm = 0;
    for (size_t i = 0; i < t->count; i++) {
        slope += (double)g[i] * d[i];
        length += (double)d[i] * d[i];
        norm += (double)g[i] * g[i];
    }
    length = sqrt(length), norm = sqrt(norm);
    double h = fmin(loss_change / fabs(slope), longest_step / length);
    double near = loss_at(s, t, h) - loss_at(s, t, -h), far = loss_at(s, t, 2 * h) - loss_at(s, t, -2 * h);
    loss_at(s, t, 0); // puts the tensor back
    return fabs((8 * near - far) / (12 * h) - slope) / (norm * length);
}

static void check_model(ModelConfig shape, int seq_len, int rows, uint64_t seed) {
    Setup s = {.w = world_of(shape, seq_len, rows, seed), .rows = rows};
    s.engine = engine_of(&s.w, (EngineConfig){.micro_batch = rows, .threads = 1});
    s.moved = floats_of(&s.w), s.direction = floats_of(&s.w);
    s.token_loss = malloc((size_t)(rows * seq_len) * sizeof(float));
    s.at = measure(&s.w, s.engine, s.w.tokens, 0, rows, rows, GNS_OFF);
    double worst = 0;
    const char *where = "";
    for (int k = 0; k < s.w.model.tensor_count; k++) {
        const Tensor *t = &s.w.model.tensors[k];
        for (uint64_t i = 0; i < DIRECTIONS; i++) {
            double error = direction_error(&s, t, SMALL_DIRECTIONS + 2 * (DIRECTIONS * (uint64_t)k + i));
            CHECK(error <= tolerance, "%s: slope off by %.3g of |g| |d|", t->name, error);
            if (error > worst) worst = error, where = t->name;
        }
    }
    printf("  worst of %d directions: %.2g of |g| |d| (%s)\n", DIRECTIONS * s.w.model.tensor_count, worst, where);
    engine_destroy(s.engine);
    world_close(&s.w);
    free(s.moved), free(s.direction), free(s.token_loss), free(s.at.grad);
}

static void test_models(void) {
    check_model((ModelConfig){2, 2, 32, 61, 13}, 13, 3, 1);
    check_model((ModelConfig){1, 1, 24, 37, 16}, 7, 5, 2); // one head; positions beyond the rows
    check_model((ModelConfig){2, 4, 32, 5, 40}, 33, 2, 3); // few words
}

int main(void) {
    RUN(test_models);
    return test_summary();
}
