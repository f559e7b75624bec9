// Turns of connections: one that has much to read or to send leaves the others theirs. Counted in bytes, not in time.
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "transport/tcp/connection.h"
#include "transport/tcp/frames.h"
#include "transport/tcp/poller.h"

namespace crossrail::tcp {

namespace {

constexpr uint64_t kFrameBytes = sizeof(FrameHeader) + sizeof(PingMeta);
constexpr uint64_t kTurnBytes = 1024;
constexpr uint64_t kFramesPerBatch = 10;

// Counts the frames that arrive, and sends as many as it is told to.
class Counting final : public Stream {
 public:
  explicit Counting(std::shared_ptr<Connection> connection) : Stream(Role::kAcceptor, std::move(connection)) {}

  uint64_t arrived = 0;
  uint64_t to_send = 0;
  int turns_over = 0;

 protected:
  bool on_head(const FrameHeader&, std::span<const std::byte>, Placement&) override { return true; }
  bool on_frame() override {
    ++arrived;
    return true;
  }
  void fill(TxBatch& batch) override {
    for (uint64_t i = 0; i < kFramesPerBatch && to_send > 0; ++i, --to_send)
      put_frame(batch, FrameType::kPong, PingMeta{1});
  }
  void on_turn_over() override { ++turns_over; }
  void on_broken() override {}
};

// A connection, and the socket of who is at its other end.
struct Peer {
  explicit Peer(ConnectionContext* context) {
    int pair[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
    far = Fd(pair[1]);
    stream = std::make_unique<Counting>(
        std::make_shared<Connection>(context, Socket{Fd(pair[0]), nullptr}, /*is_bulk=*/true));
  }
  // Whole frames, until the socket is full or there were `most`. Returns how many.
  uint64_t send_frames(uint64_t most) const {
    std::vector<std::byte> frame;
    append_frame(frame, FrameType::kPing, PingMeta{1});
    REQUIRE(frame.size() == kFrameBytes);
    uint64_t sent = 0;
    while (sent < most && send(far.get(), frame.data(), frame.size(), MSG_NOSIGNAL) == ssize_t{kFrameBytes}) ++sent;
    return sent;
  }
  uint64_t receive_frames() const {
    std::vector<std::byte> bytes(1 << 20);
    uint64_t received = 0;
    for (ssize_t got = 0; (got = recv(far.get(), bytes.data(), bytes.size(), 0)) > 0;)
      received += static_cast<uint64_t>(got);
    return received / kFrameBytes;
  }

  Fd far;
  std::unique_ptr<Counting> stream;
};

}  // namespace

TEST_CASE("turns: who is sent more than a turn's worth keeps nobody else waiting, and loses nothing") {
  Poller poller;
  ConnectionContext context(&poller);
  context.receive_per_turn_bytes = kTurnBytes;
  Peer busy(&context);
  Peer quiet(&context);
  const uint64_t waiting = busy.send_frames(200);  // it was the first to have news
  REQUIRE(waiting * kFrameBytes > 2 * kTurnBytes);
  REQUIRE(quiet.send_frames(1) == 1);

  CHECK(poller.poll() == 2);

  CHECK(quiet.stream->arrived == 1);
  CHECK(busy.stream->arrived * kFrameBytes >= kTurnBytes - kFrameBytes);
  CHECK(busy.stream->arrived * kFrameBytes <= kTurnBytes + kRangeHeadBytes);

  for (uint64_t turn = 0; turn < waiting && busy.stream->arrived < waiting; ++turn) poller.poll();
  CHECK(busy.stream->arrived == waiting);
}

TEST_CASE("turns: who has more to send than a turn's worth stops there, and says so") {
  Poller poller;
  ConnectionContext context(&poller);
  context.send_per_turn_bytes = kTurnBytes;
  Peer busy(&context);
  constexpr uint64_t kFrames = 200;
  busy.stream->to_send = kFrames;

  CHECK(busy.stream->pump());

  const uint64_t sent = kFrames - busy.stream->to_send;
  CHECK(busy.stream->turns_over == 1);
  CHECK(sent * kFrameBytes >= kTurnBytes);
  CHECK(sent * kFrameBytes < kTurnBytes + kFramesPerBatch * kFrameBytes);
  uint64_t received = busy.receive_frames();
  CHECK(received == sent);

  for (uint64_t turn = 0; turn < kFrames && busy.stream->pump(); ++turn) received += busy.receive_frames();
  CHECK(received == kFrames);
}

}  // namespace crossrail::tcp
