/* A growing byte buffer. */
#ifndef BENCH_BUFFER_H
#define BENCH_BUFFER_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char *bytes;
    size_t length, capacity;
} Buffer;

static inline void buffer_reserve(Buffer *b, size_t extra) {
    if (b->length + extra <= b->capacity) return;
    size_t wanted = b->capacity ? b->capacity : 4096;
    while (wanted < b->length + extra) wanted *= 2;
    b->bytes = realloc(b->bytes, wanted);
    if (!b->bytes) {
        fprintf(stderr, "load: out of memory (%zu bytes wanted)\n", wanted);
        exit(2);
    }
    b->capacity = wanted;
}

static inline void buffer_add(Buffer *b, const char *bytes, size_t length) {
    buffer_reserve(b, length);
    memcpy(b->bytes + b->length, bytes, length);
    b->length += length;
}

static inline void buffer_text(Buffer *b, const char *text) { buffer_add(b, text, strlen(text)); }

__attribute__((format(printf, 2, 3))) static inline void buffer_format(Buffer *b, const char *format, ...) {
    va_list args;
    va_start(args, format);
    buffer_reserve(b, 1024);
    int written = vsnprintf(b->bytes + b->length, b->capacity - b->length, format, args);
    va_end(args);
    if (written < 0 || (size_t)written >= b->capacity - b->length) {
        fprintf(stderr, "load: formatted text longer than its buffer\n");
        exit(2);
    }
    b->length += (size_t)written;
}

#endif
