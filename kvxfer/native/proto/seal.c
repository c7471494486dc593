/* seal.c: agreement, key schedule and records; see seal.h. Nothing is allocated per record. */
#include "proto/seal.h"

#include <stdio.h>
#include <string.h>

#define HASH_BYTES 32

/* -- HKDF-SHA256 (RFC 5869) --------------------------------------------------------------------------------------- */

static bool seal_hkdf_extract(const kvx_libcrypto *api, const uint8_t *salt, uint32_t salt_length,
                              const uint8_t *material, uint32_t length, uint8_t out[HASH_BYTES]) {
    return api->HMAC(api->EVP_sha256(), salt, (int)salt_length, material, length, out, NULL) != NULL;
}

/* `label` is the info of the RFC; at most two blocks are needed. */
static bool seal_hkdf_expand(const kvx_libcrypto *api, const uint8_t from[HASH_BYTES], const char *label, uint8_t *out,
                             uint32_t length) {
    uint8_t input[HASH_BYTES + 64], block[HASH_BYTES];
    uint32_t before = 0;
    const uint32_t label_length = (uint32_t)strlen(label);
    bool good = label_length < 64;
    for (uint8_t i = 1; good && length > 0; i++) {
        memcpy(input, block, before);
        memcpy(input + before, label, label_length);
        input[before + label_length] = i;
        good = api->HMAC(api->EVP_sha256(), from, HASH_BYTES, input, before + label_length + 1, block, NULL) != NULL;
        uint32_t part = length < HASH_BYTES ? length : HASH_BYTES;
        memcpy(out, block, part);
        out += part;
        length -= part;
        before = HASH_BYTES;
    }
    explicit_bzero(input, sizeof input);
    explicit_bzero(block, sizeof block);
    return good;
}

/* -- keys --------------------------------------------------------------------------------------------------------- */

/* The next key and iv of the chain, and the chain's next link. */
static bool seal_rekey(kvx_seal_way *way) {
    const kvx_libcrypto *api = way->api;
    uint8_t key[KVX_SEAL_KEY_BYTES], next[KVX_SEAL_KEY_BYTES];
    bool good = seal_hkdf_expand(api, way->chain, "kvxfer sealed 2 key", key, sizeof key) &&
                seal_hkdf_expand(api, way->chain, "kvxfer sealed 2 iv", way->iv, sizeof way->iv) &&
                seal_hkdf_expand(api, way->chain, "kvxfer sealed 2 next", next, sizeof next);
    if (good && way->seals) {
        good = api->EVP_EncryptInit_ex(way->cipher, api->EVP_aes_256_gcm(), NULL, key, NULL) == 1;
    } else if (good) {
        good = api->EVP_DecryptInit_ex(way->cipher, api->EVP_aes_256_gcm(), NULL, key, NULL) == 1;
    }
    memcpy(way->chain, next, sizeof next);
    way->records = 0;
    explicit_bzero(key, sizeof key);
    explicit_bzero(next, sizeof next);
    return good;
}

static bool seal_direction_init(kvx_seal_way *way, const kvx_libcrypto *api, bool seals, const uint8_t from[HASH_BYTES],
                                const char *label) {
    way->api = api;
    way->seals = seals;
    way->cipher = api->EVP_CIPHER_CTX_new();
    return way->cipher != NULL && seal_hkdf_expand(api, from, label, way->chain, sizeof way->chain) && seal_rekey(way);
}

bool kvx_seal_begin(kvx_seal *seal, const kvx_libcrypto *api, uint8_t share[KVX_SHARE_BYTES]) {
    uint8_t own[KVX_SHARE_BYTES];
    size_t length = KVX_SHARE_BYTES;
    memset(seal, 0, sizeof *seal);
    seal->api = api;
    kvx_random(own, sizeof own);
    seal->pair = api->EVP_PKEY_new_raw_private_key(KVX_EVP_X25519, NULL, own, sizeof own);
    explicit_bzero(own, sizeof own);
    bool good = seal->pair != NULL && api->EVP_PKEY_get_raw_public_key(seal->pair, share, &length) == 1 &&
                length == KVX_SHARE_BYTES;
    if (!good) {
        api->ERR_clear_error();
        kvx_seal_end(seal);
    }
    return good;
}

