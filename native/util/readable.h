// Memory that disappeared under us.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace crossrail {

// Whether the kernel can read all of it. It cannot if pages were unmapped, or a mapped file was truncated. Any thread;
// costs one system call per page.
bool is_readable(const std::byte* base, uint64_t length_bytes);

// Whether its first or its last byte is mapped, and cannot be written. Any thread; two system calls, which change
// nothing.
bool is_read_only(const std::byte* base, uint64_t length_bytes);

// Whether a file is mapped anywhere in it: only files can be truncated. Any thread; costs as much as opening a file,
// before Linux 6.11 as much as reading all of /proc/self/maps. True if that cannot be read.
bool maps_file(const std::byte* base, uint64_t length_bytes);
// The same in the text of /proc/self/maps.
bool maps_file(const std::string& maps, const std::byte* base, uint64_t length_bytes);

// Copies to memory where a file is mapped. False: part of it no longer exists, and some of the bytes may have been
// copied. Any thread; costs a system call, plus a pipe if the kernel refuses that call (seccomp; device memory) or
// bytes are missing.
bool copy_to_file(std::byte* target, const std::byte* source, size_t bytes);

inline constexpr const char* kUnreadableText =
    "memory cannot be read: it was unmapped while registered, or the file that is mapped there was cut short";
inline constexpr const char* kUnwritableText =
    "memory cannot be written: it was unmapped while registered, or the file that is mapped there was cut short";

}  // namespace crossrail
