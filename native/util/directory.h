// What is in a directory. Not std::filesystem: libstdc++ ends the process if memory runs out while it iterates.
#pragma once

#include <string>
#include <vector>

namespace crossrail {

// [any] Names of its entries, in no order, without "." and ".."; none if it cannot be read.
std::vector<std::string> names_in(const std::string& directory);

}  // namespace crossrail
