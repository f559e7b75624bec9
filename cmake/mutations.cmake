# The target crossrail_mutations: the module with deliberate mistakes in it (native/util/mutation.h), for ./dev sim --mutations.
# Compiled once more is only what includes that header; all other objects are those of the module without mistakes.

file(GLOB_RECURSE CROSSRAIL_UNMUTATED CONFIGURE_DEPENDS native/*.h native/bindings/*.cc)
set(CROSSRAIL_MUTATED_SOURCES)
foreach(source IN LISTS CROSSRAIL_CORE_SOURCES CROSSRAIL_UNMUTATED)
  file(STRINGS "${source}" found REGEX "^#include \"util/mutation\\.h\"" LIMIT_COUNT 1)
  if(found AND source IN_LIST CROSSRAIL_UNMUTATED)
    message(FATAL_ERROR "${source} includes util/mutation.h, which sources of the core alone may: the rest is not compiled once more")
  elseif(found)
    list(APPEND CROSSRAIL_MUTATED_SOURCES "${source}")
  endif()
endforeach()

# Objects, not an archive: all of them are in the module, so that none of their namesakes is taken from the core.
add_library(crossrail_mutated OBJECT EXCLUDE_FROM_ALL ${CROSSRAIL_MUTATED_SOURCES})
target_compile_definitions(crossrail_mutated PRIVATE CROSSRAIL_MUTATIONS=1)
target_link_libraries(crossrail_mutated PRIVATE crossrail_core)
crossrail_warnings(crossrail_mutated)
if(CROSSRAIL_PCH)
  target_precompile_headers(crossrail_mutated REUSE_FROM crossrail_core)
endif()

add_library(crossrail_mutations MODULE EXCLUDE_FROM_ALL $<TARGET_OBJECTS:_core> $<TARGET_OBJECTS:crossrail_mutated>)
target_link_libraries(crossrail_mutations PRIVATE $<TARGET_PROPERTY:_core,LINK_LIBRARIES>)
target_link_options(crossrail_mutations PRIVATE $<TARGET_PROPERTY:_core,LINK_OPTIONS>)
get_target_property(CROSSRAIL_MODULE_SUFFIX _core SUFFIX)
set_target_properties(
  crossrail_mutations
  PROPERTIES OUTPUT_NAME _core PREFIX "" SUFFIX "${CROSSRAIL_MODULE_SUFFIX}" LINKER_LANGUAGE CXX
             LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/mutated" LINK_DEPENDS "${CROSSRAIL_EXPORTS}")
install(TARGETS crossrail_mutations LIBRARY DESTINATION crossrail COMPONENT mutations EXCLUDE_FROM_ALL)
