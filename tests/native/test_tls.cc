// TLS on a connection, both ends in one process; and what we say of OpenSSL's interface, compared with its headers.
#include "transport/tcp/tls_session.h"

#include <doctest/doctest.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <type_traits>

#include "tls_rig.h"

#if __has_include(<openssl/ssl.h>) && __has_include(<openssl/opensslconf.h>)  // the latter is of the architecture
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

namespace {

#define CROSSRAIL_SAME(name) static_assert(std::is_same_v<decltype(&::name), decltype(crossrail::tcp::TlsCalls::name)>)
CROSSRAIL_SAME(OpenSSL_version_num);
CROSSRAIL_SAME(OpenSSL_version);
CROSSRAIL_SAME(ERR_peek_last_error);
CROSSRAIL_SAME(ERR_clear_error);
CROSSRAIL_SAME(ERR_reason_error_string);
CROSSRAIL_SAME(TLS_method);
CROSSRAIL_SAME(SSL_CTX_new);
CROSSRAIL_SAME(SSL_CTX_free);
CROSSRAIL_SAME(SSL_CTX_ctrl);
CROSSRAIL_SAME(SSL_CTX_set_num_tickets);
CROSSRAIL_SAME(SSL_CTX_set_verify);
CROSSRAIL_SAME(SSL_CTX_set_default_passwd_cb);
CROSSRAIL_SAME(SSL_CTX_load_verify_file);
CROSSRAIL_SAME(SSL_CTX_use_certificate_chain_file);
CROSSRAIL_SAME(SSL_CTX_use_PrivateKey_file);
CROSSRAIL_SAME(SSL_new);
CROSSRAIL_SAME(SSL_free);
CROSSRAIL_SAME(SSL_set_bio);
CROSSRAIL_SAME(SSL_set_connect_state);
CROSSRAIL_SAME(SSL_set_accept_state);
CROSSRAIL_SAME(SSL_do_handshake);
CROSSRAIL_SAME(SSL_read_ex);
CROSSRAIL_SAME(SSL_write_ex);
CROSSRAIL_SAME(SSL_get_error);
CROSSRAIL_SAME(SSL_set_read_ahead);
CROSSRAIL_SAME(SSL_has_pending);
CROSSRAIL_SAME(SSL_key_update);
CROSSRAIL_SAME(SSL_get_verify_result);
CROSSRAIL_SAME(SSL_get1_peer_certificate);
CROSSRAIL_SAME(SSL_get_current_cipher);
CROSSRAIL_SAME(SSL_CIPHER_get_name);
CROSSRAIL_SAME(SSL_export_keying_material);
CROSSRAIL_SAME(X509_free);
CROSSRAIL_SAME(X509_check_host);
CROSSRAIL_SAME(X509_verify_cert_error_string);
CROSSRAIL_SAME(BIO_get_new_index);
CROSSRAIL_SAME(BIO_meth_new);
CROSSRAIL_SAME(BIO_meth_set_write_ex);
CROSSRAIL_SAME(BIO_meth_set_read_ex);
CROSSRAIL_SAME(BIO_meth_set_ctrl);
CROSSRAIL_SAME(BIO_new);
CROSSRAIL_SAME(BIO_set_data);
CROSSRAIL_SAME(BIO_get_data);
CROSSRAIL_SAME(BIO_set_init);
CROSSRAIL_SAME(BIO_set_flags);
CROSSRAIL_SAME(BIO_clear_flags);
#undef CROSSRAIL_SAME

using namespace crossrail::tcp;
static_assert(kSslCtrlMode == SSL_CTRL_MODE);
static_assert(kSslCtrlSetSessionCacheMode == SSL_CTRL_SET_SESS_CACHE_MODE);
static_assert(kSslCtrlSetMaxCertList == SSL_CTRL_SET_MAX_CERT_LIST);
static_assert(kSslCtrlSetMinProtoVersion == SSL_CTRL_SET_MIN_PROTO_VERSION);
static_assert(kSslCtrlSetMaxProtoVersion == SSL_CTRL_SET_MAX_PROTO_VERSION);
static_assert(kTls13 == TLS1_3_VERSION);
static_assert(kSslModeReleaseBuffers == SSL_MODE_RELEASE_BUFFERS);
static_assert(kSslVerifyMutually == (SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT));
static_assert(kSslFileTypePem == SSL_FILETYPE_PEM);
static_assert(kSslErrorWantRead == SSL_ERROR_WANT_READ && kSslErrorWantWrite == SSL_ERROR_WANT_WRITE);
static_assert(kSslErrorZeroReturn == SSL_ERROR_ZERO_RETURN);
static_assert(kSslKeyUpdateNotRequested == SSL_KEY_UPDATE_NOT_REQUESTED);
static_assert(kBioTypeSourceSink == BIO_TYPE_SOURCE_SINK);
static_assert(kBioFlagsRead == BIO_FLAGS_READ && kBioFlagsRetry == BIO_FLAGS_SHOULD_RETRY);
static_assert(kBioCtrlFlush == BIO_CTRL_FLUSH);
static_assert(kX509CheckNames == (X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS | X509_CHECK_FLAG_NEVER_CHECK_SUBJECT));
static_assert(kOpensslInitNoAtexit == OPENSSL_INIT_NO_ATEXIT);

}  // namespace
#endif

