// CROSSRAIL_TARGET_BEGIN("avx2,f16c") ... CROSSRAIL_TARGET_END: what is defined between them may use these instructions.
// gcc gives a template that is instantiated at the end of a file the target of that place: so END is the file's last line
// but for closing braces. No header of the standard library is included in between.
#pragma once

#define CROSSRAIL_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define CROSSRAIL_TARGET_BEGIN(features) \
  CROSSRAIL_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define CROSSRAIL_TARGET_END CROSSRAIL_PRAGMA(clang attribute pop)
#else
#define CROSSRAIL_TARGET_BEGIN(features) CROSSRAIL_PRAGMA(GCC target(features))
#define CROSSRAIL_TARGET_END
#endif
