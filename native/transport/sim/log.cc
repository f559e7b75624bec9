#include "transport/sim/log.h"

#include <cstdio>

#include "transport/rdma/nic.h"

namespace crossrail::sim {

namespace {

const char* fault_name(uint64_t fault) {
  switch (static_cast<rdma::NicFault>(fault)) {
    case rdma::NicFault::kFlushed:
      return "flushed";
    case rdma::NicFault::kUnreachable:
      return "unreachable";
    case rdma::NicFault::kRemoteAccess:
      return "remote-access";
    case rdma::NicFault::kLocal:
      return "local";
  }
  return "?";
}

const char* deed_name(uint64_t fault) {
  switch (static_cast<FaultWord>(fault)) {
    case FaultWord::kRailDown:
      return "rail-down";
    case FaultWord::kRailUp:
      return "rail-up";
    case FaultWord::kSlow:
      return "slow";
    case FaultWord::kPartition:
      return "partition";
    case FaultWord::kHeal:
      return "heal";
    case FaultWord::kFailWorks:
      return "fail-works";
    case FaultWord::kWithhold:
      return "withhold-completions";
    case FaultWord::kRelease:
      return "release-completions";
    case FaultWord::kQueueFull:
      return "queue-full";
    case FaultWord::kQueueRoom:
      return "queue-room";
    case FaultWord::kFailRegistrations:
      return "fail-registrations";
    case FaultWord::kDatagramLoss:
      return "datagram-loss";
    case FaultWord::kSilence:
      return "silence";
    case FaultWord::kSound:
      return "sound";
  }
  return "?";
}

// Escapes the separators of values and lines: "decoder 0" becomes "decoder%200".
std::string escaped(const std::string& name) {
  constexpr char kHex[] = "0123456789ABCDEF";
  std::string text;
  for (const char letter : name) {
    const auto byte = static_cast<unsigned char>(letter);
    if (byte <= ' ' || byte == 0x7f || byte == '%') {
      text += {'%', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      text += letter;
    }
  }
  return text;
}

}  // namespace

void EventLog::name_host(const std::string& name) {
  mix(name);
  hosts_.push_back(name);
}

void EventLog::name_engine(const std::string& name) {
  mix(name);
  engines_.push_back(escaped(name));
}

void EventLog::mix(std::string_view text) {
  mix(text.size());
  for (const char letter : text) mix(static_cast<uint8_t>(letter));
}

std::string EventLog::digest() const {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(first_),
                static_cast<unsigned long long>(second_));
  return text;
}

void EventLog::write(int64_t at_ns, uint32_t host, LogWord word, const std::array<uint64_t, kValues>& values) {
  // "-": concerns all hosts, before there are any.
  std::string line = std::to_string(at_ns) + " " + (host < hosts_.size() ? hosts_[host] : "-") + " ";
  const auto number = [&](const char* name, uint64_t value) {
    line += std::string(" ") + name + "=" + std::to_string(value);
  };
  const auto engine = [&](const char* what) { line += std::string(what) + " engine=" + engines_[values[0]]; };
  const auto to = [&](size_t at) { line += " to=" + hosts_[values[at]] + "/" + std::to_string(values[at + 1]); };
  const auto of_rail = [&](const char* what) {
    engine(what);
    number("rail", values[1]);
  };
  const auto of_work = [&](const char* what) {
    line += what;
    number("work", values[0]);
  };
  switch (word) {
    case LogWord::kEngineOpen:
      engine("engine-open");
      break;
    case LogWord::kEngineClose:
      engine("engine-close");
      break;
    case LogWord::kPost:
      of_rail("post");
      number("work", values[2]);
      line += values[3] != 0 ? " op=read" : values[4] == 0 ? " op=imm" : " op=write";
      number("bytes", values[4]);
      if (values[5] != 0) number("imm", values[5] - 1);
      to(6);
      break;
    case LogWord::kLand:
      of_work("land");
      break;
    case LogWord::kCount:
      engine("count");
      number("imm", values[1]);
      break;
    case LogWord::kDone:
      of_work("done");
      break;
    case LogWord::kFail:
      of_work("fail");
      line += std::string(" fault=") + fault_name(values[1]);
      break;
    case LogWord::kConnect:
      of_rail("connect");
      to(2);
      break;
    case LogWord::kBreak:
      of_rail("break");
      break;
    case LogWord::kFlush:
      of_rail("flush");
      break;
    case LogWord::kKilled:
      engine("killed");
      break;
    case LogWord::kFrozen:
      engine("frozen");
      break;
    case LogWord::kThawed:
      engine("thawed");
      break;
    case LogWord::kFault:
      line += std::string("fault kind=") + deed_name(values[0]);
      number("value", values[1]);
      break;
  }
  if (lines_.size() == keep_max_) lines_.pop_front();
  lines_.push_back(std::move(line));
}

std::vector<std::string> EventLog::lines() const { return {lines_.begin(), lines_.end()}; }

}  // namespace crossrail::sim
