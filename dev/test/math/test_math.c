// Compares random numbers, schedules, GELU's codes, e4m3 and z-scores with their definitions. Pins the order of the
// data. test_optimizers checks AdamW; dev/oracle checks dropout's masks.
#include "../e4m3.h"
#include "../test.h"

#include "math/adamw.h"
#include "math/gelu.h"
#include "math/rng.h"
#include "math/loss_scale.h"
#include "math/mixture.h"
#include "math/outliers.h"
#include "math/permutation.h"
#include "math/schedule.h"

// ---- rng ------------------------------------------------------------------------------------------------------------

// Random123's known answers for Philox4x32-10 (kat_vectors): counter, key, output.
static void test_philox_known_answers(void) {
    static const uint32_t known[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d, 0x41c83b0e, 0xa20bc7c6,
         0x6d5451fd},
        // the digits of pi
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb, 0x5001e420,
         0x24126ea1},
    };
    for (int i = 0; i < 3; i++) {
        const uint32_t *k = known[i];
        RngBlock got = rng_rounds((RngBlock){{k[0], k[1], k[2], k[3]}}, k[4], k[5], 10);
        for (int w = 0; w < 4; w++)
            CHECK(got.word[w] == k[6 + w], "vector %d word %d: %08x, want %08x", i, w, got.word[w], k[6 + w]);
        // rng_block: the seed is the key, stream and block are the counter
        uint64_t block = (uint64_t)k[1] << 32 | k[0], stream = (uint64_t)k[3] << 32 | k[2];
        uint64_t seed = (uint64_t)k[5] << 32 | k[4];
        RngBlock b = rng_block(seed, stream, block);
        for (int w = 0; w < 4; w++) CHECK(b.word[w] == k[6 + w], "block %d word %d", i, w);
    }
}

// Pins random numbers, since a resumed run must continue their sequence. A Python program, written from the text of
// rng.h, computed them with log and cos to 60 digits.
static void test_known_draws(void) {
    static const struct {
        uint64_t seed, stream, index;
        double uniform, normal;
    } known[] = {
        {0, 0, 0, 0x1.c2d38b1acc4fdp-1, -0.397667538444182123},
        {1337, 3, 7, 0x1.d940279c319ebp-1, 1.19884273565066457},
        {42, (uint64_t)1 << 40, 12345678901, 0x1.6c0de10a9dc54p-2, -0.0326105713758661764},
        {0x299f31d0a4093822, 0x0370734413198a2e, 0x05a308d3243f6a88, 0x1.95b231f5d62d0p-4, -1.44527199279832819},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint64_t seed = known[i].seed, stream = known[i].stream, index = known[i].index;
        CHECK(rng_uniform(seed, stream, index) == known[i].uniform, "draw %zu: %a", i,
              rng_uniform(seed, stream, index));
        CHECK_CLOSE(rng_normal(seed, stream, index), known[i].normal, 1e-14, 1);
    }
}

// ---- AdamW ----------------------------------------------------------------------------------------------------------

// Without a gradient only decay acts.
static void test_adamw_landmarks(void) {
    AdamWStep s = adamw_step(0.01, 0.9, 0.999, 1e-8, 0.5, 1, 1);
    CHECK(s.bias1 == 1 - s.beta1 && s.bias2 == 1 - s.beta2, "the corrections do not use the moments' betas");
    float m = 0, v = 0;
    CHECK_CLOSE(adamw_update(2, 0, &m, &v, &s, true), 2 * (1 - 0.01 * 0.5), 1e-7, 1);
    CHECK(adamw_update(2, 0, &m, &v, &s, false) == 2, "moved without gradient or decay");
    CHECK(adamw_clip(5, 2) == 0.4 && adamw_clip(1, 2) == 1 && adamw_clip(5, 0) == 1, "clip");
    CHECK(adamw_grad_scale(64, 4, 1) == 0.125 && adamw_grad_scale(64, 4, 3) == 0.25, "scale");
    CHECK(isnan(adamw_grad_scale(INFINITY, 4, 1)) && isnan(adamw_grad_scale(NAN, 4, 0)), "scale of no finite norm");
}

