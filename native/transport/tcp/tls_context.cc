#include "transport/tcp/tls_context.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include "util/errors.h"

namespace crossrail::tcp {

namespace {

// Limit for a peer's chain as transmitted: three or four certificates of the usual size.
constexpr long kChainBytesMax = 16 << 10;
constexpr size_t kGatheredBytes = 16 << 10;  // one record

// A key with a password would ask for it on the terminal.
int no_password(char*, int, int, void*) { return -1; }

void check_readable(const char* option, const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  char first = 0;
  if (file.get(first)) return;
  const std::string why = file.is_open() && errno == 0 ? "it is empty" : std::strerror(errno);
  throw UsageError(std::string(option) + " = '" + path + "' cannot be read: " + why);
}

}  // namespace

TlsContext::TlsContext(const TlsOptions& options)
    : gathered(kGatheredBytes), options_(options), library_(open_tls_library()) {
  check_readable("tls.cert", options_.cert_file);
  check_readable("tls.key", options_.key_file);
  check_readable("tls.ca", options_.ca_file);
  calls().ERR_clear_error();
  handle_ = calls().SSL_CTX_new(calls().TLS_method());
  if (handle_ == nullptr) throw TransportError("SSL_CTX_new", 0, library_->take_error());
  try {
    load();
  } catch (...) {
    calls().SSL_CTX_free(handle_);
    throw;
  }
}

TlsContext::~TlsContext() { calls().SSL_CTX_free(handle_); }

void TlsContext::load() {
  const TlsCalls& ssl = calls();
  if (ssl.SSL_CTX_ctrl(handle_, kSslCtrlSetMinProtoVersion, kTls13, nullptr) != 1 ||
      ssl.SSL_CTX_ctrl(handle_, kSslCtrlSetMaxProtoVersion, kTls13, nullptr) != 1) {
    throw TransportError("SSL_CTX_ctrl", 0, library_->path + " has no TLS 1.3: " + library_->take_error());
  }
  ssl.SSL_CTX_ctrl(handle_, kSslCtrlMode, kSslModeReleaseBuffers, nullptr);
  ssl.SSL_CTX_ctrl(handle_, kSslCtrlSetSessionCacheMode, 0, nullptr);
  ssl.SSL_CTX_ctrl(handle_, kSslCtrlSetMaxCertList, kChainBytesMax, nullptr);
  ssl.SSL_CTX_set_num_tickets(handle_, 0);
  ssl.SSL_CTX_set_verify(handle_, kSslVerifyMutually, nullptr);
  ssl.SSL_CTX_set_default_passwd_cb(handle_, no_password);
  if (ssl.SSL_CTX_use_certificate_chain_file(handle_, options_.cert_file.c_str()) != 1) {
    throw UsageError("tls.cert = '" + options_.cert_file +
                     "' is not a certificate in PEM format: " + library_->take_error());
  }
  load_key();
  if (ssl.SSL_CTX_load_verify_file(handle_, options_.ca_file.c_str()) != 1) {
    throw UsageError("tls.ca = '" + options_.ca_file +
                     "' contains no certificates in PEM format: " + library_->take_error());
  }
  ssl.ERR_clear_error();
}

void TlsContext::load_key() {
  const TlsCalls& ssl = calls();
  if (ssl.SSL_CTX_use_PrivateKey_file(handle_, options_.key_file.c_str(), kSslFileTypePem) == 1) return;
  const std::string why = library_->take_error();
  // Without a certificate it is accepted, if it is a key at all.
  ssl_ctx_st* const alone = ssl.SSL_CTX_new(ssl.TLS_method());
  if (alone == nullptr) throw TransportError("SSL_CTX_new", 0, library_->take_error());
  ssl.SSL_CTX_set_default_passwd_cb(alone, no_password);
  const bool is_key = ssl.SSL_CTX_use_PrivateKey_file(alone, options_.key_file.c_str(), kSslFileTypePem) == 1;
  ssl.SSL_CTX_free(alone);
  ssl.ERR_clear_error();
  if (is_key) {
    throw UsageError("tls.key = '" + options_.key_file + "' is not the key of tls.cert = '" + options_.cert_file +
                     "': " + why);
  }
  throw UsageError("tls.key = '" + options_.key_file +
                   "' is not a private key in PEM format without a password: " + why);
}

}  // namespace crossrail::tcp
