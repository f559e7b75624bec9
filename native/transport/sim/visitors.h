// Tracks the threads that use a world: a waiting thread must not let time advance while another is about to do
// something.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

namespace crossrail::sim {

// With a single thread, as there should be, none of this matters. With several, time stops until all threads
// wait and have looked at what moved last. A thread that was not heard of for kPatienceNs of real time is busy
// elsewhere, or gone: nobody waits for it until it returns.
// Threads: whoever holds the world's lock.
class Visitors {
 public:
  void act() { ++self().acts; }
  void begin_wait();
  void end_wait();
  // An engine had a turn: waiting threads must check whether it is what they wait for.
  void note_move() { ++moves_; }
  // This thread goes to look and will return: it has then seen everything that moved before it went.
  void go_look() { self().looking_at = moves_; }
  void come_back() {
    Visitor& visitor = self();
    visitor.looked = visitor.looking_at;
  }
  bool has_looked() { return self().looked == moves_; }
  // Whether one of the others is about to do something, or to look.
  bool others_act();

 private:
  static constexpr int64_t kPatienceNs = 100'000'000;
  struct Visitor {
    std::thread::id thread;
    uint32_t waits = 0;
    uint64_t looking_at = 0;  // the number of moves so far
    uint64_t looked = 0;
    uint64_t acts = 0;
    uint64_t acts_seen = 0;     // when somebody last looked,
    int64_t seen_since_ns = 0;  // and since when all of these are seen
  };
  Visitor& self() {
    if (last_ < visitors_.size() && visitors_[last_].thread == std::this_thread::get_id()) return visitors_[last_];
    return find();
  }
  Visitor& find();

  std::vector<Visitor> visitors_;
  uint64_t moves_ = 0;
  size_t last_ = 0;
};

}  // namespace crossrail::sim
