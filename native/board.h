#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace slipstream {

// A board on which the workers of one host publish their progress in rounds, at the beginning of the
// memory that they share. There is a word for every worker and tensor, and another row of words for
// results. From its lowest bit, a word has: 1 if there is a value; the last 15 bits of the writer's
// step; the round + 1. Each tensor has words of its own, so that a worker may be a round ahead with
// one tensor. A word has one writer: each worker writes its own row; the first worker of the host,
// which represents it, also writes the results. The data that a word announces is written before it
// and read after it (release, acquire). All other workers read the first one's row, like results.
//
// A worker that finds nothing to do sleeps in the kernel. It reads the bell, then the words, sets a
// flag that it sleeps, and sleeps only while the bell is unchanged. A worker that changes a word
// changes the bell and then checks whether another one sleeps. Since all of these have one order
// (sequential consistency), at least one of the two sees the other's change. A sleeper that is killed
// stays counted: it costs a system call that wakes no worker.
class Board {
  public:
    // The host's first worker waits at one bell, all others at the other.
    enum Bell : std::uint32_t { contributions = 0, results = 1 };

    static constexpr std::uint64_t kMostWorkers = 4096;
    static constexpr std::uint64_t kMostTensors = std::uint64_t{1} << 24;
    static constexpr std::uint64_t kSteps = std::uint64_t{1} << 15;  // that a word can distinguish

    // Nothing if a board cannot have so many.
    static std::optional<std::size_t> nbytes(std::uint64_t workers, std::uint64_t tensors) noexcept;

    // Memory of zeros is a board on which nothing was published.
    Board(std::byte* base, std::uint64_t workers, std::uint64_t tensors) noexcept
        : base_(base), workers_(workers), tensors_(tensors) {}

    std::uint64_t workers() const { return workers_; }
    std::uint64_t tensors() const { return tensors_; }

    // A number that each worker writes for a round before it publishes. Those of the last two rounds
    // are kept, since no worker is further ahead of another one in rounds with a number.
    void note(std::uint64_t worker, std::uint64_t round, std::uint64_t number) const;
    std::uint64_t noted(std::uint64_t worker, std::uint64_t round) const;

    // Row `workers` is that of the results.
    void publish(std::uint64_t row, std::uint64_t tensor, std::uint64_t round, bool present,
                 std::uint64_t step) const;
    // Returns the last bits of the step with which a word was last published.
    std::uint64_t step(std::uint64_t row, std::uint64_t tensor) const;
    // Returns nothing if this round was not published yet.
    std::optional<bool> published(std::uint64_t row, std::uint64_t tensor,
                                  std::uint64_t round) const;
    // Returns those of these tensors that all workers but the first have published.
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
