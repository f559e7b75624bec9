#include "util/sha256.h"

#include <doctest/doctest.h>

#include <array>
#include <span>
#include <string>
#include <string_view>

#include "transport/descriptor.h"

namespace crossrail {

namespace {

std::span<const uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

std::string hash_of(std::string_view text) { return to_hex(sha256({bytes_of(text)})); }

std::string mac_of(const Bytes& key, std::string_view text) { return to_hex(hmac_sha256(key, {bytes_of(text)})); }

}  // namespace

TEST_CASE("SHA-256 gives what FIPS 180-4 says") {
  CHECK(hash_of("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hash_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hash_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(
      hash_of("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrst"
              "nopqrstu") == "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  CHECK(hash_of(std::string(1'000'000, 'a')) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("SHA-256 does not care how its input is cut") {
  const std::string text(300, 'x');
  for (size_t length = 0; length <= text.size(); ++length) {
    const std::string_view all(text.data(), length);
    const Digest whole = sha256({bytes_of(all)});
    const size_t cut = length / 3;
    CHECK(sha256({bytes_of(all.substr(0, cut)), bytes_of(all.substr(cut))}) == whole);
  }
}

TEST_CASE("HMAC-SHA-256 gives what RFC 4231 says") {
  CHECK(mac_of(Bytes(20, 0x0b), "Hi There") == "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(mac_of({'J', 'e', 'f', 'e'}, "what do ya want for nothing?") ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(mac_of(Bytes(20, 0xaa), std::string(50, '\xdd')) ==
        "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  Bytes counted(25);
  for (size_t i = 0; i < counted.size(); ++i) counted[i] = static_cast<uint8_t>(i + 1);
  CHECK(mac_of(counted, std::string(50, '\xcd')) == "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK(mac_of(Bytes(131, 0xaa), "Test Using Larger Than Block-Size Key - Hash Key First") ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK(
      mac_of(Bytes(131, 0xaa),
             "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
             "hashed before being used by the HMAC algorithm.") ==
      "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST_CASE("digests are compared whole") {
  const Digest a = sha256({});
  Digest b = a;
  CHECK(equal_in_constant_time(a, b));
  for (size_t i = 0; i < b.size(); ++i) {
    b[i] ^= 1;
    CHECK(!equal_in_constant_time(a, b));
    b[i] ^= 1;
  }
  CHECK(!equal_in_constant_time(a, std::span(b).first(31)));
}

TEST_CASE("SHA-256 by the processor's instructions is the portable one") {
  Sha256State fast = kSha256Start;
  Sha256State portable = kSha256Start;
  std::array<uint8_t, 64> block;
  for (size_t round = 0; round < 200; ++round) {
    for (size_t i = 0; i < block.size(); ++i) block[i] = static_cast<uint8_t>(round * 31 + i * i);
    sha256_block(fast, block.data());
    sha256_block_portable(portable, block.data());
    REQUIRE(fast == portable);
  }
}

}  // namespace crossrail
