// What an instance of crossrail._core.SimWorld holds.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

#include "bindings/gil.h"
#include "bindings/handles.h"
#include "transport/sim/world.h"

namespace crossrail::bindings {

// Engines keep the native world alive, not this; the Python world keeps this, and is kept by the users of its engines.
struct SimWorldHandle {
  SimWorldHandle(uint64_t seed, size_t log_lines_max, uint64_t twin)
      : world(std::make_shared<sim::World>(seed, log_lines_max, twin)) {}

  // `run` must refer only weakly to what keeps this alive: nobody collects a cycle through here.
  void set_callbacks(Ref<Notifier> notifier, nb::object run) {
    callbacks = notifier;
    // Dropped with the GIL held, wherever the last engine is destroyed.
    const std::shared_ptr<nb::object> shared(new nb::object(std::move(run)), [](nb::object* object) {
      if (Py_IsInitialized() == 0) return;  // leaked: there is nobody to return it to
      park_if_exiting();
      const nb::gil_scoped_acquire gil;
      delete object;
    });
    world->set_callbacks([notifier = std::move(notifier)] { return notifier->has_posts(); },
                         [shared] {
                           park_if_exiting();
                           const nb::gil_scoped_acquire gil;
                           (*shared)();
                         });
  }

  const std::shared_ptr<sim::World> world;
  Ref<Notifier> callbacks;
};

}  // namespace crossrail::bindings
