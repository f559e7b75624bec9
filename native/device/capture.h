// Protects CUDA graphs that are being captured while we call the driver.
#pragma once

#include "device/cuda.h"

namespace crossrail::device {

// While this exists, calls on this thread do not become part of a graph that this or another thread is capturing.
// During a capture the driver forbids some calls (allocate, pin, load, wait) and would abandon the graph. A launch on
// the captured stream is captured.
class OutsideCapture {
 public:
  explicit OutsideCapture(const Driver& driver) : driver_(driver) { exchange(); }
  ~OutsideCapture() { exchange(); }
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  void exchange() {
    if (driver_.exchange_capture_mode != nullptr) driver_.exchange_capture_mode(&mode_);
  }
  const Driver& driver_;
  int mode_ = 2;  // cuda.h: CU_STREAM_CAPTURE_MODE_RELAXED
};

}  // namespace crossrail::device