/* What the two pairs have in common. False also for shares of small order, whose result everybody would know. */
static bool seal_derive_shared(const kvx_seal *seal, const uint8_t share[KVX_SHARE_BYTES], uint8_t out[HASH_BYTES]) {
    const kvx_libcrypto *api = seal->api;
    size_t length = HASH_BYTES;
    void *theirs = api->EVP_PKEY_new_raw_public_key(KVX_EVP_X25519, NULL, share, KVX_SHARE_BYTES);
    void *context = theirs == NULL ? NULL : api->EVP_PKEY_CTX_new(seal->pair, NULL);
    bool good = context != NULL && api->EVP_PKEY_derive_init(context) == 1 &&
                api->EVP_PKEY_derive_set_peer(context, theirs) == 1 &&
                api->EVP_PKEY_derive(context, out, &length) == 1 && length == HASH_BYTES;
    api->EVP_PKEY_CTX_free(context);
    api->EVP_PKEY_free(theirs);
    return good;
}

bool kvx_seal_agree(kvx_seal *seal, uint32_t role, const uint8_t secret[KVX_SECRET_BYTES],
                    const uint8_t greeting[2 * KVX_STREAM_SEALED_HELLO_BYTES], const uint8_t share[KVX_SHARE_BYTES],
                    uint8_t binding[2 * KVX_NONCE_BYTES]) {
    const kvx_libcrypto *api = seal->api;
    bool dialler = role == KVX_STREAM_DIALLER;
    uint8_t material[KVX_SECRET_BYTES + HASH_BYTES], root[HASH_BYTES];
    memcpy(material, secret, KVX_SECRET_BYTES);
    bool good =
        seal_derive_shared(seal, share, material + KVX_SECRET_BYTES) &&
        seal_hkdf_extract(api, greeting, 2 * KVX_STREAM_SEALED_HELLO_BYTES, material, sizeof material, root) &&
        seal_direction_init(dialler ? &seal->out : &seal->in, api, dialler, root, "kvxfer sealed 2 dialler") &&
        seal_direction_init(dialler ? &seal->in : &seal->out, api, !dialler, root, "kvxfer sealed 2 acceptor") &&
        seal_hkdf_expand(api, root, "kvxfer sealed 2 binding", binding, 2 * KVX_NONCE_BYTES);
    explicit_bzero(material, sizeof material);
    explicit_bzero(root, sizeof root);
    api->EVP_PKEY_free(seal->pair); /* it wipes the private half: nobody can agree on these keys again */
    seal->pair = NULL;
    if (!good) {
        api->ERR_clear_error();
    }
    return good;
}

static void seal_direction_wipe(kvx_seal_way *way) {
    if (way->cipher != NULL) {
        way->api->EVP_CIPHER_CTX_free(way->cipher);
    }
    explicit_bzero(way, sizeof *way);
}

void kvx_seal_end(kvx_seal *seal) {
    if (seal->pair != NULL) {
        seal->api->EVP_PKEY_free(seal->pair);
        seal->pair = NULL;
    }
    seal_direction_wipe(&seal->out);
    seal_direction_wipe(&seal->in);
}

int kvx_encryption_probe(char *why, size_t why_size) {
    kvx_seal seal;
    uint8_t share[KVX_SHARE_BYTES];
    const kvx_libcrypto *api = kvx_libcrypto_get(why, why_size);
    if (api == NULL) {
        return KVX_E_UNSUPPORTED;
    }
    if (!kvx_seal_begin(&seal, api, share)) {
        snprintf(why, why_size, "the system's libcrypto does not offer X25519 (is it restricted to FIPS algorithms?)");
        return KVX_E_UNSUPPORTED;
    }
    kvx_seal_end(&seal);
    return KVX_OK;
}

/* -- records ------------------------------------------------------------------------------------------------------ */

