#include "transport/shm/peer_user.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>

namespace crossrail::shm {

namespace {

constexpr uid_t kRoot = 0;

// Whether this uid stands for all users unknown to the user namespace of that process ("self", or a pid): that of
// nobody, except in a namespace that knows all.
bool is_anybody(uid_t user, const std::string& process) {
  uid_t nobody = 65534;
  std::ifstream("/proc/sys/kernel/overflowuid") >> nobody;
  if (user != nobody) return false;
  uint32_t inside = 1, outside = 1, count = 0;
  std::ifstream("/proc/" + process + "/uid_map") >> inside >> outside >> count;
  return inside != 0 || outside != 0 || count != UINT32_MAX;
}

enum class UserNamespace { kOurs, kAnother, kUnknown };

// The user namespace of a process, as far as it lets us look.
UserNamespace user_namespace_of(pid_t pid) {
  struct stat own{}, other{};
  if (pid <= 0 || stat("/proc/self/ns/user", &own) != 0) return UserNamespace::kUnknown;
  if (stat(("/proc/" + std::to_string(pid) + "/ns/user").c_str(), &other) != 0) return UserNamespace::kUnknown;
  return own.st_ino == other.st_ino ? UserNamespace::kOurs : UserNamespace::kAnother;
}

bool is_our_user(const ucred& peer) {
  return peer.uid == geteuid() &&
         (!is_anybody(peer.uid, "self") || user_namespace_of(peer.pid) == UserNamespace::kOurs);
}

// Whether that process, of our user, sees that we are: not from a user namespace that lacks the user, or has given him
// the number of nobody. True if it does not let us look.
bool sees_our_user(const ucred& peer) {
  if (user_namespace_of(peer.pid) != UserNamespace::kAnother) return true;
  const std::string process = std::to_string(peer.pid);
  std::ifstream map("/proc/" + process + "/uid_map");
  if (!map) return true;
  // The second column has the numbers of the namespace that reads it.
  for (uint32_t inside = 0, outside = 0, count = 0; map >> inside >> outside >> count;) {
    if (peer.uid - outside < count) return !is_anybody(inside + (peer.uid - outside), process);
  }
  return false;
}

// Whether root in our user namespace is an unprivileged user to that process.
bool is_foreign_to_root(const ucred& peer) {
  const UserNamespace of_peer = user_namespace_of(peer.pid);
  return of_peer == UserNamespace::kAnother || (of_peer == UserNamespace::kUnknown && is_anybody(peer.uid, "self"));
}

}  // namespace

ucred peer_of(int socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return {.pid = 0, .uid = static_cast<uid_t>(-1), .gid = static_cast<gid_t>(-1)};
  }
  return credentials;
}

bool is_let_in(const ucred& peer) { return is_our_user(peer) || peer.uid == kRoot; }

std::string why_not_let_in(int socket) {
  const ucred peer = peer_of(socket);
  const bool is_ours = is_our_user(peer);
  if ((is_ours && sees_our_user(peer)) || (geteuid() == kRoot && !is_foreign_to_root(peer))) return {};
  const std::string detail = is_ours ? ", whom its user namespace does not know or calls nobody"
                             : peer.uid == geteuid()
                                 ? ", which is anybody's number in a user namespace that does not know all users"
                                 : "";
  return "it belongs to user " + std::to_string(peer.uid) + (geteuid() == kRoot ? " of another user namespace" : "") +
         ", and this process to user " + std::to_string(geteuid()) + detail +
         ": shm is for processes of one user, and for root's";
}

}  // namespace crossrail::shm
