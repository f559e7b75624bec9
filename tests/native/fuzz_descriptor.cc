// Addresses and region descriptors, raw and with a right checksum: what decodes is what the bytes say, byte for byte.
#include "fuzz.h"
#include "transport/descriptor.h"
#include "util/errors.h"

namespace crossrail::fuzz {
namespace {

template <typename T>
void check(Input bytes) {
  try {
    const T value = T::decode(bytes);
    require(std::ranges::equal(value.encode(), bytes), "decoded and encoded, the same bytes");
    require(T::decode(value.encode()) == value, "encoded and decoded, the same value");
  } catch (const UsageError& error) {
    require(*error.what() != 0, "an error has words");
  }
}

// As descriptor.cc seals: FNV-1a of all before it.
Bytes sealed(Input body) {
  uint32_t hash = 2166136261u;
  for (const uint8_t byte : body) hash = (hash ^ byte) * 16777619u;
  Bytes bytes(body.begin(), body.end());
  for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<uint8_t>(hash >> shift));
  return bytes;
}

}  // namespace
}  // namespace crossrail::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace crossrail;
  using namespace crossrail::fuzz;
  const Input input(data, size);
  check<Address>(input);
  check<RegionDescriptor>(input);
  check<Address>(sealed(input));
  check<RegionDescriptor>(sealed(input));
  return 0;
}
