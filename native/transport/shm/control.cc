#include "transport/shm/control.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "util/clock.h"
#include "util/codec.h"
#include "util/errors.h"

namespace crossrail::shm {

namespace {

constexpr uint64_t kListenerToken = 1;
constexpr uint64_t kCommandToken = 2;
constexpr size_t kPacketBytesMax = 2048;
constexpr size_t kFdsMax = 4;
constexpr size_t kOutboxMax = 4096;    // packets queued for a peer that does not read; then it is cut off
constexpr size_t kStrangersMax = 128;  // accepted connections that have not said hello yet
constexpr int64_t kHelloTimeoutNs = 5'000'000'000;
constexpr uint16_t kProtocolVersion = 2;

enum PacketType : uint8_t { kHello = 1, kWelcome, kRefuse, kImport, kImported, kRegionGone, kPing, kPong, kGoodbye };

// A value that only this process has; survives fork, so it is compared together with the pid.
uint64_t process_token() {
  static const int anchor = 0;
  static const uint64_t token = static_cast<uint64_t>(now_ns()) ^ reinterpret_cast<uint64_t>(&anchor) << 16;
  return token;
}

sockaddr_un socket_address(const Incarnation& incarnation, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "crossrail." + to_hex(incarnation);
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // leading zero: abstract
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// What a peer sent of its home. Throws UsageError or TransportError.
std::unique_ptr<PeerHome> open_home(Fd map, Fd bell) {
  auto home = std::make_unique<PeerHome>();
  home->map = MemoryMap::map(std::move(map), sizeof(HomeSegment));
  home->segment = reinterpret_cast<HomeSegment*>(home->map->data());
  if (home->segment->magic != kLayoutMagic) throw UsageError("shared memory is not crossrail's");
  home->bell = WakeEvent::adopt(std::move(bell));
  return home;
}

}  // namespace

// One socket. Lifecycle: 1. strangers have accepted = true and no link yet; initiators are connecting. 2. up. 3. lost;
// swept at the end of the loop turn.
struct Control::Connection {
  uint64_t token = 0;
  uint64_t link_id = 0;  // ours when we initiated, made up by us when accepted
  bool accepted = false;
  bool up = false;
  bool lost = false;
  bool connected = false;  // connect(2) went through
  bool same_process = false;
  bool orderly = false;  // it said goodbye
  uint32_t pid = 0;
  int64_t deadline_ns = 0;
  Fd socket;
  Fd process;  // pidfd: sees death even while a forked child holds the socket open
  std::string peer_name = "?";
  std::shared_ptr<const Address> target;  // initiator only
  std::shared_ptr<MemoryMap> segment;     // initiator only
  uint32_t rail_count = 0;
  struct Packet {
    std::vector<uint8_t> bytes;
    std::vector<Fd> fds;
  };
  std::deque<Packet> outbox;
};

Control::Control(const Address& address, std::shared_ptr<MemoryMap> home, const WakeEvent* bell, RegionTable* regions,
                 int64_t connect_timeout_ns, Transport* waker)
    : address_(address),
      address_bytes_(address.encode()),
      home_(std::move(home)),
      bell_(bell),
      regions_(regions),
      connect_timeout_ns_(connect_timeout_ns),
      waker_(waker) {
  process_token();
  listener_ = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener_) throw_errno("socket", "cannot make a unix socket");
  socklen_t length = 0;
  const sockaddr_un name = socket_address(address_.incarnation, &length);
  if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0)
    throw_errno("bind", "cannot name the unix socket");
  if (listen(listener_.get(), 512) != 0) throw_errno("listen", "cannot listen on the unix socket");
  epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  command_event_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_ || !command_event_) throw_errno("epoll_create1", "cannot watch sockets", "raise the limit on open files");
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kListenerToken}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event);
  event.data.u64 = kCommandToken;
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, command_event_.get(), &event);
  thread_ = std::thread([this] { run(); });
}

Control::~Control() { stop(); }

// --- called by others ---

