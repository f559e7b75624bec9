#include "moe/rows.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "util/copy.h"
#include "util/errors.h"

namespace crossrail::moe {

namespace {

// From this size on, rows copied in one call would evict each other from the core's own caches: with streaming stores,
// pulling a rank's share of a decode round takes a quarter less (256 rows of 7 KiB: 350 us against 450 for all four
// sources).
constexpr size_t kStreamedBytesMin = size_t{1} << 19U;

// Copies rows of `bytes` bytes one by one; those who read them on other cores are told after the copier's destruction.
class RowCopier {
 public:
  RowCopier(size_t rows, size_t bytes) : bytes_(bytes), streamed_(rows * bytes >= kStreamedBytesMin) {}
  ~RowCopier() {
    if (streamed_) copy_fence();
  }
  RowCopier(const RowCopier&) = delete;
  RowCopier& operator=(const RowCopier&) = delete;

  // next: what will be copied afterwards, or null.
  void copy(std::byte* to, const std::byte* from, const std::byte* next) const {
    if (streamed_) {
      copy_streaming(to, from, bytes_, next, next == nullptr ? 0 : bytes_);
    } else {
      copy_cached(to, from, bytes_);
    }
  }

 private:
  size_t bytes_;
  bool streamed_;
};

void check_row(const char* argument, size_t entry, int32_t row, size_t rows) {
  if (row >= 0 && static_cast<size_t>(row) < rows) return;
  throw UsageError(std::string(argument) + "[" + std::to_string(entry) + "] is row " + std::to_string(row) +
                   ", must be in [0, " + std::to_string(rows) + ")");
}

template <typename Index>
[[noreturn]] void refuse_index(Index index, size_t route, uint32_t top_k, size_t experts) {
  throw UsageError("indices: token " + std::to_string(route / top_k) + ", k " + std::to_string(route % top_k) +
                   " goes to expert " + std::to_string(index) + ", must be in [0, " + std::to_string(experts) +
                   "), or -1 for none");
}

}  // namespace

template <typename Index>
void count_routes(std::span<const Index> indices, uint32_t top_k, std::span<int32_t> counts, std::span<int32_t> slots) {
  using Unsigned = std::make_unsigned_t<Index>;
  const auto experts = static_cast<Unsigned>(counts.size());
  // -1 becomes 0, and anything below it large. No early exit, so that it vectorises.
  const auto is_bad = [experts](Index index) {
    return static_cast<Unsigned>(static_cast<Unsigned>(index) + 1) > experts;
  };
  bool is_any_bad = false;
  for (const Index index : indices) is_any_bad |= is_bad(index);
  if (is_any_bad) {
    const auto bad = std::ranges::find_if(indices, is_bad);
    if (bad != indices.end()) refuse_index(*bad, static_cast<size_t>(bad - indices.begin()), top_k, counts.size());
  }
  std::fill(counts.begin(), counts.end(), 0);
  for (size_t route = 0; route < indices.size(); ++route) {
    const Index index = indices[route];
    // Check again: another thread may be writing there.
    if (is_bad(index)) [[unlikely]]
      refuse_index(index, route, top_k, counts.size());
    slots[route] = index < 0 ? -1 : counts[static_cast<size_t>(index)]++;
  }
}

template void count_routes(std::span<const int32_t>, uint32_t, std::span<int32_t>, std::span<int32_t>);
template void count_routes(std::span<const int64_t>, uint32_t, std::span<int32_t>, std::span<int32_t>);

template <typename Index>
uint64_t hash_routes(std::span<const Index> indices, uint32_t top_k) {
  uint64_t sum = 0;  // a sum of well-mixed numbers does not depend on their order
  for (size_t route = 0; route < indices.size(); ++route) {
    if (indices[route] < 0) continue;
    // The finalizer of splitmix64.
    uint64_t mixed = (uint64_t{route / top_k} << 32 | static_cast<uint32_t>(indices[route])) + 0x9e3779b97f4a7c15;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
    sum += mixed ^ mixed >> 31;
  }
  return sum;
}

template uint64_t hash_routes(std::span<const int32_t>, uint32_t);
template uint64_t hash_routes(std::span<const int64_t>, uint32_t);

void pack_rows(const RowsOut& target, const RowsIn& x, const RowsIn& scales, const std::span<const int32_t>* table) {
  const size_t count = table == nullptr ? x.rows : table->size();
  if (count > target.rows) {
    throw UsageError("target has " + std::to_string(target.rows) + " rows, must have " + std::to_string(count));
  }
  if (x.bytes + scales.bytes > target.bytes) {
    throw UsageError("target has rows of " + std::to_string(target.bytes) + " bytes, must have " +
                     std::to_string(x.bytes + scales.bytes));
  }
  std::vector<int32_t> rows;
  if (table != nullptr) {
    rows.assign(table->begin(), table->end());
    for (size_t i = 0; i < count; ++i) check_row("table", i, rows[i], x.rows);
  }
  const auto row_of = [&](size_t i) { return table == nullptr ? i : static_cast<size_t>(rows[i]); };
  const RowCopier copier(count, x.bytes);
  for (size_t i = 0; i < count; ++i) {
    const size_t row = row_of(i);
    std::byte* to = target.data + i * target.bytes;
    copier.copy(to, x.data + row * x.bytes, i + 1 < count ? x.data + row_of(i + 1) * x.bytes : nullptr);
    if (scales.bytes > 0) copy_cached(to + x.bytes, scales.data + row * scales.bytes, scales.bytes);
    std::memset(to + x.bytes + scales.bytes, 0, target.bytes - x.bytes - scales.bytes);
  }
}

void pull_rows(const RowsOut& x, const RowsOut& scales, const RowsIn& source, std::span<const Move> table) {
  if (x.bytes + scales.bytes > source.bytes) {
    throw UsageError("source has rows of " + std::to_string(source.bytes) + " bytes, must have " +
                     std::to_string(x.bytes + scales.bytes));
  }
  const std::vector<Move> moves(table.begin(), table.end());
  const size_t rows = scales.bytes > 0 ? std::min(x.rows, scales.rows) : x.rows;
  for (size_t i = 0; i < moves.size(); ++i) {
    check_row("table (from)", i, moves[i].from, source.rows);
    check_row("table (to)", i, moves[i].to, rows);
  }
  const RowCopier copier(moves.size(), x.bytes);
  const auto row_at = [&](size_t i) { return source.data + static_cast<size_t>(moves[i].from) * source.bytes; };
  for (size_t i = 0; i < moves.size(); ++i) {
    const auto to = static_cast<size_t>(moves[i].to);
    copier.copy(x.data + to * x.bytes, row_at(i), i + 1 < moves.size() ? row_at(i + 1) : nullptr);
    if (scales.bytes > 0) copy_cached(scales.data + to * scales.bytes, row_at(i) + x.bytes, scales.bytes);
  }
}

}  // namespace crossrail::moe
