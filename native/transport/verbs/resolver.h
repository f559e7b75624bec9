// Finds routes to endpoints beside the progress holder: where a neighbour does not answer, the kernel takes a second and
// more to say so, and other peers must not wait for that.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/verbs/adapter.h"

namespace crossrail::verbs {

// A thread of its own, which the constructor starts, as asking may not fail; destruction waits for the question it is at.
class Resolver {
 public:
  struct Answer {
    std::string endpoint;
    AddressHandle handle;  // null: no route
  };

  // on_answer: called on the resolver's thread after each answer, to wake the holder. Throws TransportError.
  Resolver(std::shared_ptr<const Adapter> adapter, std::function<void()> on_answer);
  ~Resolver();

  // False: too many are being asked for.
  bool ask(const std::string& endpoint);
  std::vector<Answer> take_answers();
  bool has_answers() const { return has_answers_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kQuestionsMax = 256;
  void run();
  Answer answer(const std::string& endpoint) const;

  const std::shared_ptr<const Adapter> adapter_;
  const std::function<void()> on_answer_;
  std::mutex mutex_;  // of all below
  std::condition_variable news_;
  std::deque<std::string> questions_;
  std::vector<Answer> answers_;
  std::atomic<bool> has_answers_{false};  // spares the holder the lock; whoever reads it late reads it at the next poll
  bool is_closing_ = false;
  std::thread thread_;
};

}  // namespace crossrail::verbs
