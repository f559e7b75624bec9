// Of the double of NVIDIA's driver: streams of the user's, and the kernels that change words of the host, or wait for
// them; what is to take time has none, but for a wait of no time at all, which ends at once. What is
// launched happens when the test says so. An address that is none of a page that was pinned and mapped for GPUs ends
// the test.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

namespace crossrail::test {

class FakeKernels {
  struct Module {
    int gpu;
    std::string text;
  };

 public:
  static constexpr int kGpus = 2;
  // A GPU's address of pinned memory is not the host's.
  static constexpr uint64_t kAlias = uint64_t{1} << 46;

  struct Launch {
    uint64_t address;
    uint64_t delta;
    const void* round = nullptr;  // a kernel of rounds, one of round_kernels(), or that waits; and its arguments
    std::array<uint64_t, 5> arguments{};
  };
  struct Stream {
    int gpu = 0;
    bool is_of_another_context = false;
    std::deque<Launch> launched;
  };

  // What drivers refuse: a CUDA error, or 0.
  std::atomic<int> pin_error{0};
  std::atomic<int> load_error{0};
  std::atomic<int> launch_error{0};
  std::atomic<int> capability{9};
  std::atomic<uint32_t> loads{0};
  std::function<std::byte*(uint64_t)> gpu_memory;  // the bytes at an address of the GPU's; null: it is none

  // Between these, calls that CUDA forbids during a capture break it, unless their thread is in relaxed mode.
  void begin_capture() { is_capturing_ = true; }
  bool end_capture() { return is_capturing_.exchange(false); }
  bool is_capturing() const { return is_capturing_; }

  // The oldest that was launched there and not taken. False: none.
  bool take(Stream* stream, Launch* launch) {
    const std::lock_guard lock(mutex_);
    if (stream->launched.empty()) return false;
    *launch = stream->launched.front();
    stream->launched.pop_front();
    return true;
  }
  // As the GPU does it. False: it waits for a word.
  bool run(const Launch& launch) {
    if (launch.round == &waiting_) return run_wait(launch);
    if (launch.round != nullptr) return run_round(launch);
    const std::lock_guard lock(mutex_);
    const uint64_t address = launch.address - kAlias;
    if (address % sizeof(uint64_t) != 0 || !is_mapped(address)) std::abort();
    reinterpret_cast<std::atomic<uint64_t>*>(address)->fetch_add(launch.delta);  // NOLINT(performance-no-int-to-ptr)
    return true;
  }

  // --- the driver's part

  void forbidden_while_capturing() {
    if (mode_ != 2) is_capturing_ = false;
  }
  void* context(int gpu) { return &contexts_.at(static_cast<size_t>(gpu)); }
  int gpu_of(const void* context) const {
    for (int gpu = 0; gpu < kGpus; ++gpu) {
      if (context == &contexts_.at(static_cast<size_t>(gpu))) return gpu;
    }
    return context == &another_ ? 0 : -1;
  }
  void* context_of(const Stream* stream) { return stream->is_of_another_context ? &another_ : context(stream->gpu); }

  int pinned(uint64_t base, size_t bytes, unsigned flags) {
    forbidden_while_capturing();
    if (pin_error != 0) return pin_error;
    const std::lock_guard lock(mutex_);
    if ((flags & 3) == 3) mapped_[base] = bytes;
    return 0;
  }
  void unpinned(uint64_t base) {
    const std::lock_guard lock(mutex_);
    mapped_.erase(base);
  }
  int address_of(uint64_t host, uint64_t* address) {
    const std::lock_guard lock(mutex_);
    if (!is_mapped(host)) return 1;
    *address = host + kAlias;
    return 0;
  }
  int load(void** module, const char* text, int gpu) {
    forbidden_while_capturing();
    if (load_error != 0) return load_error;
    if (gpu < 0 || std::strstr(text, ".target sm_70") == nullptr) return 218;
    ++loads;
    Module& made = modules_.at(static_cast<size_t>(gpu));
    made = {gpu, text};
    *module = &made;
    return 0;
  }
  static int function(void** function, void* module, const char* name) {
    if (std::strcmp(name, "crossrail_copy_pieces") == 0) {
      *function = &copying_;
      return 0;
    }
    if (std::strcmp(name, "crossrail_await_counts") == 0) {
      *function = &waiting_;
      return 0;
    }
    for (size_t i = 0; i < kRoundKernels.size(); ++i) {
      if (kRoundKernels[i] != name) continue;
      *function = &round_kernels_[i];
      return 0;
    }
    const std::string entry = std::string(".visible .entry ") + name + "(.param .u64 word, .param .u64 delta)";
    if (static_cast<Module*>(module)->text.find(entry) == std::string::npos) return 500;
    *function = module;
    return 0;
  }
  int launch(const void* function, Stream* stream, void** arguments, int gpu) {
    if (launch_error != 0) return launch_error;
    if (stream->is_of_another_context || stream->gpu != gpu) return 400;
    const std::lock_guard lock(mutex_);
    if (const size_t kernel = round_kernel(function); kernel < kRoundKernels.size()) {
      Launch launch{.address = 0, .delta = 0, .round = function, .arguments = {}};
      for (size_t i = 0; i < kArguments[kernel]; ++i) launch.arguments[i] = *static_cast<uint64_t*>(arguments[i]);
      stream->launched.push_back(launch);
      return 0;
    }
    if (function == &waiting_) {
      Launch launch{.address = 0, .delta = 0, .round = function, .arguments = {}};
      for (size_t i = 0; i < 3; ++i) launch.arguments[i] = *static_cast<uint64_t*>(arguments[i]);
      stream->launched.push_back(launch);
      return 0;
    }
    if (static_cast<const Module*>(function)->gpu != gpu) return 400;
    stream->launched.push_back({*static_cast<uint64_t*>(arguments[0]), *static_cast<uint64_t*>(arguments[1])});
    return 0;
  }
  static int exchange_capture_mode(int* mode) {
    std::swap(*mode, mode_);
    return 0;
  }
  static bool copies(const void* function) { return function == &copying_; }
  static unsigned threads(const void* function) {
    return function == &round_kernels_[1] || function == &round_kernels_[2] ? 32 : 1;
  }
  Stream* default_stream(int gpu) { return &default_streams_.at(static_cast<size_t>(gpu)); }

