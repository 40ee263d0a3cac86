/* What happened: counters, latencies, and the errors, the first of which is kept as text. */
#ifndef BENCH_OUTCOME_H
#define BENCH_OUTCOME_H

#include "histogram.h"
#include "http.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct {
    uint64_t requests, empty, pushed, popped, acked;
    Histogram push, pop, ack;
} Counters;

typedef struct {
    uint64_t http, unexpected, connection;
    char first[400];
} Errors;

static inline uint64_t errors_total(const Errors *e) { return e->http + e->unexpected + e->connection; }

/* Remembers the first error; the text is made safe to stand inside a JSON string. */
static inline void errors_note(Errors *e, uint64_t *kind, const char *what, const Response *r) {
    (*kind)++;
    if (errors_total(e) > 1) return;
    int length = snprintf(e->first, sizeof e->first, "%s", what);
    if (r) {
        int shown = r->body_length < 200 ? (int)r->body_length : 200;
        length = snprintf(e->first, sizeof e->first, "%s: HTTP %d %.*s", what, r->status, shown, r->body);
    }
    for (int i = 0; i < length && e->first[i]; i++) {
        unsigned char c = (unsigned char)e->first[i];
        if (c == '"' || c == '\\')
            e->first[i] = '\'';
        else if (c < 32 || c > 126)
            e->first[i] = ' ';
    }
}

#define POP_KEY "\"transactionId\":"

static inline bool answered_ok(const Response *r) {
    return r->status == 200 || r->status == 201 || r->status == 204;
}

#endif
