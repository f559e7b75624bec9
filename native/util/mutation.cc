#include "util/mutation.h"

#ifdef CROSSRAIL_MUTATIONS

#include <cstdlib>

namespace crossrail {

namespace {

Mutation chosen() {
  static const Mutation mutation = [] {
    const char* const number = std::getenv("CROSSRAIL_MUTATION");
    return number == nullptr ? Mutation::kNone : static_cast<Mutation>(std::atoi(number));
  }();
  return mutation;
}

}  // namespace

bool is_mutated(Mutation mutation) { return mutation == chosen(); }

bool is_mutated_now(Mutation mutation, uint32_t of) {
  static uint32_t asked = 0;  // one thread drives everything in a simulated world
  return is_mutated(mutation) && ++asked % of == 0;
}

}  // namespace crossrail

#endif
