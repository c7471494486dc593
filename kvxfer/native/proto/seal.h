/* seal.h: the sealed records of an encrypted data connection, without a socket.
 *
 * Both sides know the secret of the acceptor's engine, which travelled inside the control plane. Each draws an X25519
 * key pair for this connection and sends the public half, its share, after its hello. All keys come by HKDF-SHA256 from
 * the secret and what the two pairs agree on, salted with everything that was said until then; so no key is ever used
 * for two connections, a recording is worth nothing to who learns the secret later, and who changed a hello gets other
 * keys. Each direction has its own key. What is sent afterwards is cut into records: the length of the text in clear
 * (4 bytes, authenticated), the text under AES-256-GCM, the tag. Records are numbered, not on the wire: the number
 * makes the nonce, so one that is missing, doubled, swapped, sent back or changed does not open. After
 * KVX_SEAL_RECORDS_MAX records a direction goes on with the next key of its chain, far below what one key may carry.
 * Each side's first record is empty: it shows that the keys are the same. The empty record comes nowhere else.
 * docs/wire-format.md, "sealed connections", is the specification. */
#ifndef KVX_SEAL_H
#define KVX_SEAL_H

#include <stdbool.h>
#include <sys/uio.h>

#include "api.h"
#include "proto/libcrypto.h"
#include "proto/stream.h"

#define KVX_SEAL_HEADER_BYTES 4
#define KVX_SEAL_TAG_BYTES    16
#define KVX_SEAL_EXTRA_BYTES  (KVX_SEAL_HEADER_BYTES + KVX_SEAL_TAG_BYTES)
#define KVX_SEAL_TEXT_MAX     (64u << 10)
#define KVX_SEAL_IV_BYTES     12
#define KVX_SEAL_KEY_BYTES    32
#ifndef KVX_SEAL_RECORDS_MAX            /* tests compile it with a small one */
#define KVX_SEAL_RECORDS_MAX (1u << 20) /* under one key: at most 2^32 blocks of 16 bytes */
#endif

/* One direction. */
typedef struct kvx_seal_way {
    const kvx_libcrypto *api;
    void *cipher; /* an EVP_CIPHER_CTX with the key */
    bool seals;   /* or opens */
    bool begun;   /* the empty record has passed */
    uint32_t records;
    uint8_t iv[KVX_SEAL_IV_BYTES];
    uint8_t chain[KVX_SEAL_KEY_BYTES]; /* the next key comes from it */
} kvx_seal_way;

/* A connection's: our half of the agreement until there are keys, then two directions. */
typedef struct kvx_seal {
    const kvx_libcrypto *api;
    void *pair; /* an EVP_PKEY; NULL after the agreement */
    kvx_seal_way out, in;
} kvx_seal;

/* Draws a pair; `share` is what the other side gets of it. False: libcrypto cannot (X25519 may be switched off). */
bool kvx_seal_begin(kvx_seal *seal, const kvx_libcrypto *api, uint8_t share[KVX_SHARE_BYTES]);
/* `greeting`: both hellos as they were sent, the dialler's first. `binding`: what only these two share, for the
 * authenticators of frames. False: the other share is none, or libcrypto failed. */
bool kvx_seal_agree(kvx_seal *seal, uint32_t role, const uint8_t secret[KVX_SECRET_BYTES],
                    const uint8_t greeting[2 * KVX_STREAM_SEALED_HELLO_BYTES], const uint8_t share[KVX_SHARE_BYTES],
                    uint8_t binding[2 * KVX_NONCE_BYTES]);
void kvx_seal_end(kvx_seal *seal);

/* Seals `length` bytes from the vectors, which are moved on; `record` has room for length + KVX_SEAL_EXTRA_BYTES. */
bool kvx_seal_record(kvx_seal_way *way, struct iovec *vectors, uint32_t length, uint8_t *record);
/* Of the record that begins here, all in all; 0: too little is there to say, UINT32_MAX: it is none. */
uint32_t kvx_seal_length(const kvx_seal_way *way, const uint8_t *bytes, uint32_t have);
/* Opens a whole record into the vectors, which may be its own text. False: it is not what was sealed; what the vectors
 * point at was written all the same. */
bool kvx_seal_open(kvx_seal_way *way, const uint8_t *record, const struct iovec *vectors, uint32_t count);

#endif