// ---- schedules ------------------------------------------------------------------------------------------------------

// Rates computed by hand: warm-up 100 tokens, horizon 1100, decay to a fifth; wsd decays from 880 to 1100.
static void test_schedules(void) {
    static const struct {
        ScheduleKind kind;
        double hold, tokens, rate;
    } cases[] = {
        {SCHEDULE_COSINE, 0, 0, 0},           {SCHEDULE_COSINE, 0, 50, 0.5},
        {SCHEDULE_COSINE, 0, 100, 1},         {SCHEDULE_COSINE, 0, 350, 0.6 + 0.4 * M_SQRT1_2},
        {SCHEDULE_COSINE, 0, 600, 0.6},       {SCHEDULE_COSINE, 0, 1100, 0.2},
        {SCHEDULE_COSINE, 0, 5000, 0.2},      {SCHEDULE_LINEAR, 0, 25, 0.25},
        {SCHEDULE_LINEAR, 0, 350, 0.8},       {SCHEDULE_LINEAR, 0, 5000, 0.2},
        {SCHEDULE_LINEAR, 0.5, 550, 1},       {SCHEDULE_LINEAR, 0.5, 825, 0.6},
        {SCHEDULE_COSINE, 0.5, 825, 0.6},     {SCHEDULE_CONSTANT, 0.5, 10, 0.1},
        {SCHEDULE_CONSTANT, 0, 5000, 1},      {SCHEDULE_INVERSE_SQRT, 0, 75, 0.75},
        {SCHEDULE_INVERSE_SQRT, 0, 400, 0.5}, {SCHEDULE_INVERSE_SQRT, 0, 10000, 0.1},
        {SCHEDULE_WSD, 0.8, 50, 0.5},         {SCHEDULE_WSD, 0.8, 880, 1},
        {SCHEDULE_WSD, 0.8, 935, 0.6},     // after 1/4 of the decay: 1/2 of the way down
        {SCHEDULE_WSD, 0.8, 1003.75, 0.4}, // after 9/16: 3/4 of the way
        {SCHEDULE_WSD, 0.8, 5000, 0.2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Schedule s = {cases[i].kind, 3, 100, 1100, 0.2, cases[i].hold};
        CHECK_CLOSE(schedule_lr(&s, cases[i].tokens), 3 * cases[i].rate, 1e-15, 3);
    }
    Schedule none = {SCHEDULE_INVERSE_SQRT, 1, 0, 1000, 0, 0}; // without a warm-up, lr holds for 1% of the horizon
    CHECK(schedule_lr(&none, 0) == 1 && schedule_lr(&none, 10) == 1, "held");
    CHECK_CLOSE(schedule_lr(&none, 40), 0.5, 1e-15, 1);
    // A warm-up as long as the run, or longer, must not divide by 0.
    for (int kind = 0; kind < SCHEDULE_KINDS; kind++)
        for (int over = 0; over < 2; over++) {
            Schedule all = {(ScheduleKind)kind, 1, 1000 + over, 1000, 0, 0.8 * over};
            for (double t = 0; t <= 1002; t++) CHECK(isfinite(schedule_lr(&all, t)), "schedule %d at %g", kind, t);
            CHECK_CLOSE(schedule_lr(&all, 999), 999.0 / (1000 + over), 1e-15, 1);
        }
}

// Compares GELU's derivative at every bf16 number with float64, and checks every code.
static void test_gelu_codes(void) {
    const double scale = sqrt(2 / M_PI), cubic = 0.044715;
    int least = GELU_CODE_NAN, most = 0;
    for (uint32_t i = 0; i < 1 << 16; i++) {
        const uint32_t bits = i << 16;
        float x;
        memcpy(&x, &bits, sizeof x);
        if (!(fabsf(x) < 1e6f)) continue;
        const double t = tanh(scale * (x + cubic * x * x * x));
        const double d = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * scale * (1 + 3 * cubic * x * x);
        const int code = gelu_encode((float)d);
        const double error = fabs(gelu_decode((unsigned)code) - d);
        CHECK(error <= 1.0 / 404 + 2e-7, "gelu'(%g): code %d is off by %g", x, code, error);
        least = code < least ? code : least, most = code > most ? code : most;
    }
    CHECK(least == 0 && most == 254, "codes %d to %d", least, most);
    CHECK(gelu_decode(gelu_encode(0)) == 0 && gelu_decode(gelu_encode(1)) == 1, "0 and 1 are exact");
    for (unsigned code = 0; code < GELU_CODE_NAN; code++) {
        CHECK(gelu_encode(gelu_decode(code)) == code, "code %u", code);
        CHECK(code == 0 || gelu_decode(code) > gelu_decode(code - 1), "code %u", code);
    }
    CHECK(gelu_encode(NAN) == GELU_CODE_NAN && gelu_encode(-NAN) == GELU_CODE_NAN, "NaN");
    CHECK(isnan(gelu_decode(GELU_CODE_NAN)), "NaN");
}

// ---- fp8 ------------------------------------------------------------------------------------------------------------

// Tries all codes and returns the nearest; a tie goes to the even code.
static int nearest_e4m3(double y) {
    int best = 0;
    for (int code = 0; code < 0x7f; code++) {
        const double now = fabs((double)e4m3_value(code) - fabs(y)), least = fabs((double)e4m3_value(best) - fabs(y));
        if (now < least || (now == least && code % 2 == 0)) best = code;
    }
    return best | (signbit(y) ? 0x80 : 0);
}

static void check_fp8(float y, int want) {
    const double rounded = (double)fp8_round(y), value = (double)e4m3_value(want);
    CHECK(e4m3_code(y) == want, "%a: code %02x, want %02x", (double)y, e4m3_code(y), want);
    CHECK(rounded == value || (isnan(rounded) && isnan(value)), "%a: %a, want %a", (double)y, rounded, value);
}

static void test_fp8_codes(void) {
    for (int code = 0; code < 256; code++) {
        const float x = e4m3_value(code), next = e4m3_value(code + 1);
        check_fp8(x, isnan(x) ? 0x7f : code);
        if (isnan(x) || isnan(next)) continue;
        const float tie = (x + next) / 2; // goes to the even code
        check_fp8(tie, code + code % 2);
        check_fp8(nextafterf(tie, x), code);
        check_fp8(nextafterf(tie, next), code + 1);
    }
    for (uint64_t i = 0; i < 3000; i++) {
        const float y = (float)(rng_normal(1, 0, i) * pow(2, rng_uniform(1, 1, i) * 24 - 13));
        check_fp8(y, nearest_e4m3((double)y));
    }
    const float large[] = {448, 449, 463.99f, 464, 480, 1e30f, INFINITY}, small[] = {0, 1e-45f, 1e-30f, 0x1p-10f};
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) check_fp8(large[i], 0x7e), check_fp8(-large[i], 0xfe);
    for (size_t i = 0; i < sizeof small / sizeof *small; i++) check_fp8(small[i], 0), check_fp8(-small[i], 0x80);
    check_fp8(NAN, 0x7f);
}

