#include "transport/tcp/tls_session.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string_view>
#include <utility>

#include "util/errors.h"

namespace crossrail::tcp {

namespace {

// Encrypted before the kernel gets it: several records per system call.
constexpr size_t kSealBytes = 64 << 10;
constexpr size_t kKeptBytes = 2 * kSealBytes;  // capacity kept by an empty buffer
// RFC 9266: a value that both ends of a TLS session, and nobody between them, can compute.
constexpr std::string_view kBindingLabel = "EXPORTER-Channel-Binding";

// The one OpenSSL of the process. Set before there is a session; OpenSSL's callbacks get nothing but a BIO.
const TlsCalls* g_calls = nullptr;

}  // namespace

// --- between OpenSSL and the socket ---

// OpenSSL's own BIO for sockets raises SIGPIPE, and its memory BIO grows without bound.
const bio_method_st* TlsSession::bio_method(const TlsCalls& calls) {
  static const bio_method_st* const method = [&] {
    bio_method_st* const made =
        calls.BIO_meth_new(calls.BIO_get_new_index() | kBioTypeSourceSink, "crossrail connection");
    if (made == nullptr) throw std::bad_alloc();
    calls.BIO_meth_set_read_ex(made, on_bio_read);
    calls.BIO_meth_set_write_ex(made, on_bio_write);
    calls.BIO_meth_set_ctrl(made, on_bio_ctrl);
    g_calls = &calls;
    return made;
  }();
  return method;
}

int TlsSession::on_bio_read(bio_st* bio, char* data, size_t size, size_t* done) {
  auto* const self = static_cast<TlsSession*>(g_calls->BIO_get_data(bio));
  g_calls->BIO_clear_flags(bio, kBioFlagsRead | kBioFlagsRetry);
  *done = 0;
  if (self->is_closed_ || self->error_ != 0) return 0;  // asked again, the kernel would answer something else
  if (self->bytes_left_ == 0) {
    self->trouble_ = "more than " + std::to_string(kHandshakeBytesMax) + " bytes before it has said who it is";
    return 0;
  }
  const size_t most = std::min<uint64_t>({size, self->bytes_left_, self->turn_left_, self->idle_left_});
  ssize_t got = -1;
  errno = EAGAIN;
  if (most > 0) {
    do {
      got = recv(self->fd_, data, most, MSG_DONTWAIT);
    } while (got < 0 && errno == EINTR);
  }
  if (got > 0) {
    *done = static_cast<size_t>(got);
    self->turn_left_ -= *done;
    self->idle_left_ -= *done;
    if (self->bytes_left_ != kNoLimit) self->bytes_left_ -= *done;
    return 1;
  }
  if (got == 0) {
    self->is_closed_ = true;
  } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
    g_calls->BIO_set_flags(bio, kBioFlagsRead | kBioFlagsRetry);
  } else {
    self->error_ = errno;
  }
  return 0;
}

int TlsSession::on_bio_write(bio_st* bio, const char* data, size_t size, size_t* done) {
  auto* const self = static_cast<TlsSession*>(g_calls->BIO_get_data(bio));
  *done = 0;
  if (self->unsent_.size() + size > kUnsentBytesMax) {
    self->trouble_ = "it makes TLS answer more than it reads";
    return 0;
  }
  const auto* const bytes = reinterpret_cast<const std::byte*>(data);
  self->unsent_.insert(self->unsent_.end(), bytes, bytes + size);
  *done = size;
  return 1;
}

long TlsSession::on_bio_ctrl(bio_st*, int command, long, void*) { return command == kBioCtrlFlush ? 1 : 0; }

// --- the session ---

TlsSession::TlsSession(std::shared_ptr<TlsContext> context, Side side, int fd)
    : context_(std::move(context)), calls_(context_->calls()), fd_(fd) {
  const bio_method_st* const method = bio_method(calls_);
  ssl_ = calls_.SSL_new(context_->handle());
  bio_st* const bio = ssl_ == nullptr ? nullptr : calls_.BIO_new(method);
  if (bio == nullptr) {
    calls_.SSL_free(ssl_);
    throw TransportError("SSL_new", 0, context_->library().take_error());
  }
  calls_.BIO_set_data(bio, this);
  calls_.BIO_set_init(bio, 1);
  calls_.SSL_set_bio(ssl_, bio, bio);  // takes ownership of it
  if (side == Side::kInitiator) {
    calls_.SSL_set_connect_state(ssl_);
  } else {
    calls_.SSL_set_accept_state(ssl_);
  }
}

TlsSession::~TlsSession() { calls_.SSL_free(ssl_); }

