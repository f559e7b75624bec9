#include "transport/tcp/tls_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>

#include "util/dynamic_library.h"
#include "util/errors.h"

namespace crossrail::tcp {

namespace {

constexpr const char* kSoname = "libssl.so.3";
constexpr const char* kRemedy =
    "install OpenSSL 3 (Debian, Ubuntu: apt install libssl3; RHEL: dnf install openssl-libs), or set CROSSRAIL_LIBSSL "
    "to the path of a libssl.so.3";
constexpr unsigned long kVersionMin = 0x30000000;
constexpr unsigned long kAlerts = 1000;  // reasons from here on are the peer's alerts (SSL_AD_REASON_OFFSET)
constexpr unsigned long kVersionBehind = 0x40000000;

std::mutex g_mutex;
std::shared_ptr<const TlsLibrary> g_library;

// Looks functions up by name; those that libssl lacks are looked for in the libcrypto that it brings.
class Finder {
 public:
  explicit Finder(void* handle) : handle_(handle) {}
  template <typename Function>
  void find(const char* name, Function* function) {
    if (!find_function(handle_, name, function) && missing_.empty()) missing_ = name;
  }
  const std::string& missing() const { return missing_; }

 private:
  void* const handle_;
  std::string missing_;
};

#define CROSSRAIL_FIND(name) finder.find(#name, &calls.name)

void find_contexts(Finder& finder, TlsCalls& calls) {
  CROSSRAIL_FIND(OpenSSL_version_num);
  CROSSRAIL_FIND(OpenSSL_version);
  CROSSRAIL_FIND(OPENSSL_init_ssl);
  CROSSRAIL_FIND(ERR_peek_last_error);
  CROSSRAIL_FIND(ERR_clear_error);
  CROSSRAIL_FIND(ERR_reason_error_string);
  CROSSRAIL_FIND(TLS_method);
  CROSSRAIL_FIND(SSL_CTX_new);
  CROSSRAIL_FIND(SSL_CTX_free);
  CROSSRAIL_FIND(SSL_CTX_ctrl);
  CROSSRAIL_FIND(SSL_CTX_set_num_tickets);
  CROSSRAIL_FIND(SSL_CTX_set_verify);
  CROSSRAIL_FIND(SSL_CTX_set_default_passwd_cb);
  CROSSRAIL_FIND(SSL_CTX_load_verify_file);
  CROSSRAIL_FIND(SSL_CTX_use_certificate_chain_file);
  CROSSRAIL_FIND(SSL_CTX_use_PrivateKey_file);
}

void find_sessions(Finder& finder, TlsCalls& calls) {
  CROSSRAIL_FIND(SSL_new);
  CROSSRAIL_FIND(SSL_free);
  CROSSRAIL_FIND(SSL_set_bio);
  CROSSRAIL_FIND(SSL_set_connect_state);
  CROSSRAIL_FIND(SSL_set_accept_state);
  CROSSRAIL_FIND(SSL_do_handshake);
  CROSSRAIL_FIND(SSL_read_ex);
  CROSSRAIL_FIND(SSL_write_ex);
  CROSSRAIL_FIND(SSL_get_error);
  CROSSRAIL_FIND(SSL_set_read_ahead);
  CROSSRAIL_FIND(SSL_has_pending);
  CROSSRAIL_FIND(SSL_key_update);
  CROSSRAIL_FIND(SSL_get_verify_result);
  CROSSRAIL_FIND(SSL_get1_peer_certificate);
  CROSSRAIL_FIND(SSL_get_current_cipher);
  CROSSRAIL_FIND(SSL_CIPHER_get_name);
  CROSSRAIL_FIND(SSL_export_keying_material);
  CROSSRAIL_FIND(X509_free);
  CROSSRAIL_FIND(X509_check_host);
  CROSSRAIL_FIND(X509_verify_cert_error_string);
}

void find_bios(Finder& finder, TlsCalls& calls) {
  CROSSRAIL_FIND(BIO_get_new_index);
  CROSSRAIL_FIND(BIO_meth_new);
  CROSSRAIL_FIND(BIO_meth_set_write_ex);
  CROSSRAIL_FIND(BIO_meth_set_read_ex);
  CROSSRAIL_FIND(BIO_meth_set_ctrl);
  CROSSRAIL_FIND(BIO_new);
  CROSSRAIL_FIND(BIO_set_data);
  CROSSRAIL_FIND(BIO_get_data);
  CROSSRAIL_FIND(BIO_set_init);
  CROSSRAIL_FIND(BIO_set_flags);
  CROSSRAIL_FIND(BIO_clear_flags);
}

#undef CROSSRAIL_FIND

class Search {
 public:
  // Null: not there, or unusable; the reason is recorded.
  std::shared_ptr<const TlsLibrary> try_one(const std::string& path, int extra_flags, const std::string& what) {
    std::string why;
    void* const handle = load_library(path, extra_flags, &why);
    if (handle == nullptr) {
      notes_.add(what, why);
      return nullptr;
    }
    auto library = std::make_shared<TlsLibrary>();
    library->path = path_of_symbol(handle, "SSL_new", path);
    Finder finder(handle);
    find_contexts(finder, library->calls);
    find_sessions(finder, library->calls);
    find_bios(finder, library->calls);
    std::string trouble;
    if (!finder.missing().empty()) {
      trouble = "is not OpenSSL 3: it lacks " + finder.missing();
    } else if (const auto version = library->calls.OpenSSL_version_num();
               version < kVersionMin || version >= kVersionBehind) {
      trouble = std::string("is ") + library->calls.OpenSSL_version(0) + ", and version 3 is needed";
      // At exit workers may still be reading; whatever the library holds ends with the process then.
    } else if (library->calls.OPENSSL_init_ssl(kOpensslInitNoAtexit, nullptr) != 1) {
      trouble = "does not start: " + library->take_error();
    }
    if (!trouble.empty()) {
      notes_.add(what, library->path + " " + trouble);
      dlclose(handle);
      return nullptr;
    }
    library->version = library->calls.OpenSSL_version(0);
    return library;
  }
  const std::string& notes() const { return notes_.text(); }

 private:
  SearchNotes notes_;
};

std::shared_ptr<const TlsLibrary> search() {
  Search search;
  if (const char* const wanted = std::getenv("CROSSRAIL_LIBSSL"); wanted != nullptr && *wanted != '\0') {
    auto library = search.try_one(wanted, 0, "CROSSRAIL_LIBSSL=" + std::string(wanted));
    if (library == nullptr) throw TransportError("dlopen", 0, search.notes(), kRemedy);
    return library;
  }
  if (auto library = search.try_one(kSoname, RTLD_NOLOAD, "already in the process")) return library;
  if (auto library = search.try_one(kSoname, 0, "the system's")) return library;
  throw TransportError("dlopen", 0, "tls needs OpenSSL 3, and none can be used (" + search.notes() + ")", kRemedy);
}

}  // namespace

std::string TlsLibrary::take_error() const {
  const unsigned long error = calls.ERR_peek_last_error();
  const char* const reason = error == 0 ? nullptr : calls.ERR_reason_error_string(error);
  const unsigned long number = error & 0x7fffff;
  calls.ERR_clear_error();
  if (reason != nullptr)
    return (number > kAlerts && number < kAlerts + 256 ? "the other side says: " : "") + std::string(reason);
  return error == 0 ? "no reason given" : "OpenSSL error " + std::to_string(error);
}

std::shared_ptr<const TlsLibrary> open_tls_library() {
  const std::lock_guard lock(g_mutex);
  if (g_library == nullptr) g_library = search();
  return g_library;
}

}  // namespace crossrail::tcp