// A new exponent scales amax into [64, 128). The exponent does not change while amax is in [28, 160] or unknown.
static void test_fp8_exponents(void) {
    for (uint64_t i = 0; i < 20000; i++) {
        const float amax = (float)exp2(rng_uniform(2, 0, i) * 200 - 100);
        const int k = fp8_next(FP8_UNSET, amax), other = (int)(rng_uniform(2, 1, i) * 40) - 20 + k;
        const double scaled = ldexp((double)amax, k), stays = ldexp((double)amax, other);
        if (abs(k) < FP8_EXPONENT_MAX) CHECK(scaled >= 64 && scaled < 128, "%g: exponent %d", (double)amax, k);
        CHECK(abs(k) <= FP8_EXPONENT_MAX && fp8_next(k, amax) == k, "%g: exponent %d", (double)amax, k);
        if (abs(other) > FP8_EXPONENT_MAX) continue;
        const int want = stays > 160 || stays < 3.5 ? k : stays >= 28 || other == FP8_EXPONENT_MAX ? other : other + 1;
        CHECK(fp8_next(other, amax) == want, "%g: exponent %d", (double)amax, other);
        CHECK(fp8_saturates(other, amax) == (stays > 448), "%g: exponent %d", (double)amax, other);
    }
    const float none[] = {0, INFINITY, NAN};
    for (int i = 0; i < 3; i++) {
        CHECK(fp8_next(FP8_UNSET, none[i]) == FP8_UNSET && fp8_next(5, none[i]) == 5, "%g", (double)none[i]);
        CHECK(fp8_saturates(5, none[i]) == (i > 0) && !fp8_saturates(FP8_UNSET, none[i]), "%g", (double)none[i]);
    }
    CHECK(fp8_next(0, 448) == -2 && !fp8_saturates(0, 448) && fp8_saturates(0, 449), "the largest number");
    CHECK(fp8_next(0, 160) == 0 && fp8_next(0, 161) == -1 && fp8_next(0, 28) == 0, "ends");
    CHECK(fp8_next(0, 27.9f) == 1 && fp8_next(0, 3.5f) == 1 && fp8_next(0, 3.4f) == 5, "lower ends");
}

