// What to say where memory could not be locked.
#pragma once

#include <string>

namespace crossrail {

// [any] The limit on locked memory that this process has now, and how to raise it.
std::string locked_memory_remedy();

}  // namespace crossrail
