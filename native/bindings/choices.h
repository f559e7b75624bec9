// Words that stand for one of several values.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "engine/engine.h"
#include "util/errors.h"

namespace crossrail::bindings {

template <typename T>
using Choice = std::pair<const char*, T>;

// Throws UsageError, which names the argument, for any other word.
template <typename T, size_t N>
T choose(const char* argument, const std::string& given, const Choice<T> (&choices)[N]) {
  std::string names;
  for (const auto& [name, value] : choices) {
    if (given == name) return value;
    names += std::string(names.empty() ? "" : ", ") + "'" + name + "'";
  }
  throw UsageError(std::string(argument) + " is '" + given + "', must be one of " + names);
}

inline constexpr Choice<Polling> kPollings[] = {
    {"adaptive", Polling::kAdaptive}, {"spin", Polling::kSpin}, {"manual", Polling::kManual}};
inline constexpr Choice<TlsVerify> kTlsVerifies[] = {{"chain", TlsVerify::kChain}, {"name", TlsVerify::kName}};
inline constexpr Choice<PrivatePath> kPrivatePaths[] = {
    {"auto", PrivatePath::kAuto}, {"staged", PrivatePath::kStaged}, {"cma", PrivatePath::kCrossMemoryAttach}};

}  // namespace crossrail::bindings
