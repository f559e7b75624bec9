#include <doctest/doctest.h>

#include <cerrno>
#include <string>

#include "util/errors.h"

namespace crossrail {

TEST_CASE("what the system refuses comes with what to do, whatever the call") {
  for (const int code : {EMFILE, ENFILE, EPERM, ENOSYS, ENOMEM}) {
    errno = code;
    try {
      throw_errno("eventfd", "cannot make a descriptor");
    } catch (const TransportError& error) {
      CHECK(error.code() == code);
      CHECK_FALSE(error.remedy().empty());
    }
  }
}

}  // namespace crossrail