// ---- The loss scale -------------------------------------------------------------------------------------------------

// Returns the steps until the scale is `to`; -1: never.
static int steps_to(LossScale *s, bool overflow, double to) {
    for (int steps = 0; steps <= 10 * LOSS_SCALE_INTERVAL; steps++) {
        if (s->scale == to) return steps;
        if (!loss_scale_step(s, overflow)) return -1;
    }
    return -1;
}

static void test_loss_scale(void) {
    LossScale s = {.scale = 65536};
    CHECK(steps_to(&s, false, 131072) == 2000 && steps_to(&s, false, 524288) == 4000, "%g", s.scale);
    for (int i = 0; i < 1999; i++) loss_scale_step(&s, false);
    CHECK(s.scale == 524288 && s.clean == 1999 && s.overflows == 0, "%g", s.scale);
    CHECK(loss_scale_step(&s, true) && s.scale == 262144 && s.clean == 0 && s.overflows == 1, "%g", s.scale);
    CHECK(steps_to(&s, false, 524288) == 2000, "an overflow begins the interval anew");
    CHECK(steps_to(&s, true, 1) == 19 && s.overflows == 20, "%g", s.scale);
    CHECK(!loss_scale_step(&s, true) && s.scale == 1 && s.overflows == 21, "%g", s.scale);
    s = (LossScale){.scale = LOSS_SCALE_MAX, .clean = 1999};
    CHECK(loss_scale_step(&s, false) && s.scale == LOSS_SCALE_MAX && s.clean == 0, "%g", s.scale);
    const double bad[] = {0, 0.5, 3, 65535, -4, 0x1p33, INFINITY, NAN};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) CHECK(!loss_scale_valid(bad[i]), "%g", bad[i]);
    for (double x = 1; x <= 0x1p32; x *= 2) CHECK(loss_scale_valid(x), "%g", x);
}

// ---- The order of the data ------------------------------------------------------------------------------------------

