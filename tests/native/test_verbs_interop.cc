// The verbs NIC against a peer that is not ours: tests/vm/pyverbs_peer.py. Run by `./dev vm test`.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sstream>

#include "transport/verbs/open.h"
#include "util/errors.h"

#if CROSSRAIL_WITH_VERBS

using namespace crossrail;

namespace {

bool is_possible() { return std::getenv("CROSSRAIL_VM") != nullptr; }

// Asks and answers by lines.
class Child {
 public:
  Child(const char* program, const char* script, const char* argument) {
    std::array<int, 2> in;
    std::array<int, 2> out;
    REQUIRE(::pipe(in.data()) == 0);
    REQUIRE(::pipe(out.data()) == 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(in[0], 0);
      ::dup2(out[1], 1);
      for (const int fd : {in[0], in[1], out[0], out[1]}) ::close(fd);
      ::execl(program, program, script, argument, nullptr);
      ::_exit(127);
    }
    ::close(in[0]);
    ::close(out[1]);
    to_ = ::fdopen(in[1], "w");
    from_ = ::fdopen(out[0], "r");
  }
  ~Child() {
    std::fclose(to_);
    std::fclose(from_);
    ::waitpid(pid_, nullptr, 0);
  }
  void tell(const std::string& line) {
    std::fprintf(to_, "%s\n", line.c_str());
    std::fflush(to_);
  }
  std::string answer() {
    std::array<char, 1024> line{};
    if (std::fgets(line.data(), static_cast<int>(line.size()), from_) == nullptr) return "(the peer ended)";
    line[std::strcspn(line.data(), "\n")] = 0;
    return line.data();
  }
  std::string ask(const std::string& line) {
    tell(line);
    return answer();
  }

 private:
  pid_t pid_ = -1;
  FILE* to_ = nullptr;
  FILE* from_ = nullptr;
};

std::vector<uint8_t> from_hex(const std::string& text) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2)
    bytes.push_back(static_cast<uint8_t>(std::strtoul(text.substr(i, 2).c_str(), nullptr, 16)));
  return bytes;
}

struct Heard final : rdma::NicEvents {
  uint64_t done = 0;
  uint64_t failed = 0;
  std::vector<uint32_t> imms;
  std::vector<std::string> fragments;
  bool flushed = false;
  void on_work_done(rdma::NicPath&, uint64_t cookie, bool) override { done = cookie + 1; }
  void on_work_failed(rdma::NicPath&, uint64_t, rdma::NicFault, int, const std::string&) override { ++failed; }
  void on_imm(rdma::NicPath*, uint32_t imm) override { imms.push_back(imm); }
  void on_fragment(rdma::NicPath*, std::span<const uint8_t> bytes) override {
    fragments.emplace_back(bytes.begin(), bytes.end());
  }
  void on_datagram(std::span<const uint8_t>) override {}
  void on_nobody(std::span<const uint8_t>) override {}
  void on_path_broken(rdma::NicPath&, bool, const std::string&) override {}
  void on_path_flushed(rdma::NicPath&) override { flushed = true; }
  void on_port(bool, const std::string&) override {}
  void on_device_fatal(const std::string&) override {}
};

}  // namespace

TEST_CASE("verbs interop: a pyverbs peer writes, reads, sends, and is written to" * doctest::skip(!is_possible())) {
  TransportOptions options;
  options.rails = {"rxe0"};
  const auto nic = std::move(verbs::open_nics(options).at(0));
  Heard heard;
  std::vector<std::byte> memory(1 << 20, std::byte{0x41});
  const auto region = nic->register_memory(memory.data(), memory.size(), Access::kRemoteWrite);
  const auto path = nic->make_path();
  const auto until = [&](const std::function<bool()>& condition) {
    const Deadline deadline = deadline_in(10);
    while (!condition() && now_ns() < deadline) nic->poll(heard);
    return condition();
  };

  Child peer("/usr/bin/python3", "tests/vm/pyverbs_peer.py", "rxe1");
  std::istringstream described(peer.ask("describe"));
  std::string endpoint;
  std::string offer;
  uint64_t address = 0;
  uint64_t key = 0;
  described >> endpoint >> offer >> address >> key;
  REQUIRE(!described.fail());
  path->connect(from_hex(endpoint), from_hex(offer));
  REQUIRE(peer.ask("connect " + to_hex(nic->endpoint()) + " " + to_hex(path->offer())) == "connected");

  const std::string ours = std::to_string(region->remote_base) + " " + std::to_string(region->key);
  CHECK(peer.ask("read " + ours + " 100000") == "0 4141414141414141");
  CHECK(peer.ask("write " + ours + " 100000 123456789") == "0");
  REQUIRE(until([&] { return heard.imms.size() == 1; }));
  CHECK(heard.imms[0] == 123456789);
  CHECK(std::count(memory.begin(), memory.end(), std::byte{'p'}) == 100000);
  CHECK(peer.ask("send hello") == "0");
  REQUIRE(until([&] { return heard.fragments.size() == 1; }));
  CHECK(heard.fragments[0] == "hello");

  CHECK(peer.ask("receive") == "ready");
  std::fill(memory.begin(), memory.end(), std::byte{0x42});
  rdma::NicWork work;
  work.local = memory.data();
  work.length_bytes = 70000;
  work.registration = region.get();
  work.remote_address = address;
  work.remote_key = key;
  work.has_imm = true;
  work.imm = 0xfeedbeef;
  REQUIRE(path->post(std::span(&work, 1)) == 1);
  CHECK(until([&] { return heard.done == 1; }));
  CHECK(peer.ask("immediate") == "0 3 70000 " + std::to_string(0xfeedbeefu) + " 4242424242424242");
  const std::string text(300, 'm');
  CHECK(path->send({reinterpret_cast<const uint8_t*>(text.data()), text.size()}, {}));
  CHECK(until([&] { return path->is_sent(); }));
  CHECK(peer.ask("message") == "0 4 " + text);

  CHECK(peer.ask("write " + std::to_string(region->remote_base + memory.size() - 10) + " " +
                 std::to_string(region->key) + " 11 1") == "10");  // remote access error
  path->break_off("end");
  CHECK(until([&] { return heard.flushed; }));
  CHECK(heard.failed == 0);
}

#endif
