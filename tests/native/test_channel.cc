#include <doctest/doctest.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <thread>

#include "transport/shm/channel.h"

namespace crossrail::shm {

namespace {
struct ZeroedChannel {
  ZeroedChannel()
      : memory(mmap(nullptr, sizeof(Channel), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~ZeroedChannel() { munmap(memory, sizeof(Channel)); }
  Channel* get() { return static_cast<Channel*>(memory); }
  void* memory;
};
}  // namespace

TEST_CASE("entries and staged bytes cross a channel in order, whole, many times around") {
  ZeroedChannel channel;
  constexpr uint64_t kEntries = 50'000;
  std::thread consumer([&] {
    ChannelReader reader(channel.get());
    for (uint64_t expected = 0; expected < kEntries;) {
      const Entry* entry = reader.peek();
      if (entry == nullptr) {
        reader.publish();
        std::this_thread::yield();
        continue;
      }
      REQUIRE(entry->work.offset == expected);
      const std::byte* block = reader.block(entry->work.stage_at, entry->work.stage_bytes);
      REQUIRE(block != nullptr);
      REQUIRE(block[0] == static_cast<std::byte>(expected));
      REQUIRE(block[entry->work.stage_bytes - 1] == static_cast<std::byte>(expected));
      reader.pop(expected % 7 == 0 ? 5 : 0);
      if (++expected % 16 == 0) reader.publish();
    }
    reader.publish();
  });
  ChannelWriter writer(channel.get());
  std::deque<uint64_t> heads;
  uint64_t confirmed = 0;
  for (uint64_t i = 0; i < kEntries;) {
    writer.refresh();
    for (; confirmed < writer.consumed(); ++confirmed) {
      REQUIRE(writer.status_of(confirmed) == (confirmed % 7 == 0 ? 5 : 0));
      writer.release_stage(heads.front());
      heads.pop_front();
    }
    const uint64_t bytes = 1 + i * 977 % 40'000;
    uint64_t stage_at = 0;
    std::byte* block = writer.has_room() ? writer.reserve(bytes, &stage_at) : nullptr;
    if (block == nullptr) {
      std::this_thread::yield();
      continue;
    }
    std::memset(block, static_cast<int>(i & 0xff), bytes);
    heads.push_back(writer.stage_head());
    Entry& entry = writer.next();
    entry.kind = EntryKind::kStagedWrite;
    entry.work = {};
    entry.work.offset = i;
    entry.work.stage_at = stage_at;
    entry.work.stage_bytes = static_cast<uint32_t>(bytes);
    writer.publish(entry);
    ++i;
  }
  consumer.join();
}

TEST_CASE("an empty ring begins at its start again, and has room for a block of its whole length") {
  ZeroedChannel channel;
  ChannelWriter writer(channel.get());
  uint64_t stage_at = 1;
  for (int turn = 0; turn < 3; ++turn) {
    REQUIRE(writer.reserve(1000, &stage_at) != nullptr);
    CHECK(stage_at == 0);
    const uint64_t first = writer.stage_head();
    REQUIRE(writer.reserve(500, &stage_at) != nullptr);
    CHECK(stage_at == 1000);
    writer.release_stage(first);
    writer.release_stage(writer.stage_head());
  }
  CHECK(writer.reserve(kStageBytes, &stage_at) != nullptr);
  CHECK(writer.reserve(1, &stage_at) == nullptr);
}

TEST_CASE("an entry without bytes that is released late takes no room from others") {
  ZeroedChannel channel;
  ChannelWriter writer(channel.get());
  uint64_t stage_at = 0;
  writer.reserve(100, &stage_at);
  const uint64_t whole = writer.stage_head();
  writer.reserve(0, &stage_at);
  const uint64_t nothing = writer.stage_head();
  writer.release_stage(whole);
  REQUIRE(writer.reserve(kStageBytes / 2, &stage_at) != nullptr);

  writer.release_stage(nothing);

  CHECK(writer.reserve(kStageBytes / 2, &stage_at) != nullptr);
}

TEST_CASE("a staged block past the ring is refused") {
  ZeroedChannel channel;
  const ChannelReader reader(channel.get());
  CHECK(reader.block(0, kStageBytes) != nullptr);
  CHECK(reader.block(1, kStageBytes) == nullptr);
  CHECK(reader.block(kStageBytes, 1) == nullptr);
  CHECK(reader.block(~uint64_t{0}, 2) == nullptr);
  CHECK(reader.block(8, ~uint64_t{0} - 4) == nullptr);
}

TEST_CASE("a consumer that claims more than it was given is not believed") {
  ZeroedChannel channel;
  ChannelWriter writer(channel.get());
  channel.get()->consumed.store(1'000'000);
  writer.refresh();
  CHECK(writer.consumed() == 0);
}

}  // namespace crossrail::shm
