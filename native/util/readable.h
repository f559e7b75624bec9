// Memory that went away under us.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace crossrail {

// Whether the kernel can read all of it. It cannot where pages were unmapped, or a file that is mapped was cut short.
// Any thread; costs a system call a page.
bool is_readable(const std::byte* base, uint64_t length_bytes);

// Whether a file is mapped anywhere in it: only files can be cut short. Any thread; costs as much as opening a file,
// before Linux 6.11 as reading all of /proc/self/maps. True where that cannot be read.
bool maps_file(const std::byte* base, uint64_t length_bytes);
// The same in the text of /proc/self/maps.
bool maps_file(const std::string& maps, const std::byte* base, uint64_t length_bytes);

// Copies to where a file is mapped. False: some of it is not there any more, and some of the bytes may be copied. Any
// thread; costs a system call, and a pipe where the kernel refuses that one (seccomp; memory of a device) or there are
// bytes missing.
bool copy_to_file(std::byte* target, const std::byte* source, size_t bytes);

inline constexpr const char* kUnreadableText =
    "memory cannot be read: it was unmapped while registered, or the file that is mapped there was cut short";
inline constexpr const char* kUnwritableText =
    "memory cannot be written: it was unmapped while registered, or the file that is mapped there was cut short";

}  // namespace crossrail