void Control::submit(Command command) {
  std::lock_guard lock(mutex_);  // also over the write: stop() closes the descriptor
  if (stopped_) return;
  commands_.push_back(std::move(command));
  const uint64_t one = 1;
  // An eventfd write fails only when 2^64 - 2 wake-ups are pending.
  [[maybe_unused]] const ssize_t written = write(command_event_.get(), &one, sizeof one);
}

void Control::connect(uint64_t link_id, const std::shared_ptr<const Address>& address,
                      std::shared_ptr<MemoryMap> segment, uint32_t rail_count) {
  submit({.kind = Command::Kind::kConnect,
          .link_id = link_id,
          .address = address,
          .segment = std::move(segment),
          .rail_count = rail_count});
}
void Control::import_region(uint64_t link_id, uint64_t region_id) {
  submit({.kind = Command::Kind::kImport, .link_id = link_id, .region_id = region_id});
}
void Control::ping(uint64_t link_id) { submit({.kind = Command::Kind::kPing, .link_id = link_id}); }
void Control::drop(uint64_t link_id) { submit({.kind = Command::Kind::kDrop, .link_id = link_id}); }
void Control::region_closed(uint64_t region_id) {
  submit({.kind = Command::Kind::kRegionClosed, .region_id = region_id});
}

std::vector<ControlEvent> Control::take_events() {
  std::lock_guard lock(mutex_);
  has_events_.store(false, std::memory_order_relaxed);
  return std::exchange(events_, {});
}

void Control::stop() {
  if (!thread_.joinable()) return;
  submit({.kind = Command::Kind::kStop});
  thread_.join();
  std::lock_guard lock(mutex_);
  stopped_ = true;
  listener_.reset();
  epoll_.reset();
  command_event_.reset();
}

// The thread is not in the child: it can be neither joined nor detached, so it is leaked. The child holds copies of the
// parent's sockets until it ends or execs; peers see the parent's death by its pidfd all the same.
void Control::abandon_after_fork() {
  new std::thread(std::move(thread_));
  listener_.reset();
}

// --- control thread ---

void Control::emit(ControlEvent event) {
  {
    std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    has_events_.store(true, std::memory_order_release);
  }
  waker_->wake();
}

void Control::run() {
  pthread_setname_np(pthread_self(), "crossrail-ctl");
  epoll_event ready[64];
  while (!stopping_) {
    const int count = epoll_wait(epoll_.get(), ready, 64, next_timeout_ms());
    for (int i = 0; i < count; ++i) {
      const uint64_t token = ready[i].data.u64;
      if (token == kListenerToken) {
        accept_all();
      } else if (token == kCommandToken) {
        handle_commands();
      } else if (auto found = connections_.find(token & ~uint64_t{1}); found != connections_.end()) {
        Connection& connection = *found->second;
        if ((token & 1) != 0) {  // its pidfd
          // What it sent before it died is still in the socket.
          if (!connection.lost) on_readable(connection);
          if (!connection.lost) lose(connection, "process " + std::to_string(connection.pid) + " exited");
        } else {
          if ((ready[i].events & EPOLLOUT) != 0) flush(connection);
          if (!connection.lost && (ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) on_readable(connection);
        }
      }
    }
    check_timeouts();
    sweep();
  }
  for (auto& [token, connection] : connections_) {
    if (connection->up) send(*connection, kGoodbye, {});
  }
  connections_.clear();
}

int Control::next_timeout_ms() const {
  for (const auto& [token, connection] : connections_) {
    if (!connection->up) return 20;
  }
  return -1;
}

void Control::handle_commands() {
  uint64_t count;
  [[maybe_unused]] const ssize_t got = read(command_event_.get(), &count, sizeof count);
  std::deque<Command> commands;
  {
    std::lock_guard lock(mutex_);
    commands.swap(commands_);
  }
  for (Command& command : commands) handle_command(command);
}

void Control::handle_command(Command& command) {
  Writer body;
  body.put(command.region_id);
  switch (command.kind) {
    case Command::Kind::kConnect: {
      Connection& connection = add_connection(Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)));
      connection.link_id = command.link_id;
      connection.target = command.address;
      connection.peer_name = command.address->name;
      connection.segment = std::move(command.segment);
      connection.rail_count = command.rail_count;
      connection.deadline_ns = now_ns() + connect_timeout_ns_;
      token_of_link_[command.link_id] = connection.token;
      if (!connection.socket) {
        lose(connection, std::string("cannot make a socket: ") + std::strerror(errno));
      } else {
        start_connect(connection);
      }
      return;
    }
    case Command::Kind::kImport:
      if (Connection* connection = find(command.link_id)) send(*connection, kImport, body.bytes());
      return;
    case Command::Kind::kPing:
      if (Connection* connection = find(command.link_id)) send(*connection, kPing, {});
      return;
    case Command::Kind::kDrop:
      if (Connection* connection = find(command.link_id)) {
        if (connection->up) send(*connection, kGoodbye, {});
        connection->lost = true;  // silently: the asker knows
      }
      return;
    case Command::Kind::kRegionClosed:
      for (auto& [token, connection] : connections_) {
        if (connection->accepted && connection->up) send(*connection, kRegionGone, body.bytes());
      }
      return;
    case Command::Kind::kStop:
      stopping_ = true;
      return;
  }
}

