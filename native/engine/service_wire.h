// The messages between engines, apart from their users' operations (WorkOp::kService). Little-endian, versioned,
// bounds-checked: they come from outside.
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
  kPing = 1,  // no body. That the engine has it is the answer: the transport tells the sender
  kQuestion,  // Question
  kVerdict    // Verdict
};

struct Ping {};

// To the peer of a checked operation, once its bytes are in place: is this the sum of yours? If so, count the
// immediate. The bytes are those of the pages offset + stride_bytes * pages[i], one after the other; a range is one
// page.
inline constexpr size_t kPagesPerQuestion = 960;
struct Question {
  uint64_t token = 0;  // the asker's
  uint64_t region_id = 0;
  uint64_t offset = 0;
  uint64_t page_bytes = 0;
  uint64_t stride_bytes = 0;
  uint64_t sum = 0;
  uint32_t imm = kNoImm;
  bool reads = false;           // of a read: no immediate
  std::vector<uint32_t> pages;  // 1..kPagesPerQuestion
};

// The answer. status: kDone (it is, and the immediate is counted), kChecksumMismatch, kRegionClosed,
// kRegionRevoked, kOutOfBounds, kAccessDenied, or kTransportFailed: too many questions at once.
struct Verdict {
  uint64_t token = 0;
  Status status = Status::kDone;
  uint64_t sum = 0;  // that was found
};

Bytes encode(const Ping& ping);
Bytes encode(const Question& question);
Bytes encode(const Verdict& verdict);

using ServiceMessage = std::variant<Ping, Question, Verdict>;
// Nothing: malformed, or of another version; *why says so, for people.
std::optional<ServiceMessage> decode_service(std::span<const uint8_t> bytes, std::string* why);

}  // namespace crossrail
