#pragma once
// Which sanitizer this build runs under: asked by the arena, which then guards its pieces, and by long tests, which then do less.

namespace lockstep {

#if defined(__has_feature)  // clang
#if __has_feature(address_sanitizer)
#define LOCKSTEP_ADDRESS_SANITIZER 1
#elif __has_feature(thread_sanitizer)
#define LOCKSTEP_THREAD_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)  // gcc
#define LOCKSTEP_ADDRESS_SANITIZER 1
#elif defined(__SANITIZE_THREAD__)
#define LOCKSTEP_THREAD_SANITIZER 1
#endif

#if defined(LOCKSTEP_ADDRESS_SANITIZER)
inline constexpr bool kAddressSanitizer = true;
#else
inline constexpr bool kAddressSanitizer = false;
#endif
#if defined(LOCKSTEP_THREAD_SANITIZER)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

}  // namespace lockstep
