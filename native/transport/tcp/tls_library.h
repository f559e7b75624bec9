// OpenSSL, opened at run time: where it is found, and the functions that we call.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

// OpenSSL's opaque types, declared here so that building does not need its headers. tests/native/test_tls.cc compares
// what follows with the headers, if they are installed.
struct ssl_ctx_st;
struct ssl_st;
struct ssl_method_st;
struct bio_st;
struct bio_method_st;
struct x509_st;
struct x509_store_ctx_st;
struct ssl_cipher_st;

namespace crossrail::tcp {

// The binary interface of libssl.so.3 and libcrypto.so.3.
struct TlsCalls {
  unsigned long (*OpenSSL_version_num)();
  const char* (*OpenSSL_version)(int what);
  int (*OPENSSL_init_ssl)(uint64_t options, const void* settings);
  unsigned long (*ERR_peek_last_error)();
  void (*ERR_clear_error)();
  const char* (*ERR_reason_error_string)(unsigned long error);

  const ssl_method_st* (*TLS_method)();
  ssl_ctx_st* (*SSL_CTX_new)(const ssl_method_st* method);
  void (*SSL_CTX_free)(ssl_ctx_st* context);
  long (*SSL_CTX_ctrl)(ssl_ctx_st* context, int command, long number, void* pointer);
  int (*SSL_CTX_set_num_tickets)(ssl_ctx_st* context, size_t count);
  void (*SSL_CTX_set_verify)(ssl_ctx_st* context, int mode, int (*callback)(int, x509_store_ctx_st*));
  void (*SSL_CTX_set_default_passwd_cb)(ssl_ctx_st* context, int (*callback)(char*, int, int, void*));
  int (*SSL_CTX_load_verify_file)(ssl_ctx_st* context, const char* path);
  int (*SSL_CTX_use_certificate_chain_file)(ssl_ctx_st* context, const char* path);
  int (*SSL_CTX_use_PrivateKey_file)(ssl_ctx_st* context, const char* path, int type);

  ssl_st* (*SSL_new)(ssl_ctx_st* context);
  void (*SSL_free)(ssl_st* ssl);
  void (*SSL_set_bio)(ssl_st* ssl, bio_st* in, bio_st* out);
  void (*SSL_set_connect_state)(ssl_st* ssl);
  void (*SSL_set_accept_state)(ssl_st* ssl);
  int (*SSL_do_handshake)(ssl_st* ssl);
  int (*SSL_read_ex)(ssl_st* ssl, void* data, size_t size, size_t* done);
  int (*SSL_write_ex)(ssl_st* ssl, const void* data, size_t size, size_t* done);
  int (*SSL_get_error)(const ssl_st* ssl, int result);
  void (*SSL_set_read_ahead)(ssl_st* ssl, int yes);
  int (*SSL_has_pending)(const ssl_st* ssl);
  int (*SSL_key_update)(ssl_st* ssl, int type);
  long (*SSL_get_verify_result)(const ssl_st* ssl);
  x509_st* (*SSL_get1_peer_certificate)(const ssl_st* ssl);
  const ssl_cipher_st* (*SSL_get_current_cipher)(const ssl_st* ssl);
  const char* (*SSL_CIPHER_get_name)(const ssl_cipher_st* cipher);
  int (*SSL_export_keying_material)(ssl_st* ssl, unsigned char* out, size_t out_bytes, const char* label,
                                    size_t label_bytes, const unsigned char* context, size_t context_bytes,
                                    int use_context);
  void (*X509_free)(x509_st* certificate);
  int (*X509_check_host)(x509_st* certificate, const char* name, size_t name_bytes, unsigned int flags, char** peer);
  const char* (*X509_verify_cert_error_string)(long code);

  int (*BIO_get_new_index)();
  bio_method_st* (*BIO_meth_new)(int type, const char* name);
  int (*BIO_meth_set_write_ex)(bio_method_st* method, int (*call)(bio_st*, const char*, size_t, size_t*));
  int (*BIO_meth_set_read_ex)(bio_method_st* method, int (*call)(bio_st*, char*, size_t, size_t*));
  int (*BIO_meth_set_ctrl)(bio_method_st* method, long (*call)(bio_st*, int, long, void*));
  bio_st* (*BIO_new)(const bio_method_st* method);
  void (*BIO_set_data)(bio_st* bio, void* data);
  void* (*BIO_get_data)(bio_st* bio);
  void (*BIO_set_init)(bio_st* bio, int initialised);
  void (*BIO_set_flags)(bio_st* bio, int flags);
  void (*BIO_clear_flags)(bio_st* bio, int flags);
};

// Constants that OpenSSL's headers define as macros.
inline constexpr int kSslCtrlMode = 33;
inline constexpr int kSslCtrlSetSessionCacheMode = 44;
inline constexpr int kSslCtrlSetMaxCertList = 51;
inline constexpr int kSslCtrlSetMinProtoVersion = 123;
inline constexpr int kSslCtrlSetMaxProtoVersion = 124;
inline constexpr long kTls13 = 0x0304;
inline constexpr long kSslModeReleaseBuffers = 0x10;
inline constexpr int kSslVerifyMutually = 0x1 | 0x2;
inline constexpr int kSslFileTypePem = 1;
inline constexpr int kSslErrorWantRead = 2;
inline constexpr int kSslErrorWantWrite = 3;
inline constexpr int kSslErrorZeroReturn = 6;
inline constexpr int kSslKeyUpdateNotRequested = 0;
inline constexpr int kBioTypeSourceSink = 0x0400;
inline constexpr int kBioFlagsRead = 0x1;
inline constexpr int kBioFlagsRetry = 0x8;
inline constexpr int kBioCtrlFlush = 11;
inline constexpr unsigned int kX509CheckNames = 0x4 | 0x20;  // no wildcards within a label, never the common name
inline constexpr uint64_t kOpensslInitNoAtexit = 0x00080000;

// Immutable; [any] thread. Never unloaded: other parts of the process may use the same library.
struct TlsLibrary {
  TlsCalls calls{};
  std::string path;     // as reported by the loader
  std::string version;  // "OpenSSL 3.0.15 3 Sep 2024"

  // Returns and clears the reason why this thread's last call failed. Never empty.
  std::string take_error() const;
};

// The process's OpenSSL 3, opened by the first call that finds one. Looked for in this order:
// 1. CROSSRAIL_LIBSSL, a path: this one or none.
// 2. One already loaded into the process: Python's ssl module brings one.
// 3. The system's libssl.so.3.
// Throws TransportError that lists what was tried. OpenSSL 1.1.1 has been without security fixes since 2023 and is not
// accepted.
std::shared_ptr<const TlsLibrary> open_tls_library();

}  // namespace crossrail::tcp
