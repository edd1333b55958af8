#pragma once

// Sleeping in the kernel until another process changes a word of memory that both share.

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <thread>

namespace slipstream {

using Clock = std::chrono::steady_clock;

inline Clock::time_point after(double seconds) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                              std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e6)));
}

// Shared between processes, so none of the private variants.
inline void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t seen,
                        Clock::time_point until) {
    const auto left = until - Clock::now();
    if (left <= Clock::duration::zero()) return;
#if defined(__linux__)
    const auto whole = std::chrono::duration_cast<std::chrono::seconds>(left);
    timespec wait{};
    wait.tv_sec = static_cast<time_t>(whole.count());
    wait.tv_nsec = std::chrono::duration_cast<std::chrono::nanoseconds>(left - whole).count();
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &wait, nullptr, 0);
#else
    if (word.load() == seen)
        std::this_thread::sleep_for(std::min<Clock::duration>(left, std::chrono::milliseconds(1)));
#endif
}

inline void wake(std::atomic<std::uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
    static_cast<void>(word);  // a sleeper wakes by itself soon
#endif
}

}  // namespace slipstream
