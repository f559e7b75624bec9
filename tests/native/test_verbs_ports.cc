// The verbs NIC on ports that no machine here has: InfiniBand, partitions, addresses that come and go, what peers send
// of theirs.
#include <doctest/doctest.h>
#include <net/if.h>

#include <algorithm>
#include <chrono>
#include <initializer_list>
#include <string>
#include <thread>
#include <vector>

#if CROSSRAIL_WITH_VERBS

#include "transport/verbs/queues.h"
#include "util/errors.h"
#include "verbs_rig.h"

using namespace crossrail;
using verbs_test::Fake;
using verbs_test::FakeQueuePair;
using verbs_test::open_fake;
using verbs_test::Rig;
using verbs_test::Told;

TEST_CASE("verbs ports: an interface names its own addresses, also where the port would be used under another's") {
  Fake fake;
  ibv_gid_entry of_loopback{};
  of_loopback.gid.raw[0] = 0xfd;  // IPv6, so not the first choice
  of_loopback.gid_index = 4;
  of_loopback.port_num = 1;
  of_loopback.gid_type = IBV_GID_TYPE_ROCE_V2;
  of_loopback.ndev_ifindex = ::if_nametoindex("lo");
  fake.more_gids.push_back(of_loopback);
  TransportOptions options;
  options.rails = {"lo"};
  const auto gid = [&] { return verbs::decode_endpoint(verbs::open_nics(options).at(0)->endpoint())->gid; };
  CHECK(gid()[0] == 0xfd);
  options.rails = {"fake0"};
  CHECK(gid()[12] == 192);
  options.rails = {"lo"};
  options.rdma.gid_index = 0;  // by number, then: the name says which port
  CHECK(gid()[12] == 192);
  options.rails = {"eth7"};
  CHECK_THROWS_AS(verbs::open_nics(options), UsageError);
}

TEST_CASE("verbs ports: an address of this network namespace comes before those of others on the port") {
  Fake fake;  // 192.168.0.1, nobody's here, first in the table
  const auto add = [&](uint32_t index, std::initializer_list<uint8_t> ipv4, uint32_t type) {
    ibv_gid_entry entry{};
    entry.gid.raw[10] = entry.gid.raw[11] = 0xff;
    std::copy(ipv4.begin(), ipv4.end(), entry.gid.raw + 12);
    entry.gid_index = index;
    entry.port_num = 1;
    entry.gid_type = type;
    fake.more_gids.push_back(entry);
  };
  add(5, {192, 168, 0, 2}, IBV_GID_TYPE_ROCE_V2);
  add(6, {127, 0, 0, 1}, IBV_GID_TYPE_ROCE_V1);
  CHECK(verbs::ports().at(0).gid_index == 0);  // v1 is worse still
  add(7, {127, 0, 0, 1}, IBV_GID_TYPE_ROCE_V2);
  const verbs::Port port = verbs::ports().at(0);
  CHECK(port.gid_index == 7);
  CHECK(port.address == "127.0.0.1");
  TransportOptions options;
  options.rails = {"192.168.0.2"};  // by name, any
  CHECK(verbs::decode_endpoint(verbs::open_nics(options).at(0)->endpoint())->gid[15] == 2);
}

TEST_CASE("verbs ports: long packets are named where works get no answer") {
  Fake fake;
  const auto nic = open_fake();
  verbs::Endpoint peer = *verbs::decode_endpoint(nic->endpoint());
  const std::string hint = nic->silence_hint(verbs::encode(peer));
  CHECK(hint.find("4096 bytes") != std::string::npos);
  CHECK(hint.find("path_mtu=1024") != std::string::npos);
  peer.mtu = IBV_MTU_1024;
  CHECK(nic->silence_hint(verbs::encode(peer)).empty());
  CHECK(nic->silence_hint({}).empty());
}

