// What travels as fragments: control, and messages.
//
// Messages use one path at a time. When it breaks, those with unknown outcome are sent again, completely, on another:
// the receiver recognises them by their ids, and outcomes are told again. So each is delivered once. Service messages
// work likewise, with numbers of their own.
#include <algorithm>
#include <cstring>

#include "transport/rdma/rdma_transport.h"
#include "util/codec.h"
#include "util/errors.h"
#include "util/mutation.h"

namespace crossrail::rdma {

namespace {

size_t chunks_of(uint64_t length_bytes) {
  return std::max<size_t>(1, static_cast<size_t>((length_bytes + kChunkBytes - 1) / kChunkBytes));
}

std::span<const uint8_t> chunk_of(const WorkRequest& request, uint32_t chunk) {
  const uint64_t offset = uint64_t{chunk} * kChunkBytes;
  const uint64_t length = std::min<uint64_t>(kChunkBytes, request.length_bytes - offset);
  return {reinterpret_cast<const uint8_t*>(request.local) + offset, static_cast<size_t>(length)};
}

}  // namespace

// --- arriving; only takes notes ---

Path* RdmaTransport::path_of_fragment(Rail& rail, NicPath* nic_path, uint64_t token) {
  const auto found = tokens_.find(token);
  if (found == tokens_.end() || (nic_path != nullptr && path_of(*nic_path) != found->second)) {
    ++garbage_;  // of a path that is gone; if the NIC names the path, invalid
    return nullptr;
  }
  Path* const path = found->second;
  // A path that is breaking may still receive what was sent before; one that was only offered receives nothing.
  const bool hears = path->is_connected && path->rail == rail.index && !path->session->is_over;
  return hears ? path : nullptr;
}

void RdmaTransport::on_fragment(Path& path, FragmentKind kind, std::span<const uint8_t> body) {
  Session& session = *path.session;
  bool makes_sense = true;
  switch (kind) {
    case FragmentKind::kState:
      if (const auto state = decode_state(body)) {
        on_state(session, *state);
      } else {
        makes_sense = false;
      }
      break;
    case FragmentKind::kIntroduce:
      makes_sense = on_introduce(session, body);
      break;
    case FragmentKind::kMessage:
      makes_sense = on_message_chunk(session, body);
      break;
    case FragmentKind::kOutcomes:
      makes_sense = on_outcomes(session, body);
      break;
    case FragmentKind::kRecall:
      makes_sense = on_recall(session, body);
      break;
    case FragmentKind::kService:
      makes_sense = on_service(session, body);
      break;
    case FragmentKind::kServed:
      makes_sense = on_served(session, body);
      break;
    case FragmentKind::kPing:
    case FragmentKind::kPong: {
      makes_sense = body.size() == sizeof(uint64_t);
      if (!makes_sense || kind == FragmentKind::kPong) break;
      uint64_t value;
      std::memcpy(&value, body.data(), sizeof value);
      path.pong = value;
      mark_dirty(session);
      break;
    }
    case FragmentKind::kResolve:
    case FragmentKind::kResolved:
      // Answering needs NICs, so it happens later, as for a datagram. These have a datagram's length.
      makes_sense = body.size() <= kDatagramBytesMax;
      if (makes_sense) said_.push_back({session.key, kind, Bytes(body.begin(), body.end())});
      break;
    case FragmentKind::kBye:
      said_.push_back({session.key, kind, Bytes(body.begin(), body.end())});
      break;
  }
  if (!makes_sense) {
    mark_broken(path, Cause::kProtocol, "a malformed fragment of kind " + std::to_string(static_cast<int>(kind)));
  }
}

void RdmaTransport::on_state(Session& session, const StateBody& state) {
  if (state.number <= session.state_heard) return;  // overtaken by a later one
  session.state_heard = state.number;
  session.peer_has_link = state.has_link;
  session.peer_left = state.leaves;
  if (session.peer_has_link) session.has_left = false;
  tend_soon(session);
}

bool RdmaTransport::on_introduce(Session& session, std::span<const uint8_t> body) {
  if (session.peer_address) return true;
  try {
    auto address = std::make_shared<const Address>(Address::decode(body));
    if (address->incarnation != session.key.peer || !address->has(kind_) || !has_rails_of(session, *address))
      return false;
    get_to_know(session, std::move(address));
  } catch (const UsageError&) {
    return false;
  }
  const auto& endpoints = session.peer_address->rdma_on(kind_).endpoints;
  for (uint32_t i = 0; i < endpoints.size(); ++i) session.peer_endpoints[i] = endpoints[i].bytes;
  mark_dirty(session);  // messages may have been waiting for this
  return true;
}

void RdmaTransport::on_said(const Said& said) {
  Session* const session = find_session(said.session.peer, said.session.leads);
  if (session == nullptr || session->is_over) return;
  if (said.kind == FragmentKind::kBye) {
    on_bye(*session, decode_text(said.body).value_or("it gave no reason"));
  } else if (const auto question = decode_resolve(said.body); said.kind == FragmentKind::kResolve && question) {
    on_resolve(*session, *question);
  } else if (const auto word = decode_resolved(said.body); said.kind == FragmentKind::kResolved && word) {
    on_resolved(*session, *word);
  } else {
    report_garbage(session->peer_name, "a question or answer from it was malformed");
  }
}

void RdmaTransport::on_bye(Session& session, const std::string& text) { doom(session, text, LinkEnd::kLeft); }

bool RdmaTransport::on_message_chunk(Session& session, std::span<const uint8_t> body) {
  const auto head = decode_message_head(body);
  if (!head || head->length_bytes > kMessageBytesMax || head->id == 0 || head->first_open > head->id ||
      head->id - head->first_open >= kMessagesUnderWayMax) {
    return false;
  }
  const auto chunk = body.subspan(kMessageHeadBytes);
  const size_t chunks = chunks_of(head->length_bytes);
  const uint64_t offset = uint64_t{head->chunk} * kChunkBytes;
  if (head->chunk >= chunks || chunk.size() != std::min<uint64_t>(kChunkBytes, head->length_bytes - offset))
    return false;
  forget_known_outcomes(session, head->first_open);
  if (head->id < session.first_open_id) return true;  // delayed: the sender knows its outcome
  if (session.outcomes.contains(head->id) && !is_mutated(Mutation::kMessageTwice)) {  // the sender does not know it yet
    tell_outcome(session, head->id);
    return true;
  }
  if (session.held.any_of([&](const Session::Held& held) { return held.id == head->id; })) return true;
  auto item = session.assemblies.find(head->id);
  if (item == session.assemblies.end()) {
    if (session.held_bytes + head->length_bytes > kMessageWindowBytes + kMessageBytesMax) return false;
    session.held_bytes += head->length_bytes;
    item = session.assemblies.try_emplace(head->id).first;
    item->second.payload.resize(head->length_bytes);
    item->second.arrived.resize(chunks);
    item->second.missing = chunks;
  }
  Assembly& assembly = item->second;
  if (assembly.payload.size() != head->length_bytes) return false;
  if (assembly.arrived[head->chunk]) return true;
  assembly.arrived[head->chunk] = true;
  if (!chunk.empty()) std::memcpy(assembly.payload.data() + offset, chunk.data(), chunk.size());
  if (--assembly.missing > 0) return true;
  session.held.push_back({head->id, std::move(assembly.payload)});
  session.assemblies.erase(item);
  mark_dirty(session);
  return true;
}

// Outcomes that the sender knows need not be remembered. Neither need messages that we hold and that it has given up,
// with a link that it forgot: they would take up room that its window does not know about. Invariant: outcomes,
// assemblies and held are of first_open_id and later.
void RdmaTransport::forget_known_outcomes(Session& session, uint64_t first_open_id) {
  if (first_open_id <= session.first_open_id) return;
  session.first_open_id = first_open_id;
  session.outcomes.erase(session.outcomes.begin(), session.outcomes.lower_bound(first_open_id));
  const auto end = session.assemblies.lower_bound(first_open_id);
  for (auto item = session.assemblies.begin(); item != end; ++item) session.held_bytes -= item->second.payload.size();
  session.assemblies.erase(session.assemblies.begin(), end);
  session.held.filter([&](const Session::Held& held) {
    const bool is_open = held.id >= first_open_id;
    if (!is_open) session.held_bytes -= held.payload.size();
    return is_open;
  });
}

bool RdmaTransport::on_recall(Session& session, std::span<const uint8_t> body) {
  const auto recall = decode_recall(body);
  if (!recall) return false;
  forget_known_outcomes(session, recall->first_open);
  if (recall->id < session.first_open_id) return true;  // delayed
  if (is_mutated(Mutation::kRecallTaken)) session.outcomes.erase(recall->id);
  // The outcome of a message that the engine has is told once more.
  if (session.outcomes.try_emplace(recall->id, Outcome::kRecalled).second) {
    if (const auto item = session.assemblies.find(recall->id); item != session.assemblies.end()) {
      session.held_bytes -= item->second.payload.size();
      session.assemblies.erase(item);
    }
    session.held.filter([&](const Session::Held& held) {
      if (held.id == recall->id) session.held_bytes -= held.payload.size();
      return held.id != recall->id;
    });
  }
  tell_outcome(session, recall->id);
  return true;
}

void RdmaTransport::tell_outcome(Session& session, uint64_t id) {
  if (std::ranges::find(session.untold, id) == session.untold.end()) session.untold.push_back(id);
  mark_dirty(session);
}

bool RdmaTransport::on_outcomes(Session& session, std::span<const uint8_t> body) {
  Reader reader(body);
  const size_t count = reader.get<uint8_t>();
  if (count > kOutcomesPerFragment) return false;
  for (size_t i = 0; i < count; ++i) {
    const auto id = reader.get<uint64_t>();
    const auto outcome = reader.get<uint8_t>();
    if (!reader.ok() || outcome > static_cast<uint8_t>(Outcome::kRecalled)) return false;
    if (!session.link || session.link->messages.empty()) continue;
    RdmaLink& link = *session.link;
    const uint64_t first = link.messages.front().id;
    if (id < first || id - first >= link.messages.size()) continue;  // told again
    SentMessage& message = link.messages[id - first];
    if (message.is_over) continue;
    const bool is_recalled = outcome == static_cast<uint8_t>(Outcome::kRecalled);
    if (is_recalled && !message.is_recalled) return false;
    message.is_over = true;
    link.messages_bytes -= message.request.length_bytes;
    const WorkRequest request = message.request;
    if (is_recalled) {
      end_outstanding(link, 1);
      sink_->on_withdrawn(link, request.context, request.tag, request.length_bytes);
      continue;
    }
    const bool taken = outcome == static_cast<uint8_t>(Outcome::kTaken);
    retire(link, request, taken ? Status::kDone : Status::kMessageTooLong,
           taken ? ""
                 : "message of " + std::to_string(request.length_bytes) +
                       " bytes: no receive buffer of the target is as long");
  }
  if (session.link) {
    auto& messages = session.link->messages;
    while (!messages.empty() && messages.front().is_over) messages.pop_front();
    mark_dirty(session);  // the window has room
  }
  return reader.finished();
}

// --- service messages ---

bool RdmaTransport::on_service(Session& session, std::span<const uint8_t> body) {
  const auto head = decode_service_head(body);
  if (!head || body.size() - kServiceHeadBytes > kServiceBytesMax) return false;
  if (head->first_open > session.first_open_service) {  // the sender knows these, they need not be remembered
    session.first_open_service = head->first_open;
    auto& heard = session.services_heard;
    heard.erase(heard.begin(), heard.lower_bound(head->first_open));
  }
  if (head->id < session.first_open_service) return true;  // delayed
  mark_dirty(session);
  if (!session.services_heard.insert(head->id).second) {  // it was acknowledged, and the acknowledgement was lost
    if (!session.services.any_of([&](const Session::Held& held) { return held.id == head->id; }))
      session.services_untold.push_back(head->id);
    return session.services_untold.size() <= 4 * kServicesUnderWayMax;
  }
  // The sender never introduces itself, and its messages wait for that. Others send no more than this unacknowledged.
  if (session.services.size() >= kServicesUnderWayMax) return false;
  const auto payload = body.subspan(kServiceHeadBytes);
  session.services.push_back({head->id, {payload.begin(), payload.end()}});
  return true;
}

bool RdmaTransport::on_served(Session& session, std::span<const uint8_t> body) {
  Reader reader(body);
  const size_t count = reader.get<uint8_t>();
  for (size_t i = 0; i < count; ++i) {
    const auto id = reader.get<uint64_t>();
    if (!reader.ok()) return false;
    if (!session.link || session.link->services_out.empty()) continue;
    RdmaLink& link = *session.link;
    const uint64_t first = link.services_out.front().id;
    if (id < first || id - first >= link.services_out.size()) continue;  // told again
    SentService& service = link.services_out[id - first];
    if (std::exchange(service.is_over, true)) continue;
    const WorkRequest request = service.request;
    retire(link, request, Status::kDone, "");
  }
  if (session.link) {
    auto& services = session.link->services_out;
    while (!services.empty() && services.front().is_over) services.pop_front();
    mark_dirty(session);  // the window has room
  }
  return reader.finished();
}

bool RdmaTransport::pump_served(Session& session, Path& path) {
  while (!session.services_untold.empty()) {
    const size_t count = std::min(kOutcomesPerFragment, session.services_untold.size());
    Writer writer;
    writer.put(static_cast<uint8_t>(count));
    for (size_t i = 0; i < count; ++i) writer.put(session.services_untold[i]);
    if (!path.nic_path->send(begin_fragment(path.peer_token, FragmentKind::kServed), writer.bytes())) return false;
    const auto begin = session.services_untold.begin();
    session.services_untold.erase(begin, begin + static_cast<std::ptrdiff_t>(count));
  }
  return true;
}

bool RdmaTransport::pump_services(Session& session, Path& path) {
  RdmaLink& link = *session.link;
  while (!link.services.empty() && link.services_out.size() < kServicesUnderWayMax) {
    link.services_out.push_back({link.services.pop_front(), session.next_service_id++});
    --link.queued;
  }
  for (size_t i = 0; i < link.services_out.size(); ++i) {
    SentService& service = link.services_out[i];
    if (service.is_over || service.is_sent) continue;
    Bytes head = begin_fragment(path.peer_token, FragmentKind::kService);
    put(head, ServiceHead{service.id, link.services_out.front().id});
    const auto* const payload = reinterpret_cast<const uint8_t*>(service.request.local);
    if (!path.nic_path->send(head, {payload, static_cast<size_t>(service.request.length_bytes)})) return false;
    service.is_sent = true;
  }
  return true;
}

// --- what the engine takes ---

void RdmaTransport::offer_held(Session& session) {
  while (!session.services.empty() && session.peer_address) {
    const Session::Held& message = session.services.front();
    sink_->on_service(session.peer_address, message.payload);
    session.services_untold.push_back(message.id);
    session.services.pop_front();
  }
  while (!session.held.empty() && session.peer_address) {
    const Session::Held& message = session.held.front();
    const Sink::Offer offer = sink_->on_message(session.peer_address, message.payload);
    if (offer == Sink::Offer::kHold) break;
    session.held_bytes -= message.payload.size();
    if (message.id >= session.first_open_id) {
      session.outcomes[message.id] = offer == Sink::Offer::kTaken ? Outcome::kTaken : Outcome::kTooLong;
      session.untold.push_back(message.id);
    }
    session.held.pop_front();
  }
  const auto listed = std::ranges::find(holding_, &session);
  if (session.held.empty() == (listed == holding_.end())) return;
  if (session.held.empty()) {
    holding_.erase(listed);
  } else {
    holding_.push_back(&session);
  }
}

// --- leaving. False: a NIC has no room ---

bool RdmaTransport::pump_control(Session& session) {
  // A stuck path must not keep the others from answering.
  bool all = true;
  bool told = session.untold.empty() && session.services_untold.empty();
  for (auto& path : session.paths) {
    if (!is_usable(*path)) continue;
    all = pump_path_control(*path) && all;
    told = told || (pump_outcomes(session, *path) && pump_served(session, *path));
  }
  return all && (told || !session.has_open_path());
}

bool RdmaTransport::pump_path_control(Path& path) {
  const auto send = [&](FragmentKind kind, std::span<const uint8_t> body) {
    return path.nic_path->send(begin_fragment(path.peer_token, kind), body);
  };
  Session& session = *path.session;
  if (path.state_due) {
    Bytes body;
    put(body, StateBody{session.states_said + 1, session.link != nullptr, session.has_left});
    if (!send(FragmentKind::kState, body)) return false;
    ++session.states_said;
    path.state_due = false;
  }
  if (path.pong) {
    const uint64_t value = *path.pong;
    if (!send(FragmentKind::kPong, {reinterpret_cast<const uint8_t*>(&value), sizeof value})) return false;
    path.pong.reset();
  }
  if (path.ping_due) {
    const auto value = static_cast<uint64_t>(now_);
    if (!send(FragmentKind::kPing, {reinterpret_cast<const uint8_t*>(&value), sizeof value})) return false;
    path.ping_due = false;
    path.pinged_ns = now_;
  }
  // Last: it is long, and may find no room where those before it do.
  if (path.introduce_due) {
    if (!send(FragmentKind::kIntroduce, introduction_)) return false;
    path.introduce_due = false;
  }
  return true;
}

bool RdmaTransport::pump_outcomes(Session& session, Path& path) {
  while (!session.untold.empty()) {
    Writer writer;
    const size_t count = std::min(kOutcomesPerFragment, session.untold.size());
    size_t told = 0;
    writer.put(uint8_t{0});
    for (size_t i = 0; i < count; ++i) {
      const auto outcome = session.outcomes.find(session.untold[i]);
      if (outcome == session.outcomes.end()) continue;  // known meanwhile
      writer.put(outcome->first);
      writer.put(static_cast<uint8_t>(outcome->second));
      ++told;
    }
    writer.bytes()[0] = static_cast<uint8_t>(told);
    const Bytes head = begin_fragment(path.peer_token, FragmentKind::kOutcomes);
    if (told > 0 && !path.nic_path->send(head, writer.bytes())) return false;
    session.untold.erase(session.untold.begin(), session.untold.begin() + static_cast<std::ptrdiff_t>(count));
  }
  return true;
}

// The path that messages use; after a change, those with unknown outcome are sent again.
Path* RdmaTransport::message_path(Session& session) {
  RdmaLink& link = *session.link;
  Path* const current = link.message_path;
  if (current != nullptr && current->epoch == link.message_epoch && is_usable(*current)) return current;
  Path* next = nullptr;
  for (auto& path : session.paths) {
    if (is_usable(*path) && (next == nullptr || path->speed_mbps > next->speed_mbps)) next = path.get();
  }
  if (next == nullptr) return nullptr;
  link.message_path = next;
  link.message_epoch = next->epoch;
  for (size_t i = 0; i < link.services_out.size(); ++i) link.services_out[i].is_sent = false;
  if (link.messages.empty()) return next;
  for (size_t i = 0; i < link.messages.size(); ++i) {
    SentMessage& message = link.messages[i];
    message.next_chunk = 0;
    message.is_recall_sent = false;
    link.has_recalls = link.has_recalls || (message.is_recalled && !message.is_over);
  }
  link.unsent_id = link.messages.front().id;
  return next;
}

bool RdmaTransport::pump_recalls(RdmaLink& link, Path& path) {
  for (size_t i = 0; i < link.messages.size(); ++i) {
    SentMessage& message = link.messages[i];
    if (!message.is_recalled || message.is_recall_sent || message.is_over) continue;
    Bytes body;
    put(body, RecallBody{message.id, link.messages.front().id});
    if (!path.nic_path->send(begin_fragment(path.peer_token, FragmentKind::kRecall), body)) return false;
    message.is_recall_sent = true;
  }
  link.has_recalls = false;
  return true;
}

bool RdmaTransport::pump_messages(Session& session) {
  if (!session.link || session.link->doom) return true;
  RdmaLink& link = *session.link;
  const bool has_services = !link.services.empty() || !link.services_out.empty();
  if (link.sends.empty() && link.messages.empty() && !has_services) return true;
  Path* const path = message_path(session);
  if (path == nullptr || path->state_due || path->introduce_due) return path == nullptr || pump_path_control(*path);
  if (has_services && !pump_services(session, *path)) return false;
  if (link.has_recalls && !pump_recalls(link, *path)) return false;
  while (!link.sends.empty() && link.messages.size() < kMessagesUnderWayMax &&
         (link.messages_bytes == 0 || link.messages_bytes + link.sends.front().length_bytes <= kMessageWindowBytes)) {
    const WorkRequest request = link.sends.pop_front();
    --link.queued;
    link.messages_bytes += request.length_bytes;
    link.messages.push_back({request, session.next_message_id++, 0, false});
  }
  if (link.messages.empty()) return true;
  const uint64_t first = link.messages.front().id;
  link.unsent_id = std::max(link.unsent_id, first);
  for (; link.unsent_id - first < link.messages.size(); ++link.unsent_id) {
    SentMessage& message = link.messages[link.unsent_id - first];
    if (message.is_over || message.is_recalled) continue;
    const auto chunks = static_cast<uint32_t>(chunks_of(message.request.length_bytes));
    for (; message.next_chunk < chunks; ++message.next_chunk) {
      Bytes head = begin_fragment(path->peer_token, FragmentKind::kMessage);
      const auto length = static_cast<uint32_t>(message.request.length_bytes);
      put(head, MessageHead{message.id, first, length, message.next_chunk});
      if (!path->nic_path->send(head, chunk_of(message.request, message.next_chunk))) return false;
    }
  }
  return true;
}

}  // namespace crossrail::rdma
