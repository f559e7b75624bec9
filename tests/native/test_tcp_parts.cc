// The parts of the tcp transport that need no connection: the handshake's messages, pairs of rails, batches of frames.
#include <doctest/doctest.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "transport/identity.h"
#include "transport/tcp/batch.h"
#include "transport/tcp/connect.h"
#include "transport/tcp/frames.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/link.h"
#include "transport/tcp/poller.h"
#include "transport/tcp/region_table.h"
#include "transport/tcp/stage_pool.h"
#include "transport/tcp/stranger_news.h"
#include "util/clock.h"
#include "util/sha256.h"

namespace crossrail::tcp {

namespace {

Endpoint v4(uint8_t a, uint8_t b, uint8_t c, uint8_t d, uint8_t prefix = 24) {
  return {.family = 4, .ip = {a, b, c, d}, .port = 1, .prefix_bits = prefix};
}

Endpoint v6(uint8_t subnet, uint8_t host) {
  Endpoint endpoint{.family = 6, .port = 1, .prefix_bits = 64};
  endpoint.ip[0] = 0x20;
  endpoint.ip[7] = subnet;
  endpoint.ip[15] = host;
  return endpoint;
}

Hello hello() {
  Hello hello;
  for (size_t i = 0; i < hello.nonce.size(); ++i) hello.nonce[i] = static_cast<uint8_t>(i);
  hello.link_id = 0x1122334455667788;
  hello.channel = 3;
  hello.epoch = 7;
  hello.resumes = true;
  hello.sender = make_identity("someone", transport_bit(TransportKind::kTcp), 1);
  hello.sender.endpoints = {v4(10, 0, 0, 1)};
  hello.target_tag = target_tag(hello.sender.incarnation);
  return hello;
}

template <typename Decode>
void refuses_all_but_whole(const Bytes& whole, Decode&& decode) {
  CHECK(decode(whole));
  for (size_t length = 0; length < whole.size(); ++length) CHECK(!decode(std::span(whole).first(length)));
  Bytes longer = whole;
  longer.push_back(0);
  CHECK(!decode(longer));
  for (size_t at = 0; at <= kHandshakeHeadBytes; ++at) {  // magic, length, kind: version is judged by the reader
    if (at == 4 || at == 5) continue;
    Bytes changed = whole;
    changed[at] ^= 0x40;
    CHECK(!decode(changed));
  }
}

}  // namespace

TEST_CASE("messages of the handshake come back as they were, whole or not at all") {
  const Hello sent = hello();
  const Bytes bytes = encode(sent);
  const auto got = decode_hello(bytes);
  REQUIRE(got);
  CHECK(got->target_tag == sent.target_tag);
  CHECK(got->nonce == sent.nonce);
  CHECK(got->link_id == sent.link_id);
  CHECK(got->channel == sent.channel);
  CHECK(got->epoch == sent.epoch);
  CHECK(got->resumes);
  CHECK(!got->is_bulk);
  CHECK(got->sender.encode() == sent.sender.encode());
  refuses_all_but_whole(bytes, decode_hello);
  Challenge challenge;
  challenge.nonce.fill(5);
  challenge.proof.fill(6);
  refuses_all_but_whole(encode(challenge), decode_challenge);
  CHECK(decode_challenge(encode(challenge))->proof == challenge.proof);
  refuses_all_but_whole(encode(Proof{challenge.proof}), decode_proof);
  refuses_all_but_whole(encode(Refusal{RefusalCode::kFull, "come back later"}), decode_refusal);
  CHECK(decode_refusal(encode(Refusal{RefusalCode::kFull, "come back later"}))->text == "come back later");
  CHECK(decode_refusal(encode(Refusal{RefusalCode::kStale, std::string(5000, 'x')}))->text.size() == kTextBytesMax);
  CHECK(handshake_kind(encode(Accept{})) == HandshakeKind::kAccept);
}

TEST_CASE("the longest address that an engine can have fits a handshake") {
  Hello longest = hello();
  longest.sender.name = std::string(64, 'n');
  longest.sender.host = std::string(64, 'h');
  longest.sender.endpoints.assign(kRailsMax, v6(1, 1));
  longest.sender.rail_count = kRailsMax;
  const Bytes bytes = encode(longest);
  CHECK(bytes.size() <= kHandshakeBytesMax);
  REQUIRE(decode_hello(bytes));
  CHECK(decode_hello(bytes)->sender.endpoints.size() == kRailsMax);
}

TEST_CASE("a proof says who made it, for which hello, nonce, secret and target") {
  const Bytes greeting = encode(hello());
  const Nonce nonce{1};
  const Incarnation target{2};
  const Digest key = handshake_key("secret", target);
  const Digest proof = initiator_proof(key, {greeting, nonce, {}});
  CHECK(proof != acceptor_proof(key, {greeting, nonce, {}}));
  CHECK(proof != initiator_proof(key, {greeting, Nonce{2}, {}}));
  CHECK(proof != initiator_proof(handshake_key("Secret", target), {greeting, nonce, {}}));
  CHECK(proof != initiator_proof(handshake_key("secret", Incarnation{3}), {greeting, nonce, {}}));
  Bytes other = greeting;
  other.back() ^= 1;
  CHECK(proof != initiator_proof(key, {other, nonce, {}}));
  CHECK(proof != initiator_proof(key, {greeting, nonce, Digest{4}}));
  CHECK(draw_nonce() != draw_nonce());
}

TEST_CASE("random bytes are no message") {
  std::mt19937 random(7);
  const Bytes valid[] = {encode(hello()), encode(Challenge{}), encode(Proof{}),
                         encode(Refusal{RefusalCode::kFull, "no"}), encode(StartTls{})};
  for (int round = 0; round < 20'000; ++round) {
    Bytes bytes = valid[random() % std::size(valid)];
    for (size_t edits = 1 + random() % 5; edits > 0; --edits)
      bytes[random() % bytes.size()] = static_cast<uint8_t>(random());
    if (random() % 3 == 0) bytes.resize(random() % (bytes.size() + 1));
    uint16_t version;
    (void)handshake_bytes(bytes, &version);
    (void)handshake_kind(bytes);
    if (const auto got = decode_hello(bytes)) CHECK(got->sender.endpoints.size() <= kRailsMax);
    (void)decode_challenge(bytes);
    (void)decode_proof(bytes);
    (void)decode_start_tls(bytes);
    if (const auto got = decode_refusal(bytes)) CHECK(got->text.size() <= kTextBytesMax);
  }
}

TEST_CASE("rails of a common subnet talk to each other, all of the larger side's are used") {
  using Pairs = std::vector<RailPair>;
  CHECK(pair_rails({v4(10, 0, 0, 1)}, {v4(10, 0, 0, 2)}) == Pairs{{0, 0}});
  // Two subnets, in another order there.
  CHECK(pair_rails({v4(10, 0, 0, 1), v4(10, 0, 1, 1)}, {v4(10, 0, 1, 2), v4(10, 0, 0, 2)}) == Pairs{{0, 1}, {1, 0}});
  // Different counts in one subnet.
  CHECK(pair_rails({v4(10, 0, 0, 1)}, {v4(10, 0, 0, 2), v4(10, 0, 0, 3), v4(10, 0, 0, 4)}) ==
        Pairs{{0, 0}, {0, 1}, {0, 2}});
  CHECK(pair_rails({v4(10, 0, 0, 1), v4(10, 0, 0, 2), v4(10, 0, 0, 3)}, {v4(10, 0, 0, 9), v4(10, 0, 0, 8)}) ==
        Pairs{{0, 0}, {1, 1}, {2, 0}});
  // A rail without a counterpart stays out while others have one.
  CHECK(pair_rails({v4(10, 0, 0, 1), v4(172, 16, 0, 1)}, {v4(10, 0, 0, 2)}) == Pairs{{0, 0}});
  // Routed: nothing in common, paired by index within a family.
  CHECK(pair_rails({v4(10, 0, 0, 1), v4(10, 0, 1, 1)}, {v4(10, 1, 0, 1), v4(10, 1, 1, 1)}) == Pairs{{0, 0}, {1, 1}});
  CHECK(pair_rails({v4(10, 0, 0, 1), v6(1, 1)}, {v6(2, 1), v4(10, 1, 0, 1)}) == Pairs{{0, 1}, {1, 0}});
  // Mixed families: each by itself.
  CHECK(pair_rails({v4(10, 0, 0, 1), v6(1, 1)}, {v6(1, 2), v4(10, 0, 0, 2)}) == Pairs{{0, 1}, {1, 0}});
  CHECK(pair_rails({v4(10, 0, 0, 1)}, {v6(1, 2)}).empty());
  // The shorter prefix decides.
  CHECK(pair_rails({v4(10, 0, 0, 1, 8)}, {v4(10, 200, 0, 1, 24)}) == Pairs{{0, 0}});
}

TEST_CASE("both sides compute the same pairs, and use every rail that has a counterpart") {
  std::mt19937 random(11);
  for (int round = 0; round < 2000; ++round) {
    const auto draw = [&](uint8_t host) {
      std::vector<Endpoint> rails;
      for (size_t n = 1 + random() % 5; n > 0; --n) {
        const auto subnet = static_cast<uint8_t>(random() % 3);
        const auto number = static_cast<uint8_t>(host + n);
        rails.push_back(random() % 4 == 0 ? v6(subnet, number) : v4(10, 0, subnet, number));
      }
      return rails;
    };
    const auto ours = draw(10);
    const auto theirs = draw(100);
    auto pairs = pair_rails(ours, theirs);
    auto mirrored = pair_rails(theirs, ours);
    for (RailPair& pair : mirrored) std::swap(pair.rail, pair.peer_rail);
    const auto less = [](const RailPair& a, const RailPair& b) {
      return std::pair(a.rail, a.peer_rail) < std::pair(b.rail, b.peer_rail);
    };
    std::sort(pairs.begin(), pairs.end(), less);
    std::sort(mirrored.begin(), mirrored.end(), less);
    CHECK(pairs == mirrored);
    CHECK(pairs.size() <= ours.size() + theirs.size());
    for (const RailPair& pair : pairs) CHECK(ours[pair.rail].family == theirs[pair.peer_rail].family);
  }
}

TEST_CASE("a batch gives its bytes in order, however little is sent at once, and lets go of a region") {
  std::mt19937 random(5);
  std::vector<std::byte> region(4000);
  for (size_t i = 0; i < region.size(); ++i) region[i] = static_cast<std::byte>(i * 7);
  for (int round = 0; round < 200; ++round) {
    TxBatch batch;
    std::vector<std::byte> expected;
    for (int part = 0; part < 20; ++part) {
      const size_t at = random() % 3000;
      const size_t size = random() % 900;
      if (random() % 2 == 0) {
        batch.copy(region.data() + at, size);
      } else {
        batch.view(region.data() + at, size);
      }
      expected.insert(expected.end(), region.data() + at, region.data() + at + size);
    }
    CHECK(batch.pending_bytes() == expected.size());
    std::vector<std::byte> taken;
    auto kept = region;
    bool detached = false;
    while (!batch.empty()) {
      size_t turn = 1 + random() % 700;
      if (!detached && random() % 10 == 0) {
        detached = true;
        if (round % 2 == 0) {
          batch.detach(region.data(), region.size());
        } else {
          batch.detach_all();
        }
        std::fill(region.begin(), region.end(), std::byte{0xee});
      }
      turn = std::min<size_t>(turn, batch.pending_bytes());
      size_t left = turn;
      for (const iovec& view : batch.views()) {
        const size_t size = std::min(left, view.iov_len);
        const auto* data = static_cast<const std::byte*>(view.iov_base);
        taken.insert(taken.end(), data, data + size);
        left -= size;
        if (left == 0) break;
      }
      batch.sent(turn);
    }
    region = kept;
    CHECK(taken == expected);
    CHECK(batch.pending_bytes() == 0);
  }
}

TEST_CASE("a batch tells which operation was not sent whole") {
  const std::vector<std::byte> data(100);
  TxBatch batch;
  batch.copy(data.data(), 10);  // of nobody
  CHECK(batch.first_unsent() == TxBatch::kAllSent);
  batch.view(data.data(), 90);
  batch.mark(5);  // to 7
  batch.copy(data.data(), 20);
  batch.mark(8);

  CHECK(batch.first_unsent() == 5);
  batch.sent(99);
  CHECK(batch.first_unsent() == 5);
  batch.sent(1);
  CHECK(batch.first_unsent() == 8);
  batch.sent(20);
  CHECK(batch.first_unsent() == TxBatch::kAllSent);

  batch.copy(data.data(), 1);
  batch.mark(9);
  CHECK(batch.first_unsent() == 9);
  batch.clear();
  CHECK(batch.first_unsent() == TxBatch::kAllSent);
  batch.copy(data.data(), 1);
  batch.mark(10);
  batch.detach_all();
  CHECK(batch.first_unsent() == TxBatch::kAllSent);
}

TEST_CASE("tcp: frames go into a batch whole, or wait for the next one") {
  std::mt19937 random(13);
  std::vector<std::byte> frames;
  for (uint64_t token = 0; frames.size() < 5 * TxBatch::kBytes; ++token) {
    append_frame(frames, FrameType::kPong, PingMeta{token}, std::string(random() % kTextBytesMax, 'x'));
  }
  const std::vector<std::byte> expected = frames;
  std::vector<std::byte> sent;
  while (!frames.empty()) {
    TxBatch batch;
    const std::vector<std::byte> others(random() % TxBatch::kBytes);
    batch.copy(others.data(), others.size());
    put_frames(batch, frames);
    const uint64_t taken = batch.pending_bytes() - others.size();
    CHECK(taken + sent.size() + frames.size() == expected.size());
    for (const iovec& view : batch.views()) {
      const auto* const data = static_cast<const std::byte*>(view.iov_base);
      sent.insert(sent.end(), data + (view.iov_len - taken), data + view.iov_len);
    }
    if (!frames.empty()) {
      const auto header = read_meta<FrameHeader>(frames);
      CHECK(header.mark == mark_of(header));
    }
  }
  CHECK(sent == expected);
}

TEST_CASE("a sleeper is rung by the time that was asked for first, or earlier, and again once that was seen") {
  constexpr int64_t kSoonNs = 1'000'000;
  constexpr int64_t kLateNs = 60'000'000'000;
  Poller poller;
  poller.doorbell().watch();
  const auto rings_within = [&](int ms) {
    pollfd item{.fd = poller.doorbell().sleep_fd(), .events = POLLIN, .revents = 0};
    return ::poll(&item, 1, ms) == 1;
  };
  poller.wake_by(now_ns() + kLateNs);
  poller.wake_by(now_ns() + kSoonNs);
  poller.wake_by(now_ns() + kLateNs);
  REQUIRE(rings_within(20'000));
  poller.wake_by(now_ns() + kLateNs);  // it has rung, and nobody has looked
  CHECK(rings_within(0));
  CHECK(poller.poll() == 1);
  CHECK(!rings_within(0));
  poller.wake_by(now_ns() + kSoonNs);
  CHECK(rings_within(20'000));
}

TEST_CASE("a placement puts bytes where they belong, and nowhere in a range that was closed") {
  std::mt19937 random(9);
  for (int round = 0; round < 500; ++round) {
    std::vector<std::byte> first(1000);
    std::vector<std::byte> second(1000);
    auto first_model = first;
    auto second_model = second;
    Placement place;
    struct Part {
      std::vector<std::byte>* model;
      size_t at;
      size_t length;
    };
    std::vector<Part> parts;
    for (int part = 0; part < 8; ++part) {
      const size_t at = random() % 500;
      const size_t length = random() % 500;
      switch (random() % 3) {
        case 0:
          place.add(first.data() + at, length);
          parts.push_back({&first_model, at, length});
          break;
        case 1:
          place.add(second.data() + at, length);
          parts.push_back({&second_model, at, length});
          break;
        default:
          place.add_discard(length);
          parts.push_back({nullptr, 0, length});
      }
    }
    bool closed = false;
    auto value = static_cast<uint8_t>(round);
    size_t part = 0;
    size_t in_part = 0;
    while (place.bytes_left > 0) {
      if (!closed && random() % 6 == 0) {
        closed = true;
        place.discard_range(second.data(), second.size());
      }
      std::vector<std::byte> chunk(std::min<uint64_t>(1 + random() % 300, place.bytes_left));
      for (std::byte& byte : chunk) {
        byte = static_cast<std::byte>(++value);
        while (parts[part].length == in_part) {
          ++part;
          in_part = 0;
        }
        if (parts[part].model != nullptr && !(closed && parts[part].model == &second_model)) {
          (*parts[part].model)[parts[part].at + in_part] = byte;
        }
        ++in_part;
      }
      place.copy_in(chunk.data(), chunk.size());
    }
    CHECK(first == first_model);
    CHECK(second == second_model);
  }
}

TEST_CASE("a region is quiet once nobody uses it, and nobody starts to after it was revoked") {
  RegionTable table;
  std::vector<std::byte> memory(10);
  auto region = table.add(5, memory.data(), memory.size(), Access::kRemoteWrite);
  CHECK(!table.use(6));
  RegionUse use = table.use(5);
  REQUIRE(use);
  RegionUse shared = use.share();
  const uint64_t before = table.revocations();
  table.revoke(*region);
  CHECK(table.revocations() != before);
  CHECK(use.is_revoked());
  CHECK(!table.use(5));
  CHECK(!RegionTable::is_quiet(*region));
  use = RegionUse();
  CHECK(!RegionTable::is_quiet(*region));
  shared.reset();
  CHECK(RegionTable::is_quiet(*region));
  auto again = table.add(5, memory.data(), memory.size(), Access::kRemoteWrite);
  region.reset();  // whose id another has by now
  CHECK(table.use(5));
}

TEST_CASE("tcp stages: what cannot be pinned is kept as well, as many as there would be otherwise") {
  StagePool pool;
  std::vector<std::unique_ptr<device::HostBuffer>> taken;
  for (size_t i = 0; i < StagePool::kStages + 4; ++i) taken.push_back(pool.take());
  CHECK(pool.kept() == 0);
  for (std::unique_ptr<device::HostBuffer>& stage : taken) {
    CHECK_FALSE(stage->is_pinned());
    pool.give(std::move(stage));
  }
  CHECK(pool.kept() == StagePool::kStages);
  const std::unique_ptr<device::HostBuffer> again = pool.take();
  CHECK(pool.kept() == StagePool::kStages - 1);
}

TEST_CASE("of strangers of one kind the first are told, then how many there were, also when no more come") {
  constexpr int64_t kMinute = StrangerNews::kEveryNs;
  StrangerNews news;
  const auto knock = [&](RefusalCode code, int64_t now) { return news.take(code, "10.0.0.1:5", "it is odd", now); };

  for (uint32_t i = 0; i < StrangerNews::kAtOnce; ++i) {
    const auto line = knock(RefusalCode::kMalformed, i);
    REQUIRE(line);
    CHECK(line->who == "10.0.0.1:5");
    CHECK(line->text == "connection from 10.0.0.1:5 refused: it is odd");
  }
  CHECK(news.due() == kNoDeadline);
  for (int64_t i = 0; i < 1000; ++i) CHECK(!knock(RefusalCode::kMalformed, 100 + i));
  CHECK(knock(RefusalCode::kAuthentication, 2000));  // of another kind

  const int64_t due = news.due();
  CHECK(due == StrangerNews::kAtOnce - 1 + kMinute);
  CHECK(!news.take_due(due - 1));
  const auto line = news.take_due(due);
  REQUIRE(line);
  CHECK(line->text.ends_with("; and 999 more of this kind before it, not told one by one"));
  CHECK(!news.take_due(due));
  CHECK(news.due() == kNoDeadline);
  CHECK(!knock(RefusalCode::kMalformed, due + 1));
  const auto later = knock(RefusalCode::kMalformed, due + kMinute);
  REQUIRE(later);
  CHECK(later->text.ends_with("; and 1 more of this kind before it, not told one by one"));
}

}  // namespace crossrail::tcp
