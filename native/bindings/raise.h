// What the bindings raise on their own. Messages are written in Python, in crossrail/_raise.py.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/gil.h"
#include "engine/transfer.h"

namespace nb = nanobind;

namespace crossrail::bindings {

// An attribute of a module of the package, imported at first use, since the package imports us first. Borrowed, never
// dropped.
nb::handle package_attribute(const char* module, const char* name);
template <typename... Args>
nb::object call_package(const char* module, const char* name, Args&&... args) {
  return in_python([&] { return package_attribute(module, name)(std::forward<Args>(args)...); });
}

// Raises the exception that function `name` of crossrail._raise makes from the arguments.
[[noreturn]] void raise_object(nb::object exception);
template <typename... Args>
nb::object make_error(const char* name, Args&&... args) {
  return call_package("crossrail._raise", name, std::forward<Args>(args)...);
}

}  // namespace crossrail::bindings
