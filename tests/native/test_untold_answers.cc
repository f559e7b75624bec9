// Answers that are to be told again: how many are kept, and which.
#include <doctest/doctest.h>

#include <deque>
#include <iterator>
#include <string>

#include "engine/untold_answers.h"

namespace crossrail {

namespace {

constexpr int64_t kSecond = 1'000'000'000;

UntoldAnswers::Answer answer_to(const std::string& name, uint64_t told = 0) {
  UntoldAnswers::Answer answer;
  answer.asker.name = name;
  answer.verdict = {1, 2, 3};
  answer.told = told;
  return answer;
}

}  // namespace

TEST_CASE("untold answers: each is tried at its times, and then no more") {
  UntoldAnswers answers;
  CHECK(answers.next() == kNoDeadline);
  int64_t now = 5;
  UntoldAnswers::Answer answer = answer_to("dead");
  for (const int64_t after : kTellAgainAfterNs) {
    CHECK_FALSE(answers.add(now, answer));
    CHECK(answers.next() == now + after);
    CHECK(answers.has_due(now) == (after == 0));
    if (after > 0) CHECK(answers.take_due(now + after - 1).empty());
    now += after;
    auto due = answers.take_due(now);
    REQUIRE(due.size() == 1);
    CHECK(due[0].asker.name == "dead");
    CHECK(due[0].told == answer.told + 1);
    CHECK(answers.size() == 1);  // on its way
    answer = due[0];
    answers.on_ended();
  }
  CHECK_FALSE(answers.add(now, answer));
  CHECK(answers.size() == 0);
  CHECK(now == 5 + 26'110'000'000);
}

TEST_CASE("untold answers: beyond the bound the one that was tried most often is given up") {
  UntoldAnswers answers(3);
  CHECK_FALSE(answers.add(0, answer_to("new")));
  CHECK_FALSE(answers.add(0, answer_to("older", 3)));
  CHECK_FALSE(answers.add(0, answer_to("oldest", 6)));
  CHECK(answers.add(0, answer_to("newer", 1))->asker.name == "oldest");
  CHECK(answers.add(0, answer_to("old", 5))->asker.name == "old");
  CHECK(answers.size() == 3);
  // Those on their way count too, and cannot be given up.
  CHECK(answers.take_due(0).size() == 2);
  CHECK(answers.add(0, answer_to("next"))->asker.name == "older");
  CHECK(answers.size() == 3);
  answers.clear();
  CHECK(answers.size() == 2);
  answers.on_ended();
  answers.on_ended();
  CHECK(answers.size() == 0);
}

TEST_CASE("untold answers: askers that die again and again take no more than the bound, and nobody's place") {
  UntoldAnswers answers(1000);
  std::deque<UntoldAnswers::Answer> on_way;
  size_t given_up = 0;
  size_t tries_of_living = 0;
  int64_t now = 0;
  for (int life = 0; life < 3000; ++life, now += kSecond / 100) {  // a hundred lives a second, fifty answers each
    for (int i = 0; i < 50; ++i) given_up += answers.add(now, answer_to("hostile")).has_value() ? 1 : 0;
    const std::string living = "living " + std::to_string(life);
    given_up += answers.add(now, answer_to(living)).has_value() ? 1 : 0;
    for (auto& due : answers.take_due(now)) on_way.push_back(std::move(due));
    CHECK(answers.size() <= 1000);
    for (; !on_way.empty(); on_way.pop_front()) {
      answers.on_ended();
      if (on_way.front().asker.name == living) {
        ++tries_of_living;
      } else {
        given_up += answers.add(now, std::move(on_way.front())).has_value() ? 1 : 0;
      }
    }
    CHECK(answers.size() <= 1000);
  }
  CHECK(given_up > 0);
  CHECK(tries_of_living == 3000);
}

}  // namespace crossrail
