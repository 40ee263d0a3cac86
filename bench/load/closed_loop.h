/* The closed loop: every connection sends its next request as soon as it has the answer to the last one. One
   thread, one epoll set. */
#ifndef BENCH_CLOSED_LOOP_H
#define BENCH_CLOSED_LOOP_H

#include "clock.h"
#include "connection.h"
#include "outcome.h"
#include "requests.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/epoll.h>

#define MAX_ERRORS 1000
#define DRAINED_AFTER_NS (1 * NS_PER_S) /* no message for so long means that none are left */
#define FINISH_WITHIN_NS (5 * NS_PER_S) /* answers still under way when the time is up */
#define MIN_PAUSE_NS (1 * NS_PER_MS)
#define MAX_PAUSE_NS (20 * NS_PER_MS)

typedef enum { PUSHING, POPPING, ACKING } Step;

typedef struct {
    int fd, group;
    bool pusher, writable_wanted, in_flight;
    Step step;
    int messages;                     /* in the request under way */
    uint64_t sent_at, wake_at, pause; /* wake_at 0: not sleeping */
    Outgoing out;
    Buffer in;
} Connection;

typedef struct {
    uint64_t pushed, acked;
} Second;

typedef struct {
    const Options *options;
    Source source;
    int epoll, in_flight;
    Connection *connections;
    bool measuring, stopping, drained;
    uint64_t issued, next_partition, next_slot, last_message_at, started_at, stopped_at;
    double cpu;
    Counters total, counted; /* counted: since the measurement started */
    Errors errors;
    Second before, *series; /* totals when the measurement started, and after each second */
    int seconds;
} Loop;

static inline void start_next(Loop *l, Connection *c);

static inline void watch(Loop *l, Connection *c, int operation, bool writable) {
    struct epoll_event event = {.events = EPOLLIN | (writable ? EPOLLOUT : 0u), .data.ptr = c};
    epoll_ctl(l->epoll, operation, c->fd, &event);
    c->writable_wanted = writable;
}

static inline void open_connection(Loop *l, Connection *c) {
    c->fd = connect_to(l->options->host, l->options->port);
    if (c->fd < 0) {
        fprintf(stderr, "load: cannot connect to %s:%d: %s\n", l->options->host, l->options->port,
                strerror(errno));
        exit(2);
    }
    fcntl(c->fd, F_SETFL, fcntl(c->fd, F_GETFL) | O_NONBLOCK);
    watch(l, c, EPOLL_CTL_ADD, false);
}

static inline void settle(Loop *l, Connection *c) {
    if (c->in_flight) l->in_flight--;
    c->in_flight = false;
}

static inline void sleep_until(Connection *c, uint64_t when) { c->wake_at = when; }

static inline void drop_connection(Loop *l, Connection *c, const char *why) {
    errors_note(&l->errors, &l->errors.connection, why, NULL);
    settle(l, c);
    close(c->fd);
    c->in.length = 0;
    open_connection(l, c);
    sleep_until(c, now_ns() + 100 * NS_PER_MS);
}

static inline void flush_out(Loop *l, Connection *c) {
    Outgoing *out = &c->out;
    size_t length = out->buffer.length - out->start;
    while (out->sent < length) {
        ssize_t n = send(c->fd, out->buffer.bytes + out->start + out->sent, length - out->sent, MSG_NOSIGNAL);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        if (n < 0) {
            drop_connection(l, c, "connection lost while sending");
            return;
        }
        out->sent += (size_t)n;
    }
    bool unfinished = out->sent < length;
    if (unfinished != c->writable_wanted) watch(l, c, EPOLL_CTL_MOD, unfinished);
}

static inline void send_request(Loop *l, Connection *c, Step step) {
    c->step = step;
    c->in_flight = true;
    l->in_flight++;
    c->sent_at = now_ns();
    flush_out(l, c);
}

/* Takes the next place in the schedule of --rate; true when it lies in the future and the connection must
 * wait. */
static inline bool must_wait_for_slot(Loop *l, Connection *c) {
    const Options *o = l->options;
    if (o->rate <= 0) return false;
    uint64_t now = now_ns();
    if (c->wake_at == 0) {
        if (l->next_slot + NS_PER_S < now) l->next_slot = now - NS_PER_S;
        c->wake_at = l->next_slot;
        l->next_slot = c->wake_at + (uint64_t)((double)o->messages / o->rate * 1e9);
    }
    if (c->wake_at > now) return true;
    c->wake_at = 0;
    return false;
}

static inline void start_push(Loop *l, Connection *c) {
    const Options *o = l->options;
    uint64_t left = o->total ? o->total - l->issued : (uint64_t)o->messages;
    if (left == 0 || must_wait_for_slot(l, c)) return;
    c->messages = left < (uint64_t)o->messages ? (int)left : o->messages;
    l->issued += (uint64_t)c->messages;
    uint64_t partitions = (uint64_t)o->partitions;
    uint64_t partition =
        o->round_robin ? l->next_partition++ % partitions : random_below(&l->source.random, partitions);
    write_push(&c->out, o, &l->source, o->queue, c->messages, (int)partition);
    send_request(l, c, PUSHING);
}

