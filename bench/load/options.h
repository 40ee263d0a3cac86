/* Command line of the load generator. */
#ifndef BENCH_OPTIONS_H
#define BENCH_OPTIONS_H

#include <getopt.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum { MODE_PUSH, MODE_POP, MODE_POP_ACK, MODE_MIXED, MODE_PARK, MODE_SAMPLE } Mode;

typedef struct {
    const char *mode_name;
    Mode mode;
    const char *host, *queue;
    int port, connections, pushers, messages, batch, partitions, groups, pairs, rounds;
    bool round_robin, latency;
    double seconds, warmup, idle, rate;
    uint64_t total, expect, seed;
} Options;

static const char USAGE[] =
    "usage: load <mode> --port PORT [options]\n"
    "\n"
    "modes\n"
    "  push           every connection pushes, one request after the other\n"
    "  pop            every connection pops with autoAck\n"
    "  pop-ack        every connection long-polls a batch, then acknowledges it with ack/batch\n"
    "  mixed          some connections push (--pushers), the others pop and acknowledge\n"
    "  latency-push   push of 1 message on one connection\n"
    "  latency-pop    pop of 1 message with autoAck on one connection\n"
    "  latency-ack    pop of 1 message, then its ack, on one connection; the ack is timed\n"
    "  park           time from sending a push to its delivery at a pop that is already waiting\n"
    "  sample         prints --total messages as JSON lines, connects nowhere\n"
    "\n"
    "options\n"
    "  --host ADDRESS        numeric IPv4 address (127.0.0.1)\n"
    "  --queue NAME          queue name, URL-safe (bench)\n"
    "  --connections N       keep-alive connections (64)\n"
    "  --pushers N           mixed: how many of them push (half)\n"
    "  --seconds S           length of the measurement (10)\n"
    "  --warmup S            time before it that is not counted (1)\n"
    "  --total N             push: stop after N messages; sample: how many\n"
    "  --expect N            pop: messages there are for each group; stop when all have been received\n"
    "  --messages N          messages per push request (100)\n"
    "  --batch N             messages per pop (100)\n"
    "  --partitions N        partitions p0..pN-1; each request goes to one, at random (1)\n"
    "  --round-robin         visit the partitions in turn instead\n"
    "  --groups N            consumer groups g0..gN-1 spread over the connections; 0: no group (0)\n"
    "  --rate R              pushed messages per second at most; 0: as fast as answers come (0)\n"
    "  --idle S              park: how long the pop has been waiting when the push is sent (0.02)\n"
    "  --pairs N             park: pop/push pairs at the same time (1)\n"
    "  --rounds N            park: rounds per pair; 0: until the time is up (0)\n"
    "  --seed N              seed of the payload pool (1)\n"
    "\n"
    "Prints one JSON object. Writes `start` and `stop` to stderr around the measured time.\n"
    "Exit code 0: clean; 1: the server answered with errors; 2: wrong usage or no connection.\n";

static inline void usage_error(const char *what, const char *value) {
    fprintf(stderr, "load: %s%s%s\n\n%s", what, value ? ": " : "", value ? value : "", USAGE);
    exit(2);
}

static inline void set_mode(Options *o, const char *name) {
    static const struct {
        const char *name;
        Mode mode;
        bool latency;
    } modes[] = {
        {"push", MODE_PUSH, false},          {"pop", MODE_POP, false},
        {"pop-ack", MODE_POP_ACK, false},    {"mixed", MODE_MIXED, false},
        {"park", MODE_PARK, false},          {"sample", MODE_SAMPLE, false},
        {"latency-push", MODE_PUSH, true},   {"latency-pop", MODE_POP, true},
        {"latency-ack", MODE_POP_ACK, true},
    };
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        if (strcmp(name, modes[i].name) != 0) continue;
        o->mode_name = modes[i].name;
        o->mode = modes[i].mode;
        o->latency = modes[i].latency;
        return;
    }
    usage_error("unknown mode", name);
}

static inline Options options_parse(int argc, char **argv) {
    static const struct option known[] = {
        {"port", 1, 0, 'p'},        {"host", 1, 0, 'h'},    {"queue", 1, 0, 'q'},
        {"connections", 1, 0, 'c'}, {"pushers", 1, 0, 'P'}, {"seconds", 1, 0, 's'},
        {"warmup", 1, 0, 'w'},      {"total", 1, 0, 't'},   {"expect", 1, 0, 'e'},
        {"messages", 1, 0, 'm'},    {"batch", 1, 0, 'b'},   {"partitions", 1, 0, 'n'},
        {"round-robin", 0, 0, 'r'}, {"groups", 1, 0, 'g'},  {"rate", 1, 0, 'R'},
        {"idle", 1, 0, 'i'},        {"pairs", 1, 0, 'a'},   {"rounds", 1, 0, 'o'},
        {"seed", 1, 0, 'S'},        {"help", 0, 0, 'H'},    {0, 0, 0, 0},
    };
    Options o = {.host = "127.0.0.1",
                 .queue = "bench",
                 .connections = 64,
                 .pushers = -1,
                 .messages = 100,
                 .batch = 100,
                 .partitions = 1,
                 .pairs = 1,
                 .seconds = 10,
                 .warmup = 1,
                 .idle = 0.02,
                 .seed = 1};
    for (int flag; (flag = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        switch (flag) {
        case 'p': o.port = atoi(optarg); break;
        case 'h': o.host = optarg; break;
        case 'q': o.queue = optarg; break;
        case 'c': o.connections = atoi(optarg); break;
        case 'P': o.pushers = atoi(optarg); break;
        case 's': o.seconds = atof(optarg); break;
        case 'w': o.warmup = atof(optarg); break;
        case 't': o.total = strtoull(optarg, NULL, 10); break;
        case 'e': o.expect = strtoull(optarg, NULL, 10); break;
        case 'm': o.messages = atoi(optarg); break;
        case 'b': o.batch = atoi(optarg); break;
        case 'n': o.partitions = atoi(optarg); break;
        case 'r': o.round_robin = true; break;
        case 'g': o.groups = atoi(optarg); break;
        case 'R': o.rate = atof(optarg); break;
        case 'i': o.idle = atof(optarg); break;
        case 'a': o.pairs = atoi(optarg); break;
        case 'o': o.rounds = atoi(optarg); break;
        case 'S': o.seed = strtoull(optarg, NULL, 10); break;
        case 'H': fputs(USAGE, stdout); exit(0);
        default: usage_error("see the options below", NULL);
        }
    }
    if (optind != argc - 1) usage_error("exactly one mode is expected", NULL);
    set_mode(&o, argv[optind]);
    if (o.latency) o.connections = o.messages = o.batch = 1;
    if (o.pushers < 0) o.pushers = o.connections / 2;
    if (o.mode != MODE_SAMPLE && (o.port < 1 || o.port > 65535)) usage_error("--port must be 1..65535", NULL);
    if (o.connections < 1 || o.messages < 1 || o.batch < 1 || o.partitions < 1 || o.pairs < 1 || o.groups < 0)
        usage_error("counts must be positive", NULL);
    if (o.mode == MODE_MIXED && (o.pushers < 1 || o.pushers >= o.connections))
        usage_error("mixed needs at least one pusher and one consumer", NULL);
    if (strlen(o.queue) > 200) usage_error("--queue is longer than 200 characters", NULL);
    return o;
}

#endif
