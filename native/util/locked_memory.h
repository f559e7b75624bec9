// Advice for when memory could not be locked.
#pragma once

#include <string>

namespace crossrail {

// [any] The process's present limit on locked memory, and how to raise it.
std::string locked_memory_remedy();

}  // namespace crossrail