Control::Connection& Control::add_connection(Fd fd) {
  auto connection = std::make_unique<Connection>();
  connection->token = next_token_;
  next_token_ += 2;  // the odd one is its pidfd
  connection->socket = std::move(fd);
  Connection& added = *connection;
  connections_[added.token] = std::move(connection);
  return added;
}

Control::Connection* Control::find(uint64_t link_id) {
  const auto found = token_of_link_.find(link_id);
  if (found == token_of_link_.end()) return nullptr;
  const auto connection = connections_.find(found->second);
  return connection == connections_.end() || connection->second->lost ? nullptr : connection->second.get();
}

void Control::start_connect(Connection& connection) {
  socklen_t length = 0;
  const sockaddr_un name = socket_address(connection.target->incarnation, &length);
  if (::connect(connection.socket.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0) {
    if (errno == EAGAIN || errno == EINTR) return;  // its backlog is full: check_timeouts tries again
    lose(connection, errno == ECONNREFUSED
                         ? "no engine of this incarnation is running; it was closed, killed or restarted"
                         : std::string("connect: ") + std::strerror(errno));
    return;
  }
  connection.connected = true;
  epoll_event event{.events = EPOLLIN, .data = {.u64 = connection.token}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection.socket.get(), &event);
  watch_process(connection);
  Writer body;
  body.put(kProtocolVersion);
  body.put(kLayoutVersion);
  body.put(process_token());
  body.put(static_cast<uint8_t>(connection.rail_count));
  body.put_bytes(address_bytes_);
  const int fds[] = {home_->fd(), bell_->fd(), connection.segment->fd()};
  send(connection, kHello, body.bytes(), fds);
}

// Learns the peer's pid and gets a pidfd. Without one (old kernel, other pid namespace) the socket alone tells of death.
void Control::watch_process(Connection& connection) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (getsockopt(connection.socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return;
  connection.pid = static_cast<uint32_t>(credentials.pid);
  if (credentials.pid <= 0 || credentials.pid == getpid()) return;
#ifdef SYS_pidfd_open
  connection.process = Fd(static_cast<int>(syscall(SYS_pidfd_open, credentials.pid, 0)));
  if (!connection.process) return;
  epoll_event event{.events = EPOLLIN, .data = {.u64 = connection.token | 1}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection.process.get(), &event);
#endif
}

void Control::accept_all() {
  for (;;) {
    Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      if (errno == EMFILE || errno == ENFILE) {
        // Out of descriptors: leave the backlog alone for a moment instead of spinning on it.
        emit({.kind = ControlEvent::Kind::kProtocolError,
              .text = "out of file descriptors: cannot accept peers; raise ulimit -n"});
        poll(nullptr, 0, 50);
      }
      return;
    }
    ucred credentials{};
    socklen_t length = sizeof credentials;
    getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length);
    if (credentials.uid != geteuid() && credentials.uid != 0 && geteuid() != 0) {
      emit({.kind = ControlEvent::Kind::kProtocolError,
            .text = "refused a connection of user " + std::to_string(credentials.uid)});
      continue;
    }
    make_room_for_stranger();
    Connection& connection = add_connection(std::move(fd));
    connection.accepted = true;
    connection.connected = true;
    connection.link_id = connection.token;
    connection.deadline_ns = now_ns() + kHelloTimeoutNs;
    epoll_event event{.events = EPOLLIN, .data = {.u64 = connection.token}};
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection.socket.get(), &event);
    watch_process(connection);
  }
}

