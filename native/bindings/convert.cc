#include "bindings/convert.h"

#include <cmath>
#include <cstdio>
#include <string_view>

#include "bindings/gil.h"
#include "bindings/raise.h"
#include "engine/engine.h"
#include "transport/descriptor.h"

namespace crossrail::bindings {

namespace {

[[noreturn]] void throw_out_of_range(nb::handle value, const char* argument, uint64_t min, uint64_t max) {
  PyErr_Clear();
  throw UsageError(std::string(argument) + " is " + nb::str(value).c_str() + ", must be " + std::to_string(min) + ".." +
                   std::to_string(max));
}

// Short, as Python prints it.
std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

}  // namespace

std::string type_name_of(nb::handle object) { return object.is_none() ? "None" : nb::type_name(object.type()).c_str(); }

uint64_t to_u64(nb::handle value, const char* argument, uint64_t max, uint64_t min) {
  nb::object index;  // keeps what __index__ returned alive
  if (PyBool_Check(value.ptr())) throw UsageError(std::string(argument) + " must be a whole number, not bool");
  if (!PyLong_Check(value.ptr())) {
    index = in_python([&] { return nb::steal(PyNumber_Index(value.ptr())); });
    if (!index.is_valid()) {
      PyErr_Clear();
      throw UsageError(std::string(argument) + " must be a whole number, not " + type_name_of(value));
    }
    value = index;
  }
  const unsigned long long number = PyLong_AsUnsignedLongLong(value.ptr());
  if (number == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
    throw_out_of_range(value, argument, min, max);
  }
  if (number < min || number > max) throw_out_of_range(value, argument, min, max);
  return number;
}

bool to_bool(nb::handle value, const char* argument) {
  if (!PyBool_Check(value.ptr())) {
    throw UsageError(std::string(argument) + " must be True or False, not " + type_name_of(value));
  }
  return value.is(Py_True);
}

nb::sequence to_sequence(nb::handle value, const char* argument, const char* items) {
  const bool is_text = PyUnicode_Check(value.ptr()) || PyBytes_Check(value.ptr());
  if (is_text || PySequence_Check(value.ptr()) == 0 ||
      PySequence_Size(value.ptr()) < 0) {  // numpy has sequences without a size
    PyErr_Clear();
    throw UsageError(std::string(argument) + " must be a list of " + items + ", not " + type_name_of(value));
  }
  return nb::borrow<nb::sequence>(value);
}

uint32_t to_rail(nb::handle value) { return value.is_none() ? kAnyRail : to_u32(value, "rail", kRailsMax - 1); }

int64_t to_ns(double value, const char* argument, double unit_ns, double min, double max) {
  if (!(value >= min && value <= max)) {  // false for NaN too
    throw UsageError(std::string(argument) + " is " + number_text(value) + ", must be " + number_text(min) + ".." +
                     number_text(max));
  }
  return static_cast<int64_t>(value * unit_ns);
}

double to_seconds(nb::handle timeout_s) {
  if (timeout_s.is_none()) return std::numeric_limits<double>::infinity();
  const double seconds = PyBool_Check(timeout_s.ptr()) ? -1.0 : PyFloat_AsDouble(timeout_s.ptr());
  if (PyBool_Check(timeout_s.ptr()) || (seconds == -1.0 && PyErr_Occurred() != nullptr)) {
    PyErr_Clear();
    throw UsageError("timeout_s must be a number of seconds or None, not " + type_name_of(timeout_s));
  }
  if (std::isnan(seconds) || seconds < 0.0) {
    throw UsageError("timeout_s is " + number_text(seconds) + ", must be 0 or more, or None to wait for ever");
  }
  return seconds;
}

Deadline to_deadline(nb::handle timeout_s, const Clock& clock) {
  constexpr double kForEverSeconds = 1e9;  // 30 years; more would overflow nanoseconds in 64 bits
  const double seconds = to_seconds(timeout_s);
  return seconds >= kForEverSeconds ? kNoDeadline : clock.deadline_in(seconds);
}

namespace {

// One of the words between plus signs.
void add_transport(const std::string& word, const std::string& all, TransportWord* to) {
  constexpr std::string_view kOfiPrefix = "ofi:";
  for (uint32_t number = 1; number <= kTransportKinds; ++number) {
    const auto kind = static_cast<TransportKind>(number);
    if (word != transport_name(kind)) continue;
    to->kinds.push_back(kind);
    return;
  }
  const std::string provider = word.starts_with(kOfiPrefix) ? word.substr(kOfiPrefix.size()) : "";
  if (provider.empty() || provider.size() > kFabricBytesMax) {
    throw UsageError("transport is '" + all +
                     "', must be 'auto', or one or several of 'shm', 'tcp', 'verbs', 'ofi', 'ofi:PROVIDER' and 'null', "
                     "as 'ofi:tcp' or 'shm+verbs'; 'sim' inside a simulated world");
  }
  to->kinds.push_back(TransportKind::kOfi);
  to->provider = provider;
}

}  // namespace

TransportWord to_transports(const std::string& text) {
  TransportWord word;
  if (text == "auto") return {{TransportKind::kShm, TransportKind::kTcp}, true, {}};
  for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = text.find('+', begin);
    add_transport(text.substr(begin, end == std::string::npos ? end : end - begin), text, &word);
  }
  return word;
}

Access to_access(const std::string& name) {
  for (Access access : {Access::kLocal, Access::kRemoteRead, Access::kRemoteWrite}) {
    if (name == access_name(access)) return access;
  }
  throw UsageError("access is '" + name + "', must be 'local', 'read' or 'write'");
}

nb::str to_text(const std::string& text) {
  PyObject* object = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (object == nullptr) throw nb::python_error();
  return nb::steal<nb::str>(object);
}

nb::str to_shown(const std::string& text) { return nb::str(call_package("crossrail._text", "plain", to_text(text))); }

std::span<const uint8_t> bytes_of(nb::handle bytes) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(bytes.ptr(), &data, &size) != 0) throw nb::python_error();
  return {reinterpret_cast<const uint8_t*>(data), static_cast<size_t>(size)};
}

nb::bytes to_bytes(std::span<const uint8_t> bytes) {
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

bool BufferView::acquire(nb::handle object, int flags) {
  release();
  if (PyObject_GetBuffer(object.ptr(), &view_, flags) == 0) return true;
  PyErr_Clear();
  view_ = Py_buffer{};
  return false;
}

void BufferView::release() {
  if (view_.obj != nullptr) PyBuffer_Release(&view_);
}

bool interrupted() {
  park_if_exiting();
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

}  // namespace crossrail::bindings
