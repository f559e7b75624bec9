# Applies CROSSRAIL_SANITIZE to every target made after this file is included.

if(CROSSRAIL_SANITIZE STREQUAL "")
  return()
elseif(CROSSRAIL_SANITIZE STREQUAL "address")
  # Undefined behaviour ends the program too: a report that scrolls by is a report nobody reads.
  # Not its check of virtual tables: that opens a pipe to see whether memory can be read, and without a file
  # descriptor to spare it reports every object as broken (tests/faults runs engines out of descriptors).
  set(CROSSRAIL_SANITIZE_FLAGS -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all)
elseif(CROSSRAIL_SANITIZE STREQUAL "thread")
  set(CROSSRAIL_SANITIZE_FLAGS -fsanitize=thread)
else()
  message(FATAL_ERROR "CROSSRAIL_SANITIZE is '${CROSSRAIL_SANITIZE}'; it must be empty, 'address' or 'thread'")
endif()

# -O1 and line tables alone, behind what the build type asks for: checks are most of the code, and all of it is optimised. With
# -O2 and -g each source takes up to twice as long to compile.
add_compile_options(${CROSSRAIL_SANITIZE_FLAGS} -fno-omit-frame-pointer -O1 -g1)
add_link_options(${CROSSRAIL_SANITIZE_FLAGS})
# Functions that one thread at a time may enter check that it is the one (util/spinlock.h).
add_compile_definitions(CROSSRAIL_CHECK_HOLDERS)
