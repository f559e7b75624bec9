// A session of TLS on a network, and against a peer, that does what ours never do.
#include <dlfcn.h>
#include <doctest/doctest.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <vector>

#include "tls_rig.h"

namespace crossrail::tcp {

struct TlsInsides {
  static ssl_st* handle(TlsSession& session) { return session.ssl_; }
};

namespace {

constexpr int kKeyUpdateRequested = 1;

// Of the same library; what the transport itself has no use for.
template <typename Function>
Function call_of(const TlsContext& context, const char* name) {
  void* const library = dlopen(context.library().path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  REQUIRE(library != nullptr);
  void* const found = dlsym(library, name);
  REQUIRE(found != nullptr);
  return reinterpret_cast<Function>(found);
}

void send_words(Ends& ends, std::vector<std::byte>& words) {
  const iovec view = view_of(words, 0, words.size());
  REQUIRE(ends.near->seal({&view, 1}) == static_cast<ssize_t>(words.size()));
  REQUIRE(ends.near->flush() == 0);
}

ssize_t receive(TlsSession& session, std::vector<std::byte>& place) {
  const iovec view = view_of(place, 0, place.size());
  return session.receive({&view, 1});
}

// The last byte of what waits in the socket arrives wrong.
void corrupt_last_byte(Ends& ends) {
  std::array<uint8_t, 4096> bytes{};
  const ssize_t size = recv(ends.far_fd.get(), bytes.data(), bytes.size(), 0);
  REQUIRE(size > 0);
  REQUIRE(size < static_cast<ssize_t>(bytes.size()));
  bytes[static_cast<size_t>(size) - 1] ^= 1;
  REQUIRE(send(ends.near_fd.get(), bytes.data(), static_cast<size_t>(size), 0) == size);
}

TEST_CASE("tls: a handshake whose flights arrive byte by byte, both ways") {
  Ends ends;
  Step ours = Step::kMore, theirs = Step::kMore;
  int steps = 0;
  for (; steps < 20'000 && !(ours == Step::kDone && theirs == Step::kDone); ++steps) {
    ends.near->begin_turn(1);
    ends.far->begin_turn(1);
    if (ours == Step::kMore) ours = ends.near->handshake();
    REQUIRE(ends.near->flush() == 0);
    if (theirs == Step::kMore) theirs = ends.far->handshake();
    REQUIRE(ends.far->flush() == 0);
  }
  CHECK(ours == Step::kDone);
  CHECK(theirs == Step::kDone);
  CHECK(steps > 500);  // a byte each, of flights that are longer than that
}

TEST_CASE("tls: what arrives byte by byte comes out whole, and none of it is left behind") {
  Ends ends;
  ends.shake_hands();
  std::vector<std::byte> sent = numbered(40'001), got(sent.size());
  send_words(ends, sent);
  size_t arrived = 0;
  for (size_t taken = 0; taken < 2 * sent.size() && arrived < got.size(); ++taken) {
    ends.far->begin_turn(1);
    const iovec view = view_of(got, arrived, got.size() - arrived);
    const ssize_t size = ends.far->receive({&view, 1});
    if (size < 0) REQUIRE(errno == EAGAIN);
    arrived += static_cast<size_t>(std::max<ssize_t>(size, 0));
  }
  CHECK(arrived == sent.size());
  CHECK(got == sent);
  CHECK_FALSE(ends.far->holds_more());
}

TEST_CASE("tls: an end that comes with the bytes before it is told, though the socket has nothing more") {
  std::vector<std::byte> words = numbered(100), got(400);
  Ends ends;
  ends.shake_hands();
  send_words(ends, words);
  send_words(ends, words);
  corrupt_last_byte(ends);
  REQUIRE(receive(*ends.far, got) == 100);  // the first record
  CHECK(ends.far->end_waits());
  CHECK(receive(*ends.far, got) == -1);
  CHECK(errno == EPROTO);
  // Asked again and again it stays what it was, whatever the kernel says meanwhile.
  ends.near_fd.reset();
  CHECK(receive(*ends.far, got) == -1);
  CHECK(errno == EPROTO);
}

TEST_CASE("tls: a peer that says close_notify has closed the connection") {
  std::vector<std::byte> words = numbered(100), got(400);
  Ends ends;
  ends.shake_hands();
  send_words(ends, words);
  call_of<int (*)(ssl_st*)>(*ends.context, "SSL_shutdown")(TlsInsides::handle(*ends.near));
  REQUIRE(ends.near->flush() == 0);
  REQUIRE(receive(*ends.far, got) == 100);
  CHECK(ends.far->end_waits());
  CHECK(receive(*ends.far, got) == 0);
  CHECK(receive(*ends.far, got) == 0);
  CHECK(ends.far->trouble().empty());
}

TEST_CASE("tls: a connection that was reset stays so") {
  std::vector<std::byte> got(10);
  Ends ends;
  ends.shake_hands();
  // As a unix socket sees it: closed with bytes that were not read.
  std::vector<std::byte> back = numbered(10);
  const iovec view = view_of(back, 0, back.size());
  REQUIRE(ends.far->seal({&view, 1}) == 10);
  REQUIRE(ends.far->flush() == 0);
  ends.near_fd.reset();
  REQUIRE(receive(*ends.far, got) == -1);
  CHECK(errno == ECONNRESET);
  CHECK(receive(*ends.far, got) == -1);
  CHECK(errno == ECONNRESET);
}

TEST_CASE("tls: keys may change as often as a connection needs it") {
  Ends ends(/*key_bytes_max=*/1);  // before every seal
  ends.shake_hands();
  std::vector<std::byte> words = numbered(100), got(100);
  for (int i = 0; i < 300; ++i) {
    CAPTURE(i);
    send_words(ends, words);
    REQUIRE(receive(*ends.far, got) == 100);
    REQUIRE(got == words);
  }
}

TEST_CASE("tls: a peer that wants our keys changed gets new ones with the next that we send") {
  Ends ends;
  ends.shake_hands();
  std::vector<std::byte> words = numbered(100), got(100);
  ssl_st* const near = TlsInsides::handle(*ends.near);
  for (int i = 0; i < 100; ++i) {
    CAPTURE(i);
    ends.context->calls().SSL_key_update(near, kKeyUpdateRequested);
    send_words(ends, words);
    REQUIRE(receive(*ends.far, got) == 100);
    const iovec view = view_of(words, 0, words.size());
    REQUIRE(ends.far->seal({&view, 1}) == 100);
    REQUIRE(ends.far->flush() == 0);
    REQUIRE(receive(*ends.near, got) == 100);
  }
}

TEST_CASE("tls: a turn ends though a peer sends new keys and no data") {
  Ends ends;
  ends.shake_hands();
  ssl_st* const near = TlsInsides::handle(*ends.near);
  for (int i = 0; i < 3000; ++i) {
    REQUIRE(ends.context->calls().SSL_key_update(near, kSslKeyUpdateNotRequested) == 1);
    REQUIRE(ends.context->calls().SSL_do_handshake(near) == 1);
  }
  REQUIRE(ends.near->flush() == 0);
  int waiting = 0;
  REQUIRE(ioctl(ends.far_fd.get(), FIONREAD, &waiting) == 0);
  REQUIRE(waiting > static_cast<int>(TlsSession::kIdleBytesMax));
  std::vector<std::byte> got(10);

  ends.far->begin_turn(UINT64_MAX);
  CHECK(receive(*ends.far, got) == -1);
  CHECK(errno == EAGAIN);

  int left = 0;
  REQUIRE(ioctl(ends.far_fd.get(), FIONREAD, &left) == 0);
  CHECK(waiting - left == static_cast<int>(TlsSession::kIdleBytesMax));
}

TEST_CASE("tls: who asks for new keys for ever is not answered for ever") {
  Ends ends;
  ends.shake_hands();
  ssl_st* const near = TlsInsides::handle(*ends.near);
  auto* const do_handshake = ends.context->calls().SSL_do_handshake;
  std::vector<std::byte> got(10);
  ssize_t result = -1;
  int asked = 0;
  for (errno = EAGAIN; result < 0 && errno == EAGAIN && asked < 100'000; ++asked) {
    REQUIRE(ends.context->calls().SSL_key_update(near, kKeyUpdateRequested) == 1);
    REQUIRE(do_handshake(near) == 1);  // without a byte of data
    REQUIRE(ends.near->flush() == 0);
    ends.far->begin_turn(UINT64_MAX);
    result = receive(*ends.far, got);
  }
  CHECK(result == -1);
  CHECK(errno == EPROTO);
  CHECK(asked > 1000);
  CHECK(ends.far->trouble().find("more than it reads") != std::string::npos);
}

}  // namespace
}  // namespace crossrail::tcp
