# crossrail_warnings(target): the project's warnings; errors in a developer's build, never in a user's.

function(crossrail_warnings target)
  # No -Wpedantic: we use what gcc and clang share, __int128 for one.
  # -Wno-missing-field-initializers: a designated initializer leaves the rest at its default on purpose.
  # -Wshadow=local: a constructor's parameter may be called like the member it fills.
  target_compile_options(
    ${target}
    PRIVATE -Wall -Wextra -Wconversion -Wno-sign-conversion -Wno-missing-field-initializers
            -Wnon-virtual-dtor -Woverloaded-virtual $<IF:$<CXX_COMPILER_ID:GNU>,-Wshadow=local,-Wshadow>)
  if(NOT CROSSRAIL_DEV)
    return()
  endif()
  target_compile_options(${target} PRIVATE -Werror -g1)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # These follow data flow through inlined code, cry wolf, and differ from one gcc to the next: shown, not fatal.
    # -Wtsan says that ThreadSanitizer does not understand fences; whoever uses one reads it there.
    target_compile_options(
      ${target} PRIVATE -Wno-error=maybe-uninitialized -Wno-error=array-bounds -Wno-error=stringop-overflow
                        -Wno-error=stringop-overread -Wno-restrict)  # -Wrestrict: gcc bug 105329, any "a" + string
    if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 12)
      target_compile_options(${target} PRIVATE -Wno-error=dangling-pointer)
    endif()
    if(CROSSRAIL_SANITIZE STREQUAL "thread")
      target_compile_options(${target} PRIVATE -Wno-error=tsan)
    endif()
  endif()
endfunction()
