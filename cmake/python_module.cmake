# The module crossrail._core and its stub, from native/bindings/*.cc.

# SABIModule tells the suffix of the stable ABI; CMake before 3.26 does not know it, and nanobind then asks Python.
find_package(
  Python 3.10 REQUIRED
  COMPONENTS Interpreter Development.Module
  OPTIONAL_COMPONENTS Development.SABIModule)

if(NOT nanobind_DIR AND NOT nanobind_ROOT)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
    OUTPUT_VARIABLE nanobind_ROOT
    OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE CROSSRAIL_NANOBIND_RESULT)
  if(NOT CROSSRAIL_NANOBIND_RESULT EQUAL 0)
    message(FATAL_ERROR "nanobind is missing: ${Python_EXECUTABLE} -m pip install nanobind")
  endif()
endif()
find_package(nanobind CONFIG REQUIRED)

file(GLOB CROSSRAIL_BINDINGS_SOURCES CONFIGURE_DEPENDS native/bindings/*.cc)
set(CROSSRAIL_MODULE_OPTIONS STABLE_ABI NB_STATIC NB_SUPPRESS_WARNINGS NOMINSIZE)
if(CROSSRAIL_DEV OR CROSSRAIL_SANITIZE)
  list(APPEND CROSSRAIL_MODULE_OPTIONS NOSTRIP)
endif()
nanobind_add_module(_core ${CROSSRAIL_MODULE_OPTIONS} ${CROSSRAIL_BINDINGS_SOURCES})
target_link_libraries(_core PRIVATE crossrail_core)
crossrail_warnings(_core)

# nanobind's headers write to stderr; libstdc++ happens to include what that needs, libc++ does not.
get_target_property(CROSSRAIL_MODULE_LIBRARIES _core LINK_LIBRARIES)
list(FILTER CROSSRAIL_MODULE_LIBRARIES INCLUDE REGEX "^nanobind")
target_compile_options(${CROSSRAIL_MODULE_LIBRARIES} PRIVATE -include stdio.h)
# Not precompiled in ./dev asan, which finds the include that a binding lacks, as ./dev tsan does for the rest.
if(CROSSRAIL_PCH AND NOT CROSSRAIL_SANITIZE)
  crossrail_precompile(_core <stdio.h> <nanobind/nanobind.h>)  # gcc takes a precompiled header only if nothing is before it
else()
  target_compile_options(_core PRIVATE -include stdio.h)
endif()

# One module for any machine, next to any other module: it carries its own C++ runtime and exports PyInit__core alone.
if(NOT CROSSRAIL_SANITIZE)
  set(CROSSRAIL_EXPORTS "${CMAKE_CURRENT_SOURCE_DIR}/cmake/exports.map")
  target_link_options(_core PRIVATE -static-libstdc++ -static-libgcc "-Wl,--version-script=${CROSSRAIL_EXPORTS}")
  set_target_properties(_core PROPERTIES LINK_DEPENDS "${CROSSRAIL_EXPORTS}")
endif()

install(TARGETS _core LIBRARY DESTINATION crossrail)

# The built module lies in a package of its own, so that the stub's writer can import it under its real name.
set(CROSSRAIL_STAGE "${CMAKE_CURRENT_BINARY_DIR}/stage")
set_target_properties(_core PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${CROSSRAIL_STAGE}/crossrail")
file(WRITE "${CROSSRAIL_STAGE}/crossrail/__init__.py" "# Only for the stub's writer.\n")

# Writing the stub imports the module, so it is left out where that cannot work or needs a preloaded runtime.
# A folder _core/ of stubs beside the module, because the module has submodules; with the private names, because our own
# Python files use them.
if(NOT CMAKE_CROSSCOMPILING AND NOT CROSSRAIL_SANITIZE)
  nanobind_add_stub(
    crossrail_stub
    MODULE crossrail._core
    RECURSIVE
    INCLUDE_PRIVATE
    OUTPUT_PATH stage/crossrail
    OUTPUT stage/crossrail/_core/__init__.pyi
    MARKER_FILE stage/crossrail/py.typed
    PATTERN_FILE "${CMAKE_CURRENT_SOURCE_DIR}/cmake/stub_patterns.txt"
    PYTHON_PATH "${CROSSRAIL_STAGE}"
    DEPENDS _core)
  install(FILES "${CROSSRAIL_STAGE}/crossrail/py.typed" DESTINATION crossrail)
  install(DIRECTORY "${CROSSRAIL_STAGE}/crossrail/_core" DESTINATION crossrail FILES_MATCHING PATTERN "*.pyi")
endif()
