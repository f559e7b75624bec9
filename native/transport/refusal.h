// What a peer may answer about an operation of ours.
#pragma once

#include <cstdint>

#include "transport/types.h"

namespace crossrail {

// Whether a peer may say this, a Status, of an operation of ours that it did not do. It cannot tell us that it is lost,
// that our own engine is closed, or that our user wanted the operation back.
constexpr bool is_refusal(uint64_t number) {
  if (number > UINT8_MAX) return false;
  switch (static_cast<Status>(number)) {
    case Status::kRegionClosed:
    case Status::kRegionRevoked:
    case Status::kOutOfBounds:
    case Status::kAccessDenied:
    case Status::kMessageTooLong:
    case Status::kTransportFailed:  // of the peer's GPU
      return true;
    case Status::kPending:
    case Status::kDone:
    case Status::kCancelled:
    case Status::kPeerLost:
    case Status::kEngineClosed:
    case Status::kChecksumMismatch:
      return false;
  }
  return false;  // a number that no status has
}

}  // namespace crossrail