static inline void start_pop(Loop *l, Connection *c) {
    const Options *o = l->options;
    bool acks = o->mode != MODE_POP;
    PopRequest pop = {
        .batch = o->batch, .group = c->group, .auto_ack = !acks, .wait_ms = acks ? POP_WAIT_MS : 0};
    write_pop(&c->out, o, o->queue, pop);
    send_request(l, c, POPPING);
}

static inline void start_next(Loop *l, Connection *c) {
    if (l->stopping) return;
    if (c->pusher)
        start_push(l, c);
    else
        start_pop(l, c);
}

static inline void pushed(Loop *l, Connection *c, const Response *r, uint64_t latency) {
    size_t queued = count_occurrences(r->body, r->body_length, "\"queued\"");
    if (queued != (size_t)c->messages)
        errors_note(&l->errors, &l->errors.unexpected, "not every message was queued", r);
    l->total.pushed += queued;
    l->counted.pushed += queued;
    histogram_add(&l->counted.push, latency);
    start_next(l, c);
}

static inline void popped_nothing(Loop *l, Connection *c) {
    l->counted.empty++;
    if (l->options->mode != MODE_POP) {
        start_next(l, c); /* it has waited at the server */
        return;
    }
    c->pause = c->pause ? c->pause * 2 : MIN_PAUSE_NS;
    if (c->pause > MAX_PAUSE_NS) c->pause = MAX_PAUSE_NS;
    sleep_until(c, now_ns() + c->pause);
}

static inline void popped(Loop *l, Connection *c, const Response *r, uint64_t latency) {
    size_t count = r->status == 204 ? 0 : count_occurrences(r->body, r->body_length, POP_KEY);
    if (r->status != 204 && !memmem(r->body, r->body_length, "\"messages\"", 10))
        errors_note(&l->errors, &l->errors.unexpected, "a pop answered without messages", r);
    if (count > (size_t)l->options->batch)
        errors_note(&l->errors, &l->errors.unexpected, "a pop returned more than its batch", r);
    if (count == 0) {
        popped_nothing(l, c);
        return;
    }
    c->pause = 0;
    l->total.popped += count;
    l->counted.popped += count;
    l->last_message_at = c->sent_at + latency;
    histogram_add(&l->counted.pop, latency);
    if (l->options->mode == MODE_POP) {
        start_next(l, c);
        return;
    }
    c->messages = write_ack(&c->out, l->options, r, c->group, l->options->latency);
    if (c->messages != (int)count) {
        errors_note(&l->errors, &l->errors.unexpected, "a popped message lacks transactionId or partitionId",
                    r);
        start_next(l, c);
        return;
    }
    send_request(l, c, ACKING);
}

static inline void acked(Loop *l, Connection *c, const Response *r, uint64_t latency) {
    size_t done = count_occurrences(r->body, r->body_length, "\"success\":true");
    if (done != (size_t)c->messages)
        errors_note(&l->errors, &l->errors.unexpected, "not every ack succeeded", r);
    l->total.acked += done;
    l->counted.acked += done;
    histogram_add(&l->counted.ack, latency);
    start_next(l, c);
}

static inline void answered(Loop *l, Connection *c, const Response *r) {
    uint64_t latency = now_ns() - c->sent_at;
    settle(l, c);
    l->counted.requests++;
    if (!answered_ok(r)) {
        static const char *const names[] = {"push", "pop", "ack"};
        errors_note(&l->errors, &l->errors.http, names[c->step], r);
        sleep_until(c, now_ns() + 50 * NS_PER_MS);
    } else if (c->step == PUSHING) {
        pushed(l, c, r, latency);
    } else if (c->step == POPPING) {
        popped(l, c, r, latency);
    } else {
        acked(l, c, r, latency);
    }
}

static inline void readable(Loop *l, Connection *c) {
    buffer_reserve(&c->in, 65536);
    ssize_t n = recv(c->fd, c->in.bytes + c->in.length, c->in.capacity - c->in.length, 0);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0) {
        drop_connection(l, c, "connection closed by the server");
        return;
    }
    c->in.length += (size_t)n;
    Response r;
    ResponseState state = response_parse(c->in.bytes, c->in.length, &r);
    if (state == RESPONSE_INCOMPLETE) return;
    if (state == RESPONSE_UNREADABLE || c->in.length > r.total_length || !c->in_flight) {
        drop_connection(l, c, "unreadable answer (chunked, or not HTTP/1.1, or not asked for)");
        return;
    }
    c->in.length = 0; /* the bytes stay in place: `answered` reads them before the next recv */
    answered(l, c, &r);
    if (r.closes) drop_connection(l, c, "the server ended a keep-alive connection");
}

