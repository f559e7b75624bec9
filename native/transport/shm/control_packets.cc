// The messages on a control socket. Everything that arrives is untrusted.
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "transport/foreign_text.h"
#include "transport/shm/control_connection.h"
#include "util/clock.h"
#include "util/codec.h"
#include "util/errors.h"

namespace crossrail::shm {

namespace {

constexpr size_t kPacketBytesMax = 2048;
constexpr size_t kFdsMax = 4;
constexpr size_t kOutboxMax = 4096;  // answers that a peer does not read; beyond that it is cut off

TransportError out_of_fds(const char* call) {
  return {call, EMFILE, "out of file descriptors", "raise the limit on open files (ulimit -n)"};
}

// The home that a peer has sent. Throws UsageError or TransportError.
std::unique_ptr<PeerHome> open_home(Fd map, Fd open, Fd bell) {
  auto home = std::make_unique<PeerHome>();
  home->map = MemoryMap::map(std::move(map), sizeof(HomeSegment));
  home->segment = reinterpret_cast<HomeSegment*>(home->map->data());
  home->open_map = MemoryMap::map(std::move(open), sizeof(OpenRegions), MemoryMap::Writers::kOwner);
  home->open = reinterpret_cast<const OpenRegions*>(home->open_map->data());
  if (home->segment->magic != kLayoutMagic || home->open->magic != kOpenRegionsMagic)
    throw UsageError("shared memory is not crossrail's");
  home->bell = WakeEvent::adopt(std::move(bell));
  return home;
}

// The connecting side asks, the connected side answers. Each side numbers links for itself, so an answer from the
// connecting side would be taken for one on some link of ours; and the asking side is held back (may_read) and listed
// as a toucher.
bool is_from_right_side(uint8_t type, bool is_initiator) {
  switch (type) {
    case kHello:
    case kImport:
    case kPing:
      return is_initiator;
    case kWelcome:
    case kImported:
    case kRegionGone:
    case kPong:
      return !is_initiator;
    default:  // a byte from outside, not an enum
      return true;
  }
}

}  // namespace

uint64_t process_token() {
  static const int anchor = 0;
  static const uint64_t token = static_cast<uint64_t>(now_ns()) ^ reinterpret_cast<uint64_t>(&anchor) << 16;
  return token;
}

void Control::on_readable(Connection& connection) {
  for (int round = 0; round < 64 && !connection.lost && connection.may_read(); ++round) {
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
      lose(connection, process_named(connection.pid) + " exited or closed the connection");
      return;
    }
    // Truncated although there was room for more descriptors: our process cannot take any more.
    const bool lacks_fds = (header.msg_flags & MSG_CTRUNC) != 0 && fds.size() < kFdsMax;
    if ((header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 && !lacks_fds) {
      emit({.kind = ControlEvent::Kind::kProtocolError, .text = "oversized packet from " + connection.peer_name});
      lose(connection, "it sent an oversized packet");
      return;
    }
    on_message(connection, {bytes, static_cast<size_t>(got)}, std::move(fds), lacks_fds);
  }
}

void Control::on_message(Connection& connection, std::span<const uint8_t> bytes, std::vector<Fd> fds, bool lacks_fds) {
  const uint8_t type = bytes[0];
  const auto body = bytes.subspan(1);
  Reader reader(body);
  try {
    if (lacks_fds && type != kImported) throw out_of_fds("recvmsg");
    if (connection.accepted && !connection.up) {
      if (type != kHello) throw UsageError("first packet is not a hello");
      on_hello(connection, body, std::move(fds));
      return;
    }
    if (!is_from_right_side(type, connection.accepted))
      throw UsageError("packet of type " + std::to_string(type) + " from the wrong side");
    switch (type) {
      case kWelcome:
        on_welcome(connection, body, std::move(fds));
        return;
      case kRefuse:
        lose_unmade(connection, "it refused us: " + shown(reader.get_text()));
        return;
      case kImport:
        on_import(connection, body);
        return;
      case kImported:
        on_imported(connection, body, std::move(fds), lacks_fds);
        return;
      case kRegionGone:
        on_region_gone(connection, body);
        return;
      case kPing:
        send(connection, kPong, {});
        return;
      case kPong:
        emit({.kind = ControlEvent::Kind::kPong, .link_id = connection.link_id});
        return;
      case kGoodbye:
        connection.end = LinkEnd::kLeft;
        lose(connection, "the engine was closed");
        return;
      default:  // a byte from outside, not an enum
        throw UsageError("packet of unknown type " + std::to_string(type));
    }
  } catch (const TransportError& error) {  // in this process, or about memory that the peer sent
    refuse(connection, error.what(), error.what());
  } catch (const std::bad_alloc&) {
    refuse(connection, "out of memory", "out of memory in this process");
  } catch (const std::exception& error) {
    refuse(connection, error.what(), std::string("protocol error: ") + error.what());
  }
}

void Control::refuse(Connection& connection, std::string_view text, const std::string& reason) {
  emit({.kind = ControlEvent::Kind::kProtocolError, .text = connection.peer_name + ": " + std::string(text)});
  Writer refusal;
  refusal.put_text(text.substr(0, 255));
  send(connection, kRefuse, refusal.bytes());
  lose_unmade(connection, reason);
}

void Control::on_hello(Connection& connection, std::span<const uint8_t> body, std::vector<Fd> fds) {
  Reader reader(body);
  const auto protocol = reader.get<uint16_t>();
  const auto layout = reader.get<uint32_t>();
  reader.get<uint64_t>();  // process token: only the one in the welcome is used
  const uint32_t rails = reader.get<uint8_t>();
  if (!reader.ok()) throw UsageError("hello is too short");
  if (protocol != kControlVersion || layout != kLayoutVersion) {
    throw UsageError("the connecting engine speaks shm protocol " + std::to_string(protocol) + "." +
                     std::to_string(layout) + ", the accepting engine " + std::to_string(kControlVersion) + "." +
                     std::to_string(kLayoutVersion) + "; use the same crossrail release on both sides");
  }
  if (rails < 1 || rails > kRailsMax) throw UsageError("hello names " + std::to_string(rails) + " rails");
  auto peer = std::make_shared<const Address>(Address::decode(reader.rest()));
  if (fds.size() != 4) throw UsageError("hello carries " + std::to_string(fds.size()) + " descriptors, 4 expected");
  auto home = open_home(std::move(fds[0]), std::move(fds[1]), std::move(fds[2]));
  auto segment = MemoryMap::map(std::move(fds[3]), link_segment_bytes(rails));
  if (reinterpret_cast<const LinkSegment*>(segment->data())->magic != kLayoutMagic)
    throw UsageError("shared memory is not crossrail's");
  connection.peer_name = peer->name;
  connection.up = true;
  // Until the holder has handled kInDown.
  Fd process(connection.process ? fcntl(connection.process.get(), F_DUPFD_CLOEXEC, 0) : -1);
  regions_->add_toucher(connection.link_id, peer->name, segment, std::move(process));
  emit({.kind = ControlEvent::Kind::kInUp,
        .link_id = connection.link_id,
        .peer = peer,
        .home = std::move(home),
        .segment = segment,
        .rail_count = rails});
  Writer welcome;
  welcome.put(process_token());
  const int out[] = {home_->fd(), regions_->seen_by_peers().fd(), bell_->fd()};
  send(connection, kWelcome, welcome.bytes(), out);
}

void Control::on_welcome(Connection& connection, std::span<const uint8_t> body, std::vector<Fd> fds) {
  Reader reader(body);
  const auto token = reader.get<uint64_t>();
  if (connection.up || !reader.finished() || fds.size() != 3) throw UsageError("unexpected welcome");
  auto home = open_home(std::move(fds[0]), std::move(fds[1]), std::move(fds[2]));
  connection.up = true;
  connection.same_process = token == process_token() && connection.pid == static_cast<uint32_t>(getpid());
  emit({.kind = ControlEvent::Kind::kOutUp,
        .link_id = connection.link_id,
        .home = std::move(home),
        .pid = connection.pid,
        .same_process = connection.same_process});
}

// Decodes a peer's byte: in which of the two ways its region is not open to us.
static Status gone_from_peer(uint8_t status) {
  return status == static_cast<uint8_t>(Status::kRegionRevoked) ? Status::kRegionRevoked : Status::kRegionClosed;
}

void Control::on_region_gone(Connection& connection, std::span<const uint8_t> body) {
  Reader reader(body);
  ControlEvent event{.kind = ControlEvent::Kind::kRegionClosed, .link_id = connection.link_id};
  event.region_id = reader.get<uint64_t>();
  event.facts.status = gone_from_peer(reader.get<uint8_t>());
  if (!reader.finished()) throw UsageError("malformed news of a region");
  emit(std::move(event));
}

// For GPU memory: how others reach it. A descriptor of physical memory is made for each peer that asks for one: regions
// are many, and few are mapped.
static Fd put_shared(Writer& reply, device::SharedRange shared, bool wants_handle) {
  Fd memory;
  if (wants_handle && shared.by == device::SharedBy::kVmm) {
    try {
      memory = shared.physical->share();
    } catch (const TransportError& error) {
      shared.by = device::SharedBy::kNothing;
      shared.why_not = error.call() + ": " + error.text();
    }
  }
  reply.put(static_cast<uint8_t>(shared.by));
  reply.put(shared.offset);
  reply.put_bytes(shared.handle);
  reply.put(shared.allocation_id);
  reply.put(shared.allocation_bytes);
  reply.put_text(std::string_view(shared.why_not).substr(0, 255));
  return memory;
}

static device::SharedRange get_shared(Reader& reader, uint64_t length_bytes) {
  device::SharedRange shared;
  const auto by = reader.get<uint8_t>();
  shared.offset = reader.get<uint64_t>();
  reader.get_bytes(shared.handle);
  shared.allocation_id = reader.get<uint64_t>();
  shared.allocation_bytes = reader.get<uint64_t>();
  shared.why_not = reader.get_text();
  if (by > static_cast<uint8_t>(device::SharedBy::kVmm)) throw UsageError("memory shared in an unknown way");
  shared.by = static_cast<device::SharedBy>(by);
  if (shared.by == device::SharedBy::kVmm && !fits(shared.offset, length_bytes, shared.allocation_bytes))
    throw UsageError("memory of a GPU past the end of its allocation");
  return shared;
}

void Control::on_import(Connection& connection, std::span<const uint8_t> body) {
  Reader reader(body);
  const auto region_id = reader.get<uint64_t>();
  const bool wants_handle = reader.get<uint8_t>() != 0;
  if (!reader.finished()) throw UsageError("malformed import");
  const RegionFacts facts = regions_->facts(region_id);
  // If it is closed after this, a command that says so is still to come.
  if (facts.status == Status::kDone) connection.imported.insert(region_id);
  Writer reply;
  reply.put(region_id);
  reply.put(static_cast<uint8_t>(facts.status));
  reply.put(static_cast<uint8_t>(facts.access));
  reply.put(facts.base);
  reply.put(facts.length_bytes);
  reply.put(facts.map_offset);
  reply.put(static_cast<uint8_t>(facts.is_gpu));
  Fd memory;
  if (facts.is_gpu) memory = put_shared(reply, facts.shared, wants_handle);
  const int fd = memory ? memory.get() : facts.map ? facts.map->fd() : -1;
  send(connection, kImported, reply.bytes(), fd < 0 ? std::span<const int>() : std::span(&fd, 1));
}

void Control::on_imported(Connection& connection, std::span<const uint8_t> body, std::vector<Fd> fds, bool lacks_fds) {
  Reader reader(body);
  ControlEvent event{.kind = ControlEvent::Kind::kImported, .link_id = connection.link_id};
  event.region_id = reader.get<uint64_t>();
  const auto status = reader.get<uint8_t>();
  event.facts.access = static_cast<Access>(reader.get<uint8_t>());
  event.facts.base = reader.get<uint64_t>();
  event.facts.length_bytes = reader.get<uint64_t>();
  event.facts.map_offset = reader.get<uint64_t>();
  event.facts.is_gpu = reader.get<uint8_t>() != 0;
  if (event.facts.is_gpu) event.facts.shared = get_shared(reader, event.facts.length_bytes);
  if (!reader.finished()) throw UsageError("malformed import reply");
  event.facts.status = status == static_cast<uint8_t>(Status::kDone) ? Status::kDone : gone_from_peer(status);
  if (event.facts.status == Status::kDone && lacks_fds) {
    event.facts.status = Status::kTransportFailed;  // this region only: the peer is fine
    event.text = out_of_fds("recvmsg").what();
  } else if (event.facts.status == Status::kDone && event.facts.is_gpu) {
    if (!fds.empty()) event.memory = std::move(fds[0]);
  } else if (event.facts.status == Status::kDone && !fds.empty()) {
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
  // The rest is bounded: an initiator is read only while its answers are being sent, it is told of a region's end once
  // for each time that it asked, and our own questions are up to us. A slow or stopped peer may leave tens of thousands
  // waiting.
  if (type == kPong && connection.outbox.size() >= kOutboxMax) {
    lose(connection, "it does not read its control socket");
    return;
  }
  Connection::Packet packet;
  packet.bytes.push_back(type);
  packet.bytes.insert(packet.bytes.end(), body.begin(), body.end());
  if (connection.outbox.empty() && send_now(connection, packet.bytes, fds)) return;
  if (connection.lost) return;
  // The packet waits for room, and needs its own descriptors meanwhile.
  for (const int fd : fds) {
    packet.fds.emplace_back(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!packet.fds.back()) {
      lose_unmade(connection, out_of_fds("fcntl").what());
      return;
    }
  }
  connection.outbox.push_back(std::move(packet));
  watch_room(connection);
}

// False: there is no room now, in the socket or for descriptors in flight; or the connection is lost.
bool Control::send_now(Connection& connection, std::span<const uint8_t> bytes, std::span<const int> fds) {
  iovec vector{.iov_base = const_cast<uint8_t*>(bytes.data()), .iov_len = bytes.size()};
  alignas(cmsghdr) char ancillary[CMSG_SPACE(sizeof(int) * kFdsMax)] = {};
  msghdr header{};
  header.msg_iov = &vector;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = ancillary;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* item = CMSG_FIRSTHDR(&header);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(item), fds.data(), sizeof(int) * fds.size());
  }
  if (sendmsg(connection.socket.get(), &header, MSG_NOSIGNAL) >= 0) return true;
  if (errno == ETOOMANYREFS || errno == ENOBUFS || errno == ENOMEM) connection.lacked = errno;
  if (errno == EAGAIN || errno == EINTR || connection.lacked != 0) return false;
  // A peer that closed first may have left us a reason: let the read side find it.
  if (errno == EPIPE || errno == ECONNRESET) {
    connection.outbox.clear();
    return true;
  }
  lose(connection, std::string("cannot send: ") + std::strerror(errno));
  return false;
}

void Control::flush(Connection& connection) {
  connection.lacked = 0;
  while (!connection.outbox.empty() && !connection.lost) {
    const Connection::Packet& packet = connection.outbox.front();
    std::vector<int> fds;
    for (const Fd& fd : packet.fds) fds.push_back(fd.get());
    if (!send_now(connection, packet.bytes, fds)) break;
    if (!connection.outbox.empty()) connection.outbox.pop_front();
  }
  watch_room(connection);
}

void Control::watch_room(const Connection& connection) {
  epoll_event event{.events = 0, .data = {.u64 = connection.token}};
  if (connection.may_read()) event.events |= EPOLLIN;
  if (!connection.outbox.empty() && connection.lacked == 0) event.events |= EPOLLOUT;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.socket.get(), &event);
}

}  // namespace crossrail::shm
