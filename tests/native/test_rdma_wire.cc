// What the rdma layer says to its peers: taken apart as it was put together, and never trusted.
#include <doctest/doctest.h>

#include <random>

#include "rdma_node.h"

namespace crossrail::rdma::test {

namespace {

using Work = Node::Work;

DatagramHead head_of(DatagramKind kind) {
  DatagramHead head;
  head.kind = kind;
  head.to_leader = true;
  head.nonce = 77;
  head.sender.fill(3);
  head.sender_session = 5;
  head.target_session = 6;
  head.endpoint = {1, 2, 3};
  return head;
}

}  // namespace

TEST_CASE("rdma: of a datagram of another version who sent it is read, to be told, unless its head is another") {
  DatagramHead head = head_of(DatagramKind::kKnock);
  head.version = kProtocolVersion + 1;
  Bytes bytes = begin_datagram(head);
  seal(bytes, sha256({}));
  const auto datagram = decode_datagram(bytes);
  REQUIRE(datagram);
  CHECK(datagram->head.version == kProtocolVersion + 1);
  CHECK(datagram->head.endpoint == Bytes{1, 2, 3});
  CHECK(datagram->body.empty());
  bytes.erase(bytes.end() - 3, bytes.end());
  const auto shorter = decode_datagram(bytes);
  REQUIRE(shorter);
  CHECK(shorter->head.endpoint.empty());
}

TEST_CASE("rdma: datagrams are read as they were written") {
  const Digest key = sha256({});
  Bytes bytes = begin_datagram(head_of(DatagramKind::kHello));
  put(bytes, PathBody{{3, 9}, 4711, 99, Bytes(kOfferBytesMax, 7), 100'000});
  seal(bytes, key);
  CHECK(is_sealed(bytes, key));
  const auto datagram = decode_datagram(bytes);
  REQUIRE(datagram);
  CHECK(datagram->head.sender_session == 5);
  CHECK(datagram->head.endpoint == Bytes{1, 2, 3});
  const auto body = decode_path(datagram->body);
  REQUIRE(body);
  CHECK(body->path == PathKey{3, 9});
  CHECK(body->epoch == 4711);
  CHECK(body->offer == Bytes(kOfferBytesMax, 7));

  Bytes question;
  put(question, ResolveBody{{1, 2}, 3, {{11, 12, 13, true, false}, {21, 22, 23, false, true}}, 77});
  const auto resolve = decode_resolve(question);
  REQUIRE(resolve);
  REQUIRE(resolve->spans.size() == 2);
  CHECK(resolve->spans[1].region_id == 21);
  CHECK(resolve->spans[1].reads);
  CHECK(!resolve->spans[1].writes);

  Bytes answer;
  put(answer, ResolvedBody{{1, 2}, 3, true, 1000, {Status::kDone, Status::kRegionClosed}, 77});
  const auto resolved = decode_resolved(answer);
  REQUIRE(resolved);
  CHECK(resolved->seen == 1000);
  CHECK(resolved->verdicts[1] == Status::kRegionClosed);
}

TEST_CASE("rdma: a datagram with one bit changed is not sealed, and bytes of any kind are read without harm") {
  const Digest key = sha256({});
  Bytes bytes = begin_datagram(head_of(DatagramKind::kResolve));
  put(bytes, ResolveBody{{1, 2}, 3, {{11, 12, 13, true, false}}});
  seal(bytes, key);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    Bytes changed = bytes;
    changed[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    CHECK(!is_sealed(changed, key));
  }
  std::mt19937_64 random(4);
  int understood = 0;
  for (int i = 0; i < 200'000; ++i) {
    Bytes mutant(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(random() % (bytes.size() + 1)));
    if (random() % 2 == 0) mutant.resize(random() % 1100);
    for (uint64_t flips = random() % 4; flips > 0 && !mutant.empty(); --flips) {
      mutant[random() % mutant.size()] = static_cast<uint8_t>(random());
    }
    const auto datagram = decode_datagram(mutant);
    const std::span<const uint8_t> body = datagram ? datagram->body : std::span<const uint8_t>(mutant);
    understood += datagram.has_value();
    decode_path(body);
    decode_refuse(body);
    decode_resolve(body);
    decode_resolved(body);
    decode_text(body);
    decode_state(body);
    decode_message_head(body);
  }
  CHECK(understood > 1000);  // else it tested nothing
}

TEST_CASE("rdma: fragments of any content break their path, no more") {
  std::mt19937_64 random(11);
  Net net({.seed = 3});
  Node a(net, "a", {.peer_timeout_ns = 20'000'000'000}), b(net, "b", {.peer_timeout_ns = 20'000'000'000});
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
  auto src = a.memory(100), dst = b.memory(100);
  for (int round = 0; round < 300; ++round) {
    REQUIRE(poll_until({&a, &b}, [&] { return a.open_paths() == 1; }));
    Path& path = *static_cast<RdmaLink*>(a.link)->session->paths[0];
    const auto kind = static_cast<FragmentKind>(1 + random() % kFragmentKindMax);
    if (kind == FragmentKind::kBye) continue;  // that ends the session as it should
    Bytes body(random() % 3 == 0 ? random() % 4000 : random() % 40);
    for (auto& byte : body) byte = static_cast<uint8_t>(random() % 3 == 0 ? random() : random() % 3);
    if (kind == FragmentKind::kState && decode_state(body)) continue;
    path.nic_path->send(begin_fragment(path.peer_token, kind), body);
    Work work;
    a.post({a.request(work, WorkOp::kWrite, *src, 0, *dst, 0, 100, 1)},
           [&] { a.transport->poll(), b.transport->poll(); });
    REQUIRE(poll_until({&a, &b}, [&] { return work.done(); }));
    CHECK(work.status == Status::kDone);
  }
  CHECK(!b.errors.empty());
  CHECK(a.downs == 0);
}

}  // namespace crossrail::rdma::test
