// Answers to checked operations that did not reach the asker, and are to be sent again, since the asker may be alive:
// it may only have been given up here, or there were no descriptors to reach it with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "transport/descriptor.h"
#include "util/clock.h"

namespace crossrail {

// How long an answer waits before each further try. At once, for an asker that was given up here and lives; later, for
// want of descriptors of our own, which may take as long to come free. An asker that is dead is so after all of them.
inline constexpr int64_t kTellAgainAfterNs[] = {
    0, 0, 10'000'000, 100'000'000, 1'000'000'000, 5'000'000'000, 20'000'000'000};

// Invariant: at most answers_max are waiting here or in flight again, however many askers die and however fast.
// Threads: one at a time.
class UntoldAnswers {
 public:
  struct Answer {
    Address asker;
    Bytes verdict;
    uint64_t told = 0;  // how often it was tried
  };

  // Of each, at most: an address, 3 KiB (16 endpoints of tcp of 28 bytes, 16 of RDMA of 150, names and fabrics of 300);
  // its verdict, 100 with what malloc adds; a node of the map and its pointers, 200; on its way a transfer and its work
  // besides, 1 KiB. So 4.5 KiB, 72 MiB of all; of tcp and shm on one rail, 0.5 KiB, 8 MiB.
  // As many as questions that wait (kJobsMax): who is forgotten with all of these unanswered gets every answer.
  static constexpr size_t kAnswersMax = 16384;

  explicit UntoldAnswers(size_t answers_max = kAnswersMax) : answers_max_(answers_max) {}

  // One that was tried in vain. Returns one that is given up for want of room: that which was to come last, of those
  // that are not on their way. As a rule it was tried most often; an asker that lives has its answer at one of the
  // first.
  std::optional<Answer> add(int64_t now_ns, Answer answer);
  // Those that are due, on their way from now on: on_ended() of each must follow, before it is add()ed again.
  std::vector<Answer> take_due(int64_t now_ns);
  void on_ended();

  bool has_due(int64_t now_ns) const { return next() <= now_ns; }
  // When the next one is due.
  Deadline next() const { return waiting_.empty() ? kNoDeadline : waiting_.begin()->first; }
  size_t size() const { return waiting_.size() + on_way_; }
  // Those that are on their way end all the same.
  void clear() { waiting_.clear(); }

 private:
  const size_t answers_max_;
  std::multimap<Deadline, Answer> waiting_;  // by when they are due
  size_t on_way_ = 0;
};

}  // namespace crossrail
