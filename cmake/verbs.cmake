# CROSSRAIL_WITH_VERBS: libibverbs' headers are here and wanted. The library itself is opened at run time, so that what is built
# here also loads where there is none.
if(NOT EXISTS "${CROSSRAIL_VERBS_INCLUDE_DIR}/infiniband/verbs.h")
  unset(CROSSRAIL_VERBS_INCLUDE_DIR CACHE)  # they went since the last configuration
endif()
set(CROSSRAIL_WITH_VERBS OFF)
if(NOT CROSSRAIL_VERBS STREQUAL "OFF")
  find_path(CROSSRAIL_VERBS_INCLUDE_DIR infiniband/verbs.h)
  if(CROSSRAIL_VERBS_INCLUDE_DIR)
    set(CROSSRAIL_WITH_VERBS ON)
  elseif(CROSSRAIL_VERBS STREQUAL "ON")
    message(FATAL_ERROR "CROSSRAIL_VERBS is ON, but infiniband/verbs.h was not found (Debian: libibverbs-dev)")
  else()
    message(STATUS "infiniband/verbs.h was not found: built without the verbs transport")
  endif()
endif()
