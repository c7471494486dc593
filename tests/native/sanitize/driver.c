/* driver.c: runs one scenario against one transport. See harness.h for what is checked on the way, run.py for who calls
 * it. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "harness.h"

static int usage(void) {
    fprintf(stderr, "usage: driver roundtrip|storm|close|ends|kill|hostile|device TRANSPORT DIR SEED ROUNDS\n");
    return 2;
}

int main(int argc, char **argv) {
    alarm(280); /* nothing here may hang for ever */
    if (argc == 5 && strcmp(argv[1], "child") == 0) {
        harness_seed = (uint64_t)getpid();
        return kill_child(argv[3], argv[4], argv[2]);
    }
    if (argc != 6) {
        return usage();
    }
    const char *scenario = argv[1], *transport = argv[2], *dir = argv[3];
    harness_seed = strtoull(argv[4], NULL, 10);
    int rounds = atoi(argv[5]);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (strcmp(scenario, "roundtrip") == 0) {
        scenario_roundtrip(transport, dir);
    } else if (strcmp(scenario, "storm") == 0) {
        scenario_storm(transport, dir, rounds);
    } else if (strcmp(scenario, "close") == 0) {
        scenario_close(transport, dir, rounds);
    } else if (strcmp(scenario, "ends") == 0) {
        scenario_ends(transport, dir, rounds);
    } else if (strcmp(scenario, "kill") == 0) {
        scenario_kill(transport, dir, rounds, argv[0]);
    } else if (strcmp(scenario, "hostile") == 0) {
        scenario_hostile(transport, dir, rounds);
    } else if (strcmp(scenario, "device") == 0) {
        scenario_device(transport, dir, rounds);
    } else {
        return usage();
    }
    return 0;
}
