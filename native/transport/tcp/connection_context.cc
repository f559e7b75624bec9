#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "transport/tcp/connection.h"

namespace crossrail::tcp {

namespace {

constexpr size_t kBatchesKept = 8;

}  // namespace

void ConnectionContext::note_hot(Connection* connection) {
  if (hot[0].connection == connection) {
    hot[0].misses = 0;
    ++hot[0].hits;
    return;
  }
  Hot moved{.connection = connection};
  for (Hot& place : hot) {
    std::swap(place, moved);
    if (moved.connection == connection) hot[0].hits = moved.hits;
    if (moved.connection == connection || moved.connection == nullptr) return;
  }
  moved.connection->watch(true);
}

void ConnectionContext::forget_hot(Connection* connection) {
  connection->watch(true);
  const auto rest =
      std::remove_if(hot.begin(), hot.end(), [&](const Hot& place) { return place.connection == connection; });
  std::fill(rest, hot.end(), Hot{});
}

void ConnectionContext::cool() {
  while (hot[0].connection != nullptr) forget_hot(hot[0].connection);
}

void ConnectionContext::ask_unwatched() {
  for (Connection* connection : std::exchange(unwatched, {})) connection->ask();
}

std::byte* ConnectionContext::arrivals_to_copy() {
  if (!arrivals) arrivals = stages.take();
  return arrivals->base();
}

std::unique_ptr<TxBatch> ConnectionContext::take_batch() {
  if (batches.empty()) return std::make_unique<TxBatch>(&stages);
  std::unique_ptr<TxBatch> batch = std::move(batches.back());
  batches.pop_back();
  return batch;
}

void ConnectionContext::give_batch(std::unique_ptr<TxBatch> batch) {
  batch->clear();
  if (batches.size() < kBatchesKept) batches.push_back(std::move(batch));
}

}  // namespace crossrail::tcp
