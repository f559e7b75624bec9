#include "transport/ofi/library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "util/dynamic_library.h"
#include "util/errors.h"

namespace crossrail::ofi {

namespace {

constexpr const char* kSoname = "libfabric.so.1";
constexpr const char* kRemedy =
    "install libfabric 2.1 or newer (on AWS: the EFA installer; without root: pip install crossrail[libfabric]), or "
    "set CROSSRAIL_LIBFABRIC to the path of a libfabric.so.1";

std::mutex g_mutex;
std::shared_ptr<const Library> g_library;
std::shared_ptr<const Library> g_replacement;
std::vector<std::string> g_last_resorts;

std::string version_of(uint32_t version) {
  return std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
}

Calls calls_of(void* handle) {
  Calls calls;
  find_function(handle, "fi_getinfo", &calls.getinfo);
  find_function(handle, "fi_freeinfo", &calls.freeinfo);
  find_function(handle, "fi_dupinfo", &calls.dupinfo);
  find_function(handle, "fi_fabric", &calls.fabric);
  find_function(handle, "fi_version", &calls.version);
  find_function(handle, "fi_strerror", &calls.strerror);
  return calls;
}

class Search {
 public:
  // Null: not there, or unusable; the reason is recorded.
  std::shared_ptr<const Library> try_one(const std::string& path, int extra_flags, const std::string& what) {
    std::string why;
    void* const handle = load_library(path, extra_flags, &why);
    if (handle == nullptr) {
      notes_.add(what, why);
      return nullptr;
    }
    try {
      return make_library(calls_of(handle), path_of_symbol(handle, "fi_version", path));
    } catch (const TransportError& error) {
      notes_.add(what, error.text());
      dlclose(handle);  // or the plugins of the next one would be bound to it
      return nullptr;
    }
  }
  const std::string& notes() const { return notes_.text(); }

 private:
  SearchNotes notes_;
};

std::shared_ptr<const Library> search() {
  Search search;
  if (const char* const wanted = std::getenv("CROSSRAIL_LIBFABRIC"); wanted != nullptr && *wanted != '\0') {
    auto library = search.try_one(wanted, 0, "CROSSRAIL_LIBFABRIC=" + std::string(wanted));
    if (library == nullptr) throw TransportError("dlopen", 0, search.notes(), kRemedy);
    return library;
  }
  // One that is loaded and unusable ends the search: another one next to it would be bound to its plugins.
  if (void* const handle = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD); handle != nullptr) {
    dlclose(handle);
    if (auto library = search.try_one(kSoname, RTLD_NOLOAD, "already in the process")) return library;
    throw TransportError("dlopen", 0, search.notes() + "; a second one beside it would mix their plugins", kRemedy);
  }
  for (const char* folder : {"/opt/amazon/efa/lib64/", "/opt/amazon/efa/lib/"}) {
    if (auto library = search.try_one(std::string(folder) + kSoname, 0, folder)) return library;
  }
  if (auto library = search.try_one(kSoname, 0, "the system's")) return library;
  for (const std::string& path : g_last_resorts) {
    if (auto library = search.try_one(path, 0, path)) return library;
  }
  throw TransportError("dlopen", 0, "no usable libfabric (" + search.notes() + ")", kRemedy);
}

}  // namespace

std::string Library::version_text() const { return version_of(version); }

std::string Library::error_text(int code) const {
  const char* const text = calls.strerror(code < 0 ? -code : code);
  return text != nullptr ? text : "error " + std::to_string(code);
}

std::shared_ptr<const Library> make_library(const Calls& calls, const std::string& path) {
  if (calls.getinfo == nullptr || calls.freeinfo == nullptr || calls.dupinfo == nullptr || calls.fabric == nullptr ||
      calls.version == nullptr || calls.strerror == nullptr) {
    throw TransportError("dlopen", 0, path + " is not libfabric: it lacks calls that every libfabric has", kRemedy);
  }
  auto library = std::make_shared<Library>();
  library->calls = calls;
  library->path = path;
  library->version = calls.version();
  library->api = std::min(library->version, kHeaderVersion);
  // Measured with 1.17: its tcp provider (tcp;ofi_rxm) takes 69 MiB per endpoint, and can stay unconnected for ever
  // after a peer's refusal. Older versions were not tested.
  if (library->version < kVersionMin) {
    throw TransportError("fi_version", 0,
                         path + " is libfabric " + library->version_text() + ", older than " + version_of(kVersionMin) +
                             ", whose tcp provider is not safe to use",
                         kRemedy);
  }
  return library;
}

void replace_library(std::shared_ptr<const Library> library) {
  const std::lock_guard lock(g_mutex);
  g_replacement = std::move(library);
}

std::shared_ptr<const Library> open_library() {
  const std::lock_guard lock(g_mutex);
  if (g_replacement != nullptr) return g_replacement;
  if (g_library == nullptr) g_library = search();
  return g_library;
}

void look_in(std::vector<std::string> paths) {
  const std::lock_guard lock(g_mutex);
  g_last_resorts = std::move(paths);
}

}  // namespace crossrail::ofi
