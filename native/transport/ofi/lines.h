// Datagrams for providers that have only connections. A line is a connection that one NIC opens to send datagrams to
// another. It is used in this direction only; answers come over a line of the other NIC's.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "transport/ofi/endpoint.h"
#include "transport/ofi/listener.h"
#include "util/clock.h"

namespace crossrail::ofi {

// Bounded: the side that opened a line closes it after 10 s without use; among the lines to us, the one that was silent
// for longest makes room for a new one.
// Threads: the progress holder.
class Lines {
 public:
  Lines(Domain& domain, const Listener& listener) : domain_(domain), listener_(listener) {}

  // The line to that NIC, dialed at first use. Null: not yet. Throws TransportError if it is impossible.
  Endpoint* to(const Name& name, int64_t now);
  // A request from a NIC that wants to send us datagrams. Throws TransportError.
  void accept(fi_info& request, int64_t now);
  // False: not one of ours.
  bool on_connected(const struct fid* endpoint);
  // The name of the peer whose line has ended; empty: it was a line to us, or not ours.
  Name on_ended(const struct fid* endpoint);
  // The line on which a datagram arrived.
  void on_heard(const Endpoint& endpoint, int64_t now);

  // Returns how many were posted.
  uint32_t post_starved_receives();
  bool is_dialing() const { return dialing_ != 0; }
  // Closes what is idle; checks from time to time.
  void tend(int64_t now);
  void close_all();
  Deadline next_timer() const;
  // Endpoints that were closed, and whose last completions may still be in the queue.
  std::vector<std::unique_ptr<Endpoint>> take_closed();

 private:
  struct Line {
    std::unique_ptr<Endpoint> endpoint;
    bool is_up = false;
    int64_t used_ns = 0;
  };
  void close(Line& line);

  Domain& domain_;
  const Listener& listener_;
  std::map<Name, Line> out_;
  std::deque<Line> in_;
  uint32_t dialing_ = 0;  // lines in out_ that are not up
  int64_t tend_next_ns_ = 0;
  std::vector<std::unique_ptr<Endpoint>> closing_;
};

}  // namespace crossrail::ofi