// Who has said nothing for longest goes: sockets that only occupy places must not keep peers out.
void Control::make_room_for_stranger() {
  size_t strangers = 0;
  Connection* oldest = nullptr;
  for (auto& [token, connection] : connections_) {  // in the order they came
    if (!connection->accepted || connection->up || connection->lost) continue;
    if (strangers++ == 0) oldest = connection.get();
  }
  if (strangers >= kStrangersMax) lose(*oldest, "too many connections that say nothing");
}

void Control::on_readable(Connection& connection) {
  for (int round = 0; round < 64 && !connection.lost; ++round) {
    uint8_t bytes[kPacketBytesMax];
    alignas(cmsghdr) char ancillary[CMSG_SPACE(sizeof(int) * kFdsMax)];
    iovec vector{.iov_base = bytes, .iov_len = sizeof bytes};
    msghdr header{};
    header.msg_iov = &vector;
    header.msg_iovlen = 1;
    header.msg_control = ancillary;
    header.msg_controllen = sizeof ancillary;
    const ssize_t got = recvmsg(connection.socket.get(), &header, MSG_CMSG_CLOEXEC);
    if (got < 0) {
      if (errno == EAGAIN || errno == EINTR) return;
      lose(connection, std::string("connection broke: ") + std::strerror(errno));
      return;
    }
    std::vector<Fd> fds;
    for (cmsghdr* item = CMSG_FIRSTHDR(&header); item != nullptr; item = CMSG_NXTHDR(&header, item)) {
      if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
      const size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(item) + i * sizeof(int), sizeof fd);
        fds.emplace_back(fd);
      }
    }
    if (got == 0) {
      lose(connection, "process " + std::to_string(connection.pid) + " exited or closed the connection");
      return;
    }
    if ((header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
      emit({.kind = ControlEvent::Kind::kProtocolError, .text = "oversized packet from " + connection.peer_name});
      lose(connection, "it sent an oversized packet");
      return;
    }
    on_message(connection, {bytes, static_cast<size_t>(got)}, std::move(fds));
  }
}

void Control::on_message(Connection& connection, std::span<const uint8_t> bytes, std::vector<Fd> fds) {
  const uint8_t type = bytes[0];
  const auto body = bytes.subspan(1);
  Reader reader(body);
  try {
    if (connection.accepted && !connection.up) {
      if (type != kHello) throw UsageError("first packet is not a hello");
      on_hello(connection, body, std::move(fds));
      return;
    }
    switch (type) {
      case kWelcome:
        on_welcome(connection, body, std::move(fds));
        return;
      case kRefuse:
        lose(connection, "it refused us: " + reader.get_text());
        return;
      case kImport:
        on_import(connection, body);
        return;
      case kImported:
        on_imported(connection, body, std::move(fds));
        return;
      case kRegionGone:
        emit({.kind = ControlEvent::Kind::kRegionClosed,
              .link_id = connection.link_id,
              .region_id = reader.get<uint64_t>()});
        return;
      case kPing:
        send(connection, kPong, {});
        return;
      case kPong:
        emit({.kind = ControlEvent::Kind::kPong, .link_id = connection.link_id});
        return;
      case kGoodbye:
        connection.orderly = true;
        lose(connection, "the engine was closed");
        return;
      default:  // a byte from outside, not an enum
        throw UsageError("packet of unknown type " + std::to_string(type));
    }
  } catch (const std::exception& error) {
    emit({.kind = ControlEvent::Kind::kProtocolError, .text = connection.peer_name + ": " + error.what()});
    Writer refusal;
    refusal.put_text(std::string_view(error.what()).substr(0, 255));
    send(connection, kRefuse, refusal.bytes());
    lose(connection, std::string("protocol error: ") + error.what());
  }
}

