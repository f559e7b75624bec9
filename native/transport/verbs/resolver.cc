#include "transport/verbs/resolver.h"

#include <pthread.h>

#include <utility>

#include "transport/verbs/route.h"
#include "util/thread.h"

namespace crossrail::verbs {

Resolver::Resolver(std::shared_ptr<const Adapter> adapter, std::function<void()> on_answer)
    : adapter_(std::move(adapter)), on_answer_(std::move(on_answer)) {
  threads_.reserve(kThreadsMax);
  start();
}

Resolver::~Resolver() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  news_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

// Called by the holder only, which owns threads_.
void Resolver::start() {
  threads_.push_back(start_thread([this] { run(); }));
  ::pthread_setname_np(threads_.back().native_handle(), "crossrail-route");
}

bool Resolver::ask(const std::string& endpoint, Urgency urgency) {
  bool lacks_thread = false;
  {
    const std::lock_guard lock(mutex_);
    if (waiting(urgency).size() >= kQuestionsMax) return false;
    waiting(urgency).push_back(endpoint);
    lacks_thread = may_ask() && idle_ < questions_[0].size() + (may_ask_again() ? 1 : 0);
  }
  news_.notify_one();
  if (!lacks_thread || threads_.size() == kThreadsMax) return true;
  try {
    start();
  } catch (const TransportError&) {  // the existing threads will get to it
  }
  return true;
}

std::vector<Resolver::Answer> Resolver::take_answers() {
  if (!has_answers()) return {};
  const std::lock_guard lock(mutex_);
  has_answers_.store(false, std::memory_order_relaxed);
  return std::exchange(answers_, {});
}

void Resolver::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    ++idle_;
    news_.wait(lock, [this] { return is_closing_ || may_ask(); });
    --idle_;
    if (is_closing_) return;
    const Urgency urgency = waiting(Urgency::kFirst).empty() ? Urgency::kAgain : Urgency::kFirst;
    const std::string endpoint = std::move(waiting(urgency).front());
    waiting(urgency).pop_front();
    if (urgency == Urgency::kAgain) ++asking_again_;
    lock.unlock();
    Answer found = answer(endpoint);
    lock.lock();
    if (urgency == Urgency::kAgain) --asking_again_;
    answers_.push_back(std::move(found));
    has_answers_.store(true, std::memory_order_relaxed);
    on_answer_();
  }
}

Resolver::Answer Resolver::answer(const std::string& bytes) const {
  Answer found{bytes, nullptr};
  const auto endpoint = decode_endpoint({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
  if (!endpoint) return found;
  ibv_ah_attr route = route_to(*adapter_, *endpoint);
  found.handle.reset(library().create_ah(adapter_->domain(), &route));
  return found;
}

}  // namespace crossrail::verbs
