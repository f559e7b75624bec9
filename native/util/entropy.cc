#include "util/entropy.h"

#include <sys/random.h>

#include <cstring>

#include "util/errors.h"

namespace crossrail {

namespace {

class KernelEntropy final : public Entropy {
 public:
  void fill(std::span<uint8_t> bytes) override {
    if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
      throw_errno("getrandom", "the kernel gives no random bytes");
    }
  }
};

}  // namespace

uint64_t Entropy::draw_u64() {
  uint8_t bytes[8];
  fill(bytes);
  uint64_t value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

Entropy& kernel_entropy() {
  static KernelEntropy entropy;
  return entropy;
}

}  // namespace crossrail