/* The nonce of the next record: the iv with the record's number in its last bytes. */
static bool seal_next_nonce(kvx_seal_way *way, uint8_t nonce[KVX_SEAL_IV_BYTES]) {
    if (way->records == KVX_SEAL_RECORDS_MAX && !seal_rekey(way)) {
        return false;
    }
    memcpy(nonce, way->iv, KVX_SEAL_IV_BYTES);
    for (uint32_t i = 0; i < 4; i++) {
        nonce[KVX_SEAL_IV_BYTES - 1 - i] ^= (uint8_t)(way->records >> (8 * i));
    }
    way->records++;
    way->begun = true;
    return true;
}

bool kvx_seal_record(kvx_seal_way *way, struct iovec *vectors, uint32_t length, uint8_t *record) {
    const kvx_libcrypto *api = way->api;
    uint8_t nonce[KVX_SEAL_IV_BYTES];
    int written = 0;
    kvx_bytes_store(record, length, KVX_SEAL_HEADER_BYTES);
    bool good = seal_next_nonce(way, nonce) && api->EVP_EncryptInit_ex(way->cipher, NULL, NULL, NULL, nonce) == 1 &&
                api->EVP_EncryptUpdate(way->cipher, NULL, &written, record, KVX_SEAL_HEADER_BYTES) == 1;
    uint8_t *at = record + KVX_SEAL_HEADER_BYTES;
    for (; good && length > 0; vectors++) {
        uint32_t part = vectors->iov_len < length ? (uint32_t)vectors->iov_len : length;
        good = api->EVP_EncryptUpdate(way->cipher, at, &written, vectors->iov_base, (int)part) == 1;
        vectors->iov_base = (uint8_t *)vectors->iov_base + part;
        vectors->iov_len -= part;
        at += part;
        length -= part;
    }
    return good && api->EVP_EncryptFinal_ex(way->cipher, at, &written) == 1 &&
           api->EVP_CIPHER_CTX_ctrl(way->cipher, KVX_EVP_AEAD_GET_TAG, KVX_SEAL_TAG_BYTES, at) == 1;
}

uint32_t kvx_seal_length(const kvx_seal_way *way, const uint8_t *bytes, uint32_t have) {
    if (have < KVX_SEAL_HEADER_BYTES) {
        return 0;
    }
    uint64_t length = kvx_bytes_load(bytes, KVX_SEAL_HEADER_BYTES);
    if (length > KVX_SEAL_TEXT_MAX || (length == 0) == way->begun) {
        return UINT32_MAX;
    }
    return (uint32_t)length + KVX_SEAL_EXTRA_BYTES;
}

bool kvx_seal_open(kvx_seal_way *way, const uint8_t *record, const struct iovec *vectors, uint32_t count) {
    const kvx_libcrypto *api = way->api;
    uint8_t nonce[KVX_SEAL_IV_BYTES], rest[KVX_SEAL_TAG_BYTES];
    int written = 0;
    bool good = seal_next_nonce(way, nonce) && api->EVP_DecryptInit_ex(way->cipher, NULL, NULL, NULL, nonce) == 1 &&
                api->EVP_DecryptUpdate(way->cipher, NULL, &written, record, KVX_SEAL_HEADER_BYTES) == 1;
    const uint8_t *at = record + KVX_SEAL_HEADER_BYTES;
    for (uint32_t i = 0; good && i < count; i++) {
        good = vectors[i].iov_len == 0 ||
               api->EVP_DecryptUpdate(way->cipher, vectors[i].iov_base, &written, at, (int)vectors[i].iov_len) == 1;
        at += vectors[i].iov_len;
    }
    good =
        good &&
        api->EVP_CIPHER_CTX_ctrl(way->cipher, KVX_EVP_AEAD_SET_TAG, KVX_SEAL_TAG_BYTES, (void *)(uintptr_t)at) == 1 &&
        api->EVP_DecryptFinal_ex(way->cipher, rest, &written) == 1;
    if (!good) {
        api->ERR_clear_error();
    }
    return good;
}
