// What LibfabricDouble keeps: the objects behind libfabric's handles, each of which begins with its own.
#pragma once

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_rma.h>

#include <compare>
#include <deque>
#include <list>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "ofi_double.h"

namespace crossrail::test::libfabric_double {

// What a context is filled with while its operation is under way.
inline constexpr uint64_t kContextMark = 0xc0ffee0ddba11;

struct Domain;

// The address of an endpoint: which device, and which queue pair of it.
struct PeerName {
  uint32_t device = 0;
  uint32_t number = 0;
  auto operator<=>(const PeerName&) const = default;
};

struct Memory {
  fid_mr fid{};  // first: libfabric's handle
  Domain* domain = nullptr;
  std::byte* base = nullptr;
  std::byte* reached = nullptr;  // where the device finds the bytes: of a GPU's memory elsewhere than at base
  uint64_t bytes = 0;
  uint64_t access = 0;
};

struct Domain {
  fid_domain fid{};
  uint32_t device = 0;
  bool has_hmem = false;
  bool direct = false;
  std::map<uint64_t, Memory*> memories;
};

struct Addresses {
  fid_av fid{};
  std::map<fi_addr_t, PeerName> names;
  fi_addr_t next = 100;
  bool is_bound = false;
};

struct Completion {
  fi_cq_data_entry entry{};
  int error = 0;
  int status = 0;
};

struct Queue {
  fid_cq fid{};
  uint32_t device = 0;
  std::deque<Completion> entries;
  size_t size = 0;
};

struct Receive {
  void* buffer;
  size_t bytes;
  void* context;
};

// Of errors of the provider's own.
struct Errors {
  fid_eq fid{};
  std::deque<int> statuses;
};

struct Endpoint {
  fid_ep fid{};
  Domain* domain = nullptr;
  Errors* errors = nullptr;
  Addresses* addresses = nullptr;
  Queue* queue = nullptr;
  PeerName name;
  bool is_enabled = false;
  bool shm_refused = false;
  std::deque<Receive> receives;
  size_t outstanding = 0;
};

struct Operation {
  enum class Kind : uint8_t { kWrite, kRead, kSend } kind;
  Endpoint* from;
  PeerName to;
  std::byte* local = nullptr;  // as the device reaches it
  uint64_t bytes = 0;
  uint64_t remote = 0;
  uint64_t key = 0;
  bool has_imm = false;
  uint64_t imm = 0;
  void* context = nullptr;
  uint32_t wait = 0;
  std::vector<std::byte> payload;  // of sends
};

}  // namespace crossrail::test::libfabric_double

namespace crossrail::test {

struct LibfabricDouble::World {
  DoubleSettings settings;
  std::mt19937 random;
  std::vector<std::string> violations;
  std::list<libfabric_double::Operation> pending;
  std::set<libfabric_double::Endpoint*> endpoints;
  std::set<uint32_t> frozen;
  std::map<uint32_t, int> failing;
  int send_error = 0;
  std::set<uint32_t> broken_queues;
  std::set<libfabric_double::Errors*> errors;
  std::map<libfabric_double::Queue*, std::vector<void*>> closed_under;  // contexts of what was under way then
  uint32_t next_number = 1;
  uint64_t next_key = 0x1000;
  std::vector<void*> sunk;

  void violate(const std::string& text) { violations.push_back(text); }
  bool chance(uint32_t percent) { return random() % 100 < percent; }
  libfabric_double::Endpoint* find(const libfabric_double::PeerName& name) {
    for (libfabric_double::Endpoint* endpoint : endpoints) {
      if (endpoint->name == name) return endpoint;
    }
    return nullptr;
  }

  // --- the devices, in ofi_double_devices.cc ---
  // Carries out whatever has waited for long enough and can be.
  void progress();
  bool carry_out(libfabric_double::Operation& operation);  // false: not now
  bool deliver_message(libfabric_double::Operation& operation, libfabric_double::Endpoint& target);
  void complete(libfabric_double::Queue& queue, const libfabric_double::Completion& completion);
};

}  // namespace crossrail::test
