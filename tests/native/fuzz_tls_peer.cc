// Who stands between two honest ends of TLS, or in the place of one: garbage instead of a handshake, and records that
// are changed, cut, dropped, repeated and put in another order. The transport lives on; of what it places, every byte
// is one that the honest end has sealed, and all before it are in place, too.
#include <sys/socket.h>

#include <cstring>
#include <deque>

#include "fuzz_tcp_victim.h"
#include "transport/tcp/frames.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/tls_session.h"

namespace crossrail::fuzz {
namespace {

constexpr size_t kWrites = 32;
// Of the victim, which does not look at its sockets at each: until an answer is there, and when there may be none.
constexpr int kTurnsMax = 3000;
constexpr int kTurnsInVain = 64;
constexpr std::byte kUntouched{0x5a};
constexpr std::byte kWritten{0x77};
constexpr size_t kRecordHeadBytes = 5;

// An honest session whose bytes pass through the fuzzer's hands, both ways.
class Relay {
 public:
  explicit Relay(Victim* victim, const std::shared_ptr<TlsContext>& context) : victim_(victim), wire_(victim->dial()) {
    int pair[2];
    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0, "there are sockets");
    ours_ = Fd(pair[0]);
    hand_ = Fd(pair[1]);
    session_ = std::make_unique<TlsSession>(context, TlsSession::Side::kInitiator, ours_.get());
  }
  ~Relay() {
    hang_up(wire_);
    victim_->turn();
  }

  TlsSession& session() { return *session_; }
  Victim& victim() { return *victim_; }

