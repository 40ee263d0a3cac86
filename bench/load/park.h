/* How long a push takes to reach a pop that is already waiting. Each pair of connections has its own thread
   and queue, and connects anew for every round so that both land on any worker of the server. */
#ifndef BENCH_PARK_H
#define BENCH_PARK_H

#include "clock.h"
#include "connection.h"
#include "outcome.h"
#include "requests.h"

#include <pthread.h>

typedef struct {
    const Options *options;
    Source source;
    int number;
    uint64_t deadline;
    Counters counters;
    Errors errors;
} Pair;

static inline void sleep_ns(uint64_t ns) {
    struct timespec t = {(time_t)(ns / NS_PER_S), (long)(ns % NS_PER_S)};
    nanosleep(&t, NULL);
}

/* Reads one whole answer from a blocking socket; false when the connection ended or the answer cannot be
 * read. */
static inline bool receive_response(int fd, Buffer *in, Response *r) {
    in->length = 0;
    for (;;) {
        buffer_reserve(in, 65536);
        ssize_t n = recv(fd, in->bytes + in->length, in->capacity - in->length, 0);
        if (n <= 0) return false;
        in->length += (size_t)n;
        ResponseState state = response_parse(in->bytes, in->length, r);
        if (state != RESPONSE_INCOMPLETE) return state == RESPONSE_COMPLETE;
    }
}

static inline bool send_whole(int fd, const Outgoing *out) {
    size_t length = out->buffer.length - out->start;
    return send(fd, out->buffer.bytes + out->start, length, MSG_NOSIGNAL) == (ssize_t)length;
}

static inline void park_round(Pair *pair, Outgoing *out, Buffer *in) {
    const Options *o = pair->options;
    Errors *errors = &pair->errors;
    char queue[256];
    snprintf(queue, sizeof queue, "%s-%d", o->queue, pair->number);
    int popper = connect_to(o->host, o->port), pusher = connect_to(o->host, o->port);
    int longest_ms = 20000 + (int)(o->idle * 1000);
    write_pop(out, o, queue, (PopRequest){.batch = 1, .group = -1, .wait_ms = longest_ms, .auto_ack = true});
    bool sent = popper >= 0 && pusher >= 0 && send_whole(popper, out);
    sleep_ns((uint64_t)(o->idle * 1e9) + random_below(&pair->source.random, 10 * NS_PER_MS));
    write_push(out, o, &pair->source, queue, 1, 0);
    Response r;
    uint64_t pushed_at = now_ns();
    if (!sent || !send_whole(pusher, out) || !receive_response(popper, in, &r)) {
        errors_note(errors, &errors->connection, "no answer to a parked pop", NULL);
    } else if (!answered_ok(&r)) {
        errors_note(errors, &errors->http, "parked pop", &r);
    } else if (count_occurrences(r.body, r.body_length, POP_KEY) != 1) {
        errors_note(errors, &errors->unexpected, "a parked pop did not return the one message", &r);
    } else {
        histogram_add(&pair->counters.pop, now_ns() - pushed_at);
        pair->counters.popped++;
    }
    if (sent && !receive_response(pusher, in, &r))
        errors_note(errors, &errors->connection, "no answer to a push", NULL);
    pair->counters.requests += 2;
    close(popper);
    close(pusher);
}

static inline void *park_pair(void *argument) {
    Pair *pair = argument;
    Outgoing out = {0};
    Buffer in = {0};
    int rounds = pair->options->rounds;
    sleep_ns(random_below(&pair->source.random, (uint64_t)(pair->options->idle * 1e9) + NS_PER_MS));
    park_round(pair, &out, &in); /* creates the queue; not counted */
    memset(&pair->counters, 0, sizeof pair->counters);
    for (int i = 0; rounds ? i < rounds : now_ns() < pair->deadline; i++) {
        park_round(pair, &out, &in);
        if (errors_total(&pair->errors) > 5) break;
    }
    return NULL;
}

static inline void histogram_merge(Histogram *into, const Histogram *from) {
    for (unsigned b = 0; b < BUCKETS; b++) into->counts[b] += from->counts[b];
    into->total += from->total;
    into->sum += from->sum;
    if (from->max > into->max) into->max = from->max;
}

static inline void errors_merge(Errors *into, const Errors *from) {
    if (!into->first[0]) memcpy(into->first, from->first, sizeof into->first);
    into->http += from->http;
    into->unexpected += from->unexpected;
    into->connection += from->connection;
}

static inline void run_park(const Options *o, const Messages *messages, Counters *counters, Errors *errors) {
    Pair *pairs = calloc((size_t)o->pairs, sizeof *pairs);
    pthread_t *threads = calloc((size_t)o->pairs, sizeof *threads);
    for (int i = 0; i < o->pairs; i++) {
        pairs[i].options = o;
        pairs[i].source = source_new(messages, now_ns() ^ ((uint64_t)(i + 1) << 40));
        pairs[i].number = i;
        pairs[i].deadline = now_ns() + (uint64_t)(o->seconds * 1e9);
        pthread_create(&threads[i], NULL, park_pair, &pairs[i]);
    }
    for (int i = 0; i < o->pairs; i++) {
        pthread_join(threads[i], NULL);
        counters->requests += pairs[i].counters.requests;
        counters->popped += pairs[i].counters.popped;
        histogram_merge(&counters->pop, &pairs[i].counters.pop);
        errors_merge(errors, &pairs[i].errors);
    }
    free(threads);
    free(pairs);
}

#endif
