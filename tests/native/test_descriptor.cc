#include <doctest/doctest.h>

#include <random>

#include "transport/descriptor.h"
#include "util/errors.h"

namespace crossrail {

namespace {
RegionDescriptor sample() {
  RegionDescriptor descriptor;
  descriptor.owner.name = "decoder-3";
  descriptor.owner.host = "4b1d";
  descriptor.owner.net = 4026531840;
  descriptor.owner.pid = 4711;
  descriptor.owner.rail_count = 4;
  descriptor.owner.transports = kAllTransports & ~transport_bit(TransportKind::kNull);
  descriptor.owner.endpoints = {{.family = 4, .ip = {10, 0, 0, 1}, .port = 4711, .prefix_bits = 24, .speed_mbps = 1000},
                                {.family = 6, .ip = {0xfe, 0x80}, .port = 80, .prefix_bits = 128}};
  descriptor.owner.rdma_on(TransportKind::kVerbs) = {
      .fabric = "", .endpoints = {{.bytes = {1, 2, 3}, .speed_mbps = 400'000}, {.bytes = {0}, .speed_mbps = 0}}};
  descriptor.owner.rdma_on(TransportKind::kOfi) = {.fabric = "efa", .endpoints = {{.bytes = Bytes(64, 7)}}};
  descriptor.owner.rdma_on(TransportKind::kSim) = {.fabric = "w", .endpoints = {{.bytes = {5, 6}}}};
  descriptor.rdma_on(TransportKind::kVerbs) = {.base = uint64_t{1} << 46, .keys = {7, ~uint64_t{0}}};
  descriptor.rdma_on(TransportKind::kOfi) = {.base = 0, .keys = {0x1122334455667788}};
  descriptor.rdma_on(TransportKind::kSim) = {.base = 1, .keys = {9}};
  for (uint8_t i = 0; i < 16; ++i) descriptor.owner.incarnation[i] = i;
  descriptor.region_id = 0x10003;
  descriptor.length_bytes = (uint64_t{1} << 40) + 1;
  return descriptor;
}
}  // namespace

TEST_CASE("address and descriptor survive the wire") {
  const RegionDescriptor descriptor = sample();
  CHECK(RegionDescriptor::decode(descriptor.encode()) == descriptor);
  CHECK(Address::decode(descriptor.owner.encode()) == descriptor.owner);
}

TEST_CASE("every truncation and every flipped bit of a descriptor is refused") {
  const Bytes bytes = sample().encode();
  for (size_t length = 0; length < bytes.size(); ++length) {
    CHECK_THROWS_AS(RegionDescriptor::decode({bytes.data(), length}), UsageError);
  }
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    Bytes flipped = bytes;
    flipped[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
    CHECK_THROWS_AS(RegionDescriptor::decode(flipped), UsageError);
  }
}

TEST_CASE("the longest address and descriptor that are allowed fit, one rail more is refused") {
  RegionDescriptor descriptor = sample();
  Address& owner = descriptor.owner;
  owner.name = owner.host = std::string(64, 'x');
  owner.endpoints.assign(kRailsMax, {.family = 6, .ip = {0xfe, 0x80}, .port = 80, .prefix_bits = 128});
  owner.rdma_on(TransportKind::kVerbs).fabric = owner.rdma_on(TransportKind::kOfi).fabric =
      owner.rdma_on(TransportKind::kSim).fabric = std::string(32, 'x');
  owner.rdma_on(TransportKind::kVerbs).endpoints.assign(kRailsMax - 2, {.bytes = Bytes(kRdmaEndpointBytesMax)});
  descriptor.rdma_on(TransportKind::kVerbs).keys.assign(kRailsMax - 2, ~uint64_t{0});
  CHECK(RegionDescriptor::decode(descriptor.encode()) == descriptor);
  CHECK(Address::decode(owner.encode()) == owner);
  owner.rdma_on(TransportKind::kOfi).endpoints.push_back({.bytes = {1}});
  CHECK_THROWS_AS(Address::decode(owner.encode()), UsageError);
}

TEST_CASE("an engine without RDMA pays nothing for it in its address") {
  Address address = sample().owner;
  const size_t with = address.encode().size();
  address.transports &= ~kRdmaTransports;
  address.rdma = {};
  CHECK(address.encode().size() + (1 + 1 + 1 + 3 + 4 + 1 + 1 + 4) + (1 + 3 + 1 + 1 + 64 + 4) +
            (1 + 1 + 1 + 1 + 2 + 4) ==
        with);
}

TEST_CASE("an address is not a descriptor, nor the other way round") {
  CHECK_THROWS_AS(RegionDescriptor::decode(sample().owner.encode()), UsageError);
  CHECK_THROWS_AS(Address::decode(sample().encode()), UsageError);
}

TEST_CASE("random bytes are refused, never crash") {
  std::mt19937 random(7);
  for (int i = 0; i < 20'000; ++i) {
    Bytes bytes(random() % 200);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    CHECK_THROWS_AS(RegionDescriptor::decode(bytes), UsageError);
    CHECK_THROWS_AS(Address::decode(bytes), UsageError);
  }
}

}  // namespace crossrail