namespace crossrail::tcp {
namespace {

TEST_CASE("tls: both ends of a session know the same binding, another session's is another") {
  Ends one, other;
  one.shake_hands();
  other.shake_hands();
  CHECK(one.near->binding() == one.far->binding());
  CHECK(one.near->binding() != other.near->binding());
  CHECK(std::string(one.near->cipher()).starts_with("TLS_"));
}

TEST_CASE("tls: a certificate is for the names it has, and no others") {
  Ends ends;
  ends.shake_hands();
  CHECK(ends.near->is_named("engine"));
  CHECK(ends.far->is_named("a.decode.example"));
  for (const char* name : {"", "test", "engin", "engine.", ".decode.example", "decode.example", "a.b.decode.example"}) {
    CAPTURE(name);
    CHECK_FALSE(ends.near->is_named(name));
  }
  CHECK_FALSE(ends.near->is_named(std::string_view("engine\0x", 8)));
}

TEST_CASE("tls: bytes come out as they went in, whatever the views; keys change on the way") {
  for (const uint64_t key_bytes_max : {TlsContext::kKeyBytesMax, uint64_t{100'000}}) {
    CAPTURE(key_bytes_max);
    Ends ends(key_bytes_max);
    ends.shake_hands();
    std::vector<std::byte> sent = numbered(3'000'017), got(sent.size());
    size_t at = 0, arrived = 0;
    for (int idle = 0; arrived < sent.size() && idle < 1000; ++idle) {
      if (!ends.near->has_unsent() && at < sent.size()) {
        const size_t first = std::min<size_t>(at % 3 == 0 ? 17 : 40'000, sent.size() - at);
        const size_t second = std::min<size_t>(1000, sent.size() - at - first);
        const iovec views[] = {view_of(sent, at, first), view_of(sent, at + first, second)};
        const ssize_t sealed = ends.near->seal(views);
        REQUIRE(sealed > 0);
        at += static_cast<size_t>(sealed);
      }
      if (ends.near->flush() != 0) REQUIRE(errno == EAGAIN);
      ends.far->begin_turn(20'000);
      const iovec views[] = {view_of(got, arrived, std::min<size_t>(5, got.size() - arrived)),
                             view_of(got, arrived + std::min<size_t>(5, got.size() - arrived),
                                     got.size() - arrived - std::min<size_t>(5, got.size() - arrived))};
      const ssize_t size = ends.far->receive(views);
      if (size < 0) {
        REQUIRE(errno == EAGAIN);
        continue;
      }
      REQUIRE(size > 0);
      CHECK(size <= 40'000);  // a turn, and what was held back of the one before
      arrived += static_cast<size_t>(size);
      idle = 0;
    }
    CHECK(got == sent);
  }
}

TEST_CASE("tls: before the peer is known, no byte behind the current record is taken from the socket") {
  Ends ends;
  ends.shake_hands();
  Ends fresh;  // whose limit was not lifted
  Step theirs = Step::kMore;
  fresh.near->handshake();
  fresh.near->flush();
  theirs = fresh.far->handshake();
  fresh.far->flush();
  CHECK(fresh.near->handshake() == Step::kDone);
  std::vector<std::byte> words = numbered(200);
  const iovec view = view_of(words, 0, words.size());
  REQUIRE(fresh.near->seal({&view, 1}) == 200);
  REQUIRE(fresh.near->seal({&view, 1}) == 200);
  fresh.near->flush();
  theirs = fresh.far->handshake();
  CHECK(theirs == Step::kDone);
  std::vector<std::byte> got(200);
  const iovec place = view_of(got, 0, got.size());
  REQUIRE(fresh.far->receive({&place, 1}) == 200);
  CHECK_FALSE(fresh.far->holds_more());
  CHECK(got == words);
  REQUIRE(fresh.far->receive({&place, 1}) == 200);  // which waited in the socket
}

TEST_CASE("tls: a closed, a reset and a corrupted connection are told apart") {
  std::vector<std::byte> words = numbered(100), got(100);
  const iovec view = view_of(words, 0, words.size()), place = view_of(got, 0, got.size());
  Ends closed;
  closed.shake_hands();
  CHECK(closed.far->receive({&place, 1}) == -1);
  CHECK(errno == EAGAIN);
  closed.near_fd.reset();
  CHECK(closed.far->receive({&place, 1}) == 0);
  Ends corrupted;
  corrupted.shake_hands();
  REQUIRE(corrupted.near->seal({&view, 1}) == 100);
  corrupted.near->flush();
  std::array<uint8_t, 200> record{};
  const ssize_t size = recv(corrupted.far_fd.get(), record.data(), record.size(), 0);
  REQUIRE(size > 100);
  record[50] ^= 1;
  REQUIRE(send(corrupted.near_fd.get(), record.data(), static_cast<size_t>(size), 0) == size);
  CHECK(corrupted.far->receive({&place, 1}) == -1);
  CHECK(errno == EPROTO);
  CHECK(corrupted.far->trouble().find("mac") != std::string::npos);
  CHECK(corrupted.far->receive({&place, 1}) == -1);  // and so it stays
  CHECK(got == std::vector<std::byte>(100));
}

TEST_CASE("tls: garbage is no handshake, and more bytes than one needs are too many") {
  Ends ends;
  const std::string garbage(1000, 'x');
  REQUIRE(send(ends.near_fd.get(), garbage.data(), garbage.size(), 0) == 1000);
  CHECK(ends.far->handshake() == Step::kFailed);
  CHECK_FALSE(ends.far->trouble().empty());
  Ends other;
  other.near->handshake();
  other.near->flush();
  CHECK(other.far->handshake() == Step::kMore);
  // change_cipher_spec, which TLS 1.3 passes over.
  std::string nothing;
  for (int i = 0; i < 8000; ++i) nothing.append("\x14\x03\x03\x00\x01\x01", 6);
  REQUIRE(send(other.near_fd.get(), nothing.data(), nothing.size(), 0) > TlsSession::kHandshakeBytesMax);
  CHECK(other.far->handshake() == Step::kFailed);
}

}  // namespace
}  // namespace crossrail::tcp
