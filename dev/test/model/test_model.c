// Compares presets with published models, and initial weights with their definition.
#include "../test.h"

#include "model/model.h"

static Error e;

// GPT-2: Radford et al. 2019, table 2; parameters as in Hugging Face's models (wte counts once). dN: depths and widths
// of llm.c's -e, with heads of 64.
static void test_presets(void) {
    static const struct {
        const char *name;
        int layers, heads, channels;
        size_t parameters; // with GPT-2's vocabulary and context; 0: not published
    } want[] = {
        {"gpt2-124M", 12, 12, 768, 124439808},
        {"gpt2-350M", 24, 16, 1024, 354823168},
        {"gpt2-774M", 36, 20, 1280, 774030080},
        {"gpt2-1558M", 48, 25, 1600, 1557611200},
        {"d6", 6, 6, 384, 0},
        {"d12", 12, 12, 768, 0},
        {"d24", 24, 16, 1024, 0},
        {"d36", 36, 20, 1280, 0},
        {"d48", 48, 25, 1600, 0},
        {"d60", 60, 30, 1920, 0},
        {"d72", 72, 45, 2880, 0},
        {"d84", 84, 54, 3456, 0},
        {"d7", 7, 7, 448, 0}, // by the rule for dN
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        Model model;
        ModelConfig c = {.vocab = 50257, .context = 1024};
        CHECK(model_preset(&c, want[i].name), "%s: no such preset", want[i].name);
        CHECK(c.layers == want[i].layers && c.heads == want[i].heads && c.channels == want[i].channels,
              "%s: %d layers, %d heads, %d channels", want[i].name, c.layers, c.heads, c.channels);
        CHECK(c.channels == 64 * c.heads, "%s: heads of %d", want[i].name, c.channels / c.heads);
        if (!want[i].parameters) continue;
        CHECK_OK(model_create(&model, &c, &e), &e);
        CHECK(model.parameters == want[i].parameters, "%s: %zu parameters", want[i].name, model.parameters);
        model_destroy(&model);
    }
    static const char *const none[] = {"", "d", "d0", "d-1", "d12x", "d 12", "D12", "gpt2", "gpt2-124m", "d1001", "12"};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
        ModelConfig c = {0};
        CHECK(!model_preset(&c, none[i]), "'%s' taken for a preset", none[i]);
    }
}

// Computes mean and standard deviation in double.
static void moments(const float *x, size_t n, double *mean, double *deviation) {
    double sum = 0, square = 0;
    for (size_t i = 0; i < n; i++) sum += x[i];
    *mean = sum / (double)n;
    for (size_t i = 0; i < n; i++) square += (x[i] - *mean) * (x[i] - *mean);
    *deviation = sqrt(square / (double)n);
}

