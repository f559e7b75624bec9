#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <map>
#include <new>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/raise.h"
#include "util/errors.h"

namespace crossrail::bindings {

nb::handle package_attribute(const char* module, const char* name) {
  // Never freed: after the interpreter has ended, there is nobody to return the references to.
  static auto& known = *new std::map<std::pair<std::string, std::string>, nb::object>;
  nb::object& found = known[{module, name}];
  if (!found.is_valid()) found = nb::module_::import_(module).attr(name);
  return found;
}

void raise_object(nb::object exception) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw nb::python_error();
}

namespace {

void set_error(const char* name, const auto&... arguments) {
  try {
    const nb::handle type = in_python([&] { return package_attribute("crossrail.errors", name); });
    const nb::object error = in_python([&] { return type(arguments...); });
    PyErr_SetObject(type.ptr(), error.ptr());
  } catch (nb::python_error& error) {
    error.restore();  // a failed import says more than we could
  }
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const UsageError& error) {
    set_error("UsageError", to_text(error.what()));
  } catch (const TransportError& error) {
    set_error("TransportError", to_text(error.call()), error.code(), to_text(error.text()), to_text(error.remedy()));
  } catch (const EngineClosedError& error) {
    set_error("EngineClosed", to_text(error.what()));
  } catch (const SimulationIdleError& error) {
    set_error("SimulationIdle", to_text(error.what()));
  } catch (const std::bad_alloc&) {
    PyErr_SetString(PyExc_MemoryError, "no memory left for this call of crossrail");
  }
}

}  // namespace

void register_errors(nb::module_&) { nb::register_exception_translator(translate); }

}  // namespace crossrail::bindings
