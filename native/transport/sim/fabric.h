// The network of a world: hosts with rails, the engines' NICs on them, and everything in flight.
//
// The life of a work: it occupies the sender's wire, then the receiver's, in the order in which works arrive there,
// which is not that of posting if many hosts write to one; its bytes arrive in parts, at several moments and in any
// order; then the immediate is reported and the sender learns of the completion, whichever comes first. On an ordered
// path works land, and are reported, in the order of posting. A retry takes place if the peer does not answer; when the
// retries are exhausted, the path breaks. After a break every work not reported yet may be executed or not (on an
// ordered path: the first few are) until the path is flushed; from then on nothing of it happens.
//
//   fabric.cc   hosts, NICs, paths, keys      works.cc    works under way
//   faults.cc   what goes wrong on purpose    parcels.cc  fragments and datagrams
//
// Threads: whoever holds the world's lock.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/rdma/nic.h"
#include "transport/sim/events.h"
#include "transport/sim/log.h"
#include "transport/sim/model.h"
#include "transport/sim/prng.h"
#include "transport/sim/standing_faults.h"

namespace crossrail::sim {

// While the peer does not answer.
inline constexpr int64_t kRetryEveryNs = 2'000'000;
inline constexpr int64_t kRetryMaxNs = 500'000'000;

class SimNic;
class SimPath;
class SimRegistration;

// Faults of works and registrations: of a whole host, or of one of its rails.
struct Faults {
  uint32_t fail_chance_ppm = 0;  // of works posted here
  uint64_t fail_count = 0;       // this many of the next ones
  uint64_t registrations_to_fail = 0;
  StandingFaults withholdings;  // of completions
};

// A rail of a host, shared by the engines on the host.
struct Rail {
  NicModel model;
  Wire out;
  Wire in;
  bool is_up = true;
  StandingFaults downs;  // up if there are none
  bool is_full = false;  // takes no works for a while
  StandingFaults fulls;  // full if there are any
  uint32_t slowness_permille = 1000;
  StandingFaults slownesses;  // slowness_permille: that of the last
  Faults faults;
};

struct Host {
  std::string name;
  std::vector<Rail> rails;
  LocalModel local_model;
  Wire local;
  Faults faults;  // of all its rails together
};

// Names an object that may be gone: an index, and a number that no other object at that index has had.
struct PathId {
  uint32_t index = 0;
  uint32_t number = 0;  // 0: none
  bool operator==(const PathId&) const = default;
};

struct Totals {
  uint64_t works = 0;
  uint64_t bytes = 0;
  uint64_t events = 0;
  uint64_t turns = 0;
};

class Fabric {
 public:
  // now: the world's clock. wake: gives that engine a turn.
  Fabric(const std::atomic<int64_t>* now_ns, Prng* prng, EventQueue* events, EventLog* log,
         std::function<void(uint32_t)> wake);
  ~Fabric();

  // --- hosts ---
  uint32_t add_host(const std::string& name, std::vector<NicModel> rails, const LocalModel& local);
  Host& host(uint32_t index) { return hosts_[index]; }
  uint32_t host_count() const { return static_cast<uint32_t>(hosts_.size()); }
  bool under_way() const { return works_under_way_ + parcels_under_way_ > 0; }

  // --- of NICs ---
  uint32_t add(SimNic* nic);
  void remove(SimNic* nic);
  PathId add(SimPath* path);
  void remove(SimPath* path);
  uint64_t add(SimRegistration* registration);  // its key
  void remove(SimRegistration* registration);
  // Everything that has begun to arrive there fails.
  void refuse_arrivals(const SimRegistration& registration);
  void post(SimPath& path, const rdma::NicWork& work);
  void send_fragment(SimPath& path, std::span<const uint8_t> head, std::span<const uint8_t> body);
  void send_datagram(SimNic& from, uint32_t to_nic, std::span<const uint8_t> bytes);
  void break_off(SimPath& path);
  SimPath* find(PathId id) const;
  // A NIC has news: its engine gets a turn.
  void wake(const SimNic& nic);
  void note_connect(const SimPath& path);
  bool has_nic(uint32_t number) const;

  void happen(const Event& event);

  // A registration on that rail shall fail: consumes one of the requested failures.
  bool take_failed_registration(uint32_t host, uint32_t rail);

  // --- faults (faults.cc). rail: one, or kAnyRail for the host as a whole. fault: which of its kind there begins, or
  // ends; kEveryFault ends all ---
  void set_rail_up(uint32_t host, uint32_t rail, bool up, FaultNumber fault);
  void set_rail_full(uint32_t host, uint32_t rail, bool full, FaultNumber fault);
  // permille: 1000 ends it. If several overlap, the one that began last counts.
  void set_slowness(uint32_t host, uint32_t rail, uint32_t permille, FaultNumber fault);
  void set_partition(uint32_t a, uint32_t b, bool parted, FaultNumber fault);
  // One direction only: traffic in the other direction arrives, but its acknowledgement does not.
  void set_silence(uint32_t from, uint32_t to, bool silent, FaultNumber fault);
  void set_failing(uint32_t host, uint32_t rail, uint32_t chance_ppm, uint64_t count);
  void set_withholding(uint32_t host, uint32_t rail, bool withholds, FaultNumber fault);
  void set_registrations_to_fail(uint32_t host, uint32_t rail, uint64_t count);
  void set_datagram_faults(uint32_t loss_ppm, uint32_t doubling_ppm);
  // The engine's process is gone: what has left its NICs still arrives, nothing else.
  void kill(uint32_t actor);