static bool ends_with(const char *text, const char *end) {
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

// Weights are N(0, 0.02^2); projections into the residual stream are divided by sqrt(2 layers). LayerNorm gains are 1,
// all else 0 (Radford et al. 2019, section 2.3; Hugging Face's GPT2PreTrainedModel._init_weights).
static double wanted_deviation(const char *name, int layers) {
    if (ends_with(name, ".bias") || strstr(name, "ln_")) return 0;
    return ends_with(name, "c_proj.weight") ? 0.02 / sqrt(2.0 * layers) : 0.02;
}

// A value depends on its index and on the seed, not on the requested piece of the tensor.
static void test_initial_weights(void) {
    Model model;
    ModelConfig c = {.layers = 3, .heads = 2, .channels = 64, .vocab = 1000, .context = 64};
    CHECK_OK(model_create(&model, &c, &e), &e);
    const size_t largest = sizeof(float) * model_tensor_largest(&model);
    float *x = malloc(largest), *other = malloc(largest), first[3] = {0};
    for (int k = 0; k < model.tensor_count; k++) {
        const Tensor *t = &model.tensors[k];
        double mean, deviation, want = wanted_deviation(t->name, c.layers), n = (double)t->count;
        for (size_t i = 0; i < t->count; i++) x[i] = NAN;
        model_init_values(&model, t, 7, 0, t->count, x);
        moments(x, t->count, &mean, &deviation);
        if (want == 0) {
            double constant = strstr(t->name, "ln_") && ends_with(t->name, ".weight");
            CHECK(deviation == 0 && mean == constant, "%s: mean %g, deviation %g", t->name, mean, deviation);
            continue;
        }
        CHECK(fabs(mean) <= 5 * want / sqrt(n), "%s: mean %g", t->name, mean);
        CHECK(fabs(deviation - want) <= 5 * want / sqrt(2 * n), "%s: deviation %g, want %g", t->name, deviation, want);
        for (int i = 0; i < 3; i++) CHECK(x[i] != first[i], "%s begins as the tensor before it does", t->name);
        memcpy(first, x, sizeof first);
        const size_t third = t->count / 3, rest = t->count - third;
        model_init_values(&model, t, 7, third, rest, other);
        CHECK(memcmp(other, x + third, rest * sizeof *x) == 0, "%s: a piece differs from the whole", t->name);
        model_init_values(&model, t, 8, 0, t->count, other);
        CHECK(memcmp(other, x, sizeof first) != 0, "%s: the seed does not matter", t->name);
    }
    free(x), free(other);
    model_destroy(&model);
}

// ---- Local models (--tensor) ----------------------------------------------------------------------------------------

// Checks the maps between a cut tensor and the whole one, element by element. Adds 1 to each element's owners.
static void check_maps(const Tensor *t, uint8_t *owners) {
    size_t before = 0, whole_count = t->whole_rows * t->whole_columns;
    for (size_t i = 0, run = 0; i<t->count; i++, run -= run> 0) {
        const size_t whole = tensor_whole_index(t, i);
        CHECK(whole < whole_count, "%s: element %zu is %zu of %zu", t->name, i, whole, whole_count);
        CHECK(i == 0 || whole > tensor_whole_index(t, i - 1), "%s: element %zu is not above", t->name, i);
        CHECK(run == 0 || whole == tensor_whole_index(t, i - 1) + 1, "%s: no run before %zu", t->name, i);
        if (run == 0) run = tensor_run(t, i);
        owners[whole]++;
        for (; before <= whole; before++)
            CHECK(tensor_elements_before(t, before) == i, "%s: %zu before %zu", t->name, i, before);
    }
    for (; before <= whole_count; before++)
        CHECK(tensor_elements_before(t, before) == t->count, "%s: all before %zu", t->name, before);
}

static bool is_cut_by_rule(TensorKind kind) {
    return kind == QKV_W || kind == QKV_B || kind == PROJ_W || kind == FC_W || kind == FC_B || kind == FCPROJ_W;
}

// An element of a cut tensor belongs to one rank, an element of a whole one to all. Bucket 0 holds the whole tensors.
static void check_ranks(const ModelConfig *c, int ranks) {
    Model whole, local[8];
    CHECK_OK(model_create(&whole, c, &e), &e);
    for (int t = 0; t < ranks; t++) CHECK_OK(model_create_local(&local[t], c, t, ranks, &e), &e);
    for (int k = 0; k < whole.tensor_count; k++) {
        const Tensor *w = &whole.tensors[k];
        const bool cut = ranks > 1 && is_cut_by_rule(w->kind);
        uint8_t *owners = calloc(w->count, 1);
        for (int t = 0; t < ranks; t++) {
            const Tensor *l = &local[t].tensors[k];
            const size_t half = w->offset + w->count / 2, bucket = (size_t)model_bucket_at(&local[t], l->offset);
            CHECK(!strcmp(l->name, w->name) && tensor_is_cut(l) == cut, "%s: cut %d", l->name, cut);
            CHECK(bucket == (cut ? (size_t)l->layer + 1 : ranks > 1 ? 0 : bucket), "%s in bucket %zu", l->name, bucket);
            const Range bounds = model_bucket(&local[t], (int)bucket);
            CHECK(l->offset >= bounds.begin && l->offset + l->count <= bounds.end, "%s outside its bucket", l->name);
            check_maps(l, owners);
            const Range low = model_local_range(&local[t], &whole, k, (Range){w->offset, half}),
                        high = model_local_range(&local[t], &whole, k, (Range){half, w->offset + w->count});
            CHECK(low.begin == l->offset && low.end == high.begin && high.end == l->offset + l->count,
                  "%s: %zu to %zu, %zu to %zu", l->name, low.begin, low.end, high.begin, high.end);
        }
        for (size_t i = 0; i < w->count; i++)
            CHECK(owners[i] == (cut ? 1 : ranks), "%s: element %zu has %d owners", w->name, i, owners[i]);
        free(owners);
    }
    for (int t = 0; t < ranks; t++) model_destroy(&local[t]);
    model_destroy(&whole);
}

static void test_local_models(void) {
    const ModelConfig small = {.layers = 2, .heads = 5, .channels = 20, .vocab = 30, .context = 7};
    for (int ranks = 1; ranks <= 5; ranks++) check_ranks(&small, ranks);
    Model model;
    CHECK_ERROR(model_create_local(&model, &small, 0, 6, &e), &e, ERR_USAGE, "--tensor 6: the model has 5 heads");
    // Shares of gpt2-1558M: 25 heads of 64; the MLP's 6400 columns in units of 64.
    static const size_t attention[] = {13 * 64, 12 * 64}, mlp[] = {34 * 64, 33 * 64, 33 * 64};
    ModelConfig xl = {.vocab = 50257, .context = 1024};
    CHECK(model_preset(&xl, "gpt2-1558M"), "no preset");
    for (int t = 0; t < 3; t++) {
        CHECK_OK(model_create_local(&model, &xl, t, 3, &e), &e);
        CHECK(model.mlp_width == mlp[t], "%zu columns of the MLP", model.mlp_width);
        model_destroy(&model);
    }
    for (int t = 0; t < 2; t++) {
        CHECK_OK(model_create_local(&model, &xl, t, 2, &e), &e);
        CHECK(model.attention_width == attention[t], "%zu columns of attention", model.attention_width);
        model_destroy(&model);
    }
}

int main(void) {
    RUN(test_presets, test_initial_weights, test_local_models);
    return test_summary();
}
