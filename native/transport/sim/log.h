// The events of a world, one line each. The digest covers all of them, whether lines are kept or not.
//
//   1500 node0 post engine=prefill0 rail=0 work=7 op=write bytes=4096 imm=12 to=node1/0
//   3712 node1 land work=7
//
// In engine names spaces, control characters and % are escaped as in a URL (%20).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

namespace crossrail::sim {

enum class LogWord : uint8_t {
  kEngineOpen,   // engine
  kEngineClose,  // engine
  kPost,         // engine, rail, work, op (0 write, 1 read), bytes, imm + 1 or 0, host to, rail to
  kLand,         // work
  kCount,        // engine, imm: reported to the receiver
  kDone,         // work
  kFail,         // work, NicFault
  kConnect,      // engine, rail, host to, rail to
  kBreak,        // engine, rail
  kFlush,        // engine, rail
  kKilled,       // engine
  kFrozen,       // engine
  kThawed,       // engine
  kFault         // FaultWord, rail or value
};
enum class FaultWord : uint8_t {
  kRailDown,
  kRailUp,
  kSlow,
  kPartition,
  kHeal,
  kFailWorks,
  kWithhold,
  kRelease,
  kQueueFull,
  kQueueRoom,
  kFailRegistrations,
  kDatagramLoss,
  kSilence,
  kSound
};

// Threads: one at a time.
class EventLog {
 public:
  static constexpr size_t kValues = 8;

  // keep_max: how many lines are kept, the last ones; 0: none.
  explicit EventLog(size_t keep_max) : keep_max_(keep_max) {}

  void name_host(const std::string& name);
  void name_engine(const std::string& name);

  template <typename... Values>
  void note(int64_t at_ns, uint32_t host, LogWord word, Values... values) {
    static_assert(sizeof...(values) <= kValues);
    mix(static_cast<uint64_t>(at_ns));
    mix(uint64_t{host} << 8 | static_cast<uint8_t>(word));
    (mix(static_cast<uint64_t>(values)), ...);
    if (keep_max_ != 0) write(at_ns, host, word, {static_cast<uint64_t>(values)...});
  }

  std::vector<std::string> lines() const;
  std::string digest() const;  // 32 hexadecimal digits

 private:
  // Two lanes of multiply and rotate: distinguishes runs, resists no attacker.
  void mix(uint64_t value) {
    first_ = ((first_ ^ value) * 0x9fb21c651e98df25) ^ (first_ >> 29);
    second_ = (second_ + value) * 0xd6e8feb86659fd93;
    second_ ^= second_ >> 32;
  }
  void mix(std::string_view text);
  void write(int64_t at_ns, uint32_t host, LogWord word, const std::array<uint64_t, kValues>& values);

  const size_t keep_max_;
  uint64_t first_ = 0x243f6a8885a308d3;
  uint64_t second_ = 0x13198a2e03707344;
  std::vector<std::string> hosts_;
  std::vector<std::string> engines_;
  std::deque<std::string> lines_;
};

}  // namespace crossrail::sim
