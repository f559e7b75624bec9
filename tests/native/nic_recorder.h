// Writes down what a NIC tells, for tests of NICs without the layer above.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "transport/rdma/nic.h"

namespace crossrail::test {

struct NicRecorder final : rdma::NicEvents {
  struct Failure {
    uint64_t cookie;
    rdma::NicFault fault;
    int code;
    std::string text;
  };

  void on_work_done(rdma::NicPath& path, uint64_t cookie, bool) override { done[&path].push_back(cookie); }
  void on_work_failed(rdma::NicPath& path, uint64_t cookie, rdma::NicFault fault, int code,
                      const std::string& text) override {
    failed[&path].push_back({cookie, fault, code, text});
  }
  void on_imm(rdma::NicPath* path, uint32_t imm) override { imms.emplace_back(path, imm); }
  void on_fragment(rdma::NicPath* path, std::span<const uint8_t> bytes) override {
    fragments.emplace_back(path, std::string(bytes.begin(), bytes.end()));
  }
  void on_datagram(std::span<const uint8_t> bytes) override { datagrams.emplace_back(bytes.begin(), bytes.end()); }
  void on_nobody(std::span<const uint8_t> endpoint) override { nobody.emplace_back(endpoint.begin(), endpoint.end()); }
  void on_path_broken(rdma::NicPath& path, bool, const std::string& reason) override { broken[&path] = reason; }
  void on_path_flushed(rdma::NicPath& path) override { ++flushed[&path]; }
  void on_port(bool is_up, const std::string&) override { ports.push_back(is_up); }
  void on_device_fatal(const std::string& reason) override { fatal = reason; }

  std::map<rdma::NicPath*, std::vector<uint64_t>> done;
  std::map<rdma::NicPath*, std::vector<Failure>> failed;
  std::vector<std::pair<rdma::NicPath*, uint32_t>> imms;
  std::vector<std::pair<rdma::NicPath*, std::string>> fragments;
  std::vector<std::string> datagrams;
  std::vector<std::vector<uint8_t>> nobody;
  std::map<rdma::NicPath*, std::string> broken;
  std::map<rdma::NicPath*, int> flushed;
  std::vector<bool> ports;
  std::string fatal;
};

}  // namespace crossrail::test
