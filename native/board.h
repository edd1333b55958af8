#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace slipstream {

// What the workers of one host tell each other about rounds, at the beginning of memory that they
// share. For every worker and tensor there is a word, and one more row of words is for results. From
// its lowest bit, a word has: whether there is anything; the last 15 bits of the writer's step; the
// round + 1. It is of one tensor, so that a worker may be a round further with another one. A word
// has one writer: a worker its own row, the first worker of the host (it speaks for them) its own
// and the results. What a word is about is written before it, and read after it (release, acquire).
// All others are told by the first one's own row, as by results.
//
// Who finds nothing to do sleeps in the kernel. It reads the bell, then the words, says that it
// sleeps, and sleeps only while the bell is as it was; whoever changes a word moves the bell and
// then looks whether anybody sleeps. In the one order of these (sequential consistency) one of the
// two sees the other. A sleeper that is killed stays counted: it costs a call that wakes nobody.
class Board {
  public:
    // The host's first worker waits at one bell, all others at the other.
    enum Bell : std::uint32_t { contributions = 0, results = 1 };

    static constexpr std::uint64_t kMostWorkers = 4096;
    static constexpr std::uint64_t kMostTensors = std::uint64_t{1} << 24;
    static constexpr std::uint64_t kSteps = std::uint64_t{1} << 15;  // that a word tells apart

    // None if no board has so many.
    static std::optional<std::size_t> nbytes(std::uint64_t workers, std::uint64_t tensors) noexcept;

    // Zeros are a board on which nothing was published.
    Board(std::byte* base, std::uint64_t workers, std::uint64_t tensors) noexcept
        : base_(base), workers_(workers), tensors_(tensors) {}

    std::uint64_t workers() const { return workers_; }
    std::uint64_t tensors() const { return tensors_; }

    // A number of each worker's own for a round, written before it publishes. The last two rounds'
    // are kept: no worker is further ahead of another one in rounds for which there is a number.
    void note(std::uint64_t worker, std::uint64_t round, std::uint64_t number) const;
    std::uint64_t noted(std::uint64_t worker, std::uint64_t round) const;

    // Row `workers` is that of results.
    void publish(std::uint64_t row, std::uint64_t tensor, std::uint64_t round, bool present,
                 std::uint64_t step) const;
    // The last bits of the step with which a word was last published.
    std::uint64_t step(std::uint64_t row, std::uint64_t tensor) const;
    // None: nothing was published for this round yet.
    std::optional<bool> published(std::uint64_t row, std::uint64_t tensor,
                                  std::uint64_t round) const;
    // Of these tensors, those for which all workers but the first have published.
    std::vector<std::uint64_t> arrived(std::uint64_t round,
                                       const std::vector<std::uint64_t>& tensors) const;

    std::uint32_t bell(Bell which) const;
    void sleep(Bell which, std::uint32_t seen, double limit_s) const;

  private:
    struct alignas(64) Ring {
        std::atomic<std::uint32_t> moves;
        std::atomic<std::uint32_t> sleepers;
    };
    struct alignas(64) Note {
        std::atomic<std::uint64_t> numbers[2];
    };

    Ring& ring(Bell which) const;
    Note& note_of(std::uint64_t worker) const;
    std::atomic<std::uint64_t>& word(std::uint64_t row, std::uint64_t tensor) const;

    std::byte* base_;
    std::uint64_t workers_, tensors_;
};

}  // namespace slipstream
