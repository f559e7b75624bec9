// What is told of strangers that were refused. A port scanner, or a health check each second all year, is no reason to
// fill logs, and to push out of the flight recorder what matters; and one kind of stranger must not hide another.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "transport/tcp/handshake.h"
#include "util/clock.h"

namespace crossrail::tcp {

struct StrangerLine {
  std::string who;
  std::string text;
};

// Of each kind of refusal the first kAtOnce are told as they happen, and later ones at most once in kEveryNs, with how
// many there were since; also when no more come.
// Threads: the progress holder.
class StrangerNews {
 public:
  static constexpr uint32_t kAtOnce = 8;
  static constexpr int64_t kEveryNs = 60'000'000'000;

  // What to tell of this one now. Nothing: it is counted.
  std::optional<StrangerLine> take(RefusalCode code, const std::string& who, const std::string& what, int64_t now) {
    Kind& kind = kinds_[static_cast<size_t>(code) % kinds_.size()];
    kind.latest = {who, "connection from " + who + " refused: " + what};
    ++kind.untold;
    return kind.may_tell(now) ? std::optional(kind.tell(now)) : std::nullopt;
  }
  // What was counted and may be told by now; nothing: no more.
  std::optional<StrangerLine> take_due(int64_t now) {
    for (Kind& kind : kinds_) {
      if (kind.untold > 0 && kind.may_tell(now)) return kind.tell(now);
    }
    return std::nullopt;
  }
  // When take_due() has something; kNoDeadline: nothing was only counted.
  Deadline due() const {
    Deadline first = kNoDeadline;
    for (const Kind& kind : kinds_) {
      if (kind.untold > 0) first = std::min(first, kind.next_ns);
    }
    return first;
  }

 private:
  struct Kind {
    uint32_t told = 0;  // of the first
    int64_t next_ns = 0;
    uint64_t untold = 0;
    StrangerLine latest;

    bool may_tell(int64_t now) const { return told < kAtOnce || now >= next_ns; }
    StrangerLine tell(int64_t now) {
      told = std::min(told + 1, kAtOnce);
      next_ns = now + kEveryNs;
      const uint64_t others = std::exchange(untold, 0) - 1;
      if (others > 0)
        latest.text += "; and " + std::to_string(others) + " more of this kind before it, not told one by one";
      return std::exchange(latest, {});
    }
  };
  std::array<Kind, static_cast<size_t>(RefusalCode::kFull) + 1> kinds_;
};

}  // namespace crossrail::tcp