TEST_CASE("verbs ports: InfiniBand is routed by lid within a subnet, by GID between subnets") {
  Fake fake;
  fake.link_layer = IBV_LINK_LAYER_INFINIBAND;
  fake.gid_type = IBV_GID_TYPE_IB;
  fake.gid = {};
  fake.gid.raw[0] = 0xfe;
  fake.gid.raw[15] = 7;
  const auto ours = *verbs::decode_endpoint(open_fake()->endpoint());
  CHECK(ours.lid == 5);
  verbs::Endpoint peer = ours;
  peer.lid = 9;
  Rig same(&peer);
  CHECK(same.works_of(*same.paths[0]).last_address.ah_attr.dlid == 9);
  CHECK(same.works_of(*same.paths[0]).last_address.ah_attr.is_global == 0);
  CHECK(same.nic->nearness(verbs::encode(peer)) == 2);
  peer.wants_global_route = true;  // a function that shares its LID with others
  Rig shared(&peer);
  CHECK(shared.works_of(*shared.paths[0]).last_address.ah_attr.is_global == 1);
  CHECK(shared.works_of(*shared.paths[0]).last_address.ah_attr.dlid == 9);
  peer.wants_global_route = false;
  peer.gid[7] = 1;  // another subnet, and nobody says how to get there
  CHECK(same.nic->nearness(verbs::encode(peer)) == 0);
  peer.gid[4] = 0xc0;  // the LID that routers know it by
  peer.gid[5] = 7;
  Rig other(&peer);
  CHECK(other.works_of(*other.paths[0]).last_address.ah_attr.is_global == 1);
  CHECK(other.works_of(*other.paths[0]).last_address.ah_attr.dlid == 0xc007);
  CHECK(other.nic->nearness(verbs::encode(peer)) == 1);
  fake.gid.raw[4] = 0xc1;  // ours likewise, in the same subnet
  fake.gid.raw[7] = 1;
  Rig near(&peer);
  CHECK(near.works_of(*near.paths[0]).last_address.ah_attr.is_global == 0);
  CHECK(near.works_of(*near.paths[0]).last_address.ah_attr.dlid == 9);
  CHECK(near.nic->nearness(verbs::encode(peer)) == 2);
  peer.fabric = verbs::Fabric::kRoceV2;
  CHECK(other.nic->nearness(verbs::encode(peer)) == 0);
  CHECK_THROWS_AS(Rig{&peer}, TransportError);
}

TEST_CASE("verbs ports: InfiniBand's partition is the one that the port is a full member of, or the wanted one") {
  Fake fake;
  fake.link_layer = IBV_LINK_LAYER_INFINIBAND;
  fake.gid_type = IBV_GID_TYPE_IB;
  fake.gid = {};
  fake.gid.raw[0] = 0xfe;
  fake.gid.raw[1] = 0x80;
  const auto index_of = [&](const RdmaOptions& options) {
    const auto nic = open_fake(options);
    const auto path = nic->make_path();
    for (const auto& [number, queue_pair] : fake.queue_pairs)  // datagrams, messages, works
      CHECK(queue_pair->partition_index == fake.queue_pairs.begin()->second->partition_index);
    return fake.queue_pairs.begin()->second->partition_index;
  };
  fake.partitions = {0x7fff, 0, 0x800b, 0x800c};  // as virtual machines in a cloud have it
  CHECK(index_of({}) == 2);
  RdmaOptions wanted;
  wanted.partition = 0x000c;
  CHECK(index_of(wanted) == 3);
  wanted.partition = 0x8123;
  CHECK_THROWS_WITH_AS(open_fake(wanted), doctest::Contains("no such partition: 0x8123"), TransportError);
  fake.partitions = {0x800b, 0x7fff};
  CHECK(index_of({}) == 0);
  const auto nic = open_fake();
  verbs::Endpoint peer = *verbs::decode_endpoint(nic->endpoint());
  CHECK(peer.partition == 0x800b);
  peer.partition = 0x000b;  // a limited member of the same
  CHECK(nic->nearness(verbs::encode(peer)) == 2);
  peer.partition = 0x800c;
  CHECK(nic->nearness(verbs::encode(peer)) == 0);
  fake.partitions = {0x7fff};
  CHECK(open_fake()->nearness(open_fake()->endpoint()) == 0);  // limited members do not hear each other
}

TEST_CASE("verbs ports: a port that lost its partition is down") {
  Fake fake;
  fake.link_layer = IBV_LINK_LAYER_INFINIBAND;
  fake.gid_type = IBV_GID_TYPE_IB;
  const auto nic = open_fake();
  CHECK(nic->is_port_up());
  fake.partitions = {0x800b};
  fake.tell(IBV_EVENT_PKEY_CHANGE);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  Told told;
  nic->poll(told);
  CHECK(told.ports == std::vector<bool>{false});
}

TEST_CASE("verbs ports: a port whose packets hold no datagram is not taken") {
  Fake fake;
  fake.mtu = IBV_MTU_512;
  CHECK_THROWS_WITH_AS(open_fake(), doctest::Contains("too small for the handshake"), TransportError);
}

