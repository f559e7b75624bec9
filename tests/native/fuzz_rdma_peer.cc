// A peer of the rdma layer that holds the secret and says what it likes: sealed datagrams, fragments on its path,
// immediates, broken paths. The layer lives on, and everything it accepted is retired.
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>

#include "fuzz.h"
#include "transport/identity.h"
#include "transport/rdma/rdma_transport.h"
#include "util/wake_event.h"

namespace crossrail::fuzz {
namespace {

using namespace rdma;

class Port;

class LoosePath final : public NicPath {
 public:
  explicit LoosePath(Port* port) : port_(port) {}
  ~LoosePath() override;
  std::span<const uint8_t> offer() const override { return offer_; }
  void connect(std::span<const uint8_t>, std::span<const uint8_t>) override {}
  uint32_t post(std::span<const NicWork> works) override;
  bool send(std::span<const uint8_t>, std::span<const uint8_t>) override { return !is_broken; }
  bool is_sent() const override { return true; }
  void break_off(const std::string&) override;

  bool is_broken = false;
  std::deque<uint64_t> works;  // cookies

 private:
  Port* const port_;
  const std::array<uint8_t, 2> offer_{1, 2};
};

class LooseRegistration final : public Registration {
 public:
  void revoke() override {}
  bool is_quiet() const override { return true; }
};

// A NIC whose other end is the input.
class Port final : public Nic {
 public:
  const std::string& name() const override { return name_; }
  const std::string& description() const override { return name_; }
  uint32_t speed_mbps() const override { return 10'000; }
  const std::string& fabric() const override { return fabric_; }
  std::span<const uint8_t> endpoint() const override { return endpoint_; }
  const NicLimits& limits() const override { return limits_; }
  int nearness(std::span<const uint8_t>) const override { return 2; }
  std::unique_ptr<Registration> register_memory(std::byte*, uint64_t, Access) override {
    return std::make_unique<LooseRegistration>();
  }
  bool is_port_up() const override { return true; }
  void send_datagram(std::span<const uint8_t>, std::span<const uint8_t> bytes) override {
    sent.assign(bytes.begin(), bytes.end());
    if (const auto datagram = decode_datagram(sent); datagram && datagram->head.kind == DatagramKind::kAccept) {
      if (const auto body = decode_path(datagram->body)) token = body->token;
    }
  }
  std::unique_ptr<NicPath> make_path() override {
    auto made = std::make_unique<LoosePath>(this);
    path = made.get();
    return made;
  }
  uint32_t poll(NicEvents& events) override {
    uint32_t told = 0;
    for (auto& event : std::exchange(events_, {})) {
      event(events);
      ++told;
    }
    return told;
  }
  void arm() override {}
  bool has_arrivals() override { return !events_.empty(); }
  const std::vector<int>& fds() const override { return fds_; }
  void hush() override {}
  void abandon_after_fork() override {}

  void tell(std::function<void(NicEvents&)> event) { events_.push_back(std::move(event)); }

  LoosePath* path = nullptr;  // the latest that lives
  std::optional<uint64_t> token;
  Bytes sent;

 private:
  const std::string name_ = "port";
  const std::string fabric_;
  const std::array<uint8_t, 4> endpoint_{1, 2, 3, 4};
  const NicLimits limits_{
      .work_bytes_max = 1 << 20, .path_works_max = 8, .ordered_paths = true, .names_imm_paths = true};
  const std::vector<int> fds_;
  std::vector<std::function<void(NicEvents&)>> events_;
};

LoosePath::~LoosePath() {
  if (port_->path == this) port_->path = nullptr;
}

uint32_t LoosePath::post(std::span<const NicWork> posted) {
  if (is_broken) return 0;
  for (const NicWork& work : posted) works.push_back(work.cookie);
  return static_cast<uint32_t>(posted.size());
}

void LoosePath::break_off(const std::string&) {
  if (std::exchange(is_broken, true)) return;
  port_->tell([this](NicEvents& events) {
    for (const uint64_t cookie : std::exchange(works, {})) {
      events.on_work_failed(*this, cookie, NicFault::kFlushed, 0, "flushed");
    }
    events.on_path_flushed(*this);
  });
}

class Peer {
 public:
  Peer() {
    TransportOptions options;
    options.identity = make_identity("victim", transport_bit(TransportKind::kVerbs), 1);
    options.identity.incarnation.fill(0x80);
    options.message_bytes_max = 64 << 10;
    options.connect_timeout_ns = options.peer_timeout_ns = 1'000'000'000;
    auto port = std::make_unique<Port>();
    port_ = port.get();
    std::vector<std::unique_ptr<Nic>> nics;
    nics.push_back(std::move(port));
    layer_ = std::make_unique<RdmaTransport>(TransportKind::kVerbs, options, std::move(nics), &sink_);
    victim_ = options.identity.incarnation;
    own_.fill(0x40);  // smaller: we lead
    layer_->complete_address(layer_->address());
  }
  ~Peer() {
    layer_->close();
    require(sink_.outstanding == 0, "everything is retired at the end");
  }

