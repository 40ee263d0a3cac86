/* The messages that are sent: payloads prepared in advance, a fresh random transactionId for every one.

   Payloads imitate what services send: a few shapes with fixed keys, and values that differ (made-up words,
   numbers, hexadecimal ids), so that they compress as real data do and no better. */
#ifndef BENCH_MESSAGES_H
#define BENCH_MESSAGES_H

#include "buffer.h"

#include <stdint.h>

#define PAYLOADS 20000
#define WORDS 4000
#define PAYLOAD_BYTES 256
#define PAYLOAD_SPREAD 20

typedef struct {
    uint64_t a, b;
} Random;

/* xoroshiro128+, enough for payloads and unique ids. */
static inline uint64_t random_next(Random *r) {
    uint64_t a = r->a, b = r->b, sum = a + b;
    b ^= a;
    r->a = ((a << 24) | (a >> 40)) ^ b ^ (b << 16);
    r->b = (b << 37) | (b >> 27);
    return sum;
}

static inline uint64_t random_below(Random *r, uint64_t bound) {
    return (uint64_t)(((unsigned __int128)random_next(r) * bound) >> 64);
}

static inline Random random_seeded(uint64_t seed) {
    Random r = {seed * 0x9e3779b97f4a7c15ULL + 1, seed ^ 0xd1b54a32d192ed03ULL};
    for (int i = 0; i < 16; i++) random_next(&r);
    return r;
}

typedef struct {
    char *text;
    size_t length;
} Text;

typedef struct {
    Text payloads[PAYLOADS];
    char words[WORDS][12];
} Messages;

static inline void make_word(Random *r, char *word) {
    static const char consonants[] = "bcdfghjklmnprstvz", vowels[] = "aeiou";
    size_t length = 3 + random_below(r, 8);
    for (size_t i = 0; i < length; i++)
        word[i] = i % 2 ? vowels[random_below(r, 5)] : consonants[random_below(r, sizeof consonants - 1)];
    word[length] = 0;
}

/* The shape without its closing: the text field that comes last is filled up to the wanted length. */
static inline void open_payload(const Messages *m, Random *r, Buffer *b) {
#define WORD m->words[random_below(r, WORDS)]
#define NUMBER(bound) (unsigned long long)random_below(r, bound)
    switch (random_below(r, 4)) {
    case 0:
        buffer_format(b,
                      "{\"orderId\":\"%08llx%04llx\",\"customer\":{\"id\":%llu,\"name\":\"%s %s\"},"
                      "\"total\":%llu.%02llu,\"lines\":[{\"sku\":\"%s-%llu\",\"quantity\":%llu},"
                      "{\"sku\":\"%s-%llu\",\"quantity\":%llu}],\"note\":\"",
                      NUMBER(1ULL << 32), NUMBER(1ULL << 16), NUMBER(900000) + 100000, WORD, WORD,
                      NUMBER(2000), NUMBER(100), WORD, NUMBER(10000), NUMBER(9) + 1, WORD, NUMBER(10000),
                      NUMBER(9) + 1);
        break;
    case 1:
        buffer_format(b,
                      "{\"event\":\"%s.%s\",\"at\":17%011llu,\"user\":{\"id\":\"%012llx\","
                      "\"country\":\"%.2s\",\"age\":%llu},\"active\":%s,\"path\":\"/%s/%s/%llu\",\"text\":\"",
                      WORD, WORD, NUMBER(100000000000ULL), NUMBER(1ULL << 48), WORD, NUMBER(80) + 10,
                      random_below(r, 2) ? "true" : "false", WORD, WORD, NUMBER(100000));
        break;
    case 2:
        buffer_format(
            b,
            "{\"device\":\"%s-%04llu\",\"readings\":{\"temperature\":%llu.%03llu,\"humidity\":0.%04llu,"
            "\"pressure\":%llu},\"position\":[%llu.%06llu,%llu.%06llu],"
            "\"firmware\":\"%llu.%llu.%llu\",\"remark\":\"",
            WORD, NUMBER(10000), NUMBER(60), NUMBER(1000), NUMBER(10000), NUMBER(200) + 900, NUMBER(90),
            NUMBER(1000000), NUMBER(180), NUMBER(1000000), NUMBER(9), NUMBER(20), NUMBER(100));
        break;
    default:
        buffer_format(b,
                      "{\"job\":\"%s_%s\",\"attempt\":%llu,\"args\":{\"source\":\"s3://%s/%s/%llu.json\","
                      "\"limit\":%llu,\"flags\":[\"%s\",\"%s\"],\"parent\":null},"
                      "\"checksum\":\"%08llx\",\"comment\":\"",
                      WORD, WORD, NUMBER(5), WORD, WORD, NUMBER(1000000), NUMBER(5000), WORD, WORD,
                      NUMBER(1ULL << 32));
    }
#undef WORD
#undef NUMBER
}

static inline void make_payload(Messages *m, Random *r, Text *payload) {
    Buffer b = {0};
    open_payload(m, r, &b);
    size_t wanted = PAYLOAD_BYTES - PAYLOAD_SPREAD + random_below(r, 2 * PAYLOAD_SPREAD + 1);
    while (b.length + 2 < wanted) {
        const char *word = m->words[random_below(r, WORDS)];
        size_t room = wanted - 2 - b.length, length = strlen(word);
        buffer_add(&b, word, length < room ? length : room);
        if (length < room) buffer_text(&b, " ");
    }
    buffer_text(&b, "\"}");
    payload->text = realloc(b.bytes, b.length);
    payload->length = b.length;
}

static inline Messages *messages_new(uint64_t seed) {
    Messages *m = calloc(1, sizeof *m);
    Random r = random_seeded(seed);
    for (int i = 0; i < WORDS; i++) make_word(&r, m->words[i]);
    for (int i = 0; i < PAYLOADS; i++) make_payload(m, &r, &m->payloads[i]);
    return m;
}

/* Where one thread takes its messages from. */
typedef struct {
    const Messages *pool;
    Random random;
    uint64_t next;
} Source;

static inline Source source_new(const Messages *pool, uint64_t seed) {
    Source source = {pool, random_seeded(seed), 0};
    source.next = random_below(&source.random, PAYLOADS);
    return source;
}

/* In turn, not at random: the same payload twice in a segment would compress better than real data do. */
static inline const Text *source_payload(Source *source) {
    return &source->pool->payloads[source->next++ % PAYLOADS];
}

/* Appends a random version-4 UUID as text: 122 random bits, so ids stay unique over every run. */
static inline void append_uuid(Buffer *b, Random *r) {
    static const char hex[] = "0123456789abcdef";
    uint64_t high = (random_next(r) & ~0xf000ULL) | 0x4000ULL;
    uint64_t low = (random_next(r) & ~(3ULL << 62)) | (2ULL << 62);
    buffer_reserve(b, 36);
    char *p = b->bytes + b->length;
    for (int i = 0; i < 32; i++) {
        if (i == 8 || i == 12 || i == 16 || i == 20) *p++ = '-';
        uint64_t half = i < 16 ? high : low;
        *p++ = hex[(half >> (60 - 4 * (i % 16))) & 15];
    }
    b->length += 36;
}

#endif
