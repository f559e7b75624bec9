// libfabric, opened at run time: where it is found, and which version of its interface we use.
#pragma once

#include <rdma/fabric.h>

#include <memory>
#include <string>
#include <vector>

namespace crossrail::ofi {

inline constexpr uint32_t kHeaderVersion = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);
// The oldest version promised. It introduced efa-direct; connections were not tested with an older tcp provider.
inline constexpr uint32_t kVersionMin = FI_VERSION(2, 1);

// The exported functions of libfabric that we use; everything else is reached through its objects' operation tables.
struct Calls {
  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_version) version = nullptr;
  const char* (*strerror)(int) = nullptr;
};

// Immutable, [any] thread. Never unloaded: providers leave threads and exit handlers behind.
struct Library {
  Calls calls;
  std::string path;      // as reported by the loader
  uint32_t version = 0;  // of the library
  uint32_t api = 0;      // the older of library and headers: requesting more than the library has is an error

  std::string version_text() const;
  std::string error_text(int code) const;  // of a negative or positive fi_errno
};

// The process's libfabric, opened by the first call that finds one. Looked for in this order:
//   1. CROSSRAIL_LIBFABRIC, a path: this one or none.
//   2. One already loaded into the process: this one or none, since two copies would mix their plugins.
//   3. /opt/amazon/efa, where AWS installs it.
//   4. The system's.
//   5. Those named by look_in().
// Throws TransportError that lists what was tried.
std::shared_ptr<const Library> open_library();

// For tests: use this one from now on; null: the real one again. Only while nothing of another is open.
void replace_library(std::shared_ptr<const Library> library);

// Libraries to try last, in this order: those that Python packages contain. No effect once a library is open.
void look_in(std::vector<std::string> paths);

// Throws TransportError if a function is missing, or it is older than `version_min`. path: for messages.
std::shared_ptr<const Library> make_library(const Calls& calls, const std::string& path);

}  // namespace crossrail::ofi