  // The beginning of every input: a path, and works of the victim's on it.
  void meet() {
    Address address = layer_->address();
    address.incarnation = own_;
    address.name = "fuzzer";
    link_ = layer_->connect(std::make_shared<const Address>(address));
    Bytes hello;
    put(hello, PathBody{{0, 0}, 1, 77, {9}, 0});
    datagram(DatagramKind::kHello, hello);
    turn();
    if (!port_->token) return;
    Bytes state;
    put(state, StateBody{1, true, false});
    fragment(static_cast<uint8_t>(FragmentKind::kState), state);
    turn();
    post();
  }

  void act(Choices& choices) {
    switch (choices.byte() % 8) {
      case 0:
        fragment(choices.byte() % 11, choices.chunk());
        break;
      case 1:
        datagram(static_cast<DatagramKind>(choices.byte() % 7 + 1), choices.chunk());
        break;
      case 2:
        raw(choices.chunk());
        break;
      case 3:
        if (LoosePath* const path = port_->path; path != nullptr && port_->token && !path->is_broken) {
          const uint32_t imm = choices.byte() * 0x01010101u;
          port_->tell([path, imm](NicEvents& events) { events.on_imm(path, imm); });
        }
        break;
      case 4:
        if (LoosePath* const path = port_->path; path != nullptr && port_->token && !path->is_broken) {
          port_->tell([path](NicEvents& events) { events.on_path_broken(*path, false, "the fuzzer"); });
        }
        break;
      case 5:
        done(choices.byte());
        break;
      case 6:
        post();
        break;
      case 7: {  // the next epoch
        Bytes hello;
        put(hello, PathBody{{0, 0}, ++epoch_, 77, {9}, 0});
        datagram(DatagramKind::kHello, hello);
        break;
      }
    }
    turn();
  }

 private:
  void turn() {
    for (int i = 0; i < 3; ++i) layer_->poll();
    if (sink_.downs > 0) link_ = nullptr;
  }

  void post() {
    if (link_ == nullptr || sink_.ups == 0) return;
    WorkRequest work;
    work.has_imm = true;
    work.wire_imm = 7;
    work.context = this;
    uint32_t completed = 0;
    ++sink_.outstanding;
    sink_.outstanding -= 1 - layer_->post(*link_, kAnyRail, {&work, 1}, &completed);
    sink_.outstanding -= completed;
  }

  void done(uint8_t how) {
    LoosePath* const path = port_->path;
    if (path == nullptr || path->works.empty() || path->is_broken) return;
    const uint64_t cookie = path->works.front();
    path->works.pop_front();
    port_->tell([path, cookie, how](NicEvents& events) {
      if (how % 4 == 0) {
        events.on_work_failed(*path, cookie, static_cast<NicFault>(how / 4 % 4), 1, "the fuzzer");
      } else {
        events.on_work_done(*path, cookie, false);
      }
    });
  }

  void fragment(uint8_t kind, Input body) {
    if (!port_->token || port_->path == nullptr || port_->path->is_broken) return;
    Bytes bytes = begin_fragment(*port_->token, static_cast<FragmentKind>(kind));
    bytes.insert(bytes.end(), body.begin(), body.end());
    port_->tell([path = port_->path, bytes](NicEvents& events) { events.on_fragment(path, bytes); });
  }

  void datagram(DatagramKind kind, Input body) {
    DatagramHead head;
    head.kind = kind;
    head.has_link = true;
    head.nonce = 5;
    head.target_tag = target_tag(victim_);
    head.sender = own_;
    head.sender_session = 1;
    head.endpoint = {4, 3, 2, 1};
    Bytes bytes = begin_datagram(head);
    bytes.insert(bytes.end(), body.begin(), body.begin() + std::min<ptrdiff_t>(body.size(), 800));
    seal(bytes, session_key("", own_, victim_));
    raw(bytes);
  }

  void raw(Input input) {
    const Bytes bytes(input.begin(), input.end());
    port_->tell([bytes](NicEvents& events) { events.on_datagram(bytes); });
  }

  BookSink sink_;
  Port* port_ = nullptr;
  std::unique_ptr<RdmaTransport> layer_;
  Link* link_ = nullptr;
  Incarnation victim_{};
  Incarnation own_{};
  uint32_t epoch_ = 1;
};

}  // namespace
}  // namespace crossrail::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace crossrail::fuzz;
  Choices choices({data, size});
  Peer peer;
  peer.meet();
  for (int step = 0; step < 64 && !choices.is_empty(); ++step) peer.act(choices);
  return 0;
}
