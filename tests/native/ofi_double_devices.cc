// What the devices of the double of libfabric (ofi_double.h) do with what was posted: in any order, late, and checked.
#include <algorithm>
#include <cstring>

#include "ofi_double_world.h"

namespace crossrail::test {

using namespace libfabric_double;

namespace {

constexpr int kBadRemoteAddress = 7, kUnknownPeer = 14;  // of the provider

int touch_memory(const Operation& operation, Endpoint& target) {
  // RDMA needs an address handle of the initiator's device at the target.
  const auto& names = target.addresses->names;
  if (std::none_of(names.begin(), names.end(),
                   [&](const auto& entry) { return entry.second.device == operation.from->name.device; }))
    return kUnknownPeer;
  const auto found = target.domain->memories.find(operation.key);
  if (found == target.domain->memories.end()) return kBadRemoteAddress;
  const Memory& memory = *found->second;
  const uint64_t needed = operation.kind == Operation::Kind::kRead ? FI_REMOTE_READ : FI_REMOTE_WRITE;
  const auto base = reinterpret_cast<uint64_t>(memory.base);
  if ((memory.access & needed) == 0 || operation.remote < base ||
      operation.remote + operation.bytes > base + memory.bytes)
    return kBadRemoteAddress;
  auto* const remote = memory.reached + (operation.remote - base);
  if (operation.kind == Operation::Kind::kRead) {
    std::memcpy(operation.local, remote, operation.bytes);
  } else if (operation.bytes != 0) {
    std::memcpy(remote, operation.local, operation.bytes);
  }
  return 0;
}

}  // namespace

void LibfabricDouble::World::complete(Queue& queue, const Completion& completion) {
  if (queue.entries.size() >= queue.size) violate("the completion queue ran over");
  queue.entries.push_back(completion);
}

bool LibfabricDouble::World::deliver_message(Operation& operation, Endpoint& target) {
  if (target.receives.empty()) return false;  // receiver not ready: the device tries again, for ever
  const Receive receive = target.receives.front();
  target.receives.pop_front();
  std::memcpy(receive.buffer, operation.payload.data(), std::min(receive.bytes, operation.payload.size()));
  Completion completion;
  completion.entry = {receive.context, FI_RECV | FI_MSG, operation.payload.size(), nullptr, 0};
  complete(*target.queue, completion);
  return true;
}

bool LibfabricDouble::World::carry_out(Operation& operation) {
  if (frozen.contains(operation.to.device)) return false;
  Completion completion;
  completion.entry.op_context = operation.context;
  completion.entry.flags = operation.kind == Operation::Kind::kWrite  ? FI_WRITE | FI_RMA
                           : operation.kind == Operation::Kind::kRead ? FI_READ | FI_RMA
                                                                      : FI_SEND | FI_MSG;
  Endpoint* const target = find(operation.to);
  if (const auto fails = failing.find(operation.to.device); fails != failing.end()) {
    completion.status = fails->second;
  } else if (target == nullptr) {
    completion.status = 9;  // no such queue pair
  } else if (operation.kind == Operation::Kind::kSend) {
    if (!deliver_message(operation, *target)) return false;
  } else {
    completion.status = touch_memory(operation, *target);
    if (completion.status == 0 && operation.has_imm) {
      Completion arrival;
      if (target->domain->direct && settings.imms_eat_receives) {
        if (target->receives.empty()) return false;
        arrival.entry.op_context = target->receives.front().context;
        target->receives.pop_front();
      }
      arrival.entry = {arrival.entry.op_context, FI_REMOTE_WRITE | FI_RMA | FI_REMOTE_CQ_DATA, operation.bytes, nullptr,
                       operation.imm & 0xffffffff};
      complete(*target->queue, arrival);
    }
  }
  completion.error = completion.status != 0 ? FI_EIO : 0;
  uint64_t mark;
  std::memcpy(&mark, operation.context, sizeof mark);
  if (mark != kContextMark) violate("a context was touched or reused before its completion");
  --operation.from->outstanding;
  complete(*operation.from->queue, completion);
  return true;
}

void LibfabricDouble::World::progress() {
  std::vector<std::list<Operation>::iterator> order;
  for (auto at = pending.begin(); at != pending.end(); ++at) order.push_back(at);
  std::shuffle(order.begin(), order.end(), random);
  for (const auto& at : order) {
    if (at->wait != 0) {
      --at->wait;
    } else if (carry_out(*at)) {
      pending.erase(at);
    }
  }
}

}  // namespace crossrail::test
