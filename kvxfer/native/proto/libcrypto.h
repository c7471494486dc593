/* libcrypto.h: the few functions of the system's libcrypto (OpenSSL) that the encrypted tcp data path is made of.
 *
 * Loaded by dlopen when an engine asks for encryption, and never otherwise: building needs no headers of it, and the
 * extension is not linked with it. Every object of it is opaque here. Both sonames have all of these functions with the
 * same signatures; the constants are part of its stable interface. */
#ifndef KVX_LIBCRYPTO_H
#define KVX_LIBCRYPTO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVX_EVP_X25519       1034
#define KVX_EVP_AEAD_GET_TAG 0x10
#define KVX_EVP_AEAD_SET_TAG 0x11

/* name, result, parameters */
#define KVX_LIBCRYPTO_FUNCTIONS(X)                                                                                     \
    X(EVP_aes_256_gcm, const void *, (void))                                                                           \
    X(EVP_sha256, const void *, (void))                                                                                \
    X(EVP_CIPHER_CTX_new, void *, (void))                                                                              \
    X(EVP_CIPHER_CTX_free, void, (void *))                                                                             \
    X(EVP_CIPHER_CTX_ctrl, int, (void *, int, int, void *))                                                            \
    X(EVP_EncryptInit_ex, int, (void *, const void *, void *, const uint8_t *, const uint8_t *))                       \
    X(EVP_EncryptUpdate, int, (void *, uint8_t *, int *, const uint8_t *, int))                                        \
    X(EVP_EncryptFinal_ex, int, (void *, uint8_t *, int *))                                                            \
    X(EVP_DecryptInit_ex, int, (void *, const void *, void *, const uint8_t *, const uint8_t *))                       \
    X(EVP_DecryptUpdate, int, (void *, uint8_t *, int *, const uint8_t *, int))                                        \
    X(EVP_DecryptFinal_ex, int, (void *, uint8_t *, int *))                                                            \
    X(EVP_PKEY_new_raw_private_key, void *, (int, void *, const uint8_t *, size_t))                                    \
    X(EVP_PKEY_new_raw_public_key, void *, (int, void *, const uint8_t *, size_t))                                     \
    X(EVP_PKEY_get_raw_public_key, int, (const void *, uint8_t *, size_t *))                                           \
    X(EVP_PKEY_free, void, (void *))                                                                                   \
    X(EVP_PKEY_CTX_new, void *, (void *, void *))                                                                      \
    X(EVP_PKEY_CTX_free, void, (void *))                                                                               \
    X(EVP_PKEY_derive_init, int, (void *))                                                                             \
    X(EVP_PKEY_derive_set_peer, int, (void *, void *))                                                                 \
    X(EVP_PKEY_derive, int, (void *, uint8_t *, size_t *))                                                             \
    X(HMAC, uint8_t *, (const void *, const void *, int, const uint8_t *, size_t, uint8_t *, unsigned *))              \
    X(ERR_clear_error, void, (void))

typedef struct kvx_libcrypto {
#define KVX_LIBCRYPTO_FIELD(name, result, parameters) result(*name) parameters;
    KVX_LIBCRYPTO_FUNCTIONS(KVX_LIBCRYPTO_FIELD)
#undef KVX_LIBCRYPTO_FIELD
} kvx_libcrypto;

/* Loads it at the first call. NULL: it cannot be used, and `why` (may be NULL) says which names were tried and what is
 * missing. Found once, it stays. */
const kvx_libcrypto *kvx_libcrypto_get(char *why, size_t why_size);

#endif
