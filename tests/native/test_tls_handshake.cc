// The tcp transport's handshake under TLS, and the connection after it, on networks and sockets at their worst.
#include <doctest/doctest.h>

#include <deque>
#include <string>
#include <vector>

#include "tcp_meeting.h"
#include "tls_rig.h"
#include "transport/tcp/connection.h"
#include "transport/tcp/frames.h"

namespace crossrail::tcp {
namespace {

// A stream that keeps a book of what comes, and sends what it is given.
class BookStream final : public Stream {
 public:
  BookStream(Role role, std::shared_ptr<Connection> connection) : Stream(role, std::move(connection)) {}
  std::vector<uint64_t> tokens;  // of pings and pongs
  std::deque<std::vector<std::byte>> to_send;
  bool is_over = false;

 private:
  bool on_head(const FrameHeader&, std::span<const std::byte> meta, Placement&) override {
    if (meta.size() != sizeof(PingMeta)) return reject("no ping");
    tokens.push_back(read_meta<PingMeta>(meta).token);
    return true;
  }
  bool on_frame() override { return true; }
  void fill(TxBatch& batch) override {
    for (; !to_send.empty() && batch.has_room(to_send.front().size()); to_send.pop_front()) {
      batch.copy(to_send.front().data(), to_send.front().size());
    }
  }
  void on_turn_over() override {}
  void on_broken() override { is_over = true; }
};

std::vector<std::byte> ping(FrameType type, uint64_t token) {
  std::vector<std::byte> bytes;
  append_frame(bytes, type, PingMeta{token});
  return bytes;
}

// Fills a socket to the brim. Returns with how many bytes.
size_t fill_up(int fd) {
  const std::vector<uint8_t> junk(64 << 10, 0xee);
  size_t total = 0;
  for (size_t size = junk.size(); size > 0;) {
    const ssize_t put = send(fd, junk.data(), size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put > 0) total += static_cast<size_t>(put);
    if (put <= 0) size /= 2;
  }
  REQUIRE(total > 0);
  return total;
}

void throw_away(const Fd& fd, size_t bytes) {
  std::vector<uint8_t> junk(64 << 10);
  const Deadline deadline = now_ns() + 20'000'000'000;
  while (bytes > 0 && now_ns() < deadline) {
    const ssize_t got = recv(fd.get(), junk.data(), std::min(bytes, junk.size()), MSG_DONTWAIT);
    if (got > 0) bytes -= static_cast<size_t>(got);
  }
  REQUIRE(bytes == 0);
}

TEST_CASE("tls handshake: bytes may come one by one, both ways") {
  for (const size_t step : {1, 2, 5, 7, 1000}) {
    CAPTURE(step);
    Meeting meeting;
    meeting.pass_on_until(step, [&] { return meeting.result && meeting.accepted; });
    CHECK(meeting.result->kind == ConnectResult::Kind::kUp);
    CHECK(meeting.strangers.empty());
  }
}

TEST_CASE("tls handshake: a frame right behind its last message is seen without another byte") {
  Meeting meeting;
  ConnectionContext context(&meeting.poller);
  meeting.pass_on_until(4096, [&] { return meeting.accepted.has_value(); });
  auto far = std::make_shared<Connection>(&context, std::move(*meeting.accepted), /*is_bulk=*/false);
  BookStream acceptor(Role::kAcceptor, far);
  acceptor.to_send = {ping(FrameType::kPong, 7)};
  REQUIRE(acceptor.pump());
  REQUIRE_FALSE(meeting.result);

  while (meeting.pass_back(4096)) {  // Accept and the frame, in one piece
  }
  while (!meeting.result && meeting.poller.poll() > 0) {
  }

  REQUIRE(meeting.result);
  REQUIRE(meeting.result->kind == ConnectResult::Kind::kUp);
  auto near = std::make_shared<Connection>(&context, std::move(meeting.result->socket), /*is_bulk=*/false);
  BookStream initiator(Role::kInitiator, near);
  meeting.poller.poll();
  CHECK(initiator.tokens == std::vector<uint64_t>{7});
}

TEST_CASE("tls handshake: an acceptor whose socket is full at every word waits for room") {
  Meeting meeting;
  ConnectionContext context(&meeting.poller);
  std::shared_ptr<Connection> far;
  std::unique_ptr<BookStream> acceptor;
  int filled = 0;
  const Deadline deadline = now_ns() + 20'000'000'000;
  while (!meeting.result && now_ns() < deadline) {
    const bool is_words = meeting.pass_forward(4096);
    const size_t junk = is_words ? fill_up(meeting.acceptor_fd()) : 0;
    filled += is_words;
    meeting.poller.poll();
    if (meeting.accepted) {  // with its last message still waiting
      CHECK(meeting.accepted->has_unsent());
      far = std::make_shared<Connection>(&context, std::move(*meeting.accepted), /*is_bulk=*/false);
      acceptor = std::make_unique<BookStream>(Role::kAcceptor, far);
      meeting.accepted.reset();
    }
    meeting.poller.poll();
    if (is_words) throw_away(meeting.far(), junk);
    meeting.poller.poll();
    while (meeting.pass_back(4096)) {
    }
    meeting.poller.poll();
  }
  REQUIRE(meeting.result);
  CHECK(meeting.result->kind == ConnectResult::Kind::kUp);
  CHECK(filled >= 3);
  CHECK(acceptor != nullptr);
  CHECK_FALSE(acceptor->is_over);
}

TEST_CASE("tls handshake: an initiator whose socket is full at its second flight waits for room") {
  Meeting meeting;
  // Its first words are on their way, and the answer to them; then there is no room.
  for (int i = 0; i < 20; ++i) {
    meeting.poller.poll();
    meeting.pass_forward(4096);
  }
  REQUIRE_FALSE(meeting.accepted);
  const size_t junk = fill_up(meeting.connector_fd());
  REQUIRE(meeting.pass_back(4096));
  for (int i = 0; i < 20; ++i) meeting.poller.poll();
  REQUIRE_FALSE(meeting.result);

  throw_away(meeting.near(), junk);

  meeting.pass_on_until(4096, [&] { return meeting.result.has_value(); });
  CHECK(meeting.result->kind == ConnectResult::Kind::kUp);
}

TEST_CASE("tls handshake: who hangs up on our first words with a refusal is heard") {
  Meeting meeting;
  const Bytes refusal = encode(Refusal{RefusalCode::kFull, "too many of you"});
  REQUIRE(send(meeting.near().get(), refusal.data(), refusal.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(refusal.size()));
  meeting.hang_up_near();  // before a word of ours: what we say resets the connection

  const Deadline deadline = now_ns() + 20'000'000'000;
  while (!meeting.result && now_ns() < deadline) meeting.poller.poll();

  REQUIRE(meeting.result);
  CHECK(meeting.result->kind == ConnectResult::Kind::kRefused);
  CHECK(meeting.result->code == RefusalCode::kFull);
  CHECK(meeting.result->text.find("too many of you") != std::string::npos);
}

// An initiator that the test speaks for, once TLS is up.
struct Impostor {
  explicit Impostor(Meeting& meeting) : meeting(&meeting) {
    const Bytes start = encode(StartTls{target_tag(meeting.acceptor_address().incarnation)});
    REQUIRE(send(meeting.far().get(), start.data(), start.size(), 0) == static_cast<ssize_t>(start.size()));
    tls = std::make_unique<TlsSession>(meeting.context(), Side::kInitiator, meeting.far().get());
    Step step = Step::kMore;
    for (int i = 0; i < 10 && step == Step::kMore; ++i) {
      step = tls->handshake();
      REQUIRE(tls->flush() == 0);
      meeting.poller.poll();
    }
    REQUIRE(step == Step::kDone);
  }
  void say(const Bytes& bytes) {
    const iovec view{const_cast<uint8_t*>(bytes.data()), bytes.size()};
    REQUIRE(tls->seal({&view, 1}) == static_cast<ssize_t>(bytes.size()));
    REQUIRE(tls->flush() == 0);
    for (int i = 0; i < 5; ++i) meeting->poller.poll();
  }
  Meeting* meeting;
  std::unique_ptr<TlsSession> tls;
};

TEST_CASE("tls handshake: a message and something more in one record is no handshake") {
  Meeting meeting;
  Impostor impostor(meeting);
  Bytes hello = meeting.hello();
  hello.push_back('x');

  impostor.say(hello);

  REQUIRE(meeting.strangers.size() == 1);
  CHECK(meeting.strangers[0].find("not a crossrail handshake") != std::string::npos);
  CHECK_FALSE(meeting.accepted);
}

TEST_CASE("tls handshake: a message that is cut over records is taken") {
  Meeting meeting;
  Impostor impostor(meeting);
  const Bytes hello = meeting.hello();

  for (const uint8_t byte : hello) impostor.say({byte});

  std::vector<std::byte> answer(1000);
  const iovec view{answer.data(), answer.size()};
  const ssize_t size = impostor.tls->receive({&view, 1});
  REQUIRE(size > 0);
  const auto challenge = decode_challenge({reinterpret_cast<uint8_t*>(answer.data()), static_cast<size_t>(size)});
  CHECK(challenge.has_value());
  CHECK(meeting.strangers.empty());
}

// --- the connection after it ---

// An engine's connection over one end of a session; the test has the other.
struct Line {
  explicit Line(Role role = Role::kAcceptor, bool is_bulk = false) {
    ends.shake_hands();
    // What the session belongs to is the connection's from now on, the descriptor too.
    Socket socket{std::move(ends.far_fd), std::move(ends.far)};
    connection = std::make_shared<Connection>(&context, std::move(socket), is_bulk);
    stream = std::make_unique<BookStream>(role, connection);
  }
  void seal(const std::vector<std::byte>& frame) {
    const iovec view{const_cast<std::byte*>(frame.data()), frame.size()};
    REQUIRE(ends.near->seal({&view, 1}) == static_cast<ssize_t>(frame.size()));
  }
  Poller poller;
  ConnectionContext context{&poller};
  Ends ends;
  std::shared_ptr<Connection> connection;
  std::unique_ptr<BookStream> stream;
};

TEST_CASE("tls connection: frames may come byte by byte") {
  for (const bool is_bulk : {false, true}) {
    CAPTURE(is_bulk);
    Line line(Role::kAcceptor, is_bulk);
    for (uint64_t token = 1; token <= 5; ++token) line.seal(ping(FrameType::kPing, token));
    REQUIRE(line.ends.near->flush() == 0);
    std::vector<uint8_t> wire(10'000);
    const ssize_t size = recv(line.connection->fd(), wire.data(), wire.size(), MSG_DONTWAIT);
    REQUIRE(size > 5 * 32);
    for (size_t at = 0; at < static_cast<size_t>(size); ++at) {
      REQUIRE(send(line.ends.near_fd.get(), wire.data() + at, 1, 0) == 1);
      line.poller.poll();
      CHECK(line.stream->tokens.size() <= at / 32);
    }
    CHECK(line.stream->tokens == std::vector<uint64_t>{1, 2, 3, 4, 5});
  }
}

TEST_CASE("tls connection: an end behind the last frame is told without another byte") {
  Line line;
  line.seal(ping(FrameType::kPing, 3));
  REQUIRE(line.ends.near->flush() == 0);
  // A record that is none.
  const std::string wrong("\x17\x03\x03\x00\x14 and twenty bytes of", 25);
  REQUIRE(send(line.ends.near_fd.get(), wrong.data(), wrong.size(), 0) == static_cast<ssize_t>(wrong.size()));

  line.poller.poll();

  CHECK(line.stream->tokens == std::vector<uint64_t>{3});
  CHECK(line.stream->is_over);
  CHECK(line.stream->reason().find("TLS: ") != std::string::npos);
}

TEST_CASE("tls connection: who stops reading is waited for, and then gets everything in order") {
  Line line(Role::kInitiator);
  constexpr uint64_t kPings = 40'000;  // 32 bytes each, and the socket has room for some 200 KB
  for (uint64_t token = 0; token < kPings; ++token) line.stream->to_send.push_back(ping(FrameType::kPing, token));
  for (int i = 0; i < 100; ++i) line.stream->pump();
  REQUIRE(line.connection->is_blocked());
  REQUIRE_FALSE(line.stream->to_send.empty());

  std::vector<std::byte> got;
  std::vector<std::byte> piece(10'007);
  const iovec view{piece.data(), piece.size()};
  const Deadline deadline = now_ns() + 20'000'000'000;
  while (got.size() < kPings * ping(FrameType::kPing, 0).size() && now_ns() < deadline) {
    const ssize_t size = line.ends.near->receive({&view, 1});
    if (size > 0) got.insert(got.end(), piece.begin(), piece.begin() + size);
    line.poller.poll();
    line.stream->pump();
  }

  std::vector<std::byte> expected;
  for (uint64_t token = 0; token < kPings; ++token) append_frame(expected, FrameType::kPing, PingMeta{token});
  CHECK(got == expected);
  CHECK_FALSE(line.connection->is_blocked());
}

TEST_CASE("tls connection: who has said all and closes is heard to the end") {
  Line line;
  for (uint64_t token = 1; token <= 3; ++token) line.seal(ping(FrameType::kPing, token));
  REQUIRE(line.ends.near->flush() == 0);
  shutdown(line.ends.near_fd.get(), SHUT_WR);  // half of it: he still reads

  line.poller.poll();
  line.poller.poll();

  CHECK(line.stream->tokens == std::vector<uint64_t>{1, 2, 3});
  CHECK(line.stream->is_over);
  CHECK(line.stream->reason() == "the peer closed the connection");
}

}  // namespace
}  // namespace crossrail::tcp
