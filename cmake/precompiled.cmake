# crossrail_precompile(target [header...]): these headers and those of the standard library that most of our sources include are
# parsed once for the target, not once for each source.
#
# Only in a developer's build; and not with a compiler launcher: ccache takes what is parsed from its store anyway. A source that
# lacks an include is found by the builds without: the wheel and ./dev asan for the bindings, ./dev tsan for the native tests. Nothing of
# ours is here, so that a changed header compiles only what includes it; nor nanobind's casters, which change what a source that
# forgot them means.

set(CROSSRAIL_PCH_DEFAULT OFF)
if(CROSSRAIL_DEV AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CROSSRAIL_PCH_DEFAULT ON)
endif()
option(CROSSRAIL_PCH "Precompile headers of the standard library" ${CROSSRAIL_PCH_DEFAULT})

function(crossrail_precompile target)
  if(CROSSRAIL_PCH)
    target_precompile_headers(
      ${target}
      PRIVATE ${ARGN}
              <algorithm>
              <array>
              <atomic>
              <bit>
              <cerrno>
              <chrono>
              <condition_variable>
              <cstddef>
              <cstdint>
              <cstring>
              <deque>
              <functional>
              <map>
              <memory>
              <mutex>
              <optional>
              <span>
              <string>
              <string_view>
              <thread>
              <unordered_map>
              <utility>
              <vector>)
  endif()
endfunction()
