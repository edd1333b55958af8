#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace slipstream {

// Memory that the processes of one job share: weights, and for every learner a ring of slots that it
// fills with gradients and the server empties. `verify/ring.pml` is a model of this protocol.
//
// A ring has one producer and one consumer. `pushed` and `taken` count without end and have one writer
// each: a learner that dies has published a slot or has not, and the learner that replaces it
// continues from `pushed`. A side that finds nothing to do sleeps in the kernel. It first sets a flag
// and checks once more; the other side first changes the count and then checks the flag. Since all
// four have one order (sequential consistency), at least one of the two sees the other's change.

// The words that one learner and the server share, a cache line for each writer.
struct Lane {
    alignas(64) std::atomic<std::uint64_t> pushed;  // number of slots published
    std::atomic<std::uint32_t> awaits;              // the learner sleeps until there is room
    alignas(64) std::atomic<std::uint64_t> taken;   // number of slots emptied
    std::atomic<std::uint32_t> room;                // changes when a sleeping learner must check again
    alignas(64) std::atomic<std::uint32_t> reading; // the learner copies weights that must not move
};

struct Shape {
    std::uint64_t learners, slots, slot_nbytes, weights_nbytes;

    bool operator==(const Shape&) const = default;
};

struct Header {
    std::uint64_t magic;
    Shape shape;
    alignas(64) std::atomic<std::uint32_t> bell;    // changes when the server must check again
    std::atomic<std::uint32_t> dozing;              // the server sleeps until then
    alignas(64) std::atomic<std::uint64_t> version; // updates made
    std::atomic<std::uint64_t> beat;                // changes as long as the server is alive
    alignas(64) std::atomic<std::uint32_t> closing; // no more slots will be pushed
    alignas(64) std::atomic<std::uint32_t> writing; // 1 + the writer's number; 0: none
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

class Segment {
  public:
    // The bytes of a segment of this shape; nothing if no address space has so many.
    static std::optional<std::size_t> nbytes(const Shape& shape) noexcept;

    // Creates a segment in zeroed memory of that many bytes.
    static void format(std::byte* base, const Shape& shape) noexcept;

    // Why this memory is not a segment; nullptr if it is one.
    static const char* check(const std::byte* base, std::size_t nbytes) noexcept;

    explicit Segment(std::byte* base) noexcept;

    // The shape when this process mapped the segment: later writes of others cannot mislead it.
    const Shape& shape() const noexcept { return shape_; }
    Header& header() const noexcept { return *header_; }
    Lane& lane(std::uint64_t learner) const noexcept { return lanes_[learner]; }
    std::size_t weights_at() const noexcept;
    std::size_t slot_at(std::uint64_t learner, std::uint64_t slot) const noexcept;

    // ---- a learner's side

    // The slot to fill, once one is free; nothing if none is free within the limit.
    std::optional<std::uint64_t> reserve(std::uint64_t learner, double limit_s) const noexcept;
    // Publishes the reserved slot, which is the server's from then on.
    void publish(std::uint64_t learner) const noexcept;

    // ---- the server's side

    struct Ready {
        std::uint64_t learner, slot;
    };
    // A published slot, of the learners in turn after `last`; nothing if none comes in time.
    std::optional<Ready> next(std::uint64_t last, double limit_s) const noexcept;
    // Signals that the server is alive.
    void beat() const noexcept;
    // Sleeps until the bell changes, and signals that the server is alive.
    void rest(double limit_s) const noexcept;
    // Returns the oldest published slot to the learner.
    void release(std::uint64_t learner) const noexcept;
    // Returns every published slot before `pushed`.
    void discard(std::uint64_t learner, std::uint64_t pushed) const noexcept;

    // ---- weights that do not change

    // False if the weights are being changed for longer than the limit.
    bool begin_reading(std::uint64_t learner, double limit_s) const noexcept;
    void end_reading(std::uint64_t learner) const noexcept;
    // A process that died while writing still has the lock when it returns, unless it was released.
    bool begin_writing(std::uint64_t who, double limit_s) const noexcept;
    void end_writing() const noexcept;
    // Releases the locks of a process that has died.
    void release_dead(std::uint64_t who) const noexcept;

    void ring() const noexcept;

  private:
    std::optional<Ready> look(std::uint64_t last) const noexcept;

    std::byte* base_;
    Header* header_;
    Lane* lanes_;
    Shape shape_;
};

}  // namespace slipstream
