#include "transport/verbs/resolver.h"

#include <pthread.h>

#include "transport/verbs/route.h"
#include "util/thread.h"

namespace crossrail::verbs {

Resolver::Resolver(std::shared_ptr<const Adapter> adapter, std::function<void()> on_answer)
    : adapter_(std::move(adapter)), on_answer_(std::move(on_answer)) {
  thread_ = start_thread([this] { run(); });
  ::pthread_setname_np(thread_.native_handle(), "crossrail-route");
}

Resolver::~Resolver() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  news_.notify_one();
  thread_.join();
}

bool Resolver::ask(const std::string& endpoint) {
  {
    const std::lock_guard lock(mutex_);
    if (questions_.size() >= kQuestionsMax) return false;
    questions_.push_back(endpoint);
  }
  news_.notify_one();
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
    news_.wait(lock, [this] { return is_closing_ || !questions_.empty(); });
    if (is_closing_) return;
    const std::string endpoint = std::move(questions_.front());
    questions_.pop_front();
    lock.unlock();
    Answer found = answer(endpoint);
    lock.lock();
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
