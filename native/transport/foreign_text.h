// Texts from other processes.
#pragma once

#include <algorithm>
#include <string>

namespace crossrail {

// Made fit to be shown: ours is plain ASCII, a stranger's may be anything, and control characters would reach people's
// terminals.
inline std::string shown(std::string text) {
  std::ranges::replace_if(text, [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

}  // namespace crossrail
