#include "transport/ofi/lines.h"

#include <algorithm>

#include "transport/ofi/wire.h"
#include "util/errors.h"

namespace crossrail::ofi {

namespace {

constexpr uint32_t kLineReceives = 4;
constexpr size_t kLinesInMax = 256;  // 17 KiB each
constexpr size_t kLinesOutMax = 1024;
constexpr int64_t kIdleTime = 10'000'000'000;
constexpr int64_t kDialTime = 5'000'000'000;
constexpr int64_t kTendPause = 100'000'000;

}  // namespace

Endpoint* Lines::to(const Name& name, int64_t now) {
  const auto known = out_.find(name);
  if (known != out_.end()) {
    if (!known->second.is_up) return nullptr;
    known->second.used_ns = now;
    return known->second.endpoint.get();
  }
  if (out_.size() == kLinesOutMax) throw TransportError("dial", 0, "too many peers are being talked to at once");
  Line line{std::make_unique<Endpoint>(domain_, listener_, kLineReceives, nullptr), false, now};
  line.endpoint->dial(name, DialWords{}.encode());
  out_.emplace(name, std::move(line));
  ++dialing_;
  return nullptr;
}

void Lines::accept(fi_info& request, int64_t now) {
  Line line{std::make_unique<Endpoint>(domain_, listener_, kLineReceives, &request), true, now};
  line.endpoint->accept();
  if (in_.size() == kLinesInMax) {
    const auto oldest = std::ranges::min_element(in_, {}, &Line::used_ns);
    close(*oldest);
    in_.erase(oldest);
  }
  in_.push_back(std::move(line));
}

bool Lines::on_connected(const struct fid* endpoint) {
  for (auto& [name, line] : out_) {
    if (!line.endpoint->is(endpoint)) continue;
    dialing_ -= line.is_up ? 0 : 1;
    line.is_up = true;
    return true;
  }
  return std::ranges::any_of(in_, [&](const Line& line) { return line.endpoint->is(endpoint); });
}

Name Lines::on_ended(const struct fid* endpoint) {
  for (auto item = out_.begin(); item != out_.end(); ++item) {
    if (!item->second.endpoint->is(endpoint)) continue;
    Name name = item->first;
    close(item->second);
    out_.erase(item);
    return name;
  }
  const auto found = std::ranges::find_if(in_, [&](const Line& line) { return line.endpoint->is(endpoint); });
  if (found == in_.end()) return {};
  close(*found);
  in_.erase(found);
  return {};
}

void Lines::on_heard(const Endpoint& endpoint, int64_t now) {
  const auto found = std::ranges::find_if(in_, [&](const Line& line) { return line.endpoint.get() == &endpoint; });
  if (found != in_.end()) found->used_ns = now;
}

uint32_t Lines::post_starved_receives() {
  uint32_t posted = 0;
  for (auto& [name, line] : out_) posted += line.endpoint->post_starved_receives();
  for (Line& line : in_) posted += line.endpoint->post_starved_receives();
  return posted;
}

void Lines::tend(int64_t now) {
  if (now < tend_next_ns_) return;
  tend_next_ns_ = now + kTendPause;
  for (auto item = out_.begin(); item != out_.end();) {
    Line& line = item->second;
    const int64_t patience = line.is_up ? kIdleTime : kDialTime;
    if (now - line.used_ns < patience) {
      ++item;
      continue;
    }
    close(line);
    item = out_.erase(item);
  }
}

void Lines::close(Line& line) {
  dialing_ -= line.is_up ? 0 : 1;
  line.endpoint->close();  // if it is busy, take_closed() tries again
  closing_.push_back(std::move(line.endpoint));
}

void Lines::close_all() {
  for (auto& [name, line] : out_) close(line);
  for (Line& line : in_) close(line);
  out_.clear();
  in_.clear();
}

Deadline Lines::next_timer() const {
  Deadline next = kNoDeadline;
  for (const auto& [name, line] : out_) next = std::min(next, line.used_ns + (line.is_up ? kIdleTime : kDialTime));
  return next;
}

std::vector<std::unique_ptr<Endpoint>> Lines::take_closed() {
  std::vector<std::unique_ptr<Endpoint>> closed;
  for (auto& endpoint : closing_) {
    if (endpoint->close()) closed.push_back(std::move(endpoint));
  }
  std::erase(closing_, nullptr);
  return closed;
}

}  // namespace crossrail::ofi
