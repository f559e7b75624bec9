#include "device/word_adder.h"

#include <array>
#include <string>

#include "device/capture.h"
#include "device/kernels.h"
#include "util/errors.h"

namespace crossrail::device {

namespace {

// cuda.h: CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP.
constexpr unsigned kPortableAndMapped = 1 | 2;

const Driver& driver_or_throw() {
  std::string why;
  const Driver* driver = find_driver(&why);
  if (driver == nullptr) {
    throw TransportError("add_on", 0, "a kernel that adds to a word needs NVIDIA's driver: " + why,
                         "without a GPU use add()");
  }
  return *driver;
}

std::string name_of(uint64_t stream) { return "the stream " + std::to_string(stream); }

// Of a stream that does not say itself.
int gpu_of(const Driver& driver, uint64_t stream) {
  const char* const remedy = "pass a torch.cuda.Stream, which says whose it is";
  if (driver.stream_context == nullptr)
    throw TransportError("cuStreamGetCtx", 0, "this driver cannot tell which GPU a stream is of", remedy);
  const OutsideCapture outside(driver);
  void* context = nullptr;
  void* const handle = reinterpret_cast<void*>(stream);  // NOLINT(performance-no-int-to-ptr)
  if (const int code = driver.stream_context(handle, &context); code != 0) {
    fail(driver, "cuStreamGetCtx", code, "cannot tell which GPU " + name_of(stream) + " is of",
         std::string("a default stream is the thread's current GPU's: make it current first, or ") + remedy);
  }
  int gpu = -1;
  int code = driver.push_context(context);
  if (code == 0) {
    code = driver.context_device(&gpu);
    void* popped = nullptr;
    driver.pop_context(&popped);
  }
  if (code != 0) fail(driver, "cuCtxGetDevice", code, "cannot tell which GPU " + name_of(stream) + " is of", remedy);
  if (context != CurrentContext(driver, gpu).handle()) {
    throw UsageError(name_of(stream) + " is of another context of GPU " + std::to_string(gpu) +
                     " than the one that CUDA's runtime and torch use: take a stream of theirs");
  }
  return gpu;
}

void check_gpu(const Driver& driver, int gpu) {
  int count = 0;
  if (const int code = driver.device_count(&count); code != 0)
    fail(driver, "cuDeviceGetCount", code, "cannot count the GPUs", "see nvidia-smi");
  if (gpu >= count) {
    throw UsageError("the stream is of GPU " + std::to_string(gpu) + ", and this process sees " +
                     std::to_string(count) + ": see CUDA_VISIBLE_DEVICES");
  }
}

}  // namespace

WordAdder::~WordAdder() {
  if (pinned_driver_ == nullptr) return;
  try {
    const CurrentContext current(*pinned_driver_, pinned_gpu_);
    const OutsideCapture outside(*pinned_driver_);
    pinned_driver_->unpin_host(base_);
  } catch (const TransportError&) {  // the GPU has failed, and has nothing pinned any more
  }
}

void WordAdder::add(std::atomic<uint64_t>* word, uint64_t delta, uint64_t stream, int gpu) {
  const Driver& driver = driver_or_throw();
  if (gpu < 0) gpu = gpu_of(driver, stream);
  check_gpu(driver, gpu);
  const CurrentContext current(driver, gpu);
  uint64_t address = 0;
  void* kernel = nullptr;
  {
    const OutsideCapture outside(driver);
    const std::lock_guard lock(mutex_);
    if (pinned_driver_ == nullptr) {
      if (const int code = driver.pin_host(base_, bytes_, kPortableAndMapped); code != 0) {
        fail(driver, "cuMemHostRegister", code, "cannot pin the page of watched words for GPUs",
             "raise the limit on locked memory (ulimit -l); if the program has registered it itself, it need not");
      }
      pinned_driver_ = &driver;
      pinned_gpu_ = gpu;
    }
    kernel = kernels_of(driver, gpu, "a kernel that adds to a word").add_to_word;
    address = address_of(driver, word);
  }
  std::array<void*, 2> arguments{&address, &delta};
  void* const handle = reinterpret_cast<void*>(stream);  // NOLINT(performance-no-int-to-ptr)
  const int code = driver.launch_kernel(kernel, 1, 1, 1, 1, 1, 1, 0, handle, arguments.data(), nullptr);
  if (code != 0) {
    fail(driver, "cuLaunchKernel", code, "cannot launch on " + name_of(stream) + " of GPU " + std::to_string(gpu),
         "the stream must be alive and of that GPU, in a capture the captured one, and no earlier kernel may have "
         "failed");
  }
}

// As kernels on the GPU that is current know it.
uint64_t WordAdder::address_of(const Driver& driver, std::atomic<uint64_t>* word) {
  uint64_t address = 0;
  if (const int code = driver.pinned_address(&address, word, 0); code != 0)
    fail(driver, "cuMemHostGetDevicePointer", code, "the GPU does not reach the page of watched words",
         "see nvidia-smi");
  return address;
}

}  // namespace crossrail::device
