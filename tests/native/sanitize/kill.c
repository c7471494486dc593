/* kill.c: one of two processes dies by SIGKILL in the middle of transfers. The survivor learns it quickly, every token
 * of it completes, and nobody writes into its memory any more. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

#define LENGTH    (1ull << 20)
#define NOTICE_MS 5000 /* 2 s is promised; sanitizers are slow */

typedef struct child {
    pid_t pid;
    FILE *to, *from;
} child;

static child child_start(const char *self, const char *transport, const char *dir, const char *role) {
    int down[2], up[2];
    CHECK(pipe(down) == 0 && pipe(up) == 0);
    fflush(NULL);
    child c = {.pid = fork()};
    CHECK(c.pid >= 0);
    if (c.pid == 0) {
        dup2(down[0], STDIN_FILENO);
        dup2(up[1], STDOUT_FILENO);
        close(down[1]);
        close(up[0]);
        execl(self, self, "child", role, transport, dir, (char *)NULL);
        _exit(127);
    }
    close(down[0]);
    close(up[1]);
    c.to = fdopen(down[1], "w");
    c.from = fdopen(up[0], "r");
    CHECK(c.to != NULL && c.from != NULL);
    return c;
}

static void child_kill(child *c) {
    int status = 0;
    CHECK(kill(c->pid, SIGKILL) == 0);
    CHECK(waitpid(c->pid, &status, 0) == c->pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL); /* it did not fail by itself before */
    fclose(c->to);
    fclose(c->from);
}

static void write_invitation(FILE *to, const side *s, const place *p) {
    kvx_remote remote = place_remote(p);
    fprintf(to, "%s %llu %llu ", s->endpoint, (unsigned long long)remote.grant, (unsigned long long)remote.generation);
    for (size_t i = 0; i < sizeof(remote.key); i++) {
        fprintf(to, "%02x", remote.key[i]);
    }
    fprintf(to, " ");
    for (size_t i = 0; i < sizeof(s->secret); i++) { /* zeros when it does not encrypt */
        fprintf(to, "%02x", s->secret[i]);
    }
    fprintf(to, "\n");
    fflush(to);
}

static void read_hex(const char *text, uint8_t *bytes, size_t length) {
    for (size_t i = 0; i < length; i++) {
        unsigned value;
        CHECK(sscanf(text + 2 * i, "%2x", &value) == 1);
        bytes[i] = (uint8_t)value;
    }
}

static void read_invitation(FILE *from, char endpoint[KVX_ENDPOINT_MAX], uint8_t secret[KVX_SECRET_BYTES],
                            kvx_remote *remote_p) {
    unsigned long long grant, generation;
    char key[33], told[65];
    CHECK(fscanf(from, "%255s %llu %llu %32s %64s", endpoint, &grant, &generation, key, told) == 5);
    *remote_p =
        (kvx_remote){.grant = grant, .generation = generation, .length = LENGTH, .access = KVX_READ | KVX_WRITE};
    read_hex(key, remote_p->key, sizeof(remote_p->key));
    read_hex(told, secret, KVX_SECRET_BYTES);
}

/* Opens the other's memory; the import. */
static uint64_t reach(side *s, const char *endpoint, const uint8_t *secret, const kvx_remote *remote) {
    side *both[1] = {s};
    uint64_t peer = 0, token = 0, import = 0;
    CHECK_STATUS(KVX_OK, kvx_peer_connect(s->engine, s->transport, endpoint,
                                          s->caps & KVX_CAP_ENCRYPTED ? secret : NULL, &peer, &token));
    side_track(s, token);
    CHECK_STATUS(KVX_OK, side_wait(both, 1, s, token).status);
    CHECK_STATUS(KVX_OK, kvx_mem_import(s->engine, peer, remote, &import, &token));
    side_track(s, token);
    CHECK_STATUS(KVX_OK, side_wait(both, 1, s, token).status);
    return import;
}

