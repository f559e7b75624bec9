// Datagrams for providers that only have connections. A line is a connection that one NIC opens to send datagrams to
// another. It is used in this direction only; answers come by a line of the other NIC's.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "transport/ofi/endpoint.h"
#include "transport/ofi/listener.h"
#include "util/clock.h"

namespace crossrail::ofi {

// Bounded: the side that opened a line closes it after 10 s without use; of the lines to us, the one that was silent
// for longest makes room for a new one.
// Threads: the progress holder.
class Lines {
 public:
  Lines(Domain& domain, const Listener& listener) : domain_(domain), listener_(listener) {}

  // What datagrams to that NIC leave by, dialed at first use. Null: not yet. Throws TransportError where it cannot be.
  Endpoint* to(const Name& name, int64_t now);
  // Of who wants to send us datagrams. Throws TransportError.
  void accept(fi_info& request, int64_t now);
  // False: none of ours.
  bool on_connected(const struct fid* endpoint);
  // The name of whom a line was to that there is no more; empty: of another one, or not ours.
  Name on_ended(const struct fid* endpoint);
  // By what a datagram came.
  void on_heard(const Endpoint& endpoint, int64_t now);

  // Returns how many went.
  uint32_t post_starved_receives();
  bool is_dialing() const { return dialing_ != 0; }
  // Closes what is idle; looks now and then.
  void tend(int64_t now);
  void close_all();
  Deadline next_timer() const;
  // What was closed, and whose last completions may still lie in the queue.
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
  uint32_t dialing_ = 0;  // of out_, those that are not up
  int64_t tend_next_ns_ = 0;
  std::vector<std::unique_ptr<Endpoint>> closing_;
};

}  // namespace crossrail::ofi
