// The engines of this process.
#pragma once

#include <mutex>
#include <set>

namespace crossrail {

class EngineCore;

// The engines of this process, for fork handling and for dumps on a signal. Never destroyed: engines may outlive static
// destructors.
struct LiveEngines {
  std::mutex mutex;  // held over fork
  std::set<EngineCore*> cores;
};
LiveEngines& live_engines();

}  // namespace crossrail