static int move(side *s, const place *here, uint64_t import) {
    int lane = side_lane(s);
    uint64_t length = 1 + dice(LENGTH / LANES), begin = (uint64_t)lane * (LENGTH / LANES);
    kvx_submit_args args = {
        .kind = dice(3) ? KVX_OP_PUT : KVX_OP_GET, .flags = KVX_OP_NOTIFY, .region = here->region.id, .import = import};
    const kvx_segment segment = {begin, begin, length};
    uint64_t token = 0;
    int inlined = 0;
    kvx_event event;
    args.count = 1;
    if (lane < 0) {
        return KVX_AGAIN;
    }
    int status = kvx_submit(s->engine, &args, &segment, &token, &inlined, &event);
    if (status == KVX_OK && !inlined) {
        side_track_lane(s, token, lane);
    }
    return status;
}

/* The process that dies: owns memory, or fills the parent's for ever. */
int kill_child(const char *transport, const char *dir, const char *role) {
    static side s;
    side *both[1] = {&s};
    place mine;
    side_open(&s, role, transport, dir);
    place_alloc(&s, &mine, LENGTH);
    if (strcmp(role, "owner") == 0) {
        place_grant(&s, &mine, KVX_READ | KVX_WRITE);
        write_invitation(stdout, &s, &mine);
        for (;;) {
            side_pump(both, 1, 1000);
        }
    }
    char endpoint[KVX_ENDPOINT_MAX];
    uint8_t secret[KVX_SECRET_BYTES];
    kvx_remote remote;
    read_invitation(stdin, endpoint, secret, &remote);
    uint64_t import = reach(&s, endpoint, secret, &remote);
    for (;;) {
        move(&s, &mine, import);
        side_pump(both, 1, s.live > 32 ? 10 : 0);
    }
}

static void owner_dies(const char *transport, const char *dir, const char *self) {
    static side s;
    side *both[1] = {&s};
    place here;
    char endpoint[KVX_ENDPOINT_MAX];
    uint8_t secret[KVX_SECRET_BYTES];
    kvx_remote remote;
    child c = child_start(self, transport, dir, "owner");
    read_invitation(c.from, endpoint, secret, &remote);
    side_open(&s, "survivor", transport, dir);
    place_alloc(&s, &here, LENGTH);
    uint64_t import = reach(&s, endpoint, secret, &remote);
    uint64_t until = now_ms() + 20 + dice(150);
    while (now_ms() < until) {
        move(&s, &here, import);
        side_pump(both, 1, s.live > 32 ? 10 : 0);
    }
    child_kill(&c);
    uint64_t deadline = now_ms() + NOTICE_MS;
    while (s.peers_down == 0) {
        CHECK(now_ms() < deadline);
        move(&s, &here, import); /* whatever it says */
        side_pump(both, 1, 10);
    }
    CHECK(s.live == 0); /* PEER_DOWN comes after the peer's tokens */
    CHECK(move(&s, &here, import) != KVX_OK);
    place_free(&s, &here, both, 1);
    side_close(&s);
}

static void initiator_dies(const char *transport, const char *dir, const char *self) {
    static side s;
    side *both[1] = {&s};
    place mine;
    child c = child_start(self, transport, dir, "initiator");
    side_open(&s, "survivor", transport, dir);
    place_alloc(&s, &mine, LENGTH);
    place_grant(&s, &mine, KVX_READ | KVX_WRITE);
    write_invitation(c.to, &s, &mine);
    uint64_t deadline = now_ms() + DEADLINE_MS;
    while (s.notified < 3 + dice(30)) {
        CHECK(now_ms() < deadline);
        side_pump(both, 1, 100);
    }
    child_kill(&c);
    deadline = now_ms() + NOTICE_MS;
    while (s.grants_lost == 0) {
        CHECK(now_ms() < deadline);
        side_pump(both, 1, 10);
    }
    /* Another stream of the dead may still hold bytes; a revoke ends that. */
    uint64_t token = 0;
    CHECK_STATUS(KVX_OK, kvx_grant_revoke(s.engine, mine.grant.id, &token));
    side_track(&s, token);
    CHECK_STATUS(KVX_OK, side_wait(both, 1, &s, token).status);
    pattern_fill(place_bytes(&mine), LENGTH, 3);
    side_pump(both, 1, 20);
    CHECK(pattern_holds(place_bytes(&mine), LENGTH, 3));
    place_free(&s, &mine, both, 1);
    side_close(&s);
}

void scenario_kill(const char *transport, const char *dir, int rounds, const char *self) {
    for (int round = 0; round < rounds; round++) {
        owner_dies(transport, dir, self);
        initiator_dies(transport, dir, self);
    }
}
