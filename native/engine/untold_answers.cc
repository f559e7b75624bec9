#include "engine/untold_answers.h"

#include <iterator>
#include <utility>

#include "util/errors.h"

namespace crossrail {

std::optional<UntoldAnswers::Answer> UntoldAnswers::add(int64_t now_ns, Answer answer) {
  if (answer.told >= std::size(kTellAgainAfterNs)) return std::nullopt;  // its asker is dead
  const Deadline due = now_ns + kTellAgainAfterNs[answer.told];
  waiting_.emplace(due, std::move(answer));
  if (size() <= answers_max_) return std::nullopt;
  const auto last = std::prev(waiting_.end());
  Answer given_up = std::move(last->second);
  waiting_.erase(last);
  return given_up;
}

std::vector<UntoldAnswers::Answer> UntoldAnswers::take_due(int64_t now_ns) {
  std::vector<Answer> due;
  for (; has_due(now_ns); waiting_.erase(waiting_.begin())) {
    due.push_back(std::move(waiting_.begin()->second));
    ++due.back().told;
    ++on_way_;
  }
  return due;
}

void UntoldAnswers::on_ended() {
  CROSSRAIL_ASSERT(on_way_ > 0);
  --on_way_;
}

}  // namespace crossrail
