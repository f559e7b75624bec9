#include "device/host_words.h"

#include <array>
#include <string>

#include "device/capture.h"
#include "device/kernels.h"
#include "util/errors.h"

namespace crossrail::device {

namespace {

// cuda.h: CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP.
constexpr unsigned kPortableAndMapped = 1 | 2;

constexpr const char* kKernelOfWords = "a kernel that adds to a word or waits for one";

const Driver& driver_or_throw() {
  std::string why;
  const Driver* driver = find_driver(&why);
  if (driver == nullptr) {
    throw TransportError("launch", 0, std::string(kKernelOfWords) + " needs NVIDIA's driver: " + why,
                         "without a GPU use what the CPU has for it: a watcher's add(), a counter's wait()");
  }
  return *driver;
}

std::string name_of(uint64_t stream) { return "the stream " + std::to_string(stream); }

// For a stream that does not identify its GPU.
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

uint64_t address_of(const Driver& driver, const void* word) {
  uint64_t address = 0;
  if (const int code = driver.pinned_address(&address, const_cast<void*>(word), 0); code != 0)
    fail(driver, "cuMemHostGetDevicePointer", code, "the GPU does not reach words of the host", "see nvidia-smi");
  return address;
}

}  // namespace

HostWords::~HostWords() {
  if (pinned_driver_ == nullptr) return;
  try {
    const CurrentContext current(*pinned_driver_, pinned_gpu_);
    const OutsideCapture outside(*pinned_driver_);
    pinned_driver_->unpin_host(base_);
  } catch (const TransportError&) {  // the GPU has failed, so nothing is pinned any more
  }
}

// That GPU's context must be current.
void HostWords::pin(const Driver& driver, int gpu) {
  const std::lock_guard lock(mutex_);
  if (pinned_driver_ != nullptr) return;
  if (const int code = driver.pin_host(base_, bytes_, kPortableAndMapped); code != 0) {
    fail(driver, "cuMemHostRegister", code, "cannot pin a page of words for GPUs",
         "raise the limit on locked memory (ulimit -l); if the program has registered it itself, it need not");
  }
  pinned_driver_ = &driver;
  pinned_gpu_ = gpu;
}

void HostWords::add(std::atomic<uint64_t>* word, uint64_t delta, uint64_t stream, int gpu) {
  launch(&Kernels::add_to_word, word, {&delta, 1}, stream, gpu);
}

void HostWords::await_counts(CountWords* words, uint64_t count, uint64_t timeout_ns, uint64_t stream, int gpu) {
  std::array<uint64_t, 2> numbers{count, timeout_ns};
  launch(&Kernels::await_counts, words, numbers, stream, gpu);
}

uint64_t HostWords::address_on(int gpu, const void* word) {
  const Driver& driver = driver_or_throw();
  check_gpu(driver, gpu);
  const CurrentContext current(driver, gpu);
  const OutsideCapture outside(driver);
  pin(driver, gpu);
  return address_of(driver, word);
}

void HostWords::launch(void* Kernels::* kernel, void* word, std::span<uint64_t> numbers, uint64_t stream, int gpu) {
  const Driver& driver = driver_or_throw();
  if (gpu < 0) gpu = gpu_of(driver, stream);
  check_gpu(driver, gpu);
  const CurrentContext current(driver, gpu);
  uint64_t address = 0;
  void* function = nullptr;
  {
    const OutsideCapture outside(driver);
    pin(driver, gpu);
    function = kernels_of(driver, gpu, kKernelOfWords).*kernel;
    address = address_of(driver, word);
  }
  std::array<void*, 3> arguments{&address};
  for (size_t i = 0; i < numbers.size(); ++i) arguments[1 + i] = &numbers[i];
  void* const handle = reinterpret_cast<void*>(stream);  // NOLINT(performance-no-int-to-ptr)
  const int code = driver.launch_kernel(function, 1, 1, 1, 1, 1, 1, 0, handle, arguments.data(), nullptr);
  if (code != 0) {
    fail(driver, "cuLaunchKernel", code, "cannot launch on " + name_of(stream) + " of GPU " + std::to_string(gpu),
         "the stream must be alive and of that GPU, in a capture the captured one, and no earlier kernel may have "
         "failed");
  }
}

}  // namespace crossrail::device