// Pins the order, since a resumed run must read the same text. The values are from permutation_example in
// dev/bench/torch_twin.py, which is written from the definition.
static void test_known_order(void) {
    static const struct {
        uint64_t n, seed, epoch, x[3]; // x: images of 0, 1 and n - 1
    } known[] = {
        {10, 1337, 0, {1, 6, 2}},
        {10, 1337, 1, {5, 8, 4}},
        {10, 9223372036854775807u, 0, {9, 3, 8}},
        {10, 9223372036854775807u, 1, {1, 3, 0}},
        {100003, 1337, 0, {8612, 37016, 53539}},
        {100003, 1337, 1, {79901, 50967, 96303}},
        {100003, 9223372036854775807u, 0, {4545, 79259, 28622}},
        {100003, 9223372036854775807u, 1, {87951, 64354, 63424}},
        {281474976710597, 1337, 0, {41919502995848, 148180336134638, 207064407634165}},
        {281474976710597, 1337, 1, {141561302266533, 161278099827159, 97047144635599}},
        {281474976710597, 9223372036854775807u, 0, {132846941347862, 254973275896718, 222461268083483}},
        {281474976710597, 9223372036854775807u, 1, {77239103324354, 41411049620905, 163065322016862}},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        for (int j = 0; j < 3; j++) {
            uint64_t n = known[i].n, k = j < 2 ? (uint64_t)j : n - 1;
            uint64_t x = permutation_at(n, permutation_key(known[i].seed, known[i].epoch), k);
            CHECK(x == known[i].x[j], "row %zu: %llu -> %llu", i, (unsigned long long)k, (unsigned long long)x);
        }
}

// Pins choices of a source. The values are from Order.place in dev/bench/torch_twin.py.
static void test_known_sources(void) {
    static const struct {
        uint64_t seed, example;
        double draw;
    } known[] = {
        {1337, 0, 0.80990529952940438},
        {1337, 1, 0.42861572510556445},
        {1337, 999, 0.051668610828372152},
        {1337, 281474976710656, 0.61477574473602292},
        {9223372036854775807u, 0, 0.40495214424574144},
        {9223372036854775807u, 2, 0.019873291841947527},
        {9223372036854775807u, 281474976710656, 0.6826772247110604},
    };
    const double end[3] = {0.25, 0.5, 1};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        double u = mixture_draw(known[i].seed, known[i].example);
        CHECK(u == known[i].draw, "row %zu: %.17g", i, u);
        int source = mixture_source(end, known[i].seed, known[i].example);
        CHECK(source == (u < 0.25 ? 0 : u < 0.5 ? 1 : 2), "row %zu: source %d", i, source);
    }
}

// Returns true if k -> permutation_at(n, key, k) is onto [0, n). seen: n bytes of scratch.
static bool is_bijection(uint64_t n, uint64_t key, unsigned char *seen) {
    memset(seen, 0, n);
    for (uint64_t k = 0; k < n; k++) {
        uint64_t x = permutation_at(n, key, k);
        if (x >= n || seen[x]) return false;
        seen[x] = 1;
    }
    return true; // n different values in [0, n)
}

static void test_bijection(void) {
    static const uint64_t large[] = {65535, 65536, 65537, 131071, 999983, 1 << 20};
    unsigned char *seen = malloc(1 << 20);
    for (uint64_t n = 1; n <= 5000; n++)
        CHECK(is_bijection(n, permutation_key(n, 0), seen), "n = %llu", (unsigned long long)n);
    for (size_t i = 0; i < sizeof large / sizeof *large; i++)
        CHECK(is_bijection(large[i], permutation_key(1, i), seen), "n = %llu", (unsigned long long)large[i]);
    free(seen);
}

// ---- outliers -------------------------------------------------------------------------------------------------------

// The window holds 1 to n, so its mean is (n + 1) / 2, and its variance is (n^2 - 1) / 12.
static void test_outliers_window(void) {
    const double n = OUTLIERS_WINDOW, deviation = sqrt((n * n - 1) / 12);
    Outliers window = {0}, still = {0};
    for (int i = 1; i <= OUTLIERS_WINDOW; i++) {
        CHECK(isnan(outliers_z(&window, i, 3)), "%d: judged before the window is full", i);
        outliers_z(&still, 5, 3);
    }
    for (int i = 0; i < 2; i++) // the window does not keep 400
        CHECK_CLOSE(outliers_z(&window, 400, 3), (400 - (n + 1) / 2) / deviation, 1e-12, 0);
    CHECK_CLOSE(outliers_z(&window, 2, 3), (2 - (n + 1) / 2) / deviation, 1e-12, 0); // replaces 1
    CHECK_CLOSE(outliers_z(&window, (n + 1) / 2 + 1 / n, 3), 0, 0, 1e-12);
    CHECK(outliers_z(&still, 5, 3) == 0 && outliers_z(&still, 6, 3) == INFINITY, "a window of equal values");
}

int main(void) {
    RUN(test_philox_known_answers, test_known_draws, test_adamw_landmarks, test_schedules, test_gelu_codes,
        test_fp8_codes, test_fp8_exponents, test_loss_scale, test_known_order, test_known_sources, test_bijection,
        test_outliers_window);
    return test_summary();
}
