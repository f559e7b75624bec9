// CROSSRAIL_TARGET_BEGIN("avx2,f16c") ... CROSSRAIL_TARGET_END: functions and templates defined between them may use
// these instructions; a template defined elsewhere may not, even if it is instantiated for them. No standard header is
// included in between.
#pragma once

#define CROSSRAIL_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define CROSSRAIL_TARGET_BEGIN(features) \
  CROSSRAIL_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define CROSSRAIL_TARGET_END CROSSRAIL_PRAGMA(clang attribute pop)
#else
#define CROSSRAIL_TARGET_BEGIN(features) CROSSRAIL_PRAGMA(GCC push_options) CROSSRAIL_PRAGMA(GCC target(features))
#define CROSSRAIL_TARGET_END CROSSRAIL_PRAGMA(GCC pop_options)
#endif
