#include "bpe_train.h"
#include "base/hash.h"
#include "text/tokenizer_impl.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    char *bytes;
    uint32_t length; // as text, then in tokens
    uint64_t count;
    uint16_t *tokens; // (length)
} Word;

typedef struct {
    uint32_t pair; // left << 16 | right
    int64_t count;
    uint32_t *words; // that may contain it
    uint32_t word_count, word_capacity;
} Pair;

struct BpeTrainer {
    Word *words;
    uint32_t word_count, word_capacity;
    uint32_t *word_slots; // open addressing: word + 1, or 0
    uint32_t word_mask;
    Pair *pairs;
    uint32_t pair_count, pair_capacity;
    uint32_t *pair_slots;
    uint32_t pair_mask;
    uint64_t (*heap)[2]; // (count, ~pair), the largest on top; an entry counts while its count is the pair's
    size_t heap_count, heap_capacity;
    uint32_t *touched; // pairs that a merge has made more frequent
    size_t touched_count, touched_capacity;
    char *spelling;        // the tokens' bytes, one behind the other
    uint32_t *start;       // (token_count + 1)
    uint32_t *token_slots; // (TOKEN_SLOTS) open addressing over spellings: token + 1, or 0
    int token_count;
    size_t spelling_capacity;
};

enum { TOKEN_SLOTS = 4 * VOCAB_MAX };

static int bpe_grow(void **array, size_t count, size_t bytes_each, Error *e) {
    void *grown = realloc(*array, count * bytes_each);
    if (!grown) return FAIL(e, ERR_MEMORY, "give less text: see --max-bytes", "out of memory: training a vocabulary");
    *array = grown;
    return 0;
}

// An emptied table of twice the slots; the caller fills it again.
static int bpe_rehash(uint32_t **slots, uint32_t *mask, Error *e) {
    *mask = *mask ? 2 * *mask + 1 : 1023;
    TRY(bpe_grow((void **)slots, (size_t)*mask + 1, sizeof **slots, e));
    memset(*slots, 0, ((size_t)*mask + 1) * sizeof **slots);
    return 0;
}

int bpe_create(BpeTrainer **out, Error *e) {
    return memory_alloc_zero((void **)out, sizeof **out, "training a vocabulary", e);
}

void bpe_destroy(BpeTrainer *b) {
    if (!b) return;
    for (uint32_t i = 0; i < b->word_count; i++) {
        free(b->words[i].bytes);
        free(b->words[i].tokens);
    }
    for (uint32_t i = 0; i < b->pair_count; i++) free(b->pairs[i].words);
    free(b->words);
    free(b->word_slots);
    free(b->pairs);
    free(b->pair_slots);
    free(b->heap);
    free(b->touched);
    free(b->spelling);
    free(b->start);
    free(b->token_slots);
    memory_free(b);
}

uint32_t bpe_word_count(const BpeTrainer *b) { return b->word_count; }

// ---------------------------------------------------------------------------------------------------------------------
// Counting words

static uint32_t bpe_word_hash(const char *bytes, size_t length) {
    uint64_t hash = hash_bytes(HASH_START, bytes, length);
    return (uint32_t)(hash ^ hash >> 32);
}

static uint32_t *bpe_word_slot(BpeTrainer *b, const char *bytes, size_t length) {
    for (uint32_t i = bpe_word_hash(bytes, length);; i++) {
        uint32_t *slot = &b->word_slots[i & b->word_mask];
        const Word *word = &b->words[*slot - 1];
        if (*slot == 0 || (word->length == length && memcmp(word->bytes, bytes, length) == 0)) return slot;
    }
}

static int bpe_add_word(BpeTrainer *b, const char *bytes, size_t length, Error *e) {
    if (2 * (b->word_count + 1) > b->word_mask) {
        TRY(bpe_rehash(&b->word_slots, &b->word_mask, e));
        for (uint32_t i = 0; i < b->word_count; i++) *bpe_word_slot(b, b->words[i].bytes, b->words[i].length) = i + 1;
    }
    uint32_t *slot = bpe_word_slot(b, bytes, length);
    if (*slot == 0) {
        if (b->word_count == b->word_capacity) {
            b->word_capacity = b->word_capacity ? 2 * b->word_capacity : 1024;
            TRY(bpe_grow((void **)&b->words, b->word_capacity, sizeof *b->words, e));
        }
        Word word = {.length = (uint32_t)length};
        TRY(bpe_grow((void **)&word.bytes, length, 1, e));
        memcpy(word.bytes, bytes, length);
        b->words[b->word_count++] = word;
        *slot = b->word_count;
    }
    b->words[*slot - 1].count++;
    return 0;
}

