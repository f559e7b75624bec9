#include "bindings/bindings.h"
#include "bindings/fork.h"
#include "bindings/gil.h"

// Not PyInit__core itself, see below.
NB_MODULE(_core_of_main, module) {
  using namespace crossrail::bindings;
  module.attr("__doc__") =
      "The native half of crossrail. Use the package; names that start with an underscore are its own.";
  module.attr("__version__") = CROSSRAIL_VERSION;
  watch_forks();
  module.def("_begin_exit", &begin_exit, nanobind::arg("timeout_s"));
  // What daemon threads hold when the interpreter ends is never released, which is not our fault to report.
  module.def("_tell_no_leaks", [] { nanobind::set_leak_warnings(false); });
  register_errors(module);
  register_descriptor(module);
  register_notifier(module);
  register_transfer(module);
  register_region(module);
  register_dlpack(module);
  register_imm_counter(module);
  register_count_flag(module);
  register_recv_pool(module);
  register_watcher(module);
  register_poison(module);
  register_devices(module);
  register_sim(module);
  register_engine(module);
  register_kv(module);
  register_moe_kernels(module);
  register_moe_layout(module);
  register_moe_words(module);
  register_moe_proxy(module);
  register_moe_stream_proxy(module);
  register_moe_node_sums(module);
  register_weights(module);
  register_bench(module);
}

// nanobind would fail in ways that tell nobody why, and in another interpreter than the main one break that, too: both
// are refused before it is asked.
extern "C" NB_EXPORT PyObject* PyInit__core() {
  static bool is_loaded = false;  // guarded by the main interpreter's GIL
  const char* refusal = nullptr;
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
    refusal =
        "crossrail cannot be imported in a subinterpreter. Next: import it in the main interpreter, or start a "
        "process (multiprocessing, spawn)";
  } else if (is_loaded) {
    refusal =
        "crossrail cannot be imported again after its modules were removed from sys.modules. Next: leave them there, "
        "or start a process (multiprocessing, spawn)";
  }
  if (refusal != nullptr) {
    PyErr_SetString(PyExc_ImportError, refusal);
    return nullptr;
  }
  is_loaded = true;
  return PyInit__core_of_main();
}
