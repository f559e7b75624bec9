// The part of the verbs transport that exists in a build without libibverbs' headers.
#include "transport/verbs/open.h"
#include "util/errors.h"

#if !CROSSRAIL_WITH_VERBS

namespace crossrail::verbs {

std::vector<Port> ports() { return {}; }

std::string missing() {
  return "this build of crossrail has no verbs transport: it was built without libibverbs' headers (Debian, Ubuntu: "
         "libibverbs-dev; then build again)";
}

std::vector<std::unique_ptr<rdma::Nic>> open_nics(const TransportOptions&) {
  throw TransportError("open_nics", 0, missing(), "or use transport 'tcp'");
}

}  // namespace crossrail::verbs

#endif
