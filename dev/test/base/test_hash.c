// Compares the hashes with published values of splitmix64 and FNV-1a. Compares the engine's hash of its weights with a
// plain loop's.
#include "base/hash.h"
#include "../small_model.h"
#include "../test.h"

#include <time.h>

// The n-th output of splitmix64 from seed 0 is the hash of a zero element in place n - 1. These five outputs are from
// Vigna's splitmix64.c (prng.di.unimi.it).
static void test_known_answers(void) {
    static const uint64_t known[] = {0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4, 0x06c45d188009454f, 0xf88bb8a8724c81ec,
                                     0x1b39896a51a8749b};
    for (uint64_t i = 0; i < 5; i++)
        CHECK(hash_element(i, 0) == known[i], "place %d: %016llx", (int)i, (unsigned long long)hash_element(i, 0));
    CHECK(hash_element(3, 1) != hash_element(3, 0) && hash_element(3, 1) != hash_element(4, 1), "no hash");
}

// FNV-1a, 64 bits, from Noll's test vectors (isthe.com/chongo/src/fnv/test_fnv.c). Each text is hashed whole and in two
// pieces.
static void test_known_answers_of_bytes(void) {
    static const struct {
        const char *text;
        uint64_t hash;
    } known[] = {{"", 0xcbf29ce484222325},
                 {"a", 0xaf63dc4c8601ec8c},
                 {"b", 0xaf63df4c8601f1a5},
                 {"foo", 0xdcb27518fed9d577},
                 {"foobar", 0x85944171f73967e8}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const char *text = known[i].text;
        for (size_t cut = 0, bytes = strlen(text); cut <= bytes; cut++) {
            uint64_t hash = hash_bytes(hash_bytes(HASH_START, text, cut), text + cut, bytes - cut);
            CHECK(hash == known[i].hash, "'%s' cut at %zu: %016llx", text, cut, (unsigned long long)hash);
        }
    }
}

static uint64_t sum_of(const uint32_t *bits, size_t begin, size_t end) {
    uint64_t sum = 0;
    for (size_t i = begin; i < end; i++) sum += hash_element(i, bits[i]);
    return sum;
}

static void check_engine(const Model *model, uint32_t *bits, int threads) {
    EngineConfig config = {.model = model, .micro_batch = 1, .seq_len = 8, .threads = threads};
    Range all = {0, model->flat_count};
    Engine *engine;
    Error e = {0};
    uint64_t hash, part;
    CHECK_OK(engine_create(&cpu_engine, &engine, &config, &e), &e);
    CHECK_OK(engine_load(engine, STATE_PARAM, all, (float *)bits, &e), &e);
    CHECK_OK(engine_hash(engine, all, &hash, &e), &e);
    CHECK(hash == sum_of(bits, 0, all.end), "%d threads: the hash of all", threads);
    for (size_t cut = 1; cut < all.end; cut = 3 * cut + 1) {
        CHECK_OK(engine_hash(engine, (Range){cut, all.end}, &part, &e), &e);
        CHECK(part == sum_of(bits, cut, all.end), "%d threads: from %zu on", threads, cut);
    }
    for (size_t i = 0; i < all.end; i += all.end / 50) { // any changed bit changes the hash
        *(uint32_t *)engine_buffer(engine, BUFFER_WEIGHT, i) ^= 1u << i % 32;
        CHECK_OK(engine_hash(engine, all, &part, &e), &e);
        CHECK(part != hash, "a bit of element %zu", i);
        *(uint32_t *)engine_buffer(engine, BUFFER_WEIGHT, i) ^= 1u << i % 32;
    }
    CHECK_OK(engine_hash(engine, all, &part, &e), &e);
    CHECK(part == hash, "%d threads: not the same again", threads);
    engine_destroy(engine);
}

static void test_engine(void) {
    const ModelConfig config = {2, 2, 32, 61, 13};
    uint64_t seed = (uint64_t)time(NULL);
    Model model;
    Error e = {0};
    uint32_t *bits;
    CHECK_OK(model_create(&model, &config, &e), &e);
    CHECK_OK(memory_alloc((void **)&bits, model.flat_count * sizeof *bits, "weights", &e), &e);
    for (size_t i = 0; i < model.flat_count; i++) bits[i] = rng_u32(seed, 3, i); // NaNs and infinities among them
    for (int threads = 1; threads < 4; threads++) check_engine(&model, bits, threads);
    memory_free(bits);
    model_destroy(&model);
}

int main(void) {
    RUN(test_known_answers, test_known_answers_of_bytes, test_engine);
    return test_summary();
}
