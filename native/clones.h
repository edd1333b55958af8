#pragma once

// One copy of each kernel per vector width, chosen when the module loads. It needs the ifunc of
// GNU libc; elsewhere the compiler's baseline (SSE2, NEON) is used. The results are the same
// bytes: additions keep their order within an element, and the build forbids contraction to FMA
// (except for text_net.cpp, whose results need not be the same everywhere).
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(SLIPSTREAM_ONE_KERNEL)
#define SLIPSTREAM_CLONES \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SLIPSTREAM_CLONES
#endif

// A function that a clone calls must be inlined into it, to be compiled for its width.
#define SLIPSTREAM_INLINE __attribute__((always_inline)) inline
