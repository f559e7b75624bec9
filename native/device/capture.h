// CUDA graphs that somebody captures while we call the driver.
#pragma once

#include "device/cuda.h"

namespace crossrail::device {

// Calls on this thread are none of a graph's that this or some other thread captures meanwhile: the driver forbids some
// (to allocate, pin, load, wait) while it captures, and gives the graph up. A launch on the captured stream is
// captured.
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