TEST_CASE("verbs ports: options of route and packet reach the queue pair") {
  Fake fake;
  const auto nic = open_fake({{}, 0, 106, 3, 1024});
  const auto path = nic->make_path();
  path->connect(nic->endpoint(), verbs::encode(verbs::Offer{4, 3, 4, 5, 6}));
  const FakeQueuePair& works = fake.queue_pair(verbs::decode_offer(path->offer())->work_queue_pair);
  CHECK(works.last_address.path_mtu == IBV_MTU_1024);
  CHECK(works.last_address.ah_attr.grh.traffic_class == 106);
  CHECK(works.last_address.ah_attr.sl == 3);
  CHECK(works.last_address.dest_qp_num == 5);
  CHECK(works.last_address.rq_psn == 6);
  CHECK_THROWS_AS(open_fake({{}, 3, 0, 0, 0}), TransportError);  // no such GID
}

TEST_CASE("verbs ports: a port that is down at the start is used when it comes up") {
  Fake fake;
  fake.port_state = IBV_PORT_DOWN;
  CHECK(verbs::missing().find("fake0:1") != std::string::npos);
  CHECK_THROWS_AS(verbs::open_nics({}), TransportError);  // without a name it is not taken
  const auto nic = open_fake();
  CHECK(!nic->is_port_up());
  fake.port_state = IBV_PORT_ACTIVE;
  fake.tell(IBV_EVENT_PORT_ACTIVE);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  Told told;
  nic->poll(told);
  CHECK(told.ports == std::vector<bool>{true});
}

TEST_CASE("verbs ports: a port that lost its address is down until it has it again") {
  Fake fake;
  const auto nic = open_fake();
  Told told;
  const auto poll_after = [&](uint8_t last) {
    fake.gid.raw[15] = last;
    fake.tell(IBV_EVENT_GID_CHANGE);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    nic->poll(told);
  };
  poll_after(77);
  poll_after(1);
  CHECK(told.ports == std::vector<bool>{false, true});
  poll_after(77);
  fake.gid_index = 3;  // given back, it is at another place of the table
  poll_after(1);
  CHECK(told.ports == std::vector<bool>{false, true, false, true});
  const auto path = nic->make_path();
  path->connect(nic->endpoint(), verbs::encode(verbs::Offer{4, 3, 4, 5, 6}));
  const FakeQueuePair& works = fake.queue_pair(verbs::decode_offer(path->offer())->work_queue_pair);
  CHECK(works.last_address.ah_attr.grh.sgid_index == 3);
}

TEST_CASE("verbs ports: devices without reliable connections are listed with the reason") {
  Fake fake;
  verbs_test::g_device.transport_type = IBV_TRANSPORT_UNSPECIFIED;
  const auto ports = verbs::ports();
  REQUIRE(ports.size() == 1);
  CHECK(ports[0].trouble.find("EFA") != std::string::npos);
  CHECK(!verbs::missing().empty());
}

TEST_CASE("verbs ports: an engine's rails interrupt by vectors of their own, which begin anywhere") {
  Fake fake;
  fake.have_completion_vectors(4);
  TransportOptions options;
  options.rails = {"fake0", "fake0"};
  options.identity.incarnation[0] = 255;
  const auto nics = verbs::open_nics(options);
  CHECK(fake.completion_vectors == std::vector<int>{3, 3, 0, 0});
  CHECK(nics[0]->description().ends_with(", completion vector 3 of 4"));

  fake.completion_vectors.clear();
  fake.have_completion_vectors(1);
  CHECK(open_fake()->description().find("vector") == std::string::npos);
  CHECK(fake.completion_vectors == std::vector<int>{0, 0});
}

TEST_CASE("verbs ports: endpoints and offers cut or changed at any place are refused or harmless") {
  Fake fake;
  Rig rig;
  std::vector<uint8_t> endpoint(rig.nic->endpoint().begin(), rig.nic->endpoint().end());
  std::vector<uint8_t> offer(rig.paths[0]->offer().begin(), rig.paths[0]->offer().end());
  CHECK(endpoint.size() <= rdma::kEndpointBytesMax);
  CHECK(offer.size() <= rdma::kOfferBytesMax);
  for (size_t cut = 0; cut < endpoint.size(); ++cut) CHECK(!verbs::decode_endpoint(std::span(endpoint).first(cut)));
  for (size_t cut = 0; cut < offer.size(); ++cut) CHECK(!verbs::decode_offer(std::span(offer).first(cut)));
  for (size_t at = 0; at < endpoint.size() * 8; ++at) {
    std::vector<uint8_t> changed = endpoint;
    changed[at / 8] = static_cast<uint8_t>(changed[at / 8] ^ 1u << at % 8);
    (void)rig.nic->nearness(changed);
    rig.nic->send_datagram(changed, {offer.data(), 1});
  }
}

#endif