void Control::on_hello(Connection& connection, std::span<const uint8_t> body, std::vector<Fd> fds) {
  Reader reader(body);
  const auto protocol = reader.get<uint16_t>();
  const auto layout = reader.get<uint32_t>();
  reader.get<uint64_t>();  // process token: only the welcome's is used
  const uint32_t rails = reader.get<uint8_t>();
  if (!reader.ok()) throw UsageError("hello is too short");
  if (protocol != kProtocolVersion || layout != kLayoutVersion) {
    throw UsageError("it speaks shm protocol " + std::to_string(protocol) + "." + std::to_string(layout) +
                     ", we speak " + std::to_string(kProtocolVersion) + "." + std::to_string(kLayoutVersion) +
                     "; use the same crossrail release on both sides");
  }
  if (rails < 1 || rails > kRailsMax) throw UsageError("hello names " + std::to_string(rails) + " rails");
  auto peer = std::make_shared<const Address>(Address::decode(reader.rest()));
  if (fds.size() != 3) throw UsageError("hello carries " + std::to_string(fds.size()) + " descriptors, 3 expected");
  auto home = open_home(std::move(fds[0]), std::move(fds[1]));
  auto segment = MemoryMap::map(std::move(fds[2]), link_segment_bytes(rails));
  if (reinterpret_cast<const LinkSegment*>(segment->data())->magic != kLayoutMagic)
    throw UsageError("shared memory is not crossrail's");
  connection.peer_name = peer->name;
  connection.up = true;
  regions_->add_toucher(connection.link_id, segment);  // until the holder has handled kInDown
  emit({.kind = ControlEvent::Kind::kInUp,
        .link_id = connection.link_id,
        .peer = peer,
        .home = std::move(home),
        .segment = segment,
        .rail_count = rails,
        .pid = connection.pid});
  Writer welcome;
  welcome.put(process_token());
  const int out[] = {home_->fd(), bell_->fd()};
  send(connection, kWelcome, welcome.bytes(), out);
}

void Control::on_welcome(Connection& connection, std::span<const uint8_t> body, std::vector<Fd> fds) {
  Reader reader(body);
  const auto token = reader.get<uint64_t>();
  if (connection.accepted || connection.up || !reader.finished() || fds.size() != 2)
    throw UsageError("unexpected welcome");
  auto home = open_home(std::move(fds[0]), std::move(fds[1]));
  connection.up = true;
  connection.same_process = token == process_token() && connection.pid == static_cast<uint32_t>(getpid());
  emit({.kind = ControlEvent::Kind::kOutUp,
        .link_id = connection.link_id,
        .home = std::move(home),
        .pid = connection.pid,
        .same_process = connection.same_process});
}

void Control::on_import(Connection& connection, std::span<const uint8_t> body) {
  Reader reader(body);
  const auto region_id = reader.get<uint64_t>();
  if (!reader.finished()) throw UsageError("malformed import");
  const RegionFacts facts = regions_->facts(region_id);
  Writer reply;
  reply.put(region_id);
  reply.put(static_cast<uint8_t>(facts.status));
  reply.put(static_cast<uint8_t>(facts.access));
  reply.put(facts.base);
  reply.put(facts.length_bytes);
  reply.put(facts.map_offset);
  if (facts.map) {
    const int fds[] = {facts.map->fd()};
    send(connection, kImported, reply.bytes(), fds);
  } else {
    send(connection, kImported, reply.bytes());
  }
}

void Control::on_imported(Connection& connection, std::span<const uint8_t> body, std::vector<Fd> fds) {
  Reader reader(body);
  ControlEvent event{.kind = ControlEvent::Kind::kImported, .link_id = connection.link_id};
  event.region_id = reader.get<uint64_t>();
  const auto status = reader.get<uint8_t>();
  event.facts.access = static_cast<Access>(reader.get<uint8_t>());
  event.facts.base = reader.get<uint64_t>();
  event.facts.length_bytes = reader.get<uint64_t>();
  event.facts.map_offset = reader.get<uint64_t>();
  if (!reader.finished() || connection.accepted) throw UsageError("malformed import reply");
  event.facts.status = status == static_cast<uint8_t>(Status::kDone) ? Status::kDone : Status::kRegionClosed;
  if (event.facts.status == Status::kDone && !fds.empty()) {
    const uint64_t end = event.facts.map_offset + event.facts.length_bytes;
    if (end < event.facts.length_bytes) throw UsageError("import reply with a range that wraps");
    try {
      event.facts.map = MemoryMap::map(std::move(fds[0]), end);
    } catch (const TransportError& error) {
      event.facts.status = Status::kTransportFailed;  // this region only: the peer is fine
      event.text = error.what();
    }
  }
  emit(std::move(event));
}

