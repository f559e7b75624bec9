// Endpoints and offers of verbs and ofi NICs, as other NICs get them: what decodes is what the bytes say.
#include "fuzz.h"
#include "transport/ofi/wire.h"
#ifdef CROSSRAIL_WITH_VERBS
#include "transport/verbs/wire.h"
#endif

namespace crossrail::fuzz {
namespace {

void check(Input bytes) {
  const auto endpoint = ofi::EndpointWords::decode(bytes);
  if (endpoint) {
    require(std::ranges::equal(endpoint->encode(), bytes), "an endpoint of ofi is its bytes");
    const int nearness = ofi::nearness_of(*endpoint, *endpoint);
    require(nearness >= 0 && nearness <= 2, "nearness is 0, 1 or 2");
    ofi::is_name_like(endpoint->format, endpoint->name, endpoint->name);
    ofi::is_name_like(endpoint->format, endpoint->name, ofi::Name(16));
  }
  if (const auto offer = ofi::OfferWords::decode(bytes)) {
    require(std::ranges::equal(offer->encode(), bytes), "an offer of ofi is its bytes");
  }
#ifdef CROSSRAIL_WITH_VERBS
  if (const auto ours = verbs::decode_endpoint(bytes)) {
    require(std::ranges::equal(verbs::encode(*ours), bytes), "an endpoint of verbs is its bytes");
    require(!verbs::address_text(ours->gid).empty(), "its address has a text");
    const int nearness = verbs::nearness(*ours, *ours);
    require(nearness >= 0 && nearness <= 2, "nearness is 0, 1 or 2");
  }
  if (const auto offer = verbs::decode_offer(bytes)) {
    require(std::ranges::equal(verbs::encode(*offer), bytes), "an offer of verbs is its bytes");
  }
#endif
}

}  // namespace
}  // namespace crossrail::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  crossrail::fuzz::check({data, size});
  return 0;
}
