// A peer of the tcp transport that holds the secret: after an honest handshake, frames of its own making, on a real
// socket. The transport lives on, checks every range, and nothing is written outside the region.
#include <sys/socket.h>

#include <cstring>

#include "fuzz_tcp_victim.h"
#include "transport/tcp/frames.h"
#include "transport/tcp/handshake.h"

namespace crossrail::fuzz {
namespace {

using namespace tcp;

// One connection, as an initiator.
class Stranger {
 public:
  explicit Stranger(Victim* victim) : victim_(victim), fd_(victim->dial()) {}
  ~Stranger() { hang_up(fd_); }

  void shake_hands(uint64_t link_id, bool is_bulk) {
    Hello hello;
    hello.target_tag = target_tag(victim_->address().incarnation);
    hello.link_id = link_id;
    hello.epoch = 1;
    hello.is_bulk = is_bulk;
    hello.sender = victim_->address();
    for (size_t i = 0; i < 8; ++i) hello.sender.incarnation[i] = static_cast<uint8_t>(link_id >> 8 * i);
    hello.sender.name = "fuzzer";
    const Bytes said = encode(hello);
    send_all(said);
    const auto challenge = decode_challenge(receive_message());
    require(challenge.has_value(), "an honest hello is answered by a challenge");
    const Digest key = handshake_key("", victim_->address().incarnation);
    send_all(encode(Proof{initiator_proof(key, {said, challenge->nonce, {}})}));
    require(handshake_kind(receive_message()) == HandshakeKind::kAccept, "an honest proof is accepted");
  }

  // What does not go at once does not go: the victim has stopped reading.
  void send_some(Input bytes) {
    size_t sent = 0;
    for (int tries = 0; sent < bytes.size() && tries < 64; ++tries) {
      const ssize_t n = send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n > 0) sent += static_cast<size_t>(n);
      victim_->turn();
      if (n < 0 && errno != EAGAIN) return;
      read_away();
    }
  }

 private:
  void send_all(Input bytes) {
    require(send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()), "it is sent");
  }
  Bytes receive_message() {
    Bytes bytes(kHandshakeBytesMax);
    size_t have = 0;
    size_t wanted = kHandshakeHeadBytes;
    for (int tries = 0; have < wanted && tries < 1'000'000; ++tries) {
      victim_->turn();
      const ssize_t n = recv(fd_, bytes.data() + have, wanted - have, MSG_DONTWAIT);
      if (n > 0) have += static_cast<size_t>(n);
      uint16_t version;
      if (have == kHandshakeHeadBytes) wanted = handshake_bytes(Input(bytes).first(have), &version).value_or(have);
    }
    bytes.resize(have);
    return bytes;
  }
  void read_away() {
    uint8_t sink[4096];
    while (recv(fd_, sink, sizeof sink, MSG_DONTWAIT) > 0) {
    }
  }

  Victim* const victim_;
  const int fd_;
};

// A frame: header fields from the input, or such that they fit what follows.
Bytes frame(Choices& choices) {
  FrameHeader header{};
  header.type = choices.byte();
  const uint8_t how = choices.byte();
  const Input given = choices.chunk();
  Bytes meta(given.begin(), given.end());
  const bool is_write = header.type == static_cast<uint8_t>(FrameType::kWrite);
  uint64_t payload = 0;
  if (is_write && (how & 1) == 0) {  // a table that fits its frame, for our region
    meta.resize(sizeof(WriteMeta) + std::max<size_t>(1, meta.size() / sizeof(WriteEntry)) * sizeof(WriteEntry));
    const uint64_t id = kRegionId;
    std::memcpy(meta.data(), &id, sizeof id);
    header.count = static_cast<uint16_t>((meta.size() - sizeof(WriteMeta)) / sizeof(WriteEntry));
    for (size_t i = 0; i < header.count; ++i) {
      WriteEntry entry;
      std::memcpy(&entry, meta.data() + sizeof(WriteMeta) + i * sizeof entry, sizeof entry);
      entry.length &= kHasImm | 0x1fff;
      if ((how & 2) == 0) entry.offset &= 0x1fff;
      std::memcpy(meta.data() + sizeof(WriteMeta) + i * sizeof entry, &entry, sizeof entry);
      payload += entry.length & ~kHasImm;
    }
    header.operations = static_cast<uint16_t>((how & 4) == 0 ? header.count : how);
  } else {
    header.count = choices.byte();
    header.operations = choices.byte() % 8;
    payload = (how & 8) == 0 ? 0 : choices.byte() * uint64_t{17};
  }
  header.meta_bytes = static_cast<uint16_t>(meta.size());
  header.payload_bytes = static_cast<uint32_t>(payload);
  // Damaged ones go no further than this sum, so most have it right.
  header.mark = mark_of(header);
  if ((how & 0xf0) != 0xf0) header.sum = head_sum(header, std::as_bytes(std::span(meta)));
  Bytes bytes(sizeof header);
  std::memcpy(bytes.data(), &header, sizeof header);
  bytes.insert(bytes.end(), meta.begin(), meta.end());
  bytes.resize(bytes.size() + std::min<uint64_t>(payload, 256 << 10), 0xab);
  return bytes;
}

}  // namespace
}  // namespace crossrail::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace crossrail::fuzz;
  static auto* const victim = new Victim;  // one for all inputs: it has to survive each of them
  static uint64_t links = 0;
  Choices choices({data, size});
  const uint8_t how = choices.byte();
  Stranger stranger(victim);
  stranger.shake_hands(++links, (how & 1) != 0);
  if ((how & 2) != 0) {
    stranger.send_some(choices.rest());
  } else {
    for (int frames = 0; frames < 32 && !choices.is_empty(); ++frames) stranger.send_some(frame(choices));
  }
  victim->check_guards();
  return 0;
}
