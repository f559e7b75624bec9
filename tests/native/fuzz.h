// What the fuzzers (fuzz_*.cc) share. Each is one libFuzzer program: ./dev fuzz. What is found wrong ends the process.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace crossrail::fuzz {

using Input = std::span<const uint8_t>;

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: not so: %s\n", what);
  std::abort();
}

// The input, taken apart: choices first, then what is thrown at a decoder.
class Choices {
 public:
  explicit Choices(Input bytes) : rest_(bytes) {}
  bool is_empty() const { return rest_.empty(); }
  uint8_t byte() {
    if (rest_.empty()) return 0;
    const uint8_t value = rest_.front();
    rest_ = rest_.subspan(1);
    return value;
  }
  // As long as two bytes say, or what is left.
  Input chunk() {
    const size_t wanted = byte() | size_t{byte()} << 8;
    const Input taken = rest_.first(std::min(wanted, rest_.size()));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }
  Input rest() const { return rest_; }

 private:
  Input rest_;
};

// Books of an engine that takes everything, and holds no more than so many works to be outstanding.
class BookSink final : public Sink {
 public:
  void on_retired(Link&, void*, uint32_t, uint32_t count, uint64_t, Status, const std::string&) override {
    retire(count);
  }
  void on_withdrawn(Link&, void*, uint32_t, uint64_t) override { retire(1); }
  void on_imm(uint32_t, uint64_t units) override { require(units > 0, "an immediate counts"); }
  Offer on_message(const std::shared_ptr<const Address>& sender, Input payload) override {
    require(sender != nullptr, "a message has a sender");
    if (payload.size() > message_bytes_max) return Offer::kTooLong;
    return ++messages % 3 == 0 ? Offer::kHold : Offer::kTaken;
  }
  void on_service(const std::shared_ptr<const Address>& sender, Input payload) override {
    require(sender != nullptr, "a service message has a sender");
    require(payload.size() <= kServiceBytesMax, "a service message is no longer than one may be");
  }
  void on_link_up(Link&) override { ++ups; }
  void on_link_down(Link&, const std::string&, LinkEnd) override { ++downs; }
  void on_link_frozen(Link&, bool, const std::string&) override {}
  void on_protocol_error(const std::string&, const std::string&) override { ++protocol_errors; }

  uint64_t outstanding = 0;
  uint64_t messages = 0;
  uint64_t message_bytes_max = 64 << 10;
  uint32_t ups = 0;
  uint32_t downs = 0;
  uint32_t protocol_errors = 0;

 private:
  void retire(uint32_t count) {
    require(count <= outstanding, "no work is retired twice");
    outstanding -= count;
  }
};

}  // namespace crossrail::fuzz