 private:
  static constexpr std::array<std::string_view, 3> kRoundKernels{"crossrail_open_round", "crossrail_publish_round",
                                                                 "crossrail_await_round"};
  static constexpr std::array<size_t, 3> kArguments{4, 4, 5};  // the last are words; count and table are before
  static size_t round_kernel(const void* function) {
    size_t kernel = 0;
    while (kernel < kRoundKernels.size() && function != &round_kernels_[kernel]) ++kernel;
    return kernel;
  }
  // Two words, of even and odd rounds, which are pinned or in memory of the GPU.
  std::atomic<uint64_t>* words_at(uint64_t address) {
    const uint64_t host = address - kAlias;
    if (address % 64 != 0) std::abort();
    if (is_mapped(host) && is_mapped(host + 127))
      return reinterpret_cast<std::atomic<uint64_t>*>(host);  // NOLINT(performance-no-int-to-ptr)
    std::byte* const bytes = gpu_memory ? gpu_memory(address) : nullptr;
    if (bytes == nullptr) std::abort();
    return reinterpret_cast<std::atomic<uint64_t>*>(bytes);
  }
  // Numbers are in memory of the GPU, which is the host's here.
  bool run_round(const Launch& launch) {
    const std::lock_guard lock(mutex_);
    const auto at = [](uint64_t address) {
      return reinterpret_cast<std::atomic<uint64_t>*>(address);  // NOLINT(performance-no-int-to-ptr)
    };
    const size_t kernel = round_kernel(launch.round);
    std::atomic<uint64_t>* const words = words_at(launch.arguments[kernel == 0 ? 2 : kArguments[kernel] - 1]);
    std::atomic<uint64_t>* const number = at(launch.arguments[kernel == 0 ? 1 : 0]);
    if (kernel == 0) {  // once: not to be run again
      *number = at(launch.arguments[0])->fetch_add(1) + 1;
      words_at(launch.arguments[3])[*number % 2 * 8] = number->load();
    }
    std::atomic<uint64_t>* const word = words + *number % 2 * 8;
    constexpr uint64_t kNone = ~uint64_t{0};
    bool is_signalled = true;
    for (uint64_t i = 0; kernel != 0 && i < launch.arguments[2]; ++i) {
      std::atomic<uint64_t>* const signal = at(*at(launch.arguments[1] + (*number % 2 * launch.arguments[2] + i) * 8));
      if (kernel == 1 && *number != kNone) *signal = number->load();
      is_signalled &= *signal >= *number;
    }
    if (kernel == 1) {
      *word = number->load();
      return true;
    }
    const bool needs_words = kernel == 0 || launch.arguments[3] != 0;
    if (is_signalled && !needs_words) return true;
    if (*word == kNone) *number = kNone;
    return *word == kNone || (is_signalled && *word >= *number);
  }

  // Words as device::CountWords: given; on the next line taken, and missed.
  bool run_wait(const Launch& launch) {
    const std::lock_guard lock(mutex_);
    constexpr uint64_t kEnded = uint64_t{1} << 63;
    const auto [words, count, timeout] =
        std::tuple(words_at(launch.arguments[0]), launch.arguments[1], launch.arguments[2]);
    if (words[9] != 0) return true;
    const uint64_t given = words[0];
    const uint64_t wanted = words[8] + count;
    if ((given & ~kEnded) >= wanted) {
      words[8] = wanted;
      return true;
    }
    if ((given & kEnded) == 0 && timeout > 0) return false;
    words[9] = count | (given & kEnded);
    return true;
  }

  bool is_mapped(uint64_t address) const {
    auto it = mapped_.upper_bound(address);
    if (it == mapped_.begin()) return false;
    --it;
    return address < it->first + it->second;
  }

  static inline thread_local int mode_ = 0;
  static inline std::array<char, kGpus> contexts_{};
  static inline char another_ = 0;
  static inline char copying_ = 0;
  static inline char waiting_ = 0;
  static inline std::array<char, 3> round_kernels_{};
  static inline std::array<Module, kGpus> modules_{};  // kept by who loaded them, as contexts are, after this one's end
  std::array<Stream, kGpus> default_streams_{Stream{.gpu = 0}, Stream{.gpu = 1}};
  std::atomic<bool> is_capturing_{false};
  std::mutex mutex_;  // guards what follows, and what is launched
  std::map<uint64_t, size_t> mapped_;
};

}  // namespace crossrail::test
