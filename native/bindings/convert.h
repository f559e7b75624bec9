// Converts Python values to the core's, with errors that name the argument, its value and the bound.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "bindings/gil.h"
#include "engine/waiting.h"
#include "transport/types.h"
#include "util/clock.h"
#include "util/errors.h"

namespace nb = nanobind;

namespace crossrail::bindings {

std::string type_name_of(nb::handle object);

// An integer (anything with __index__, except bool) in [min, max].
uint64_t to_u64(nb::handle value, const char* argument, uint64_t max = std::numeric_limits<uint64_t>::max(),
                uint64_t min = 0);
inline uint32_t to_u32(nb::handle value, const char* argument, uint32_t max = std::numeric_limits<uint32_t>::max(),
                       uint32_t min = 0) {
  return static_cast<uint32_t>(to_u64(value, argument, max, min));
}
// True or False, nothing that merely counts as one of them.
bool to_bool(nb::handle value, const char* argument);
// UsageError for anything that is not a sequence, and for text and bytes. items: what it contains, "Addresses".
nb::sequence to_sequence(nb::handle value, const char* argument, const char* items);
// None is kNoImm.
inline uint32_t to_imm(nb::handle value) { return value.is_none() ? kNoImm : to_u32(value, "imm", kImmMax); }
// None is kAnyRail. The engine knows how many rails there are.
uint32_t to_rail(nb::handle value);

// A time option: at least `min` and at most `max` of its own unit, which is `unit_ns` nanoseconds.
int64_t to_ns(double value, const char* argument, double unit_ns, double min, double max);
// The timeout of a wait; infinity for None.
double to_seconds(nb::handle timeout_s);
// None waits for ever; zero checks once. On the clock of the wait's engine.
Deadline to_deadline(nb::handle timeout_s, const Clock& clock);

// The meaning of transport=: "auto" is shm and tcp, and RDMA if there is a device; "ofi:tcp" is ofi with that provider;
// "shm+verbs" these two.
struct TransportWord {
  std::vector<TransportKind> kinds;
  bool adds_rdma = false;
  std::string provider;
};
TransportWord to_transports(const std::string& text);

Access to_access(const std::string& name);

// Names and details come from peers: bytes that are not UTF-8 are shown escaped and do not raise.
nb::str to_text(const std::string& text);
// For reprs: whatever a terminal would interpret is shown escaped, too.
nb::str to_shown(const std::string& text);

// The content of a bytes object.
std::span<const uint8_t> bytes_of(nb::handle bytes);
nb::bytes to_bytes(std::span<const uint8_t> bytes);

// An exported buffer, released at the end of the scope.
class BufferView {
 public:
  BufferView() = default;
  ~BufferView() { release(); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
  // False, without a Python error, if the object exports no such buffer.
  bool acquire(nb::handle object, int flags);
  void release();
  const Py_buffer& get() const { return view_; }
  std::span<const uint8_t> bytes() const {
    return {static_cast<const uint8_t*>(view_.buf), static_cast<size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

// InterruptCheck: Ctrl-C and other signals, on the main thread. The Python error stays set when it says stop.
bool interrupted();

// Waits with the GIL released; throws what a signal handler raised.
template <typename Wait>
WaitResult wait_without_gil(Wait wait) {
  WaitResult result;
  {
    WithoutGil no_gil;
    result = wait();
  }
  if (result == WaitResult::kInterrupted) throw nb::python_error();
  return result;
}

}  // namespace crossrail::bindings
