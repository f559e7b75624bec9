// A decoder with a planted mistake: it believes a length that comes after four right bytes. ./dev fuzz has to find it,
// or its finding nothing elsewhere means nothing.
#include "fuzz.h"
#include "util/codec.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace crossrail;
  Reader reader({data, size});
  for (const char expected : {'X', 'R', 'C', 'A'}) {
    if (reader.get<uint8_t>() != static_cast<uint8_t>(expected)) return 0;
  }
  const size_t length = reader.get<uint8_t>();
  if (!reader.ok()) return 0;
  const auto body = reader.rest();
  uint32_t sum = 0;
  for (size_t i = 0; i < length; ++i) sum += body.data()[i];  // the mistake: not all of it need be there
  return sum == 0xffffffff ? 1 : 0;
}
