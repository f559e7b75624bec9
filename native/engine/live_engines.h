// The engines of this process.
#pragma once

#include <mutex>
#include <set>

namespace crossrail {

class EngineCore;

// Engines of this process, so that fork can be survived and a signal knows whom to dump. Never destroyed: engines may
// outlive static destructors.
struct LiveEngines {
  std::mutex mutex;  // held over fork
  std::set<EngineCore*> cores;
};
LiveEngines& live_engines();

}  // namespace crossrail
