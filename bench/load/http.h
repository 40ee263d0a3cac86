/* Just enough HTTP/1.1 and JSON to drive the server: no chunked bodies, no general JSON tree. */
#ifndef BENCH_HTTP_H
#define BENCH_HTTP_H

#include "buffer.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* Room left before a body for its header, which can only be written once the length is known. */
#define HEADER_ROOM 512

typedef struct {
    int status;
    bool closes; /* the server said Connection: close */
    const char *body;
    size_t body_length, total_length;
} Response;

typedef enum { RESPONSE_INCOMPLETE, RESPONSE_COMPLETE, RESPONSE_UNREADABLE } ResponseState;

/* Value of a header inside the head, or NULL. Names are compared without case. */
static inline const char *header_value(const char *head, const char *end, const char *name) {
    size_t length = strlen(name);
    for (const char *line = head; line < end;) {
        const char *next = memchr(line, '\n', (size_t)(end - line));
        if (!next) break;
        if ((size_t)(next - line) > length && line[length] == ':' && strncasecmp(line, name, length) == 0) {
            const char *value = line + length + 1;
            while (*value == ' ') value++;
            return value;
        }
        line = next + 1;
    }
    return NULL;
}

static inline ResponseState response_parse(const char *bytes, size_t length, Response *r) {
    const char *blank = memmem(bytes, length, "\r\n\r\n", 4);
    if (!blank) return length > 65536 ? RESPONSE_UNREADABLE : RESPONSE_INCOMPLETE;
    const char *end = blank + 2;
    if (length < 12 || memcmp(bytes, "HTTP/1.1 ", 9) != 0) return RESPONSE_UNREADABLE;
    r->status = atoi(bytes + 9);
    const char *connection = header_value(bytes, end, "connection");
    r->closes = connection && strncasecmp(connection, "close", 5) == 0;
    if (header_value(bytes, end, "transfer-encoding")) return RESPONSE_UNREADABLE;
    const char *content_length = header_value(bytes, end, "content-length");
    r->body_length = content_length ? strtoull(content_length, NULL, 10) : 0;
    r->body = blank + 4;
    r->total_length = (size_t)(r->body - bytes) + r->body_length;
    return length >= r->total_length ? RESPONSE_COMPLETE : RESPONSE_INCOMPLETE;
}

static inline size_t count_occurrences(const char *bytes, size_t length, const char *needle) {
    size_t count = 0, step = strlen(needle);
    const char *end = bytes + length;
    while ((bytes = memmem(bytes, (size_t)(end - bytes), needle, step))) {
        count++;
        bytes += step;
    }
    return count;
}

typedef struct {
    const char *bytes;
    size_t length;
} Slice;

/* What an ack needs of a delivered message; the slices point into the answer, without quotes. */
typedef struct {
    Slice transaction_id, partition_id, lease_id;
} Delivered;

static inline const char *after_string(const char *p, const char *end) {
    for (p++; p < end; p++) {
        p = memchr(p, '"', (size_t)(end - p));
        if (!p) return end;
        size_t slashes = 0;
        while (p[-1 - (long)slashes] == '\\') slashes++;
        if (slashes % 2 == 0) return p + 1;
    }
    return end;
}

static inline const char *after_value(const char *p, const char *end) {
    if (*p == '"') return after_string(p, end);
    int depth = 0;
    while (p < end) {
        if (*p == '"') {
            p = after_string(p, end);
            continue;
        }
        if (*p == '{' || *p == '[') depth++;
        if (*p == '}' || *p == ']') {
            if (depth == 0) return p;
            if (--depth == 0) return p + 1;
        }
        if (*p == ',' && depth == 0) return p;
        p++;
    }
    return end;
}

static inline const char *skip_blank(const char *p, const char *end) {
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t' || *p == ',' || *p == ':')) p++;
    return p;
}

static inline bool key_is(const char *key, size_t length, const char *name) {
    return length == strlen(name) && memcmp(key, name, length) == 0;
}

/* Reads the object at *p (a message), whatever the order of its keys; false when it is not an object. */
static inline bool read_delivered(const char **p, const char *end, Delivered *d) {
    if (*p >= end || **p != '{') return false;
    memset(d, 0, sizeof *d);
    const char *q = skip_blank(*p + 1, end);
    while (q < end && *q == '"') {
        const char *key = q + 1;
        q = after_string(q, end);
        size_t key_length = (size_t)(q - key) - 1;
        const char *value = skip_blank(q, end);
        q = after_value(value, end);
        if (value < end && *value == '"') {
            Slice text = {value + 1, (size_t)(q - value) - 2};
            if (key_is(key, key_length, "transactionId"))
                d->transaction_id = text;
            else if (key_is(key, key_length, "partitionId"))
                d->partition_id = text;
            else if (key_is(key, key_length, "leaseId"))
                d->lease_id = text;
        }
        q = skip_blank(q, end);
    }
    *p = q < end ? q + 1 : end;
    return true;
}

/* First element of the top-level "messages" array, or NULL. The key cannot occur earlier as a key of a
   payload because payloads are inside that array. */
static inline const char *first_delivered(const char *body, size_t length) {
    const char *key = memmem(body, length, "\"messages\":", 11), *end = body + length;
    if (!key) return NULL;
    const char *p = skip_blank(key + 11, end);
    return p < end && *p == '[' ? skip_blank(p + 1, end) : NULL;
}

#endif
