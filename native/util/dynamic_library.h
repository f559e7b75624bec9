#pragma once

// Libraries that are opened at run time, so that the module links to none of them: a common wrapper around dlfcn.h.

#include <string>
#include <string_view>

namespace crossrail {

// dlopen() with RTLD_NOW | RTLD_LOCAL | extra_flags. Null: *why is the loader's reason. [any] thread.
void* load_library(const std::string& file, int extra_flags, std::string* why);

// Null: the library has no such symbol. [any] thread.
void* find_symbol(void* handle, const char* name);

// False, and *function null: the library has no such symbol.
template <typename Function>
bool find_function(void* handle, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(find_symbol(handle, name));
  return *function != nullptr;
}

// The file that defines this symbol; `fallback` if the loader does not know it.
std::string path_of_symbol(void* handle, const char* name, const std::string& fallback);

// Why each of several candidates was rejected, as one text.
class SearchNotes {
 public:
  void add(std::string_view what, std::string_view why);
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace crossrail
