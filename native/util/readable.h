// Memory that went away under us.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crossrail {

// Whether the kernel can read all of it. It cannot where pages were unmapped, or a file that is mapped was cut short.
// Any thread; costs a system call a page.
bool is_readable(const std::byte* base, uint64_t length_bytes);

inline constexpr const char* kUnreadableText =
    "memory cannot be read: it was unmapped while registered, or the file that is mapped there was cut short";

}  // namespace crossrail
