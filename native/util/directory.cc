#include "util/directory.h"

#include <dirent.h>

#include <memory>
#include <string_view>

namespace crossrail {

std::vector<std::string> names_in(const std::string& directory) {
  struct Closer {
    void operator()(DIR* open) const { closedir(open); }
  };
  std::vector<std::string> names;
  const std::unique_ptr<DIR, Closer> open(opendir(directory.c_str()));
  while (const dirent* const entry = open ? readdir(open.get()) : nullptr) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  return names;
}

}  // namespace crossrail
