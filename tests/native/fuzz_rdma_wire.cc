// Datagrams of the rdma layer and their bodies, from anybody in the network: what decodes is what the bytes say.
#include "fuzz.h"
#include "transport/rdma/wire.h"

namespace crossrail::fuzz {
namespace {

using namespace rdma;

template <typename Body>
void same(const Body& body, Input bytes, const char* what) {
  Bytes again;
  put(again, body);
  require(std::ranges::equal(again, bytes), what);
}

void check_body(Input bytes) {
  if (const auto body = decode_path(bytes)) same(*body, bytes, "a path's body is its bytes");
  if (const auto body = decode_resolve(bytes)) require(body->spans.size() <= kSpansMax, "spans are bounded");
  if (const auto body = decode_resolved(bytes)) require(body->verdicts.size() <= kSpansMax, "verdicts are bounded");
  if (const auto body = decode_refuse(bytes)) require(body->text.size() <= kTextBytesMax, "text is bounded");
  if (const auto text = decode_text(bytes)) {
    require(std::ranges::all_of(*text, [](char c) { return c >= ' ' && c <= '~'; }), "text can be shown");
  }
  decode_state(bytes);
  decode_message_head(bytes);
  if (const auto body = decode_recall(bytes)) {
    same(*body, bytes, "a recall is its bytes");
    require(body->first_open >= 1 && body->first_open <= body->id,
            "numbers begin with 1, and an open one is not later");
    require(body->id - body->first_open < kMessagesUnderWayMax, "only so many are open");
  }
  if (const auto head = decode_service_head(bytes)) {
    same(*head, bytes.first(kServiceHeadBytes), "a service message's head is its first bytes");
    require(head->first_open >= 1 && head->first_open <= head->id,
            "numbers begin with 1, and an open one is not later");
    require(head->id - head->first_open < kServicesUnderWayMax, "only so many are open");
  }
}

void check_datagram(Input bytes) {
  const auto datagram = decode_datagram(bytes);
  if (!datagram || datagram->head.version != kProtocolVersion) return;
  Bytes again = begin_datagram(datagram->head);
  require(again.size() + datagram->body.size() + kMacBytes == bytes.size(), "head, body and seal are all of it");
  require(datagram->head.endpoint.size() <= kEndpointBytesMax, "an endpoint is bounded");
  const Digest key{};
  again.insert(again.end(), datagram->body.begin(), datagram->body.end());
  seal(again, key);
  require(is_sealed(again, key), "what is sealed is sealed");
  again[again.size() / 2] ^= 1;
  require(!is_sealed(again, key), "and what was changed is not");
  check_body(datagram->body);
}

}  // namespace
}  // namespace crossrail::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace crossrail::fuzz;
  check_body({data, size});
  check_datagram({data, size});
  return 0;
}
