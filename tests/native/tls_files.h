// A certificate for tests and fuzzers, and the TlsContext of whoever has it: both ends of a connection may.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "transport/tcp/tls_context.h"

namespace crossrail::tcp {

// For "engine" and "*.decode.example", of itself, for a hundred years.
inline constexpr const char* kTestCertificate = R"(-----BEGIN CERTIFICATE-----
MIIBRTCB7aADAgECAgEBMAoGCCqGSM49BAMCMA8xDTALBgNVBAMMBHRlc3QwIBcN
MjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMA8xDTALBgNVBAMMBHRlc3Qw
WTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAATyMtJNJPQppVQ5m/G5e24G3j4TtVjJ
AQiDwzHt+JkmxugKO1XJKos9xsCEkeIQjiUVXG3EkBFCRaMnb7xOd0yvozgwNjAP
BgNVHRMBAf8EBTADAQH/MCMGA1UdEQQcMBqCBmVuZ2luZYIQKi5kZWNvZGUuZXhh
bXBsZTAKBggqhkjOPQQDAgNHADBEAiAwpWoGFynj5EbYPzmbY6eApZnBtdH9l7uv
1Nk8sBKvTQIgW5gnXf56bMAiwhnotoAqbl1F0fs/jcbWMFta67WPs3k=
-----END CERTIFICATE-----
)";
inline constexpr const char* kTestKey = R"(-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgOxmOm19FJbre/E26
r8H6iZkuH17be2NVe2MjnMHal9mhRANCAATyMtJNJPQppVQ5m/G5e24G3j4TtVjJ
AQiDwzHt+JkmxugKO1XJKos9xsCEkeIQjiUVXG3EkBFCRaMnb7xOd0yv
-----END PRIVATE KEY-----
)";

// A file of this text, as long as this lives.
class TextFile {
 public:
  explicit TextFile(const char* text) : path_(std::filesystem::temp_directory_path() / "crossrail-test-XXXXXX") {
    const int fd = mkstemp(path_.data());
    std::FILE* const file = fd < 0 ? nullptr : fdopen(fd, "w");
    if (file == nullptr || std::fputs(text, file) < 0 || std::fclose(file) != 0) {
      std::perror(path_.c_str());
      std::abort();
    }
  }
  ~TextFile() { unlink(path_.c_str()); }
  TextFile(const TextFile&) = delete;
  TextFile& operator=(const TextFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Whoever has this: its files, as long as it lives, and options that name them.
struct TestTls {
  TextFile certificate{kTestCertificate};
  TextFile key{kTestKey};
  TlsOptions options() const { return {certificate.path(), key.path(), certificate.path()}; }
  std::shared_ptr<TlsContext> context() const { return std::make_shared<TlsContext>(options()); }
};

}  // namespace crossrail::tcp
