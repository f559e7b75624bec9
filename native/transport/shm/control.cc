#include "transport/shm/control.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "transport/identity.h"
#include "transport/shm/control_connection.h"
#include "transport/shm/peer_user.h"
#include "util/clock.h"
#include "util/codec.h"
#include "util/errors.h"
#include "util/thread.h"

namespace crossrail::shm {

namespace {

constexpr uint64_t kListenerToken = 1;
constexpr uint64_t kCommandToken = 2;
constexpr size_t kStrangersMax = 128;  // accepted connections that have not said hello yet
constexpr int64_t kHelloTimeoutNs = 5'000'000'000;
constexpr int kLookMs = 20;  // while we wait for somebody
// Between two looks, no more than this counts as a peer's silence: if it was longer, we were stopped or not scheduled.
constexpr int64_t kSilenceMaxNs = 500'000'000;
constexpr char kWatchesRemedy[] = "raise fs.epoll.max_user_watches, which is for all processes of a user";

// To be called while errno is set.
std::string unwatched_text() {
  const bool is_limit = errno == ENOSPC;
  return std::string("epoll_ctl: ") + std::strerror(errno) + (is_limit ? std::string("; ") + kWatchesRemedy : "");
}

sockaddr_un socket_address(const Incarnation& incarnation, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "crossrail." + to_hex(incarnation);
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // leading zero: abstract
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// A pidfd for the process at the other end of a unix socket. Since Linux 6.5 the socket provides it, in any pid
// namespace and even if the pid was reused; before, it is opened by pid, if the pid is visible here. -1: the kernel
// provides none.
int pidfd_of(int socket, pid_t pid) {
  constexpr int kPeerPidfd = 77;  // SO_PEERPIDFD, which older headers lack
  int pidfd = -1;
  socklen_t length = sizeof pidfd;
  if (getsockopt(socket, SOL_SOCKET, kPeerPidfd, &pidfd, &length) == 0) return pidfd;
#ifdef SYS_pidfd_open
  if (pid > 0) return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#endif
  return -1;
}

// Why connect() to an engine's socket failed, if some policy forbids it; empty: none does.
std::string why_forbidden(int error) {
  if (error != EACCES && error != EPERM) return {};
  return "a security policy (AppArmor, SELinux, Landlock) forbids this process to connect to the peer's unix socket";
}

}  // namespace

// The peer's pid is of no use here: it may be in another pid namespace.
std::string why_refused(const Address& peer) {
  if (access("/proc/self/fd", F_OK) != 0 && errno == ENOENT) {
    return "this process sees no /proc, which it needs to wake peers: mount it (container runtimes do)";
  }
  const bool is_host_known = peer.host != kUnknownHost;
  const Fd probe(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  // A mere query binds a name, made up by the kernel: accept_some() then has nothing to report.
  const sockaddr_un nameless{.sun_family = AF_UNIX, .sun_path = {}};
  if (probe) bind(probe.get(), reinterpret_cast<const sockaddr*>(&nameless), sizeof nameless.sun_family);
  socklen_t length = 0;
  const sockaddr_un name = socket_address(peer.incarnation, &length);
  if (!probe) return {};
  if (::connect(probe.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0) {
    if (is_host_known || errno != ECONNREFUSED) return why_forbidden(errno);
    return "no engine here is that one, and /proc/sys/kernel/random/boot_id, which tells hosts apart, cannot be read";
  }
  return why_not_let_in(probe.get());
}

std::string process_named(uint32_t pid) {
  return pid == 0 ? "its process, of another pid namespace," : "process " + std::to_string(pid);
}

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
  if (!epoll_ || !command_event_) throw_errno("epoll_create1", "cannot watch sockets");
  if (!watch(listener_.get(), kListenerToken) || !watch(command_event_.get(), kCommandToken))
    throw_errno("epoll_ctl", "cannot watch sockets", kWatchesRemedy);
  thread_ = start_thread([this] { run(); });
}

Control::~Control() { stop(); }

// --- called by others ---

// The callers have begun what the command is to go on with: a closed region would stay mapped by peers, say.
void Control::submit(Command command) try {
  std::lock_guard lock(mutex_);  // also held for the write: stop() closes the descriptor
  if (stopped_) return;
  commands_.push_back(std::move(command));
  const uint64_t one = 1;
  // An eventfd write fails only when 2^64 - 2 wake-ups are pending.
  [[maybe_unused]] const ssize_t written = write(command_event_.get(), &one, sizeof one);
} catch (const std::bad_alloc&) {
  fail_out_of_memory(address_.name.c_str());
}

void Control::connect(uint64_t link_id, const std::shared_ptr<const Address>& address,
                      std::shared_ptr<MemoryMap> segment, uint32_t rail_count) {
  submit({.kind = Command::Kind::kConnect,
          .link_id = link_id,
          .address = address,
          .segment = std::move(segment),
          .rail_count = rail_count});
}
void Control::import_region(uint64_t link_id, uint64_t region_id, bool wants_handle) {
  submit({.kind = Command::Kind::kImport, .link_id = link_id, .region_id = region_id, .wants_handle = wants_handle});
}
void Control::ping(uint64_t link_id) { submit({.kind = Command::Kind::kPing, .link_id = link_id}); }
void Control::drop(uint64_t link_id) { submit({.kind = Command::Kind::kDrop, .link_id = link_id}); }
void Control::drop_toucher(uint64_t link_id) { submit({.kind = Command::Kind::kDropToucher, .link_id = link_id}); }
void Control::region_closed(uint64_t region_id, Status why) {
  submit({.kind = Command::Kind::kRegionClosed, .region_id = region_id, .status = why});
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

// The thread does not exist in the child: it can be neither joined nor detached, so it is leaked. The child holds
// copies of the parent's sockets until it ends or execs; peers see the parent's death by its pidfd all the same.
void Control::abandon_after_fork() {
  leak_thread(thread_);
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

void Control::run() try {
  pthread_setname_np(pthread_self(), "crossrail-ctl");
  epoll_event ready[64];
  while (!stopping_) {
    const int timeout_ms = next_timeout_ms();
    excuse_silence();
    const int count = epoll_wait(epoll_.get(), ready, 64, timeout_ms);
    if (timeout_ms < 0) looked_ns_ = now_ns();  // we waited for nobody
    if (count < 0) continue;                    // stopped and continued: read first what arrived meanwhile
    for (int i = 0; i < count; ++i) {
      const uint64_t token = ready[i].data.u64;
      if (token == kListenerToken) {
        accept_some();
      } else if (token == kCommandToken) {
        handle_commands();
      } else if (auto found = connections_.find(token & ~uint64_t{1}); found != connections_.end()) {
        Connection& connection = *found->second;
        if ((token & 1) != 0) {  // it is a pidfd
          // What the process sent before it died is still in the socket.
          if (!connection.lost) on_readable(connection);
          if (!connection.lost) lose(connection, process_named(connection.pid) + " exited");
        } else {
          // Also for a peer that is gone: packets waiting to be sent would keep its last words from being read.
          if ((ready[i].events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0) flush(connection);
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
} catch (const std::bad_alloc&) {  // peers would wait for answers for ever
  fail_out_of_memory(address_.name.c_str());
}

int Control::next_timeout_ms() const {
  if (regions_->forget_gone()) return kLookMs;
  for (const auto& [token, connection] : connections_) {
    if (!connection->up || connection->lacked != 0) return kLookMs;
  }
  return -1;
}

void Control::excuse_silence() {
  const int64_t now = now_ns();
  const int64_t excused_ns = now - std::exchange(looked_ns_, now) - kSilenceMaxNs;
  if (excused_ns <= 0) return;
  for (auto& [token, connection] : connections_) connection->deadline_ns += excused_ns;
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
        const bool at_limit = errno == EMFILE || errno == ENFILE;
        lose_unmade(connection, std::string("cannot make a socket: ") + std::strerror(errno) +
                                    (at_limit ? "; raise the limit on open files (ulimit -n)" : ""));
      } else {
        start_connect(connection);
      }
      return;
    }
    case Command::Kind::kImport:
      body.put(static_cast<uint8_t>(command.wants_handle));
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
    case Command::Kind::kDropToucher:
      regions_->drop_toucher(command.link_id);
      return;
    case Command::Kind::kRegionClosed:
      body.put(static_cast<uint8_t>(command.status));
      for (auto& [token, connection] : connections_) {
        const bool is_known = connection->imported.erase(command.region_id) > 0;
        if (is_known && connection->up) send(*connection, kRegionGone, body.bytes());
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
  next_token_ += 2;  // the odd number is its pidfd
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
    if (errno == EAGAIN || errno == EINTR) return;  // the peer's backlog is full: check_timeouts tries again
    const std::string forbidden = why_forbidden(errno);
    if (!forbidden.empty()) {
      lose(connection, forbidden + "; allow it, or use transport='tcp'");
    } else {
      lose(connection, errno == ECONNREFUSED
                           ? "no engine of this incarnation is running; it was closed, killed or restarted"
                           : std::string("connect: ") + std::strerror(errno));
    }
    return;
  }
  if (const std::string why = why_not_let_in(connection.socket.get()); !why.empty()) {
    lose(connection, why + "; run both as one, or use transport='tcp'");
    return;
  }
  connection.connected = true;
  if (!watch(connection.socket.get(), connection.token)) {
    lose_unmade(connection, unwatched_text());
    return;
  }
  watch_process(connection);
  Writer body;
  body.put(kControlVersion);
  body.put(kLayoutVersion);
  body.put(process_token());
  body.put(static_cast<uint8_t>(connection.rail_count));
  body.put_bytes(address_bytes_);
  const int fds[] = {home_->fd(), regions_->seen_by_peers().fd(), bell_->fd(), connection.segment->fd()};
  send(connection, kHello, body.bytes(), fds);
}

// Learns the peer's pid and gets a pidfd. Without one, only the socket shows its death, and a forked child of the peer
// may keep that open.
void Control::watch_process(Connection& connection) {
  const pid_t pid = peer_of(connection.socket.get()).pid;
  connection.pid = static_cast<uint32_t>(pid);
  if (pid == getpid()) return;
  connection.process = Fd(pidfd_of(connection.socket.get(), pid));
  if (connection.process && !watch(connection.process.get(), connection.token | 1)) connection.process.reset();
}

// False, with errno: this user's limit of watches is reached, or the kernel is out of memory.
bool Control::watch(int fd, uint64_t token) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = token}};
  return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

// A user who keeps coming must not fill logs, nor push more important entries out of the recorder.
void Control::tell_refused(uid_t user) {
  constexpr int64_t kTellEveryNs = 60'000'000'000;
  const int64_t now = now_ns();
  if (refused_told_ns_ != 0 && now < refused_told_ns_ + kTellEveryNs) {
    ++refused_untold_;
    return;
  }
  refused_told_ns_ = now;
  const uint64_t untold = std::exchange(refused_untold_, 0);
  emit({.kind = ControlEvent::Kind::kProtocolError,
        .text = "refused a connection of user " + std::to_string(user) +
                ": shm is for processes of one user, and for root's" +
                (untold == 0 ? "" : "; " + std::to_string(untold) + " earlier refusals were not reported one by one")});
}

// Accepts a bounded number, then others get their turn: epoll reports the rest again.
void Control::accept_some() {
  constexpr int kAcceptedMax = 64;
  for (int accepted = 0; accepted < kAcceptedMax; ++accepted) {
    sockaddr_un name{};
    socklen_t length = sizeof name;
    Fd fd(accept4(listener_.get(), reinterpret_cast<sockaddr*>(&name), &length, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      const bool is_limit = errno == EMFILE || errno == ENFILE;
      if (is_limit || errno == ENOBUFS || errno == ENOMEM) {
        // Leave the backlog alone for a moment instead of spinning on it.
        if (!std::exchange(lack_told_, true)) {
          emit({.kind = ControlEvent::Kind::kProtocolError,
                .text = is_limit ? "out of file descriptors: cannot accept peers; raise ulimit -n"
                                 : "cannot accept peers: the kernel is short of memory"});
        }
        poll(nullptr, 0, 50);
      }
      return;
    }
    lack_told_ = false;
    // Whoever is let in gets our regions' memory on request.
    if (const ucred peer = peer_of(fd.get()); !is_let_in(peer)) {
      if (length > sizeof name.sun_family) continue;  // by why_refused()
      tell_refused(peer.uid);
      continue;
    }
    make_room_for_stranger();
    Connection& connection = add_connection(std::move(fd));
    connection.accepted = true;
    connection.connected = true;
    connection.link_id = connection.token;
    connection.deadline_ns = now_ns() + kHelloTimeoutNs;
    if (!watch(connection.socket.get(), connection.token)) {
      emit({.kind = ControlEvent::Kind::kProtocolError, .text = "cannot accept a peer: " + unwatched_text()});
      lose(connection, "not watched");
      continue;
    }
    watch_process(connection);
  }
}

// Closes the stranger that has been silent for longest: sockets that only occupy slots must not keep peers out. If we
// are late, what it has sent may still be unread: many come at once, and all are accepted first.
void Control::make_room_for_stranger() {
  for (;;) {
    size_t strangers = 0;
    Connection* oldest = nullptr;
    for (auto& [token, connection] : connections_) {  // in order of arrival
      if (!connection->is_stranger()) continue;
      if (strangers++ == 0) oldest = connection.get();
    }
    if (strangers < kStrangersMax) return;
    on_readable(*oldest);
    if (oldest->is_stranger()) lose(*oldest, "too many connections that send no hello");
  }
}

void Control::lose(Connection& connection, const std::string& reason) {
  if (connection.lost) return;
  connection.lost = true;
  if (!connection.accepted) {
    emit({.kind = ControlEvent::Kind::kOutDown, .link_id = connection.link_id, .end = connection.end, .text = reason});
  } else if (connection.up) {
    emit({.kind = ControlEvent::Kind::kInDown, .link_id = connection.link_id, .text = reason});
  }
}

// For failures other than the peer's absence or silence: it may be reachable another time.
void Control::lose_unmade(Connection& connection, const std::string& reason) {
  if (!connection.up) connection.end = LinkEnd::kUnmade;
  lose(connection, reason);
}

// Judged as of the last look: everything that had arrived by then has been read. We may have been stopped since, and
// answers are waiting.
void Control::check_timeouts() {
  for (auto& [token, connection] : connections_) {
    if (connection->lacked != 0) flush(*connection);
    if (connection->up || connection->lost) continue;
    if (looked_ns_ < connection->deadline_ns) {
      if (!connection->connected) start_connect(*connection);
    } else if (connection->lacked == ENOBUFS || connection->lacked == ENOMEM) {
      lose_unmade(*connection, std::string("cannot send: ") + std::strerror(connection->lacked));
    } else if (connection->lacked != 0) {
      lose_unmade(*connection,
                  "cannot send it descriptors: processes of this user have more on their way to others than this one "
                  "may have open; raise the limit on open files (ulimit -n)");
    } else {
      lose(*connection, connection->accepted ? "no hello in time"
                                             : "no answer to the handshake in time: process " +
                                                   std::to_string(connection->pid) + " may be stopped or overloaded");
    }
  }
}

// Closing its descriptors is not enough: forked children have copies of them, and so does the table of touchers, of the
// pidfd. While a copy exists, epoll keeps reporting the end, again and again.
void Control::unwatch(const Connection& connection) {
  for (const Fd* const fd : {&connection.socket, &connection.process}) {
    if (*fd) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd->get(), nullptr);
  }
}

void Control::sweep() {
  for (auto it = connections_.begin(); it != connections_.end();) {
    if (it->second->lost) {
      if (!it->second->accepted) token_of_link_.erase(it->second->link_id);
      unwatch(*it->second);
      it = connections_.erase(it);
    } else {
      ++it;
    }
  }
}

}  // namespace crossrail::shm
