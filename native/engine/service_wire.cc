#include "engine/service_wire.h"

#include "util/codec.h"

namespace crossrail {

namespace {

constexpr size_t kQuestionHeadBytes = 2 + 6 * sizeof(uint64_t) + 2 * sizeof(uint32_t) + 1;
static_assert(kQuestionHeadBytes + kPagesPerQuestion * sizeof(uint32_t) <= kServiceBytesMax);

Writer begin(ServiceKind kind) {
  Writer writer;
  writer.put(kServiceVersion);
  writer.put(static_cast<uint8_t>(kind));
  return writer;
}

bool is_verdict(uint8_t status) {
  switch (static_cast<Status>(status)) {
    case Status::kDone:
    case Status::kChecksumMismatch:
    case Status::kRegionClosed:
    case Status::kRegionRevoked:
    case Status::kOutOfBounds:
    case Status::kAccessDenied:
    case Status::kTransportFailed:
      return true;
    case Status::kPending:
    case Status::kCancelled:
    case Status::kPeerLost:
    case Status::kMessageTooLong:
    case Status::kEngineClosed:
      return false;
  }
  return false;
}

std::optional<Question> decode_question(Reader& reader) {
  Question question;
  question.token = reader.get<uint64_t>();
  question.region_id = reader.get<uint64_t>();
  question.offset = reader.get<uint64_t>();
  question.page_bytes = reader.get<uint64_t>();
  question.stride_bytes = reader.get<uint64_t>();
  question.sum = reader.get<uint64_t>();
  question.imm = reader.get<uint32_t>();
  const auto reads = reader.get<uint8_t>();
  const auto count = reader.get<uint32_t>();
  if (!reader.ok() || count == 0 || count > kPagesPerQuestion || reads > 1) return std::nullopt;
  question.reads = reads == 1;
  if (question.imm != kNoImm && (question.imm > kImmMax || question.reads)) return std::nullopt;
  question.pages.resize(count);
  for (uint32_t& page : question.pages) page = reader.get<uint32_t>();
  return reader.finished() ? std::optional(std::move(question)) : std::nullopt;
}

std::optional<Verdict> decode_verdict(Reader& reader) {
  Verdict verdict;
  verdict.token = reader.get<uint64_t>();
  const auto status = reader.get<uint8_t>();
  verdict.sum = reader.get<uint64_t>();
  if (!reader.finished() || !is_verdict(status)) return std::nullopt;
  verdict.status = static_cast<Status>(status);
  return verdict;
}

}  // namespace

Bytes encode(const Ping&) { return std::move(begin(ServiceKind::kPing).bytes()); }

Bytes encode(const Question& question) {
  Writer writer = begin(ServiceKind::kQuestion);
  writer.put(question.token);
  writer.put(question.region_id);
  writer.put(question.offset);
  writer.put(question.page_bytes);
  writer.put(question.stride_bytes);
  writer.put(question.sum);
  writer.put(question.imm);
  writer.put(static_cast<uint8_t>(question.reads ? 1 : 0));
  writer.put(static_cast<uint32_t>(question.pages.size()));
  for (const uint32_t page : question.pages) writer.put(page);
  return std::move(writer.bytes());
}

Bytes encode(const Verdict& verdict) {
  Writer writer = begin(ServiceKind::kVerdict);
  writer.put(verdict.token);
  writer.put(static_cast<uint8_t>(verdict.status));
  writer.put(verdict.sum);
  return std::move(writer.bytes());
}

std::optional<ServiceMessage> decode_service(std::span<const uint8_t> bytes, std::string* why) {
  Reader reader(bytes);
  const auto version = reader.get<uint8_t>();
  const auto kind = reader.get<uint8_t>();
  if (reader.ok() && version != kServiceVersion) {
    *why = "a service message of version " + std::to_string(version) + ", we speak " + std::to_string(kServiceVersion);
    return std::nullopt;
  }
  std::optional<ServiceMessage> message;
  switch (static_cast<ServiceKind>(kind)) {
    case ServiceKind::kPing:
      if (reader.finished()) message = Ping{};
      break;
    case ServiceKind::kQuestion:
      if (auto question = decode_question(reader)) message = std::move(*question);
      break;
    case ServiceKind::kVerdict:
      if (const auto verdict = decode_verdict(reader)) message = *verdict;
      break;
  }
  if (!message) *why = "a malformed service message of kind " + std::to_string(kind);
  return message;
}

}  // namespace crossrail
