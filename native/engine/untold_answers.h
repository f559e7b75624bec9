// Answers to checked operations that did not reach the asker and are to be sent again, since the asker may be alive: it
// may only have been forgotten here, or there were no descriptors to connect with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "transport/descriptor.h"
#include "util/clock.h"

namespace crossrail {

// How long an answer waits before each further attempt. No wait, for an asker that was forgotten here but is alive;
// later ones, for a lack of descriptors on our side, which may take this long to become free. An asker that has not
// been reached after all of them is dead.
inline constexpr int64_t kTellAgainAfterNs[] = {
    0, 0, 10'000'000, 100'000'000, 1'000'000'000, 5'000'000'000, 20'000'000'000};

// Invariant: at most answers_max are waiting or being sent again, however many askers die and however fast.
// Threads: one at a time.
class UntoldAnswers {
 public:
  struct Answer {
    Address asker;
    Bytes verdict;
    uint64_t told = 0;  // number of attempts so far
  };

  // Memory of each, at most: an address, 3 KiB (16 endpoints of tcp of 28 bytes, 16 of RDMA of 150, names and fabrics
  // of 300); its verdict, 100 with malloc overhead; a map node and its pointers, 200; while being sent also a transfer
  // and its work, 1 KiB. So 4.5 KiB, and 72 MiB for all; with tcp and shm on one rail, 0.5 KiB and 8 MiB.
  // As many as questions that can wait (kJobsMax): an asker that is forgotten with all of these unanswered gets every
  // answer.
  static constexpr size_t kAnswersMax = 16384;

  explicit UntoldAnswers(size_t answers_max = kAnswersMax) : answers_max_(answers_max) {}

  // Adds an answer whose delivery failed. If there is no room, drops and returns the one whose next attempt is furthest
  // away, among those that are not being sent. As a rule that is the one tried most often; an asker that is alive gets
  // its answer with one of the first attempts.
  std::optional<Answer> add(int64_t now_ns, Answer answer);
  // Takes the answers that are due, which count as being sent from now on: on_ended() must follow for each before it is
  // add()ed again.
  std::vector<Answer> take_due(int64_t now_ns);
  void on_ended();

  bool has_due(int64_t now_ns) const { return next() <= now_ns; }
  // When the next one is due.
  Deadline next() const { return waiting_.empty() ? kNoDeadline : waiting_.begin()->first; }
  size_t size() const { return waiting_.size() + on_way_; }
  // For answers that are being sent, on_ended() is still due.
  void clear() { waiting_.clear(); }

 private:
  const size_t answers_max_;
  std::multimap<Deadline, Answer> waiting_;  // by the time at which they are due
  size_t on_way_ = 0;
};

}  // namespace crossrail
