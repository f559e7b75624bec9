// Owners of libibverbs' objects. A member that uses another is declared after it, so that it is destroyed before it.
#pragma once

#include <memory>

#include "transport/verbs/library.h"

namespace crossrail::verbs {

// What cannot be destroyed stays with the kernel until the process ends: there is nobody to tell, and nothing to do
// about it.
template <auto Member>
struct Destroy {
  template <typename Object>
  void operator()(Object* object) const {
    (library().*Member)(object);
  }
};

using Context = std::unique_ptr<ibv_context, Destroy<&Library::close_device>>;
using Domain = std::unique_ptr<ibv_pd, Destroy<&Library::dealloc_pd>>;
using Memory = std::unique_ptr<ibv_mr, Destroy<&Library::dereg_mr>>;
using Channel = std::unique_ptr<ibv_comp_channel, Destroy<&Library::destroy_comp_channel>>;
using CompletionQueue = std::unique_ptr<ibv_cq, Destroy<&Library::destroy_cq>>;
using ReceiveQueue = std::unique_ptr<ibv_srq, Destroy<&Library::destroy_srq>>;
using QueuePair = std::unique_ptr<ibv_qp, Destroy<&Library::destroy_qp>>;
using AddressHandle = std::unique_ptr<ibv_ah, Destroy<&Library::destroy_ah>>;

}  // namespace crossrail::verbs