  Totals& totals() { return totals_; }

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};

  // A work in flight. Its slot is free again when it ends; events notice by the number that the slot has been reused.
  struct Work {
    uint64_t number = 0;  // 0: free
    rdma::NicWork work;
    PathId path;  // none: the sender is gone, but what it sent is still in flight
    PathId to_path;
    uint32_t to_nic = 0;
    uint32_t from_host = 0;
    uint32_t from_rail = 0;
    uint32_t parts = 1;
    uint32_t parts_open = 0;
    uint32_t key_index = kNone;  // of the peer's registration, while bytes arrive there
    int64_t leaves_ns = 0;
    Rail* in = nullptr;      // the rail whose wire it occupies at the other end
    Wire::Time reaches = 0;  // when its first byte arrives
    Wire::Time trails = 0;   // and its last, if that wire is free
    int64_t retry_until_ns = 0;
    enum class Doom : uint8_t {
      kNone,
      kBefore,
      kAfter
    } doom = Doom::kNone;  // fails, is not executed, or is not acknowledged
    bool is_ordered = false;
    bool moves_bytes = false;
    bool is_admitted = false;  // its first part has arrived
    bool given_up = false;
    bool has_landed = false;
    bool is_withheld = false;
    std::unique_ptr<std::byte[]> copy;  // of the source, once the sender is gone
  };

  // A fragment or datagram in flight.
  struct Parcel {
    uint64_t number = 0;
    PathId path;
    PathId to_path;
    uint32_t from_host = 0;
    uint32_t from_rail = 0;
    uint32_t to_nic = 0;
    int64_t retry_until_ns = 0;
    std::vector<uint8_t> bytes;
  };

  struct Key {
    SimRegistration* registration = nullptr;
    uint32_t salt = 0;
    uint32_t next_free = kNone;
  };

  int64_t now() const { return now_ns_->load(std::memory_order_relaxed); }
  bool are_parted(uint32_t a, uint32_t b) const;
  bool is_silent(uint32_t from, uint32_t to) const;
  // Whether something from there reaches that NIC now.
  bool reaches(uint32_t from_host, uint32_t from_rail, const SimNic* to) const;
  void break_path(SimPath& path, const std::string& reason, bool by_peer = false);
  void give_up_some(SimPath& path);
  void flush(SimPath& path);

  // --- works.cc ---
  uint32_t new_work();
  void free_work(uint32_t slot);
  void plan(SimPath& path, uint32_t slot);
  void reach(uint32_t slot);
  void schedule(uint32_t slot, SimPath* path, Wire::Time begin, Wire::Time end);
  void arrive(uint32_t slot, uint32_t part);
  bool admit(uint32_t slot, SimPath& to);
  void refuse(uint32_t slot, SimPath* to);
  void place(const Work& item, uint32_t part) const;
  void land(uint32_t slot, SimPath& to);
  void tell_notices(SimPath& to, bool all);
  void report(uint32_t slot);
  // Its acknowledgement was lost: it is requested again, or the retries are exhausted. False: it has arrived.
  bool lacks_answer(uint32_t slot, SimPath& path);
  void release_withheld(SimPath& path);
  void retry(uint32_t slot, uint32_t part, SimPath* path);
  void fail_work(SimPath& path, uint32_t slot, rdma::NicFault fault, const std::string& text);
  bool draws_failure(uint32_t host, uint32_t rail);
  bool withholds(uint32_t host, uint32_t rail) const;
  Faults& faults_of(uint32_t host, uint32_t rail);
  void leave_key(Work& item);
  void give_up(Work& item);
  void push_part(int64_t at_ns, uint32_t slot, uint32_t part);
  SimRegistration* registration_of(uint64_t key) const;

  // --- parcels.cc ---
  uint32_t new_parcel();
  void free_parcel(uint32_t slot);
  void arrive_fragment(uint32_t slot);
  void arrive_datagram(uint32_t slot);

  const std::atomic<int64_t>* const now_ns_;
  Prng* const prng_;
  EventQueue* const events_;
  EventLog* const log_;
  const std::function<void(uint32_t)> wake_;
  std::deque<Host> hosts_;
  // Where a NIC is or was: traffic to a NIC that is gone takes as long, whoever still holds its engine.
  struct NicPlace {
    uint32_t host;
    uint32_t rail;
  };
  std::vector<SimNic*> nics_;  // by number; null: gone
  std::vector<NicPlace> nic_places_;
  std::vector<SimPath*> paths_;
  std::vector<uint32_t> free_paths_;
  uint32_t next_path_number_ = 1;
  std::vector<Key> keys_;
  uint32_t free_key_ = kNone;
  std::vector<Work> works_;
  std::vector<uint32_t> free_works_;
  uint64_t next_work_number_ = 1;
  std::vector<Parcel> parcels_;
  std::vector<uint32_t> free_parcels_;
  uint64_t next_parcel_number_ = 1;
  uint64_t works_under_way_ = 0;
  uint64_t parcels_under_way_ = 0;
  using FaultsByHosts = std::map<std::pair<uint32_t, uint32_t>, StandingFaults>;
  // Begins or ends a fault there. Returns whether it is the first, or none is left.
  static bool change(FaultsByHosts& faults, std::pair<uint32_t, uint32_t> hosts, bool begins, FaultNumber fault);
  FaultsByHosts partitions_;  // only entries with one
  FaultsByHosts silences_;    // from, to; only entries with one
  uint32_t datagram_loss_ppm_ = 0;
  uint32_t datagram_doubling_ppm_ = 0;
  Totals totals_;
};

}  // namespace crossrail::sim
