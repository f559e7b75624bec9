// Two or more ofi NICs in one process, polled in turn.
#pragma once

#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "nic_recorder.h"
#include "transport/ofi/nic.h"
#include "transport/ofi/wire.h"
#include "util/clock.h"

namespace crossrail::test {

inline std::span<const uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// One NIC, what it told, and memory that it knows.
struct OfiSide {
  explicit OfiSide(std::unique_ptr<ofi::OfiNic> opened) : nic(std::move(opened)), memory(1 << 20) {
    registration = nic->register_memory(memory.data(), memory.size(), Access::kRemoteWrite);
  }
  uint32_t poll() { return nic->poll(events); }
  rdma::NicWork write_to(const OfiSide& peer, uint64_t cookie, size_t offset, size_t length) const {
    rdma::NicWork work;
    work.local = const_cast<std::byte*>(memory.data()) + offset;
    work.length_bytes = length;
    work.registration = registration.get();
    work.remote_address = peer.registration->remote_base + offset;
    work.remote_key = peer.registration->key;
    work.cookie = cookie;
    return work;
  }

  std::unique_ptr<ofi::OfiNic> nic;
  NicRecorder events;
  std::vector<std::byte> memory;
  std::unique_ptr<rdma::Registration> registration;
};

// Plain libfabric over tcp, without a NIC of ours: what anybody can do who reaches a NIC's port.
struct OfiStranger {
  explicit OfiStranger(const std::string& address)
      : library(ofi::open_library()),
        rules(ofi::rules_for("tcp")),
        domain(library, rules, std::move(ofi::choose(*library, rules, {address}, 1).front())),
        listener(domain) {}

  // Dials, and polls whoever is dialed until there is an answer. True: let in.
  bool dial(const ofi::Name& to, std::span<const uint8_t> said, const std::function<void()>& poll) {
    endpoint = std::make_unique<ofi::Endpoint>(domain, listener, 4, nullptr);
    endpoint->dial(to, said);
    for (const Deadline end = deadline_in(10); now_ns() < end;) {
      poll();
      read();
      const auto event = listener.next();
      if (event) return event->kind == ofi::ConnectionEvent::Kind::kConnected;
    }
    throw std::runtime_error("nobody answered");
  }
  ssize_t read() {
    fi_cq_data_entry entry;
    const ssize_t got = fi_cq_read(domain.queue(), &entry, 1);
    fi_cq_err_entry error{};
    if (got == -FI_EAVAIL) fi_cq_readerr(domain.queue(), &error, 0);
    return got;
  }

  std::shared_ptr<const ofi::Library> library;
  ofi::Rules rules;
  ofi::Domain domain;
  ofi::Listener listener;
  std::unique_ptr<ofi::Endpoint> endpoint;
};

struct OfiPair {
  OfiPair(std::unique_ptr<ofi::OfiNic> first, std::unique_ptr<ofi::OfiNic> second)
      : a(std::move(first)), b(std::move(second)) {}

  void connect() {
    at_a = a.nic->make_path();
    at_b = b.nic->make_path();
    at_a->connect(b.nic->endpoint(), at_b->offer());
    at_b->connect(a.nic->endpoint(), at_a->offer());
  }
  void poll() {
    a.poll();
    b.poll();
  }
  // False: not within the time.
  bool until(const std::function<bool()>& wanted, double seconds = 10) {
    const Deadline end = deadline_in(seconds);
    while (!wanted()) {
      if (now_ns() > end) return false;
      poll();
    }
    return true;
  }
  // Posts all, in as many turns as it takes.
  bool post(OfiSide&, rdma::NicPath& path, std::vector<rdma::NicWork> works) {
    size_t posted = 0;
    return until([&] {
      posted += path.post({works.data() + posted, works.size() - posted});
      return posted == works.size();
    });
  }
  bool end(OfiSide& side, std::unique_ptr<rdma::NicPath>& path) {
    path->break_off("the test is over");
    const bool flushed = until([&] { return side.events.flushed[path.get()] == 1; });
    path.reset();
    return flushed;
  }

  OfiSide a;
  OfiSide b;
  std::unique_ptr<rdma::NicPath> at_a;
  std::unique_ptr<rdma::NicPath> at_b;
};

}  // namespace crossrail::test
