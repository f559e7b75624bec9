// Service messages, as the engine takes them: a message, or words that say why not; and what was understood is what is
// said.
#include <variant>

#include "engine/service_wire.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace crossrail;
  using namespace crossrail::fuzz;
  const Input input(data, size);
  std::string why;
  const std::optional<ServiceMessage> message = decode_service(input, &why);
  require(message.has_value() == why.empty(), "a refusal has words, and only a refusal");
  if (!message) return 0;
  const Bytes said = std::visit([](const auto& known) { return encode(known); }, *message);
  require(std::ranges::equal(said, input), "decoded and encoded, the same bytes");
  return 0;
}
