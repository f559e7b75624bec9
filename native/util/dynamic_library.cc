#include "util/dynamic_library.h"

#include <dlfcn.h>

namespace crossrail {

void* load_library(const std::string& file, int extra_flags, std::string* why) {
  void* const handle = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | extra_flags);
  if (handle == nullptr) {
    const char* const error = ::dlerror();
    *why = error != nullptr ? error : "not loaded";  // RTLD_NOLOAD fails without a reason
  }
  return handle;
}

void* find_symbol(void* handle, const char* name) { return ::dlsym(handle, name); }

std::string path_of_symbol(void* handle, const char* name, const std::string& fallback) {
  Dl_info info{};
  void* const symbol = find_symbol(handle, name);
  if (symbol != nullptr && ::dladdr(symbol, &info) != 0 && info.dli_fname != nullptr) return info.dli_fname;
  return fallback;
}

void SearchNotes::add(std::string_view what, std::string_view why) {
  if (!text_.empty()) text_ += "; ";
  text_.append(what).append(": ").append(why);
}

}  // namespace crossrail