void Control::send(Connection& connection, uint8_t type, std::span<const uint8_t> body, std::span<const int> fds) {
  if (connection.lost) return;
  if (connection.outbox.size() >= kOutboxMax) {
    lose(connection, "it does not read its control socket");
    return;
  }
  Connection::Packet packet;
  packet.bytes.push_back(type);
  packet.bytes.insert(packet.bytes.end(), body.begin(), body.end());
  for (const int fd : fds) packet.fds.emplace_back(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  connection.outbox.push_back(std::move(packet));
  flush(connection);
}

void Control::flush(Connection& connection) {
  while (!connection.outbox.empty() && !connection.lost) {
    Connection::Packet& packet = connection.outbox.front();
    iovec vector{.iov_base = packet.bytes.data(), .iov_len = packet.bytes.size()};
    alignas(cmsghdr) char ancillary[CMSG_SPACE(sizeof(int) * kFdsMax)] = {};
    msghdr header{};
    header.msg_iov = &vector;
    header.msg_iovlen = 1;
    if (!packet.fds.empty()) {
      header.msg_control = ancillary;
      header.msg_controllen = CMSG_SPACE(sizeof(int) * packet.fds.size());
      cmsghdr* item = CMSG_FIRSTHDR(&header);
      item->cmsg_level = SOL_SOCKET;
      item->cmsg_type = SCM_RIGHTS;
      item->cmsg_len = CMSG_LEN(sizeof(int) * packet.fds.size());
      for (size_t i = 0; i < packet.fds.size(); ++i) {
        const int fd = packet.fds[i].get();
        std::memcpy(CMSG_DATA(item) + i * sizeof(int), &fd, sizeof fd);
      }
    }
    if (sendmsg(connection.socket.get(), &header, MSG_NOSIGNAL) < 0) {
      if (errno == EAGAIN || errno == EINTR) break;
      // A peer that closed first may have left us a reason: let the read side find it.
      if (errno == EPIPE || errno == ECONNRESET) {
        connection.outbox.clear();
        return;
      }
      lose(connection, std::string("cannot send: ") + std::strerror(errno));
      return;
    }
    connection.outbox.pop_front();
  }
  epoll_event event{.events = EPOLLIN, .data = {.u64 = connection.token}};
  if (!connection.outbox.empty()) event.events |= EPOLLOUT;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.socket.get(), &event);
}

void Control::lose(Connection& connection, const std::string& reason) {
  if (connection.lost) return;
  connection.lost = true;
  if (!connection.accepted) {
    emit({.kind = ControlEvent::Kind::kOutDown,
          .link_id = connection.link_id,
          .orderly = connection.orderly,
          .text = reason});
  } else if (connection.up) {
    emit({.kind = ControlEvent::Kind::kInDown, .link_id = connection.link_id, .text = reason});
  }
}

void Control::check_timeouts() {
  const int64_t now = now_ns();
  for (auto& [token, connection] : connections_) {
    if (connection->up || connection->lost) continue;
    if (now < connection->deadline_ns) {
      if (!connection->connected) start_connect(*connection);
      continue;
    }
    lose(*connection, connection->accepted ? "no hello in time"
                                           : "no answer to the handshake in time: process " +
                                                 std::to_string(connection->pid) + " may be stopped or overloaded");
  }
}

void Control::sweep() {
  for (auto it = connections_.begin(); it != connections_.end();) {
    if (it->second->lost) {
      if (!it->second->accepted) token_of_link_.erase(it->second->link_id);
      it = connections_.erase(it);  // closing the descriptors takes them out of epoll
    } else {
      ++it;
    }
  }
}

}  // namespace crossrail::shm
