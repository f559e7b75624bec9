# crossrail_join(target): the sources of one folder are compiled as one, so that what they include is parsed once, not once for each.
#
# For the builds that are made anew and seldom changed: those of wheels and with a sanitizer. What calls each other within a folder is
# also inlined then. Names in the anonymous namespaces of one folder must differ, which the compiler tells. Folders are not mixed, so
# that a new source meets those beside it and no others. That a source lacks an include is hidden here; ./dev fuzz finds it in what
# the fuzzers link, half of the core.

if(CROSSRAIL_SANITIZE OR NOT (CROSSRAIL_DEV OR CROSSRAIL_FUZZ))
  set(CROSSRAIL_JOIN_DEFAULT ON)
else()
  set(CROSSRAIL_JOIN_DEFAULT OFF)
endif()
option(CROSSRAIL_JOIN "Compile the core's sources of one folder as one" ${CROSSRAIL_JOIN_DEFAULT})

function(crossrail_join target)
  if(NOT CROSSRAIL_JOIN)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    get_filename_component(folder "${source}" DIRECTORY)
    file(RELATIVE_PATH group "${CMAKE_CURRENT_SOURCE_DIR}/native" "${folder}")
    string(MAKE_C_IDENTIFIER "${group}" group)
    set_source_files_properties("${source}" PROPERTIES UNITY_GROUP "${group}")
  endforeach()
  # gcc takes a source that is included for a header, whose classes others see, too.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endfunction()
