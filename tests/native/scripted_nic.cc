#include "scripted_nic.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>

#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::rdma::test {

namespace {

uint64_t u64_of(std::span<const uint8_t> bytes) {
  uint64_t value = 0;
  if (bytes.size() >= sizeof value) std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

}  // namespace

// --- the net ---

std::unique_ptr<ScriptedNic> Net::make_nic(const std::string& name, uint32_t speed_mbps, uint8_t network) {
  std::lock_guard guard(lock);
  const uint64_t id = next_id++;
  auto nic = std::make_unique<ScriptedNic>(this, id, name, speed_mbps, network);
  nics[id] = nic.get();
  return nic;
}

void Net::set_port(ScriptedNic& nic, bool up) {
  std::lock_guard guard(lock);
  if (std::exchange(nic.up, up) == up) return;
  nic.push({.kind = NicEvent::Kind::kPort, .text = up ? "plugged in" : "unplugged", .up = up});
}

void Net::kill(ScriptedNic& nic) {
  std::lock_guard guard(lock);
  nic.killed = true;
}

void Net::end_device(ScriptedNic& nic) {
  std::lock_guard guard(lock);
  nic.is_dead = true;
  nic.push({.kind = NicEvent::Kind::kFatal, .text = "the device is gone"});
  for (auto& [id, path] : paths) {
    if (path->nic != &nic) continue;
    break_path(*path, "the device is gone");
    if (!std::exchange(path->broken_off, true)) nic.push({.kind = NicEvent::Kind::kFlushed, .path = id});
  }
}

void Net::set_speed(ScriptedNic& nic, uint32_t mbps) {
  std::lock_guard guard(lock);
  nic.speed_mbps_ = mbps;
  nic.push({.kind = NicEvent::Kind::kPort, .text = "another speed", .up = true});
}

void Net::freeze(ScriptedNic& nic, bool frozen) {
  std::lock_guard guard(lock);
  nic.frozen = frozen;
}

void Net::break_all_paths(ScriptedNic& nic, bool by_peer) {
  std::lock_guard guard(lock);
  for (auto& [id, path] : paths) {
    if (path->nic == &nic)
      break_path(*path, "broken by the script", by_peer ? NicFault::kFlushed : NicFault::kUnreachable);
  }
}

void Net::inject_datagram(ScriptedNic& to, std::vector<uint8_t> bytes) {
  std::lock_guard guard(lock);
  to.push({.kind = NicEvent::Kind::kDatagram, .bytes = std::move(bytes)});
}

ScriptedPath* Net::peer_of(const ScriptedPath& path) {
  const auto found = paths.find(path.peer);
  if (found == paths.end()) return nullptr;
  ScriptedPath* const peer = found->second;
  const bool reaches = peer->peer == path.id && !peer->broken && !peer->broken_off && peer->nic->up && path.nic->up &&
                       !peer->nic->killed && !path.nic->killed && !peer->nic->is_dead && !path.nic->is_dead;
  return reaches ? peer : nullptr;
}

// As a NIC that goes to the error state: works under way are reported, those carried out and not acknowledged too.
void Net::break_path(ScriptedPath& path, const std::string& reason, NicFault first) {
  if (path.broken) return;
  path.broken = true;
  NicFault fault = first;
  for (const ScriptedPath::Work& work : path.works) {
    path.nic->push({.kind = NicEvent::Kind::kFailed, .path = path.id, .cookie = work.work.cookie, .fault = fault});
    fault = NicFault::kFlushed;
  }
  path.works.clear();
  path.fragments.clear();
  if (path.broken_off) return;
  path.nic->push(
      {.kind = NicEvent::Kind::kBroken, .path = path.id, .text = reason, .by_peer = first == NicFault::kFlushed});
}

void Net::execute(ScriptedPath& path, size_t index) {
  ScriptedPath::Work& item = path.works[index];
  const NicWork& work = item.work;
  ScriptedPath* const peer = peer_of(path);
  if (work.length_bytes > 0) {
    const auto source = regions.find(item.local_key);
    CROSSRAIL_ASSERT(source != regions.end() && source->second.nic == path.nic);
    CROSSRAIL_ASSERT(work.local >= source->second.base &&
                     work.local + work.length_bytes <= source->second.base + source->second.length_bytes);
    const auto found = regions.find(work.remote_key);
    const auto* const address = reinterpret_cast<std::byte*>(work.remote_address);
    const bool known = found != regions.end() && found->second.nic == peer->nic;
    const bool fits = known && address >= found->second.base &&
                      address + work.length_bytes <= found->second.base + found->second.length_bytes;
    const bool may = fits && (work.op == NicOp::kRead ? found->second.access != Access::kLocal
                                                      : found->second.access == Access::kRemoteWrite);
    if (!may) {
      const NicWork refused = work;
      path.works.erase(path.works.begin() + static_cast<std::ptrdiff_t>(index));
      path.nic->push({.kind = NicEvent::Kind::kFailed,
                      .path = path.id,
                      .cookie = refused.cookie,
                      .fault = NicFault::kRemoteAccess,
                      .text = "remote access error"});
      if (!options.ordered_paths) return;
      break_path(path, "a work was refused", NicFault::kFlushed);
      break_path(*peer, "refused a work of the peer", NicFault::kFlushed);
      return;
    }
    auto* const remote = reinterpret_cast<std::byte*>(work.remote_address);
    if (work.op == NicOp::kRead) {
      std::memcpy(work.local, remote, work.length_bytes);
    } else if (options.moves_bytes) {
      std::memcpy(remote, work.local, work.length_bytes);
    } else {
      noted.emplace_back(work.remote_address, work.length_bytes);
    }
  }
  item.executed = true;
  if (work.has_imm) {
    peer->nic->push({.kind = NicEvent::Kind::kImm, .path = options.names_imm_paths ? peer->id : 0, .imm = work.imm});
  }
}

// Everything that is due happens.
void Net::step(int64_t now) {
  for (size_t i = 0; i < datagrams.size();) {
    if (datagrams[i].due > now) {
      ++i;
      continue;
    }
    const auto to = nics.find(datagrams[i].to);
    if (to != nics.end() && to->second->up && !to->second->killed && !to->second->is_dead) {
      to->second->push({.kind = NicEvent::Kind::kDatagram, .bytes = std::move(datagrams[i].bytes)});
    }
    datagrams.erase(datagrams.begin() + static_cast<std::ptrdiff_t>(i));
  }
  for (auto& [id, owned] : paths) {
    ScriptedPath& path = *owned;
    if (path.peer == 0 || path.broken || path.nic->killed) continue;
    ScriptedPath* const peer = peer_of(path);
    const bool has_receives = peer != nullptr && !peer->nic->frozen;
    while (has_receives && !path.fragments.empty() && path.fragments.front().due <= now) {
      peer->nic->push(
          {.kind = NicEvent::Kind::kFragment, .path = peer->id, .bytes = std::move(path.fragments.front().bytes)});
      path.fragments.pop_front();
    }
    for (size_t i = 0; i < path.works.size() && !path.broken;) {
      ScriptedPath::Work& item = path.works[i];
      const bool is_due = !item.executed && item.exec_due <= now && !options.holds_works;
      if (is_due && peer != nullptr && (has_receives || !item.work.has_imm)) {
        if (chance(options.breaks_before)) {
          break_path(path, "retries ran out");
          break;
        }
        const size_t before = path.works.size();
        execute(path, i);
        if (path.works.size() != before) continue;
        if (!path.broken && chance(options.breaks_after)) {
          break_path(path, "the acknowledgement was lost");
          break;
        }
      }
      if (path.works[i].executed && path.works[i].ack_due <= now && (i == 0 || !options.ordered_paths)) {
        path.nic->push({.kind = NicEvent::Kind::kDone, .path = path.id, .cookie = path.works[i].work.cookie});
        path.works.erase(path.works.begin() + static_cast<std::ptrdiff_t>(i));
        continue;
      }
      if (!path.works[i].executed && options.ordered_paths) break;
      ++i;
    }
    if (path.broken || peer != nullptr) continue;
    const bool waits = (!path.works.empty() && path.works.front().posted + options.retry_ns <= now) ||
                       (!path.fragments.empty() && path.fragments.front().posted + options.retry_ns <= now);
    if (waits) break_path(path, "no answer, retries ran out");
  }
}

int64_t Net::next_due() const {
  bool pending = !datagrams.empty();
  for (const auto& [id, path] : paths) pending = pending || !path->works.empty() || !path->fragments.empty();
  return pending ? now_ns() + 50'000 : kNoDeadline;
}

// --- path ---

ScriptedPath::ScriptedPath(Net* net, ScriptedNic* nic, uint64_t id) : net(net), nic(nic), id(id) {
  std::memcpy(offer_.data(), &id, sizeof id);
  net->paths[id] = this;
}

ScriptedPath::~ScriptedPath() {
  std::lock_guard guard(net->lock);
  CROSSRAIL_ASSERT(peer == 0 || broken_off);  // nic.h: 5.
  net->paths.erase(id);
}

void ScriptedPath::connect(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> peer_offer) {
  std::lock_guard guard(net->lock);
  if (!nic->connect_error.empty()) throw TransportError("connect", ENOMEM, nic->connect_error);
  if (peer_offer.size() != 8 || peer_endpoint.size() != 9) throw TransportError("connect", 0, "the offer is malformed");
  peer = u64_of(peer_offer);
  peer_nic = u64_of(peer_endpoint);
}

uint32_t ScriptedPath::post(std::span<const NicWork> posted) {
  std::lock_guard guard(net->lock);
  if (broken || broken_off || peer == 0) return 0;
  CROSSRAIL_ASSERT(posted.size() + works.size() <= net->options.path_works_max);
  size_t count = posted.size();
  if (net->chance(net->options.refuses_post)) count = static_cast<size_t>(net->delay(static_cast<int64_t>(count)));
  const int64_t now = now_ns();
  for (size_t i = 0; i < count; ++i) {
    CROSSRAIL_ASSERT(posted[i].cookie == next_cookie);
    CROSSRAIL_ASSERT(posted[i].length_bytes <= net->options.work_bytes_max);
    CROSSRAIL_ASSERT(posted[i].length_bytes == 0 || posted[i].registration != nullptr);
    ++next_cookie;
    int64_t exec_due = now + net->delay(net->options.delay_ns_max);
    if (net->options.ordered_paths && !works.empty()) exec_due = std::max(exec_due, works.back().exec_due);
    const uint64_t local_key = posted[i].length_bytes == 0 ? 0 : posted[i].registration->key;
    works.push_back({posted[i], local_key, now, exec_due, exec_due + net->delay(net->options.delay_ns_max)});
  }
  if (count > 0) net->handed_over.emplace_back(id, count);
  net->step(now);
  if (count < posted.size()) nic->push({.kind = NicEvent::Kind::kDatagram});  // there is room again: poll() moves
  return static_cast<uint32_t>(count);
}

bool ScriptedPath::send(std::span<const uint8_t> head, std::span<const uint8_t> body) {
  std::lock_guard guard(net->lock);
  if (broken || broken_off || peer == 0) return false;
  CROSSRAIL_ASSERT(head.size() + body.size() <= kFragmentBytesMax);
  if (net->chance(net->options.refuses_post)) {
    nic->push({.kind = NicEvent::Kind::kDatagram});
    return false;
  }
  const int64_t now = now_ns();
  Fragment fragment{std::vector<uint8_t>(head.begin(), head.end()), now, now + net->delay(net->options.delay_ns_max)};
  fragment.bytes.insert(fragment.bytes.end(), body.begin(), body.end());
  if (net->options.ordered_paths || fragments.empty()) {
    if (!fragments.empty()) fragment.due = std::max(fragment.due, fragments.back().due);
    fragments.push_back(std::move(fragment));
  } else {
    const auto at = fragments.begin() + net->delay(static_cast<int64_t>(fragments.size()));
    fragments.insert(at, std::move(fragment));
  }
  net->step(now);
  return true;
}

bool ScriptedPath::is_sent() const {
  std::lock_guard guard(net->lock);
  return fragments.empty();
}

void ScriptedPath::break_off(const std::string& reason) {
  std::lock_guard guard(net->lock);
  if (std::exchange(broken_off, true)) return;
  net->break_path(*this, reason);
  if (nic->flushes) nic->push({.kind = NicEvent::Kind::kFlushed, .path = id});
}

// --- nic ---

ScriptedNic::ScriptedNic(Net* net, uint64_t id, std::string name, uint32_t speed_mbps, uint8_t network)
    : net(net), id(id), speed_mbps_(speed_mbps), name_(std::move(name)), fabric_("scripted"), fds_{bell_.fd()} {
  std::memcpy(endpoint_.data(), &id, sizeof id);
  endpoint_[8] = network;
  limits_ = {.work_bytes_max = net->options.work_bytes_max,
             .path_works_max = net->options.path_works_max,
             .ordered_paths = net->options.ordered_paths,
             .names_imm_paths = net->options.names_imm_paths};
}

ScriptedNic::~ScriptedNic() {
  std::lock_guard guard(net->lock);
  net->nics.erase(id);
}

int ScriptedNic::nearness(std::span<const uint8_t> peer_endpoint) const {
  if (peer_endpoint.size() != endpoint_.size()) return 0;
  return peer_endpoint[8] == endpoint_[8] ? 2 : 1;
}

std::unique_ptr<Registration> ScriptedNic::register_memory(std::byte* base, uint64_t length_bytes, Access access) {
  std::lock_guard guard(net->lock);
  if (is_dead) throw TransportError("register_memory", EIO, name_ + " is gone");
  if (net->regions.size() >= net->options.registrations_max)
    throw TransportError("register_memory", ENOMEM, name_ + " takes no more memory");
  auto registration = std::make_unique<ScriptedRegistration>(net, net->next_id++);
  registration->remote_base = reinterpret_cast<uint64_t>(base);
  net->regions[registration->key] = {this, base, length_bytes, access};
  return registration;
}

bool ScriptedNic::is_port_up() const {
  std::lock_guard guard(net->lock);
  return up && !is_dead;
}

void ScriptedNic::send_datagram(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> bytes) {
  std::lock_guard guard(net->lock);
  CROSSRAIL_ASSERT(bytes.size() <= kDatagramBytesMax);
  if (!up || killed || is_dead || peer_endpoint.size() != endpoint_.size()) return;
  const auto there = net->nics.find(u64_of(peer_endpoint));
  if (net->options.tells_nobody && (there == net->nics.end() || there->second->killed)) {
    push({.kind = NicEvent::Kind::kNobody, .bytes = {peer_endpoint.begin(), peer_endpoint.end()}});
    return;
  }
  const int copies = net->chance(net->options.datagram_doubling) ? 2 : 1;
  for (int i = 0; i < copies; ++i) {
    if (net->chance(net->options.datagram_loss)) continue;
    net->datagrams.push_back({u64_of(peer_endpoint), std::vector<uint8_t>(bytes.begin(), bytes.end()),
                              now_ns() + net->delay(net->options.datagram_delay_ns_max)});
    constexpr size_t kVersionAt = 4;
    if (net->options.has_other_version) ++net->datagrams.back().bytes[kVersionAt];
  }
  net->step(now_ns());
}

std::unique_ptr<NicPath> ScriptedNic::make_path() {
  std::lock_guard guard(net->lock);
  if (is_dead) throw TransportError("make_path", EIO, name_ + " is gone");
  if (!make_error.empty()) throw TransportError("make_path", ENOMEM, make_error);
  return std::make_unique<ScriptedPath>(net, this, net->next_id++);
}

void ScriptedNic::push(NicEvent event) {
  events.push_back(std::move(event));
  if (std::exchange(armed, false)) bell_.ring();
}

// The lock is not held while the layer is told: events are about memory and paths of this thread's engine.
uint32_t ScriptedNic::poll(NicEvents& told) {
  std::deque<NicEvent> batch;
  {
    std::lock_guard guard(net->lock);
    net->step(now_ns());
    if (killed || frozen) return 0;
    batch.swap(events);
  }
  for (const NicEvent& event : batch) {
    ScriptedPath* path = nullptr;
    if (event.path != 0) {
      std::lock_guard guard(net->lock);
      const auto found = net->paths.find(event.path);
      if (found == net->paths.end()) continue;  // destroyed before it was connected
      path = found->second;
    }
    switch (event.kind) {
      case NicEvent::Kind::kDone:
        told.on_work_done(*path, event.cookie, limits_.ordered_paths);
        break;
      case NicEvent::Kind::kFailed:
        told.on_work_failed(*path, event.cookie, event.fault, 5, event.text.empty() ? "flushed" : event.text);
        break;
      case NicEvent::Kind::kImm:
        told.on_imm(path, event.imm);
        break;
      case NicEvent::Kind::kFragment:
        told.on_fragment(path, event.bytes);
        break;
      case NicEvent::Kind::kDatagram:
        if (!event.bytes.empty()) told.on_datagram(event.bytes);
        break;
      case NicEvent::Kind::kNobody:
        told.on_nobody(event.bytes);
        break;
      case NicEvent::Kind::kBroken:
        told.on_path_broken(*path, event.by_peer, event.text);
        break;
      case NicEvent::Kind::kFlushed:
        told.on_path_flushed(*path);
        break;
      case NicEvent::Kind::kPort:
        told.on_port(event.up, event.text);
        break;
      case NicEvent::Kind::kFatal:
        told.on_device_fatal(event.text);
        break;
    }
  }
  return static_cast<uint32_t>(batch.size());
}

void ScriptedNic::arm() {
  std::lock_guard guard(net->lock);
  armed = true;
}

bool ScriptedNic::has_arrivals() {
  std::lock_guard guard(net->lock);
  net->step(now_ns());
  return !events.empty() && !killed && !frozen;
}

Deadline ScriptedNic::next_timer() const {
  std::lock_guard guard(net->lock);
  return net->next_due();
}

}  // namespace crossrail::rdma::test