static inline void wake_sleepers(Loop *l, uint64_t now) {
    for (int i = 0; i < l->options->connections; i++) {
        Connection *c = &l->connections[i];
        if (!c->wake_at || c->wake_at > now || c->in_flight) continue;
        if (!c->pusher || l->options->rate <= 0) c->wake_at = 0;
        start_next(l, c);
    }
}

static inline int milliseconds_to_wait(const Loop *l, uint64_t now, uint64_t deadline) {
    uint64_t next = deadline;
    for (int i = 0; i < l->options->connections && !l->stopping; i++) {
        uint64_t wake = l->connections[i].wake_at;
        if (wake && !l->connections[i].in_flight && wake < next) next = wake;
    }
    return next <= now ? 0 : (int)((next - now) / NS_PER_MS) + 1;
}

static inline void turn(Loop *l, uint64_t deadline) {
    struct epoll_event events[64];
    int ready = epoll_wait(l->epoll, events, 64, milliseconds_to_wait(l, now_ns(), deadline));
    for (int i = 0; i < ready; i++) {
        Connection *c = events[i].data.ptr;
        if (events[i].events & EPOLLOUT) flush_out(l, c);
        if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(l, c);
    }
    if (!l->stopping) wake_sleepers(l, now_ns());
}

static inline bool everything_arrived(const Loop *l) {
    const Options *o = l->options;
    uint64_t groups = o->groups > 0 ? (uint64_t)o->groups : 1;
    if (o->mode == MODE_PUSH) return o->total && l->issued == o->total && l->in_flight == 0;
    if (o->mode == MODE_MIXED) return false;
    if (o->expect) return (o->mode == MODE_POP ? l->total.popped : l->total.acked) >= o->expect * groups;
    return l->last_message_at && now_ns() - l->last_message_at > DRAINED_AFTER_NS;
}

static inline void note_second(Loop *l, uint64_t now) {
    if (l->options->mode != MODE_MIXED || now < l->started_at + (uint64_t)(l->seconds + 1) * NS_PER_S) return;
    l->series = realloc(l->series, sizeof *l->series * (size_t)(l->seconds + 1));
    l->series[l->seconds++] = (Second){l->total.pushed, l->total.acked};
}

static inline void start_measuring(Loop *l) {
    memset(&l->counted, 0, sizeof l->counted);
    l->measuring = true;
    l->before = (Second){l->total.pushed, l->total.acked};
    l->started_at = now_ns();
    l->cpu = cpu_seconds();
    fputs("start\n", stderr);
}

static inline void stop_measuring(Loop *l) {
    l->stopped_at = now_ns();
    if (l->drained && l->last_message_at > l->started_at) l->stopped_at = l->last_message_at;
    l->cpu = cpu_seconds() - l->cpu;
    l->stopping = true;
    fputs("stop\n", stderr);
}

static inline void run_until(Loop *l, uint64_t deadline) {
    for (uint64_t now = now_ns(); now < deadline; now = now_ns()) {
        uint64_t wake = deadline < now + NS_PER_S / 10 ? deadline : now + NS_PER_S / 10;
        turn(l, wake);
        if (l->measuring) note_second(l, now_ns());
        if (everything_arrived(l)) {
            l->drained = l->options->mode != MODE_PUSH;
            return;
        }
        if (errors_total(&l->errors) > MAX_ERRORS) return;
    }
}

static inline void run_closed_loop(Loop *l, const Options *o, const Messages *messages) {
    l->options = o;
    l->source = source_new(messages, now_ns() ^ ((uint64_t)getpid() << 40));
    l->epoll = epoll_create1(0);
    l->next_slot = now_ns();
    l->connections = calloc((size_t)o->connections, sizeof *l->connections);
    for (int i = 0; i < o->connections; i++) {
        Connection *c = &l->connections[i];
        c->pusher = o->mode == MODE_PUSH || (o->mode == MODE_MIXED && i < o->pushers);
        c->group = o->groups > 0 ? i % o->groups : -1;
        open_connection(l, c);
    }
    for (int i = 0; i < o->connections; i++) start_next(l, &l->connections[i]);
    if (o->warmup > 0) run_until(l, now_ns() + (uint64_t)(o->warmup * 1e9));
    start_measuring(l);
    if (!l->drained) run_until(l, l->started_at + (uint64_t)(o->seconds * 1e9));
    Counters *snapshot = malloc(sizeof *snapshot);
    stop_measuring(l);
    *snapshot = l->counted;
    for (uint64_t limit = now_ns() + FINISH_WITHIN_NS; l->in_flight > 0 && now_ns() < limit;) turn(l, limit);
    l->counted = *snapshot;
    free(snapshot);
    uint64_t groups = o->groups > 0 ? (uint64_t)o->groups : 1;
    if (o->expect && l->total.popped > o->expect * groups)
        errors_note(&l->errors, &l->errors.unexpected,
                    "more messages were delivered than exist: some came twice", NULL);
}

#endif