  void send_on(Input bytes) {
    for (size_t sent = 0, tries = 0; sent < bytes.size() && tries < 64; ++tries) {
      const ssize_t put = send(wire_, bytes.data() + sent, bytes.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (put > 0) sent += static_cast<size_t>(put);
      victim_->turn();
      if (put < 0 && errno != EAGAIN) return;
    }
    victim_->turn();
  }
  // What our end has sealed since the last time.
  Bytes take() {
    session_->flush();
    return drain(hand_.get());
  }
  // What the victim has said is for our end, as it is.
  void take_answer() {
    victim_->turn();
    const Bytes said = drain(wire_);
    if (!said.empty()) send(hand_.get(), said.data(), said.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  }

 private:
  static Bytes drain(int fd) {
    Bytes bytes(64 << 10);
    const ssize_t got = recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
    bytes.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
    return bytes;
  }

  Victim* const victim_;
  const int wire_;
  Fd ours_;
  Fd hand_;
  std::unique_ptr<TlsSession> session_;
};

std::deque<Bytes> records_of(const Bytes& bytes) {
  std::deque<Bytes> records;
  for (size_t at = 0; at < bytes.size();) {
    const size_t rest = bytes.size() - at;
    require(rest >= kRecordHeadBytes, "our end seals whole records");
    const size_t size = kRecordHeadBytes + (size_t{bytes[at + 3]} << 8 | bytes[at + 4]);
    require(size <= rest, "our end seals whole records");
    records.emplace_back(bytes.begin() + static_cast<ptrdiff_t>(at), bytes.begin() + static_cast<ptrdiff_t>(at + size));
    at += size;
  }
  return records;
}

// Passes records on, as the input wants it. True: as they were.
bool meddle(Relay& relay, std::deque<Bytes> records, Choices& choices) {
  bool is_honest = true;
  for (size_t spared = records.empty() ? 0 : choices.byte() % records.size(); spared > 0; --spared) {
    relay.send_on(records.front());
    records.pop_front();
  }
  while (!records.empty()) {
    Bytes record = std::move(records.front());
    records.pop_front();
    switch (choices.byte() % 8) {
      case 1: {  // changed
        const Input changes = choices.chunk();
        for (size_t i = 0; i + 2 < changes.size(); i += 3) {
          const size_t at = (size_t{changes[i]} << 8 | changes[i + 1]) % record.size();
          record[at] ^= changes[i + 2];
          is_honest = is_honest && changes[i + 2] == 0;
        }
        relay.send_on(record);
        break;
      }
      case 2:  // lost
        is_honest = false;
        break;
      case 3:  // after the next one
        if (!records.empty()) {
          is_honest = false;
          records.insert(records.begin() + 1, std::move(record));
        } else {
          relay.send_on(record);
        }
        break;
      case 4:  // again
        is_honest = false;
        relay.send_on(record);
        relay.send_on(record);
        break;
      case 5: {  // something before it
        const Input more = choices.chunk();
        is_honest = is_honest && more.empty();
        relay.send_on(more);
        relay.send_on(record);
        break;
      }
      case 6: {  // in pieces, which is a network's right
        const size_t cut = choices.byte() % record.size();
        relay.send_on(Input(record).first(cut));
        relay.send_on(Input(record).subspan(cut));
        break;
      }
      default:
        relay.send_on(record);
    }
  }
  return is_honest;
}

void say(Relay& relay, const Bytes& message) {
  const iovec view{const_cast<uint8_t*>(message.data()), message.size()};
  require(relay.session().seal({&view, 1}) == static_cast<ssize_t>(message.size()), "our end seals");
}

// One message of the handshake, or nothing when the victim says none.
Bytes hear(Relay& relay) {
  Bytes bytes(kHandshakeBytesMax);
  const iovec view{bytes.data(), bytes.size()};
  for (int turns = 0; turns < kTurnsMax; ++turns) {
    relay.take_answer();
    const ssize_t got = relay.session().receive({&view, 1});
    if (got > 0) {
      bytes.resize(static_cast<size_t>(got));
      return bytes;
    }
  }
  return {};
}

// False: what the input did to it has ended it.
bool shake_hands(Relay& relay, uint64_t link_id, Choices& choices, bool meddles) {
  Choices none{{}};
  Choices& chosen = meddles ? choices : none;
  const Address& target = relay.victim().address();
  relay.send_on(encode(StartTls{target_tag(target.incarnation)}));
  TlsSession::Step step = relay.session().handshake();
  const bool is_honest = meddle(relay, records_of(relay.take()), chosen);
  for (int turns = 0; step == TlsSession::Step::kMore && turns < (is_honest ? kTurnsMax : kTurnsInVain); ++turns) {
    relay.take_answer();
    step = relay.session().handshake();
  }
  require(!is_honest || step == TlsSession::Step::kDone, "honest ends agree");
  if (!meddle(relay, records_of(relay.take()), chosen) || step != TlsSession::Step::kDone || !is_honest) return false;
  Hello hello;
  hello.target_tag = target_tag(target.incarnation);
  hello.link_id = link_id;
  hello.epoch = 1;
  hello.sender = target;
  for (size_t i = 0; i < 8; ++i) hello.sender.incarnation[i] = static_cast<uint8_t>(link_id >> 8 * i);
  hello.sender.name = "fuzzer";
  const Bytes said = encode(hello);
  say(relay, said);
  if (!meddle(relay, records_of(relay.take()), chosen)) return false;
  const auto challenge = decode_challenge(hear(relay));
  require(challenge.has_value(), "an honest hello is answered by a challenge");
  const Digest key = handshake_key("", target.incarnation);
  const Digest binding = relay.session().binding();
  say(relay, encode(Proof{initiator_proof(key, {said, challenge->nonce, binding})}));
  if (!meddle(relay, records_of(relay.take()), chosen)) return false;
  require(handshake_kind(hear(relay)) == HandshakeKind::kAccept, "an honest proof is accepted");
  return true;
}

// The write of one byte to its own place.
Bytes write_of(size_t index) {
  const WriteEntry entry{.offset = index, .length = 1, .wire_imm = 0};
  const WriteMeta meta{kRegionId};
  const FrameHeader header = header_of(FrameType::kWrite, 1, 1, object_bytes(meta), object_bytes(entry), 1);
  std::vector<std::byte> bytes;
  append_bytes(bytes, &header, sizeof header);
  append_bytes(bytes, &meta, sizeof meta);
  append_bytes(bytes, &entry, sizeof entry);
  bytes.push_back(kWritten);
  const auto* const begin = reinterpret_cast<const uint8_t*>(bytes.data());
  return {begin, begin + bytes.size()};
}

void check_region(Victim& victim, bool was_honest) {
  const auto region = victim.region();
  size_t written = 0;
  while (written < kWrites && region[written] == kWritten) ++written;
  require(std::all_of(region.begin() + static_cast<ptrdiff_t>(written), region.end(),
                      [](std::byte byte) { return byte == kUntouched; }),
          "what is placed was sealed, and comes in order");
  require(!was_honest || written == kWrites, "what is only cut arrives");
  victim.check_guards();
}

}  // namespace
}  // namespace crossrail::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace crossrail::fuzz;
  static const auto* const tls = new crossrail::tcp::TestTls;
  static auto* const victim = new Victim(tls);  // one for all inputs: it has to survive each of them
  static const auto context = tls->context();
  static uint64_t links = 0;
  Choices choices({data, size});
  const uint8_t how = choices.byte();
  Relay relay(victim, context);
  if (how % 4 == 0) {  // no TLS at all
    relay.send_on(encode(StartTls{target_tag(victim->address().incarnation)}));
    while (!choices.is_empty()) relay.send_on(choices.chunk());
    return 0;
  }
  if (!shake_hands(relay, ++links, choices, how % 4 == 1)) return 0;
  std::ranges::fill(victim->region(), kUntouched);
  for (size_t i = 0; i < kWrites; ++i) say(relay, write_of(i));
  const bool was_honest = meddle(relay, records_of(relay.take()), choices);
  const int turns_max = was_honest ? kTurnsMax : kTurnsInVain;
  for (int turns = 0; turns < turns_max && victim->region()[kWrites - 1] == kUntouched; ++turns) victim->turn();
  check_region(*victim, was_honest);
  return 0;
}
