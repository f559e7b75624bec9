// Shared by control.cc (the thread, commands, deadlines) and control_packets.cc (the messages on a socket).
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "transport/shm/control.h"

namespace crossrail::shm {

inline constexpr uint16_t kControlVersion = 5;

enum PacketType : uint8_t { kHello = 1, kWelcome, kRefuse, kImport, kImported, kRegionGone, kPing, kPong, kGoodbye };

// A value unique to this process; survives fork, so it is compared together with the pid.
uint64_t process_token();

// One socket. Lifecycle: 1. strangers have accepted = true and no link yet; initiators are connecting. 2. up. 3. lost;
// removed at the end of the loop turn.
struct Control::Connection {
  uint64_t token = 0;
  uint64_t link_id = 0;  // ours if we initiated, made up by us if accepted
  bool accepted = false;
  bool up = false;
  bool lost = false;
  bool connected = false;  // connect(2) has succeeded
  bool same_process = false;
  LinkEnd end = LinkEnd::kLost;  // valid once it is lost
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
  // What the kernel lacked for the first packet in the outbox, an errno: descriptors that may be in flight, of all
  // processes of this user, or memory. Nothing reports when it lacks it no longer.
  int lacked = 0;
  // Regions of ours that the peer has asked for: it is told of their end, once.
  std::unordered_set<uint64_t> imported;

  bool is_stranger() const { return accepted && !up && !lost; }
  // A peer that does not read our answers is not read either, until it does. Connections that we initiated carry no
  // answers of ours.
  bool may_read() const { return !accepted || outbox.empty(); }
};

}  // namespace crossrail::shm
