// The 32-bit immediate that travels with a write: 28 bits of the user's number, and a share code that says how much of
// a count it is worth.
#pragma once

#include <array>
#include <cstdint>

#include "transport/types.h"

namespace crossrail {

inline constexpr std::array<uint32_t, 16> kShareUnits = {
    // fractions of a count, for a write split over rails: 1, 1/2, 1/3, 1/4, 1/6, 1/8, 1/12, 1/16
    48, 24, 16, 12, 8, 6, 4, 3,
    // whole counts, for neighbouring pages that travel as one: 2, 4, 8, 16, 32, 64, 128, 256
    96, 192, 384, 768, 1536, 3072, 6144, 12288};

inline constexpr uint32_t kPagesPerRequestMax = 256;  // the largest share

constexpr uint32_t wire_imm(uint32_t imm, uint32_t share_code) { return share_code << kImmBits | imm; }
constexpr uint32_t imm_of_wire(uint32_t wire) { return wire & kImmMax; }
constexpr uint32_t units_of_wire(uint32_t wire) { return kShareUnits[wire >> kImmBits]; }

}  // namespace crossrail
