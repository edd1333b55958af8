#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace slipstream {

// Memory that the processes of one job share: weights, and for every learner a ring of slots that it
// fills with gradients and the server empties. `verify/ring.pml` is a model of what is here.
//
// A ring has one producer and one consumer. `pushed` and `taken` count for ever and have one writer
// each: a learner that dies has published a slot or has not, and the one that is started in its
// place goes on from `pushed`. Who finds nothing to do sleeps in the kernel. It says so first and
// looks once more; the other side changes the count first and then looks whether anybody sleeps:
// in the one order of all four (sequential consistency) one of the two sees the other.

// What one learner and the server tell each other, a cache line for each writer.
struct Lane {
    alignas(64) std::atomic<std::uint64_t> pushed;  // slots published, ever
    std::atomic<std::uint32_t> awaits;              // the learner sleeps until there is room
    alignas(64) std::atomic<std::uint64_t> taken;   // slots emptied, ever
    std::atomic<std::uint32_t> room;                // moves when one that sleeps is to look again
    alignas(64) std::atomic<std::uint32_t> reading; // the learner copies weights that must not move
};

struct Shape {
    std::uint64_t learners, slots, slot_nbytes, weights_nbytes;

    bool operator==(const Shape&) const = default;
};

struct Header {
    std::uint64_t magic;
    Shape shape;
    alignas(64) std::atomic<std::uint32_t> bell;    // moves when the server is to look again
    std::atomic<std::uint32_t> dozing;              // the server sleeps until then
    alignas(64) std::atomic<std::uint64_t> version; // updates made
    std::atomic<std::uint64_t> beat;                // moves as long as the server is well
    alignas(64) std::atomic<std::uint32_t> closing; // no more will be pushed
    alignas(64) std::atomic<std::uint32_t> writing; // 1 + who changes weights; 0: nobody does
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

class Segment {
  public:
    // The bytes that a segment of this shape takes; nothing if no address space holds them.
    static std::optional<std::size_t> nbytes(const Shape& shape) noexcept;

    // Makes zeroed memory of that many bytes a segment.
    static void format(std::byte* base, const Shape& shape) noexcept;

    // Why this memory is no segment; nullptr if it is one.
    static const char* check(const std::byte* base, std::size_t nbytes) noexcept;

    explicit Segment(std::byte* base) noexcept;

    // As it was when this process came: what others may write since cannot lead it astray.
    const Shape& shape() const noexcept { return shape_; }
    Header& header() const noexcept { return *header_; }
    Lane& lane(std::uint64_t learner) const noexcept { return lanes_[learner]; }
    std::size_t weights_at() const noexcept;
    std::size_t slot_at(std::uint64_t learner, std::uint64_t slot) const noexcept;

    // ---- a learner's side

    // The slot to fill, once there is room; nothing if there is none within the limit.
    std::optional<std::uint64_t> reserve(std::uint64_t learner, double limit_s) const noexcept;
    // The reserved slot is the server's from here on.
    void publish(std::uint64_t learner) const noexcept;

    // ---- the server's side

    struct Ready {
        std::uint64_t learner, slot;
    };
    // A published slot, of the learners in turn after `last`; nothing if none comes in time.
    std::optional<Ready> next(std::uint64_t last, double limit_s) const noexcept;
    // The server is well.
    void beat() const noexcept;
    // Nothing to look for: sleep, until somebody rings, and be well.
    void rest(double limit_s) const noexcept;
    // The oldest published slot is the learner's again.
    void release(std::uint64_t learner) const noexcept;
    // So is every one before `pushed`, of those published.
    void discard(std::uint64_t learner, std::uint64_t pushed) const noexcept;

    // ---- weights that hold still

    // False if whoever is in the way stays for longer than the limit.
    bool begin_reading(std::uint64_t learner, double limit_s) const noexcept;
    void end_reading(std::uint64_t learner) const noexcept;
    // Who died while writing has it still when it comes back, as long as nobody has buried it.
    bool begin_writing(std::uint64_t who, double limit_s) const noexcept;
    void end_writing() const noexcept;
    // One that has died reads and writes no more.
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
