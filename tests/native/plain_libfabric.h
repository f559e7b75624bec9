// A peer written to libfabric's manual alone, with connected endpoints of its tcp provider: nothing of ours is in it.
#pragma once

#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_rma.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace crossrail::test {

class PlainLibfabric {
 public:
  // library: the path of a libfabric. source: the IP address to connect from.
  PlainLibfabric(const std::string& library, const char* source) : handle_(::dlopen(library.c_str(), RTLD_NOW)) {
    if (handle_ == nullptr) throw std::runtime_error("no library");
    fi_info* const hints = call<decltype(&::fi_dupinfo)>("fi_dupinfo")(nullptr);  // as fi_allocinfo() does
    hints->caps = FI_MSG | FI_RMA;
    hints->ep_attr->type = FI_EP_MSG;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->fabric_attr->prov_name = ::strdup("tcp");
    const uint32_t version = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);
    const int found = call<decltype(&::fi_getinfo)>("fi_getinfo")(version, source, nullptr, FI_SOURCE, hints, &info_);
    call<decltype(&::fi_freeinfo)>("fi_freeinfo")(hints);
    must("fi_getinfo", found);
    must("fi_fabric", call<decltype(&::fi_fabric)>("fi_fabric")(info_->fabric_attr, &fabric_, nullptr));
    must("fi_domain", fi_domain(fabric_, info_, &domain_, nullptr));
    fi_eq_attr events{};
    events.wait_obj = FI_WAIT_NONE;
    must("fi_eq_open", fi_eq_open(fabric_, &events, &events_, nullptr));
    fi_cq_attr queue{};
    queue.format = FI_CQ_FORMAT_CONTEXT;
    queue.wait_obj = FI_WAIT_NONE;
    must("fi_cq_open", fi_cq_open(domain_, &queue, &queue_, nullptr));
    must("fi_endpoint", fi_endpoint(domain_, info_, &endpoint_, nullptr));
    must("fi_ep_bind", fi_ep_bind(endpoint_, &events_->fid, 0));
    must("fi_ep_bind", fi_ep_bind(endpoint_, &queue_->fid, FI_TRANSMIT | FI_RECV));
    must("fi_enable", fi_enable(endpoint_));
  }
  ~PlainLibfabric() {
    for (struct fid* object : {&endpoint_->fid, &queue_->fid, &events_->fid, &domain_->fid, &fabric_->fid})
      fi_close(object);
    call<decltype(&::fi_freeinfo)>("fi_freeinfo")(info_);
  }
  PlainLibfabric(const PlainLibfabric&) = delete;
  PlainLibfabric& operator=(const PlainLibfabric&) = delete;

  // to: a socket address. said: goes along with the request.
  void connect(const std::vector<uint8_t>& to, const std::vector<uint8_t>& said) {
    must("fi_connect", fi_connect(endpoint_, to.data(), said.data(), said.size()));
    for (auto& buffer : received_)
      must("fi_recv", static_cast<int>(fi_recv(endpoint_, buffer.data(), buffer.size(), nullptr, 0, buffer.data())));
  }
  // Once, when it is.
  bool is_connected() {
    uint32_t event = 0;
    fi_eq_cm_entry entry;
    const ssize_t got = fi_eq_read(events_, &event, &entry, sizeof entry, 0);
    if (got < 0 && got != -FI_EAGAIN) throw std::runtime_error("refused");
    return got > 0 && event == FI_CONNECTED;
  }
  void write(const std::string& text, uint64_t address, uint64_t key, uint64_t data) {
    const ssize_t code = fi_writedata(endpoint_, text.data(), text.size(), nullptr, data, 0, address, key,
                                      const_cast<char*>(text.data()));
    must("fi_writedata", static_cast<int>(code));
  }
  // Whether what was written from there is done. Drives the provider.
  bool is_done(const std::string& text) {
    fi_cq_entry entry;
    return fi_cq_read(queue_, &entry, 1) == 1 && entry.op_context == text.data();
  }

 private:
  template <typename Call>
  Call call(const char* name) const {
    return reinterpret_cast<Call>(::dlsym(handle_, name));
  }
  static void must(const char* what, int code) {
    if (code != 0) throw std::runtime_error(std::string(what) + ": " + std::to_string(code));
  }

  void* handle_;  // never closed: providers leave threads behind
  fi_info* info_ = nullptr;
  fid_fabric* fabric_ = nullptr;
  fid_domain* domain_ = nullptr;
  fid_eq* events_ = nullptr;
  fid_cq* queue_ = nullptr;
  fid_ep* endpoint_ = nullptr;
  std::array<std::array<char, 8192>, 4> received_{};
};

}  // namespace crossrail::test
