// Service messages: their bytes, and their way past messages that nobody takes.
#include <doctest/doctest.h>

#include <random>
#include <set>
#include <string>

#include "engine/service_wire.h"
#include "rdma_node.h"

namespace crossrail {

namespace {

Question some_question() {
  Question question;
  question.token = 3;
  question.region_id = 7 << kRegionSlotBits;
  question.offset = 4096;
  question.page_bytes = 100;
  question.stride_bytes = 128;
  question.sum = ~uint64_t{0};
  question.imm = 5;
  question.pages = {1, 0, 99};
  return question;
}

}  // namespace

TEST_CASE("services: what is encoded is decoded") {
  std::string why;
  CHECK(std::holds_alternative<Ping>(decode_service(encode(Ping{}), &why).value()));
  const auto question = std::get<Question>(decode_service(encode(some_question()), &why).value());
  CHECK(encode(question) == encode(some_question()));
  CHECK(question.pages == some_question().pages);
  for (const Status status :
       {Status::kDone, Status::kChecksumMismatch, Status::kRegionClosed, Status::kRegionRevoked}) {
    const auto verdict = std::get<Verdict>(decode_service(encode(Verdict{9, status, 11}), &why).value());
    CHECK(verdict.token == 9);
    CHECK(verdict.status == status);
    CHECK(verdict.sum == 11);
  }
  CHECK(why.empty());
}

TEST_CASE("services: other versions, kinds, lengths and values are refused with words") {
  const auto refused = [](Bytes bytes, const char* word) {
    std::string why;
    CHECK_FALSE(decode_service(bytes, &why).has_value());
    CHECK(why.find(word) != std::string::npos);
  };
  Bytes other_version = encode(Ping{});
  other_version[0] = kServiceVersion + 1;
  refused(other_version, "version");
  refused({}, "malformed");
  refused({kServiceVersion}, "malformed");
  refused({kServiceVersion, 0}, "malformed");
  refused({kServiceVersion, 4}, "malformed");
  refused({kServiceVersion, 1, 0}, "malformed");  // a ping has no body
  refused(encode(Verdict{1, Status::kPending, 0}), "malformed");
  refused(encode(Verdict{1, Status::kEngineClosed, 0}), "malformed");  // not a peer's to say
  Question question = some_question();
  question.pages.clear();
  refused(encode(question), "malformed");
  question.pages.resize(kPagesPerQuestion + 1);
  refused(encode(question), "malformed");
  question = some_question();
  question.imm = kImmMax + 1;
  refused(encode(question), "malformed");
}

TEST_CASE("services: garbage near the truth decodes to what it says, or is refused") {
  std::mt19937_64 random(4);
  const Bytes seeds[] = {encode(Ping{}), encode(some_question()), encode(Verdict{1, Status::kDone, 2})};
  int decoded = 0;
  for (int round = 0; round < 200'000; ++round) {
    Bytes bytes = seeds[random() % 3];
    for (uint64_t edits = random() % 4; edits > 0; --edits)
      bytes[random() % bytes.size()] = static_cast<uint8_t>(random());
    if (random() % 4 == 0) bytes.resize(random() % (bytes.size() + 8));
    std::string why;
    const auto message = decode_service(bytes, &why);
    if (!message) {
      CHECK_FALSE(why.empty());
      continue;
    }
    ++decoded;
    CHECK(std::visit([](const auto& known) { return encode(known); }, *message) == bytes);
  }
  CHECK(decoded > 1000);
}

namespace rdma::test {

TEST_CASE("rdma: service messages pass messages that nobody takes, once each, whatever breaks") {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    CAPTURE(seed);
    Net net({.seed = seed});
    Node a(net, "a", {.rails = 2}), b(net, "b", {.rails = 2});
    a.connect(b);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1 && a.open_paths() == 2; }));
    b.holds = true;
    const auto turn = [&] {
      a.transport->poll();
      b.transport->poll();
    };
    constexpr size_t kMessages = 400;  // more than may be under way
    std::vector<std::string> texts(kMessages, "a message");
    std::vector<Node::Work> works(kMessages);
    size_t sent = 0;
    const auto send_some = [&] {
      for (; sent < kMessages; ++sent) {
        WorkRequest request;
        request.op = WorkOp::kSend;
        request.local = reinterpret_cast<std::byte*>(texts[sent].data());
        request.length_bytes = texts[sent].size();
        request.context = &works[sent];
        uint32_t completed = 0;
        if (a.transport->post(*a.link, kAnyRail, {&request, 1}, &completed) == 0) return;
        ++a.open_works;
      }
    };
    for (int i = 0; i < 200; ++i) {
      send_some();
      turn();
    }
    REQUIRE(b.messages.empty());
    std::vector<std::string> services;
    for (int i = 0; i < 300; ++i) services.push_back(std::to_string(i) + std::string(i % 2 == 0 ? 0 : 3990, 's'));
    std::vector<Node::Work> told(services.size());
    for (size_t i = 0; i < services.size(); ++i) {
      WorkRequest request;
      request.op = WorkOp::kService;
      request.local = reinterpret_cast<std::byte*>(services[i].data());
      request.length_bytes = services[i].size();
      request.context = &told[i];
      a.post({request}, turn);
      if (i % 30 == 10) net.break_all_paths(*a.nics[i % 2]);
    }
    REQUIRE(
        poll_until({&a, &b}, [&] { return std::ranges::all_of(told, [](const auto& work) { return work.done(); }); }));
    CHECK(std::ranges::all_of(told, [](const auto& work) { return work.status == Status::kDone; }));
    std::multiset<std::string> arrived;
    for (const auto& [sender, text] : b.services) {
      CHECK(sender == "a");
      arrived.insert(text);
    }
    CHECK(arrived == std::multiset<std::string>(services.begin(), services.end()));
    CHECK(b.messages.empty());
    b.holds = false;
    REQUIRE(poll_until({&a, &b}, [&] {
      send_some();
      return b.messages.size() == kMessages;
    }));
    REQUIRE(
        poll_until({&a, &b}, [&] { return std::ranges::all_of(works, [](const auto& work) { return work.done(); }); }));
  }
}

}  // namespace rdma::test

}  // namespace crossrail
