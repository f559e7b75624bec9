// What io_uring would bring tcp: bare loops over loopback, each with readiness calls (recv, epoll) and with io_uring, in turns.
//   apt install liburing-dev; g++ -O2 -std=c++20 benchmarks/io_uring_loops.cc -luring -o io_uring_loops; ./io_uring_loops
// Two processes on two cores. Figures and what followed from them: ARCHITECTURE.md, "Rejected".
#include <arpa/inet.h>
#include <liburing.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int kTurns = 9;
constexpr size_t kPages = 4096;
constexpr size_t kPageBytes = 1024;
constexpr size_t kPiecesPerCall = 512;

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

void require(bool fine, const char* what) {
  if (!fine) fail(what);
}

void pin(int cpu) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(static_cast<size_t>(cpu), &cpus);
  require(sched_setaffinity(0, sizeof cpus, &cpus) == 0, "sched_setaffinity");
}

// The connected ends of a TCP connection over loopback.
void connect_pair(int ends[2]) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  require(bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(listener, 1) == 0, "listen");
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  ends[0] = socket(AF_INET, SOCK_STREAM, 0);
  require(connect(ends[0], reinterpret_cast<sockaddr*>(&address), length) == 0, "connect");
  ends[1] = accept(listener, nullptr, nullptr);
  close(listener);
  for (const int end : {ends[0], ends[1]}) {
    const int on = 1, bytes = 4 << 20;
    setsockopt(end, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(end, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    setsockopt(end, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
  }
}

class Ring {
 public:
  Ring() {
    io_uring_params params{};
    params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    if (io_uring_queue_init_params(64, &ring_, &params) != 0) fail("io_uring_queue_init");
  }
  ~Ring() { io_uring_queue_exit(&ring_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  io_uring_sqe* next() { return io_uring_get_sqe(&ring_); }
  // Submits what there is and waits for one completion: one system call. spin: without sleeping.
  int complete(bool spin) {
    io_uring_cqe* cqe = nullptr;
    if (spin) {
      io_uring_submit_and_get_events(&ring_);
      while (io_uring_peek_cqe(&ring_, &cqe) != 0) io_uring_get_events(&ring_);
    } else {
      io_uring_submit_and_wait(&ring_, 1);
      require(io_uring_wait_cqe(&ring_, &cqe) == 0, "io_uring_wait_cqe");
    }
    const int result = cqe->res;
    io_uring_cqe_seen(&ring_, cqe);
    errno = -result;
    require(result >= 0, "an operation of io_uring");
    return result;
  }

 private:
  io_uring ring_;
};

enum class How { kReadiness, kUring };

// One side of a ping-pong; the first begins.
void ping_pong(int socket, bool first, int rounds, bool spin, How how) {
  uint64_t word = 0;
  if (how == How::kUring) {
    Ring ring;
    for (int i = 0; i < rounds; ++i) {
      if (first || i > 0) {
        io_uring_sqe* sqe = ring.next();
        io_uring_prep_send(sqe, socket, &word, sizeof word, MSG_NOSIGNAL);
        sqe->flags |= IOSQE_CQE_SKIP_SUCCESS;
      }
      io_uring_prep_recv(ring.next(), socket, &word, sizeof word, MSG_WAITALL);
      ring.complete(spin);
    }
    if (!first) require(send(socket, &word, sizeof word, MSG_NOSIGNAL) == sizeof word, "send");
    return;
  }
  const int set = epoll_create1(0);
  epoll_event event{};
  event.events = EPOLLIN;
  epoll_ctl(set, EPOLL_CTL_ADD, socket, &event);
  const auto take = [&] {
    for (;;) {
      const ssize_t got = recv(socket, &word, sizeof word, MSG_DONTWAIT);
      if (got == sizeof word) return;
      require(errno == EAGAIN, "recv");
      if (!spin) epoll_wait(set, &event, 1, -1);
    }
  };
  for (int i = 0; i < rounds; ++i) {
    if (!first) take();
    require(send(socket, &word, sizeof word, MSG_NOSIGNAL) == sizeof word, "send");
    if (first) take();
  }
  close(set);
}

// Moves all pages, gathered from and scattered to shuffled places, and waits for the other side's word that it has them.
void move_pages(int socket, bool sends, std::vector<iovec>& places, int repeats, How how) {
  std::unique_ptr<Ring> ring;
  if (how == How::kUring) ring = std::make_unique<Ring>();
  char word = 0;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    std::vector<iovec> left = places;
    for (size_t at = 0; at < left.size();) {
      msghdr message{};
      message.msg_iov = &left[at];
      message.msg_iovlen = std::min(left.size() - at, kPiecesPerCall);
      ssize_t moved;
      if (ring) {
        if (sends) {
          io_uring_prep_sendmsg(ring->next(), socket, &message, MSG_NOSIGNAL);
        } else {
          io_uring_prep_recvmsg(ring->next(), socket, &message, 0);
        }
        moved = ring->complete(false);
      } else {
        moved = sends ? sendmsg(socket, &message, MSG_NOSIGNAL) : recvmsg(socket, &message, 0);
        require(moved > 0, "sendmsg or recvmsg");
      }
      for (size_t rest = static_cast<size_t>(moved); rest > 0;) {
        const size_t part = std::min(rest, left[at].iov_len);
        left[at].iov_base = static_cast<char*>(left[at].iov_base) + part;
        left[at].iov_len -= part;
        rest -= part;
        if (left[at].iov_len == 0) ++at;
      }
    }
    if (sends) {
      require(recv(socket, &word, 1, MSG_WAITALL) == 1, "recv");
    } else {
      require(send(socket, &word, 1, MSG_NOSIGNAL) == 1, "send");
    }
  }
}

// ns of one run of `side` in two processes, seen by the first.
int64_t timed(const std::function<void(int socket, bool first)>& side) {
  int ends[2];
  connect_pair(ends);
  const pid_t child = fork();
  if (child == 0) {
    pin(1);
    side(ends[1], false);
    _exit(0);
  }
  pin(0);
  const int64_t begin = now_ns();
  side(ends[0], true);
  const int64_t took = now_ns() - begin;
  int status = 0;
  waitpid(child, &status, 0);
  require(status == 0, "the other process");
  close(ends[0]);
  close(ends[1]);
  return took;
}

void compare(const char* name, const std::function<double(How)>& measure) {
  std::vector<double> readiness, uring, ratios;
  for (int turn = 0; turn < kTurns; ++turn) {
    readiness.push_back(measure(How::kReadiness));
    uring.push_back(measure(How::kUring));
    ratios.push_back(uring.back() / readiness.back());
  }
  for (auto* values : {&readiness, &uring, &ratios}) std::sort(values->begin(), values->end());
  std::printf("%-44s %8.2f %8.2f   %.2f (%.2f-%.2f)\n", name, readiness[kTurns / 2], uring[kTurns / 2],
              ratios[kTurns / 2], ratios.front(), ratios.back());
}

}  // namespace

int main() {
  std::printf("%-44s %8s %8s   ratio (least-most)\n", "medians of turns", "recv", "io_uring");
  for (const bool spin : {true, false}) {
    const int rounds = spin ? 20'000 : 5'000;
    compare(spin ? "8 bytes, one way, spinning, us" : "8 bytes, one way, sleeping, us", [&](How how) {
      return static_cast<double>(timed([&](int socket, bool first) { ping_pong(socket, first, rounds, spin, how); })) /
             rounds / 2e3;
    });
  }
  std::vector<char> memory(kPages * kPageBytes, 1);
  std::vector<iovec> places(kPages);
  std::vector<size_t> order(kPages);
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  for (size_t i = 0; i < kPages; ++i) places[i] = {&memory[order[i] * kPageBytes], kPageBytes};
  constexpr int kRepeats = 100;
  compare("4096 shuffled pages of 1 KiB, ns a page", [&](How how) {
    return static_cast<double>(
               timed([&](int socket, bool first) { move_pages(socket, first, places, kRepeats, how); })) /
           kRepeats / static_cast<double>(kPages);
  });
}
