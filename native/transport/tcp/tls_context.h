// Our identity and whom we trust under TLS: shared by all connections of one transport.
#pragma once

#include <memory>
#include <vector>

#include "transport/tcp/tls_library.h"
#include "transport/transport.h"

namespace crossrail::tcp {

// TLS 1.3 only. Both sides show a certificate, and accept the other's if the CAs in `options.ca_file` vouch for it. No
// session tickets, no resumption: every connection authenticates.
class TlsContext {
 public:
  // Reads the files, once. Throws UsageError if a file is missing or has the wrong content, TransportError without
  // OpenSSL.
  explicit TlsContext(const TlsOptions& options);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  const TlsCalls& calls() const { return library_->calls; }
  const TlsLibrary& library() const { return *library_; }
  ssl_ctx_st* handle() const { return handle_; }
  bool checks_names() const { return options_.verify == TlsVerify::kName; }

  // AES-GCM is good for 2^24.5 full records under one key (RFC 8446, 5.5). This is 2^22 of them.
  static constexpr uint64_t kKeyBytesMax = uint64_t{1} << 36;
  uint64_t key_bytes_max = kKeyBytesMax;  // sent before keys are changed; tests lower it
  // Gathers short pieces before they are encrypted. Progress holder.
  std::vector<std::byte> gathered;

 private:
  void load();
  void load_key();

  const TlsOptions options_;
  const std::shared_ptr<const TlsLibrary> library_;
  ssl_ctx_st* handle_ = nullptr;
};

}  // namespace crossrail::tcp
