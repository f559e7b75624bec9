// Finds routes to endpoints off the progress holder's thread: if a neighbour does not answer, the kernel takes a second
// or more to say so, and other peers must not wait for that.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transport/verbs/adapter.h"

namespace crossrail::verbs {

// Has its own threads, more as questions queue up; the constructor starts the first, as asking may not fail.
// Destruction waits for the questions in progress.
class Resolver {
 public:
  struct Answer {
    std::string endpoint;
    AddressHandle handle;  // null: no route
  };
  // Endpoints without an answer last time will most likely take their second again: they come last, and never occupy
  // all threads.
  enum class Urgency : uint8_t { kFirst, kAgain };

  // on_answer: called on a resolver thread after each answer, to wake the holder; by one thread at a time. Throws
  // TransportError.
  Resolver(std::shared_ptr<const Adapter> adapter, std::function<void()> on_answer);
  ~Resolver();

  // False: too many questions are queued.
  bool ask(const std::string& endpoint, Urgency urgency);
  std::vector<Answer> take_answers();
  bool has_answers() const { return has_answers_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kQuestionsMax = 256;  // per urgency
  static constexpr size_t kThreadsMax = 8;
  static constexpr size_t kThreadsForAgain = 2;
  std::deque<std::string>& waiting(Urgency urgency) { return questions_[static_cast<size_t>(urgency)]; }
  bool may_ask_again() const { return !questions_[1].empty() && asking_again_ < kThreadsForAgain; }
  bool may_ask() const { return !questions_[0].empty() || may_ask_again(); }
  void start();
  void run();
  Answer answer(const std::string& endpoint) const;

  const std::shared_ptr<const Adapter> adapter_;
  const std::function<void()> on_answer_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable news_;
  std::array<std::deque<std::string>, 2> questions_;  // by urgency
  std::vector<Answer> answers_;
  std::atomic<bool> has_answers_{false};  // spares the holder the lock; a late read is repeated at the next poll
  size_t idle_ = 0;                       // threads
  size_t asking_again_ = 0;               // likewise
  bool is_closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace crossrail::verbs
