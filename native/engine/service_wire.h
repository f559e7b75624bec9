// Messages between engines that are not operations of their users (WorkOp::kService). Little-endian, versioned,
// bounds-checked: they are untrusted.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "transport/descriptor.h"
#include "transport/transport.h"

namespace crossrail {

inline constexpr uint8_t kServiceVersion = 2;

// version u8, kind u8, then the body.
enum class ServiceKind : uint8_t {
  kPing = 1,  // no body. Delivery is the answer: the transport reports it to the sender
  kQuestion,  // Question
  kVerdict    // Verdict
};

struct Ping {};

// To the peer of a checked operation, once its bytes are in place: does this checksum match your memory? If so, count
// the immediate. The bytes are those of the pages at offset + stride_bytes * pages[i], in this order; a contiguous
// range is a single page.
inline constexpr size_t kPagesPerQuestion = 960;
struct Question {
  uint64_t token = 0;  // chosen by the asker
  uint64_t region_id = 0;
  uint64_t offset = 0;
  uint64_t page_bytes = 0;
  uint64_t stride_bytes = 0;
  uint64_t sum = 0;
  uint32_t imm = kNoImm;
  bool reads = false;           // about a read: no immediate
  std::vector<uint32_t> pages;  // 1..kPagesPerQuestion
};

// The answer. status: kDone (it matches, and the immediate is counted), kChecksumMismatch, kRegionClosed,
// kRegionRevoked, kOutOfBounds, kAccessDenied, or kTransportFailed: too many questions at once.
struct Verdict {
  uint64_t token = 0;
  Status status = Status::kDone;
  uint64_t sum = 0;  // of the answerer's memory
};

Bytes encode(const Ping& ping);
Bytes encode(const Question& question);
Bytes encode(const Verdict& verdict);

using ServiceMessage = std::variant<Ping, Question, Verdict>;
// Nothing if malformed or of another version; *why then says so, for people.
std::optional<ServiceMessage> decode_service(std::span<const uint8_t> bytes, std::string* why);

}  // namespace crossrail