ssize_t TlsSession::failed() {
  const int kind = trouble_.empty() ? calls_.SSL_get_error(ssl_, 0) : 0;
  if (kind == kSslErrorWantRead || kind == kSslErrorWantWrite) {
    calls_.ERR_clear_error();
    errno = EAGAIN;
    return -1;
  }
  const std::string reason = context_->library().take_error();
  if (kind == kSslErrorZeroReturn) is_closed_ = true;  // close_notify: equivalent to the end of the stream
  if (trouble_.empty() && is_closed_) return 0;
  if (trouble_.empty() && error_ != 0) {
    errno = error_;
    return -1;
  }
  if (trouble_.empty()) {
    const long verdict = calls_.SSL_get_verify_result(ssl_);
    trouble_ = verdict == 0 ? reason : std::string(calls_.X509_verify_cert_error_string(verdict));
    if (verdict != 0) trouble_ = "its certificate is not accepted: " + trouble_;
  }
  errno = EPROTO;
  return -1;
}

TlsSession::Step TlsSession::handshake() {
  calls_.ERR_clear_error();
  if (calls_.SSL_do_handshake(ssl_) == 1) return Step::kDone;
  const ssize_t result = failed();
  if (result == 0) return Step::kGone;
  return errno == EAGAIN ? Step::kMore : errno == EPROTO ? Step::kFailed : Step::kGone;
}

bool TlsSession::is_named(std::string_view name) const {
  // A leading dot would match all names in a domain.
  if (name.empty() || name.front() == '.') return false;
  x509_st* const certificate = calls_.SSL_get1_peer_certificate(ssl_);
  if (certificate == nullptr) return false;
  const int found = calls_.X509_check_host(certificate, name.data(), name.size(), kX509CheckNames, nullptr);
  calls_.X509_free(certificate);
  calls_.ERR_clear_error();
  return found == 1;
}

Digest TlsSession::binding() const {
  Digest digest{};
  const int done = calls_.SSL_export_keying_material(ssl_, digest.data(), digest.size(), kBindingLabel.data(),
                                                     kBindingLabel.size(), nullptr, 0, 0);
  CROSSRAIL_ASSERT(done == 1);
  return digest;
}

const char* TlsSession::cipher() const {
  const char* const name = calls_.SSL_CIPHER_get_name(calls_.SSL_get_current_cipher(ssl_));
  return name != nullptr ? name : "no cipher";
}

void TlsSession::lift_limit() {
  bytes_left_ = kNoLimit;
  calls_.SSL_set_read_ahead(ssl_, 1);
}

bool TlsSession::holds_more() const { return calls_.SSL_has_pending(ssl_) == 1; }

ssize_t TlsSession::receive(std::span<const iovec> views) {
  calls_.ERR_clear_error();
  size_t total = 0;
  for (const iovec& view : views) {
    for (size_t at = 0; at < view.iov_len;) {
      size_t got = 0;
      if (calls_.SSL_read_ex(ssl_, static_cast<std::byte*>(view.iov_base) + at, view.iov_len - at, &got) != 1) {
        const ssize_t result = failed();
        if (total == 0) return result;
        end_waits_ = result == 0 || errno != EAGAIN;  // the end persists, and is reported next time
        return static_cast<ssize_t>(total);
      }
      at += got;
      total += got;
      idle_left_ = kIdleBytesMax;
    }
  }
  return static_cast<ssize_t>(total);
}

bool TlsSession::put(const void* data, size_t size) {
  size_t done = 0;
  if (calls_.SSL_write_ex(ssl_, data, size, &done) != 1 || done != size) {
    failed();
    if (trouble_.empty()) trouble_ = "TLS takes nothing more";
    return false;
  }
  sealed_bytes_ += size;
  return true;
}

bool TlsSession::change_keys() {
  if (sealed_bytes_ < context_->key_bytes_max) return true;
  sealed_bytes_ = 0;
  if (calls_.SSL_key_update(ssl_, kSslKeyUpdateNotRequested) == 1) return true;
  trouble_ = "the keys cannot be changed: " + context_->library().take_error();
  return false;
}

ssize_t TlsSession::seal(std::span<const iovec> views) {
  calls_.ERR_clear_error();
  std::vector<std::byte>& gathered = context_->gathered;
  size_t total = 0;
  size_t short_bytes = 0;
  const auto put_gathered = [&] { return short_bytes == 0 || put(gathered.data(), std::exchange(short_bytes, 0)); };
  if (!change_keys()) return -1;
  for (const iovec& view : views) {
    const size_t length = std::min(view.iov_len, kSealBytes - total);
    if (length > gathered.size() - short_bytes && !put_gathered()) return -1;
    if (length > gathered.size()) {
      if (!put(view.iov_base, length)) return -1;
    } else {
      std::memcpy(gathered.data() + short_bytes, view.iov_base, length);
      short_bytes += length;
    }
    total += length;
    if (total == kSealBytes) break;
  }
  return put_gathered() ? static_cast<ssize_t>(total) : -1;
}

int TlsSession::flush() {
  while (has_unsent()) {
    const ssize_t put = send(fd_, unsent_.data() + sent_, unsent_.size() - sent_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return -1;
    sent_ += static_cast<size_t>(put);
  }
  unsent_.clear();
  sent_ = 0;
  if (unsent_.capacity() > kKeptBytes) unsent_.shrink_to_fit();
  return 0;
}

}  // namespace crossrail::tcp
