// What strangers can make an ofi NIC read: endpoint bytes, offers, packets.
#include <doctest/doctest.h>

#include <random>

#include "ofi_rig.h"
#include "transport/ofi/open.h"
#include "transport/ofi/wire.h"

namespace crossrail::test {
namespace {

// Of every hundred changes of good bytes, how many were still read: some must be, or nothing was tested.
template <typename Words>
void mutate(const Words& good, size_t bytes_max) {
  std::mt19937 random(7);
  const std::vector<uint8_t> bytes = good.encode();
  REQUIRE(bytes.size() <= bytes_max);
  REQUIRE(Words::decode(bytes)->encode() == bytes);
  int read = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::vector<uint8_t> changed = bytes;
    for (uint64_t n = random() % 3; n <= 3; ++n) changed[random() % changed.size()] = static_cast<uint8_t>(random());
    if (random() % 4 == 0) changed.resize(random() % (bytes.size() + 20));
    const auto words = Words::decode(changed);
    if (!words) continue;
    ++read;
    CHECK(words->encode() == changed);
  }
  CHECK(read > 1000);
  CHECK(read < 20'000);
}

ofi::Name ip_name(uint8_t last) { return {2, 0, 0x12, 0x34, 10, 0, 0, last, 0, 0, 0, 0, 0, 0, 0, 0}; }

}  // namespace

TEST_CASE("ofi wire: changed bytes are refused or read as what they say") {
  mutate(ofi::EndpointWords{FI_SOCKADDR_IN, 0, 24, ip_name(1)}, rdma::kEndpointBytesMax);
  mutate(ofi::OfferWords{77, 1234, 5678, 9, ip_name(2)}, rdma::kOfferBytesMax);
  mutate(ofi::DialWords{77, 1234}, 64);
}

TEST_CASE("ofi wire: nearness") {
  const auto at = [](uint8_t third, uint8_t bits) {
    ofi::EndpointWords words{FI_SOCKADDR_IN, 0, bits, ip_name(1)};
    words.name[6] = third;
    return words;
  };
  CHECK(ofi::nearness_of(at(1, 24), at(1, 24)) == 2);
  CHECK(ofi::nearness_of(at(1, 24), at(2, 24)) == 1);
  CHECK(ofi::nearness_of(at(2, 23), at(3, 24)) == 2);
  CHECK(ofi::nearness_of(at(1, 0), at(1, 24)) == 1);
  ofi::EndpointWords other{FI_SOCKADDR_IN6, 0, 64, ofi::Name(28, 1)};
  CHECK(ofi::nearness_of(at(1, 24), other) == 0);
  const ofi::EndpointWords efa{FI_ADDR_EFA, 1, 0, ofi::Name(32, 1)};
  CHECK(ofi::nearness_of(efa, efa) == 1);
  const ofi::EndpointWords direct{FI_ADDR_EFA, 2, 0, ofi::Name(32, 1)};
  CHECK(ofi::nearness_of(efa, direct) == 0);
}

TEST_CASE("ofi wire: packets of a stranger are dropped, and the path goes on") {
  if (!ofi::presence().found) {
    MESSAGE("left out: " << ofi::presence().missing);
    return;
  }
  const auto library = ofi::open_library();
  const ofi::Rules rules = ofi::rules_for("tcp");
  const auto open = [&](const std::string& address) {
    return std::make_unique<ofi::OfiNic>(library, rules, std::move(ofi::choose(*library, rules, {address}, 1).front()));
  };
  OfiPair pair(open("127.0.0.1"), open("127.0.0.2"));
  pair.connect();
  OfiStranger stranger("127.0.0.3");
  std::mt19937 random(11);
  std::vector<uint8_t> junk(4096);
  std::vector<std::unique_ptr<ofi::Op>> contexts;
  const auto offer = ofi::OfferWords::decode(pair.at_b->offer());
  REQUIRE(stranger.dial(offer->name, ofi::DialWords{}.encode(), [&] { pair.poll(); }));
  for (int i = 0; i < 600; ++i) {
    for (uint8_t& byte : junk) byte = static_cast<uint8_t>(random());
    const uint32_t path_id = i % 3 == 0 ? offer->path_id : static_cast<uint32_t>(random());
    const ofi::PacketHead head{0x78720001u + static_cast<uint32_t>(random() % 7), path_id, 1};
    if (i % 2 == 0) std::memcpy(junk.data(), &head, sizeof head);
    const size_t bytes = i % 5 == 0 ? random() % 40 : 4096;
    contexts.push_back(std::make_unique<ofi::Op>());
    REQUIRE(pair.until([&] {
      stranger.read();
      return fi_send(stranger.endpoint->fid(), junk.data(), bytes, nullptr, 0, contexts.back().get()) == 0;
    }));
  }
  rdma::NicWork work = pair.a.write_to(pair.b, 0, 0, 4096);
  work.has_imm = true;
  work.imm = 5;
  REQUIRE(pair.post(pair.a, *pair.at_a, {work}));
  REQUIRE(pair.until([&] { return pair.b.events.imms.size() == 1; }));
  CHECK(pair.b.events.fragments.empty());
  CHECK(pair.b.events.broken.empty());
  CHECK(pair.end(pair.a, pair.at_a));
  CHECK(pair.end(pair.b, pair.at_b));
}

}  // namespace crossrail::test
