/* Latency histogram with logarithmic buckets: 128 linear steps per power of two, so a quantile is off by <
 * 0.8 %. */
#ifndef BENCH_HISTOGRAM_H
#define BENCH_HISTOGRAM_H

#include <stdint.h>
#include <stdio.h>

#define STEP_BITS 7
#define STEPS (1u << STEP_BITS)
#define BUCKETS ((64 - STEP_BITS + 1) * STEPS)

typedef struct {
    uint64_t counts[BUCKETS];
    uint64_t total, sum, max;
} Histogram;

static inline void histogram_add(Histogram *h, uint64_t ns) {
    unsigned bucket;
    if (ns < STEPS) {
        bucket = (unsigned)ns;
    } else {
        unsigned power = 63u - (unsigned)__builtin_clzll(ns);
        unsigned step = (unsigned)(ns >> (power - STEP_BITS)) & (STEPS - 1);
        bucket = (power - STEP_BITS + 1) * STEPS + step;
    }
    h->counts[bucket]++;
    h->total++;
    h->sum += ns;
    if (ns > h->max) h->max = ns;
}

/* Upper edge of the bucket, in ns: a quantile is never reported smaller than it was. */
static inline uint64_t bucket_upper(unsigned bucket) {
    if (bucket < STEPS) return bucket;
    unsigned power = bucket / STEPS + STEP_BITS - 1;
    uint64_t step = bucket % STEPS;
    return ((STEPS + step + 1) << (power - STEP_BITS)) - 1;
}

static inline double histogram_ms(const Histogram *h, double quantile) {
    uint64_t wanted = (uint64_t)(quantile * (double)h->total + 0.999999), seen = 0;
    for (unsigned b = 0; b < BUCKETS; b++) {
        seen += h->counts[b];
        if (seen >= wanted && seen > 0) {
            uint64_t upper = bucket_upper(b);
            return (double)(upper < h->max ? upper : h->max) / 1e6;
        }
    }
    return 0.0;
}

static inline void histogram_print(const Histogram *h, const char *name, FILE *out) {
    double mean = h->total ? (double)h->sum / (double)h->total / 1e6 : 0.0;
    fprintf(out, "\"%s\":{\"count\":%llu,\"mean\":%.4f,\"p50\":%.4f,\"p90\":%.4f,\"p99\":%.4f,\"max\":%.4f}",
            name, (unsigned long long)h->total, mean, histogram_ms(h, 0.50), histogram_ms(h, 0.90),
            histogram_ms(h, 0.99), (double)h->max / 1e6);
}

#endif
