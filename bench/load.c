/* Load generator for a Queen server. `load --help` explains the modes; build: cc -O2 -pthread -o bin/load
 * load.c */
#define _GNU_SOURCE

#include "load/closed_loop.h"
#include "load/options.h"
#include "load/park.h"

static void print_sample(const Options *o, const Messages *messages);
static void print_result(const Options *o, const Loop *l);
static void print_series(const Loop *l);

int main(int argc, char **argv) {
    Options options = options_parse(argc, argv);
    Messages *messages = messages_new(options.seed);
    if (options.mode == MODE_SAMPLE) {
        print_sample(&options, messages);
        return 0;
    }
    Loop *loop = calloc(1, sizeof *loop);
    if (options.mode == MODE_PARK) {
        start_measuring(loop);
        run_park(&options, messages, &loop->counted, &loop->errors);
        stop_measuring(loop);
    } else {
        run_closed_loop(loop, &options, messages);
    }
    print_result(&options, loop);
    unsigned long long errors = errors_total(&loop->errors);
    if (errors) fprintf(stderr, "load: %llu errors; the first: %s\n", errors, loop->errors.first);
    return errors ? 1 : 0;
}

static void print_sample(const Options *o, const Messages *messages) {
    Source source = source_new(messages, o->seed);
    Buffer b = {0};
    for (uint64_t i = 0; i < o->total; i++) {
        const Text *payload = source_payload(&source);
        b.length = 0;
        buffer_text(&b, "{\"transactionId\":\"");
        append_uuid(&b, &source.random);
        buffer_text(&b, "\",\"payload\":");
        buffer_add(&b, payload->text, payload->length);
        buffer_text(&b, "}\n");
        fwrite(b.bytes, 1, b.length, stdout);
    }
}

/* The messages a mode is about: what a consumer has finished with, or what a producer has stored. */
static uint64_t messages_done(const Options *o, const Counters *c) {
    if (o->mode == MODE_PUSH) return c->pushed;
    return o->mode == MODE_POP || o->mode == MODE_PARK ? c->popped : c->acked;
}

static void print_result(const Options *o, const Loop *l) {
    const Counters *c = &l->counted;
    const Errors *e = &l->errors;
    double seconds = (double)(l->stopped_at - l->started_at) / 1e9;
    double per_second = seconds > 0 ? 1.0 / seconds : 0.0;
    uint64_t done = messages_done(o, c);
    printf("{\"mode\":\"%s\",\"connections\":%d,\"partitions\":%d,\"seconds\":%.4f,\"drained\":%s,",
           o->mode_name, o->mode == MODE_PARK ? 2 * o->pairs : o->connections, o->partitions, seconds,
           l->drained ? "true" : "false");
    printf("\"requests\":%llu,\"requests_per_s\":%.1f,\"messages\":%llu,\"messages_per_s\":%.1f,",
           (unsigned long long)c->requests, (double)c->requests * per_second, (unsigned long long)done,
           (double)done * per_second);
    printf("\"pushed\":%llu,\"popped\":%llu,\"acked\":%llu,\"empty\":%llu,", (unsigned long long)c->pushed,
           (unsigned long long)c->popped, (unsigned long long)c->acked, (unsigned long long)c->empty);
    printf("\"total_pushed\":%llu,\"total_popped\":%llu,\"total_acked\":%llu,\"cpu_s\":%.4f,",
           (unsigned long long)l->total.pushed, (unsigned long long)l->total.popped,
           (unsigned long long)l->total.acked, l->cpu);
    printf("\"errors\":{\"http\":%llu,\"unexpected\":%llu,\"connection\":%llu,\"first\":\"%s\"},",
           (unsigned long long)e->http, (unsigned long long)e->unexpected, (unsigned long long)e->connection,
           e->first);
    histogram_print(&c->push, "push_ms", stdout);
    putchar(',');
    histogram_print(&c->pop, "pop_ms", stdout);
    putchar(',');
    histogram_print(&c->ack, "ack_ms", stdout);
    print_series(l);
    puts("}");
}

/* Per second of a mixed run: messages in, messages out, and those pushed but not yet acknowledged. */
static void print_series(const Loop *l) {
    printf(",\"series\":[");
    for (int i = 0; i < l->seconds; i++) {
        Second before = i ? l->series[i - 1] : l->before, now = l->series[i];
        unsigned long long in = now.pushed - before.pushed, out = now.acked - before.acked;
        long long backlog = (long long)now.pushed - (long long)now.acked;
        printf("%s{\"in\":%llu,\"out\":%llu,\"backlog\":%lld}", i ? "," : "", in, out, backlog);
    }
    putchar(']');
}
