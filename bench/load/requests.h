/* The three requests of the contract that are measured. Each is written into an output buffer, ready to send.
 */
#ifndef BENCH_REQUESTS_H
#define BENCH_REQUESTS_H

#include "http.h"
#include "messages.h"
#include "options.h"

/* How long a consumer's long poll may wait before it asks again. */
#define POP_WAIT_MS 2000

typedef struct {
    Buffer buffer;
    size_t start, sent; /* the request is buffer[start..length); sent counts from start */
} Outgoing;

static inline void begin_body(Outgoing *out) {
    buffer_reserve(&out->buffer, HEADER_ROOM);
    out->buffer.length = HEADER_ROOM;
}

static inline void finish_post(Outgoing *out, const Options *o, const char *path) {
    char head[HEADER_ROOM];
    int length = snprintf(head, sizeof head,
                          "POST %s HTTP/1.1\r\nHost: %s:%d\r\nAccept: */*\r\nUser-Agent: queen-bench\r\n"
                          "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n",
                          path, o->host, o->port, out->buffer.length - HEADER_ROOM);
    out->start = HEADER_ROOM - (size_t)length;
    out->sent = 0;
    memcpy(out->buffer.bytes + out->start, head, (size_t)length);
}

static inline void write_push(Outgoing *out, const Options *o, Source *source, const char *queue, int count,
                              int partition) {
    char opening[300];
    int opening_length = snprintf(opening, sizeof opening,
                                  "{\"queue\":\"%s\",\"partition\":\"p%d\",\"payload\":", queue, partition);
    begin_body(out);
    Buffer *b = &out->buffer;
    buffer_text(b, "{\"items\":[");
    for (int i = 0; i < count; i++) {
        const Text *payload = source_payload(source);
        if (i) buffer_add(b, ",", 1);
        buffer_add(b, opening, (size_t)opening_length);
        buffer_add(b, payload->text, payload->length);
        buffer_add(b, ",\"transactionId\":\"", 18);
        append_uuid(b, &source->random);
        buffer_add(b, "\"}", 2);
    }
    buffer_text(b, "]}");
    finish_post(out, o, "/api/v1/push");
}

typedef struct {
    int batch, group, wait_ms; /* group < 0: none; wait_ms 0: do not wait */
    bool auto_ack;
} PopRequest;

static inline void write_pop(Outgoing *out, const Options *o, const char *queue, PopRequest pop) {
    Buffer *b = &out->buffer;
    b->length = out->start = out->sent = 0;
    buffer_format(b, "GET /api/v1/pop/queue/%s?batch=%d", queue, pop.batch);
    if (pop.auto_ack) buffer_text(b, "&autoAck=true");
    if (pop.wait_ms) buffer_format(b, "&wait=true&timeout=%d", pop.wait_ms);
    if (pop.group >= 0) buffer_format(b, "&consumerGroup=g%d", pop.group);
    buffer_format(b, " HTTP/1.1\r\nHost: %s:%d\r\nAccept: */*\r\nUser-Agent: queen-bench\r\n\r\n", o->host,
                  o->port);
}

static inline void add_field(Buffer *b, const char *name, Slice value) {
    buffer_format(b, "\"%s\":\"", name);
    buffer_add(b, value.bytes, value.length);
    buffer_text(b, "\",");
}

static inline void add_acknowledgment(Buffer *b, const Delivered *d) {
    add_field(b, "transactionId", d->transaction_id);
    add_field(b, "partitionId", d->partition_id);
    if (d->lease_id.bytes) add_field(b, "leaseId", d->lease_id);
    buffer_text(b, "\"status\":\"completed\"");
}

/* Writes the ack of every message in a pop answer; returns how many. One message goes by the single route
 * when asked. */
static inline int write_ack(Outgoing *out, const Options *o, const Response *popped, int group, bool single) {
    Buffer *b = &out->buffer;
    const char *end = popped->body + popped->body_length,
               *p = first_delivered(popped->body, popped->body_length);
    int count = 0;
    begin_body(out);
    buffer_text(b, single ? "{" : "{\"acknowledgments\":[");
    for (Delivered d; p && read_delivered(&p, end, &d); p = skip_blank(p, end)) {
        if (!d.transaction_id.bytes || !d.partition_id.bytes || (single && count == 1)) return -1;
        if (!single) buffer_text(b, count ? ",{" : "{");
        add_acknowledgment(b, &d);
        if (!single) buffer_text(b, "}");
        count++;
    }
    if (!single) buffer_text(b, "]");
    if (group >= 0) buffer_format(b, ",\"consumerGroup\":\"g%d\"", group);
    buffer_text(b, "}");
    finish_post(out, o, single ? "/api/v1/ack" : "/api/v1/ack/batch");
    return count;
}

#endif