int bpe_add_text(BpeTrainer *b, const Tokenizer *words, const char *text, size_t bytes, Error *e) {
    for (size_t at = 0, length; at < bytes; at += length) {
        length = tokenizer_word(words, text + at, bytes - at);
        TRY(bpe_add_word(b, text + at, length, e));
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pairs

static uint32_t *bpe_pair_slot(BpeTrainer *b, uint32_t pair) {
    for (uint32_t i = (uint32_t)((pair * 0x9E3779B97F4A7C15u) >> 32);; i++) { // Fibonacci hashing
        uint32_t *slot = &b->pair_slots[i & b->pair_mask];
        if (*slot == 0 || b->pairs[*slot - 1].pair == pair) return slot;
    }
}

static bool bpe_heap_less(const uint64_t a[2], const uint64_t b[2]) { return a[0] != b[0] ? a[0] < b[0] : a[1] < b[1]; }

static int bpe_heap_push(BpeTrainer *b, const Pair *pair, Error *e) {
    const uint64_t item[2] = {(uint64_t)pair->count, UINT32_MAX - pair->pair}; // the smaller pair is the larger entry
    if (b->heap_count == b->heap_capacity) {
        b->heap_capacity = b->heap_capacity ? 2 * b->heap_capacity : 1024;
        TRY(bpe_grow((void **)&b->heap, b->heap_capacity, sizeof *b->heap, e));
    }
    size_t i = b->heap_count++;
    for (; i > 0 && bpe_heap_less(b->heap[(i - 1) / 2], item); i = (i - 1) / 2)
        memcpy(b->heap[i], b->heap[(i - 1) / 2], sizeof item);
    memcpy(b->heap[i], item, sizeof item);
    return 0;
}

static void bpe_heap_pop(BpeTrainer *b, uint64_t top[2]) {
    uint64_t item[2];
    size_t i = 0;
    memcpy(top, b->heap[0], sizeof item);
    memcpy(item, b->heap[--b->heap_count], sizeof item);
    for (size_t child; (child = 2 * i + 1) < b->heap_count; i = child) {
        if (child + 1 < b->heap_count && bpe_heap_less(b->heap[child], b->heap[child + 1])) child++;
        if (!bpe_heap_less(item, b->heap[child])) break;
        memcpy(b->heap[i], b->heap[child], sizeof item);
    }
    memcpy(b->heap[i], item, sizeof item);
}

// A pair occurs `change` times more (or fewer) than was known. One that has become more frequent goes onto the heap with
// its new count; one that has become rarer is found out when its old entry surfaces.
static int bpe_count_pair(BpeTrainer *b, uint16_t left, uint16_t right, int64_t change, uint32_t word, Error *e) {
    uint32_t pair = (uint32_t)left << 16 | right;
    if (2 * (b->pair_count + 1) > b->pair_mask) {
        TRY(bpe_rehash(&b->pair_slots, &b->pair_mask, e));
        for (uint32_t i = 0; i < b->pair_count; i++) *bpe_pair_slot(b, b->pairs[i].pair) = i + 1;
    }
    uint32_t *slot = bpe_pair_slot(b, pair);
    if (*slot == 0) {
        if (b->pair_count == b->pair_capacity) {
            b->pair_capacity = b->pair_capacity ? 2 * b->pair_capacity : 1024;
            TRY(bpe_grow((void **)&b->pairs, b->pair_capacity, sizeof *b->pairs, e));
        }
        b->pairs[b->pair_count++] = (Pair){.pair = pair};
        *slot = b->pair_count;
    }
    Pair *p = &b->pairs[*slot - 1];
    p->count += change;
    if (change < 0 || (p->word_count && p->words[p->word_count - 1] == word)) return 0;
    if (p->word_count == p->word_capacity) {
        p->word_capacity = p->word_capacity ? 2 * p->word_capacity : 4;
        TRY(bpe_grow((void **)&p->words, p->word_capacity, sizeof *p->words, e));
    }
    p->words[p->word_count++] = word;
    return 0;
}

static int bpe_touch(BpeTrainer *b, uint16_t left, uint16_t right, int64_t count, uint32_t word, Error *e) {
    TRY(bpe_count_pair(b, left, right, count, word, e));
    if (b->touched_count == b->touched_capacity) {
        b->touched_capacity = b->touched_capacity ? 2 * b->touched_capacity : 1024;
        TRY(bpe_grow((void **)&b->touched, b->touched_capacity, sizeof *b->touched, e));
    }
    uint32_t pair = *bpe_pair_slot(b, (uint32_t)left << 16 | right) - 1;
    if (b->touched_count == 0 || b->touched[b->touched_count - 1] != pair) b->touched[b->touched_count++] = pair;
    return 0;
}

// Makes one token of every occurrence of the pair in a word, and keeps the counts of its neighbours.
static int bpe_merge_word(BpeTrainer *b, uint32_t index, uint32_t pair, uint16_t merged, Error *e) {
    Word *w = &b->words[index];
    uint16_t left = (uint16_t)(pair >> 16), right = (uint16_t)pair, *t = w->tokens;
    int64_t count = (int64_t)w->count;
    for (uint32_t i = 0; i + 1 < w->length; i++) {
        if (t[i] != left || t[i + 1] != right) continue;
        if (i > 0) TRY(bpe_count_pair(b, t[i - 1], left, -count, index, e));
        if (i > 0) TRY(bpe_touch(b, t[i - 1], merged, count, index, e));
        if (i + 2 < w->length) TRY(bpe_count_pair(b, right, t[i + 2], -count, index, e));
        if (i + 2 < w->length) TRY(bpe_touch(b, merged, t[i + 2], count, index, e));
        t[i] = merged;
        memmove(t + i + 1, t + i + 2, (w->length - i - 2) * sizeof *t);
        w->length--;
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Training

// The token of this spelling: an old one, where two ways lead to the same bytes, or a new one.
static int bpe_token(BpeTrainer *b, const char *bytes, size_t length, uint16_t *token, Error *e) {
    uint32_t *slot, end = b->start[b->token_count];
    for (uint32_t i = bpe_word_hash(bytes, length);; i++) {
        slot = &b->token_slots[i % TOKEN_SLOTS];
        *token = (uint16_t)(*slot - 1);
        if (*slot == 0) break;
        uint32_t at = b->start[*token];
        if (b->start[*token + 1] - at == length && memcmp(b->spelling + at, bytes, length) == 0) return 0;
    }
    *token = (uint16_t)b->token_count++;
    *slot = (uint32_t)*token + 1;
    while (end + length > b->spelling_capacity) {
        b->spelling_capacity = b->spelling_capacity ? 2 * b->spelling_capacity : 1024;
        TRY(bpe_grow((void **)&b->spelling, b->spelling_capacity, 1, e));
    }
    memcpy(b->spelling + end, bytes, length);
    b->start[b->token_count] = end + (uint32_t)length;
    return 0;
}

// Bytes in the order of GPT-2's alphabet: those that print, then the others.
static int bpe_add_bytes(BpeTrainer *b, Tokenizer *t, Error *e) {
    TRY(bpe_grow((void **)&b->start, VOCAB_MAX + 1, sizeof *b->start, e));
    TRY(bpe_grow((void **)&b->token_slots, TOKEN_SLOTS, sizeof *b->token_slots, e));
    memset(b->token_slots, 0, TOKEN_SLOTS * sizeof *b->token_slots);
    b->start[0] = 0;
    for (int others = 0; others < 2; others++)
        for (int i = 0; i < BYTE_VALUES; i++) {
            char byte = (char)i;
            bool prints = (i >= '!' && i <= '~') || (i >= 0xA1 && i <= 0xAC) || (i >= 0xAE && i <= 0xFF);
            if (prints != others) TRY(bpe_token(b, &byte, 1, &t->byte_token[i], e));
        }
    return 0;
}

static int bpe_start(BpeTrainer *b, const Tokenizer *t, Error *e) {
    for (uint32_t i = 0; i < b->word_count; i++) {
        Word *w = &b->words[i];
        TRY(bpe_grow((void **)&w->tokens, w->length, sizeof *w->tokens, e));
        for (uint32_t k = 0; k < w->length; k++) w->tokens[k] = t->byte_token[(uint8_t)w->bytes[k]];
        for (uint32_t k = 0; k + 1 < w->length; k++)
            TRY(bpe_count_pair(b, w->tokens[k], w->tokens[k + 1], (int64_t)w->count, i, e));
    }
    for (uint32_t i = 0; i < b->pair_count; i++) TRY(bpe_heap_push(b, &b->pairs[i], e));
    return 0;
}

// The token that two tokens make together.
static int bpe_join(BpeTrainer *b, uint32_t pair, uint16_t *token, Error *e) {
    uint32_t parts[2] = {pair >> 16, pair & 0xFFFF}, lengths[2];
    for (int k = 0; k < 2; k++) lengths[k] = b->start[parts[k] + 1] - b->start[parts[k]];
    char *bytes = NULL;
    TRY(bpe_grow((void **)&bytes, lengths[0] + lengths[1], 1, e));
    memcpy(bytes, b->spelling + b->start[parts[0]], lengths[0]);
    memcpy(bytes + lengths[0], b->spelling + b->start[parts[1]], lengths[1]);
    int code = bpe_token(b, bytes, lengths[0] + lengths[1], token, e);
    free(bytes);
    return code;
}

// The most frequent pair, off the heap; NULL when none occurs twice any more.
static int bpe_best(BpeTrainer *b, Pair **best, Error *e) {
    enum { RARE = 2 };
    uint64_t top[2];
    *best = NULL;
    while (b->heap_count > 0) {
        bpe_heap_pop(b, top);
        Pair *p = &b->pairs[*bpe_pair_slot(b, UINT32_MAX - (uint32_t)top[1]) - 1];
        if (p->count < RARE) continue;
        if (p->count == (int64_t)top[0]) {
            *best = p;
            return 0;
        }
        TRY(bpe_heap_push(b, p, e)); // it has become rarer
    }
    return 0;
}

static int bpe_merge(BpeTrainer *b, Tokenizer *t, Pair *p, Error *e) {
    uint32_t pair = p->pair, words = p->word_count, *in = p->words;
    uint16_t merged;
    p->words = NULL; // p itself moves when pairs are added
    p->word_count = p->word_capacity = 0;
    b->touched_count = 0;
    int code = bpe_join(b, pair, &merged, e);
    for (uint32_t i = 0; i < words && !code; i++) code = bpe_merge_word(b, in[i], pair, merged, e);
    free(in);
    if (code) return code;
    b->pairs[*bpe_pair_slot(b, pair) - 1].count = 0;
    for (size_t i = 0; i < b->touched_count; i++) TRY(bpe_heap_push(b, &b->pairs[b->touched[i]], e));
    t->merges[t->merge_count++] = (Merge){(uint16_t)(pair >> 16), (uint16_t)pair, merged};
    return 0;
}

// Hands the spellings to the tokenizer.
static int bpe_spell(const BpeTrainer *b, Tokenizer *t, Error *e) {
    size_t count = (size_t)b->token_count, bytes = b->start[count];
    t->vocab_size = b->token_count;
    TRY(memory_alloc((void **)&t->text, bytes, "vocabulary", e));
    TRY(memory_alloc((void **)&t->start, (count + 1) * sizeof *t->start, "vocabulary", e));
    TRY(memory_alloc_zero((void **)&t->literal, count, "vocabulary", e));
    memcpy(t->text, b->spelling, bytes);
    memcpy(t->start, b->start, (count + 1) * sizeof *t->start);
    return tokenizer_index_merges(t, e);
}

int bpe_train(BpeTrainer *b, Tokenizer *t, int vocab_size, Error *e) {
    static const char eot[] = "<|endoftext|>";
    uint16_t token;
    Pair *best;
    TRY(memory_alloc((void **)&t->merges, MERGES_MAX * sizeof *t->merges, "merges", e));
    TRY(bpe_add_bytes(b, t, e));
    TRY(bpe_start(b, t, e));
    while (b->token_count + 1 < vocab_size && t->merge_count < MERGES_MAX) {
        TRY(bpe_best(b, &best, e));
        if (!best) break;
        TRY(bpe_merge(b, t, best, e));
    }
    TRY(bpe_token(b, eot, sizeof eot - 1, &token, e));
    t->eot = token;
    return bpe_spell(b, t, e);
}
