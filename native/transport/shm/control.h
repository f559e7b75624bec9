// The control plane of the shm transport: one thread that accepts and makes connections, passes file descriptors,
// answers questions about regions and notices death. No payload goes this way.
//
// Peers meet at an abstract unix socket named after the incarnation: nothing in any file system, nothing left behind by
// SIGKILL. Only processes of the same user (or root) are let in.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "transport/shm/layout.h"
#include "transport/shm/region_table.h"
#include "transport/transport.h"
#include "util/memory_map.h"

namespace crossrail::shm {

// Events from the control thread to the progress holder.
struct ControlEvent {
  enum class Kind : uint8_t { kOutUp, kOutDown, kInUp, kInDown, kImported, kRegionClosed, kPong, kProtocolError };
  Kind kind;
  uint64_t link_id = 0;
  std::shared_ptr<const Address> peer = {};  // kInUp
  std::unique_ptr<PeerHome> home = {};       // kOutUp: the target's; kInUp: the initiator's
  std::shared_ptr<MemoryMap> segment = {};   // kInUp
  uint32_t rail_count = 0;                   // kInUp
  uint32_t pid = 0;                          // kOutUp: in our pid namespace, 0 when invisible
  bool same_process = false;                 // kOutUp
  LinkEnd end = LinkEnd::kLost;              // kOutDown
  uint64_t region_id = 0;                    // kImported, kRegionClosed
  RegionFacts facts = {};                    // kImported
  Fd memory = {};                            // kImported, GPU memory: what device::PhysicalMemory imports
  std::string text = {};                     // reason for kOutDown, kInDown, kProtocolError
};

// [any] Why the engine at that address, on this host, would refuse us; empty: it would not, or only connecting will
// tell.
std::string why_refused(const Address& peer);

// [any] For messages. pid: in our pid namespace, 0 if not visible there.
std::string process_named(uint32_t pid);

// [any] Why a process does not answer, as far as its state letter in /proc tells: ": " and words. "" for 0, not
// visible.
std::string silence_named(char state);

class Control {
 public:
  // home, bell: passed to peers; bell outlives us. waker: its wake() is called from the control thread when there are
  // events.
  Control(const Address& address, std::shared_ptr<MemoryMap> home, const WakeEvent* bell, RegionTable* regions,
          int64_t connect_timeout_ns, Transport* waker);
  ~Control();

  // --- progress holder; none of these blocks ---
  // Starts connecting; kOutUp or kOutDown follows.
  void connect(uint64_t link_id, const std::shared_ptr<const Address>& address, std::shared_ptr<MemoryMap> segment,
               uint32_t rail_count);
  // wants_handle: for GPU memory, also asks for the handle to map it by, which may be a descriptor.
  void import_region(uint64_t link_id, uint64_t region_id, bool wants_handle);
  void ping(uint64_t link_id);
  void drop(uint64_t link_id);
  // To be called for a link to us that is over, after kInDown.
  void drop_toucher(uint64_t link_id);

  bool has_events() const { return has_events_.load(std::memory_order_acquire); }
  std::vector<ControlEvent> take_events();

  // --- any thread ---
  // why: kRegionClosed or kRegionRevoked.
  void region_closed(uint64_t region_id, Status why);
  // Says goodbye and joins. Idempotent.
  void stop();
  void abandon_after_fork();

 private:
  struct Connection;
  struct Command {
    enum class Kind : uint8_t { kConnect, kImport, kPing, kDrop, kDropToucher, kRegionClosed, kStop };
    Kind kind;
    uint64_t link_id = 0;
    uint64_t region_id = 0;
    bool wants_handle = false;              // for kImport
    Status status = Status::kRegionClosed;  // for kRegionClosed
    std::shared_ptr<const Address> address = {};
    std::shared_ptr<MemoryMap> segment = {};
    uint32_t rail_count = 0;
  };

  void submit(Command command);
  void emit(ControlEvent event);
  void run();
  int next_timeout_ms() const;
  void excuse_silence();
  void handle_commands();
  void handle_command(Command& command);
  void start_connect(Connection& connection);
  void accept_some();
  void tell_refused(uid_t user);
  void make_room_for_stranger();
  void on_readable(Connection& connection);
  void on_message(Connection& connection, std::span<const uint8_t> bytes, std::vector<Fd> fds, bool lacks_fds);
  void refuse(Connection& connection, std::string_view text, const std::string& reason);
  void on_hello(Connection& connection, std::span<const uint8_t> body, std::vector<Fd> fds);
  void on_welcome(Connection& connection, std::span<const uint8_t> body, std::vector<Fd> fds);
  void on_region_gone(Connection& connection, std::span<const uint8_t> body);
  void on_import(Connection& connection, std::span<const uint8_t> body);
  void on_imported(Connection& connection, std::span<const uint8_t> body, std::vector<Fd> fds, bool lacks_fds);
  void send(Connection& connection, uint8_t type, std::span<const uint8_t> body, std::span<const int> fds = {});
  bool send_now(Connection& connection, std::span<const uint8_t> bytes, std::span<const int> fds);
  void flush(Connection& connection);
  void watch_room(const Connection& connection);
  void watch_process(Connection& connection);
  bool watch(int fd, uint64_t token);
  void unwatch(const Connection& connection);
  void lose(Connection& connection, const std::string& reason);
  void lose_unmade(Connection& connection, const std::string& reason);
  void check_timeouts();
  void sweep();
  Connection& add_connection(Fd fd);
  Connection* find(uint64_t link_id);

  const Address address_;
  const Bytes address_bytes_;
  const std::shared_ptr<MemoryMap> home_;
  const WakeEvent* const bell_;
  RegionTable* const regions_;
  const int64_t connect_timeout_ns_;
  Transport* const waker_;
  Fd listener_;
  Fd epoll_;
  Fd command_event_;
  std::mutex mutex_;  // guards commands_ and events_
  std::deque<Command> commands_;
  std::vector<ControlEvent> events_;
  std::atomic<bool> has_events_{false};
  // Control thread only:
  std::map<uint64_t, std::unique_ptr<Connection>> connections_;  // by token
  std::map<uint64_t, uint64_t> token_of_link_;                   // only links that we initiated
  uint64_t next_token_ = 16;
  int64_t looked_ns_ = 0;  // when sockets were last looked at, or an unlimited wait ended
  bool stopped_ = false;   // guarded by mutex_: the thread is gone, commands go nowhere
  bool stopping_ = false;
  bool lack_told_ = false;       // a lack of descriptors was reported, and none has become available since
  int64_t refused_told_ns_ = 0;  // when a refusal of another user was last reported
  uint64_t refused_untold_ = 0;  // number of refusals since then
  std::thread thread_;
};

}  // namespace crossrail::shm
