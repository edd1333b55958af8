#include "ring.h"

#include <algorithm>
#include <limits>
#include <new>

#include "futex.h"

namespace slipstream {

namespace {

constexpr std::uint64_t kMagic = 0x31'67'6e'69'72'70'69'6cULL;  // "lipring1"
constexpr std::size_t kPage = 4096;
constexpr std::uint64_t kMost = std::uint64_t{1} << 40;  // of any size, so that products do not overflow
// The longest wait for a slot or an answer that is about to come; longer, and sleeping is cheaper.
constexpr int kLooks = 64;

constexpr std::size_t rounded(std::size_t nbytes, std::size_t unit) {
    return (nbytes + unit - 1) / unit * unit;
}

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

std::size_t weights_offset(const Shape& shape) {
    return rounded(rounded(sizeof(Header), 64) + shape.learners * sizeof(Lane), kPage);
}

std::size_t slots_offset(const Shape& shape) {
    return weights_offset(shape) + rounded(shape.weights_nbytes, kPage);
}

}  // namespace

std::optional<std::size_t> Segment::nbytes(const Shape& shape) noexcept {
    const std::uint64_t parts[] = {shape.learners, shape.slots, shape.slot_nbytes,
                                   shape.weights_nbytes};
    if (std::any_of(std::begin(parts), std::end(parts),
                    [](std::uint64_t part) { return part < 1 || part > kMost; }))
        return std::nullopt;
    if (shape.learners > 4096 || shape.slots > 4096) return std::nullopt;
    const __uint128_t total =
        slots_offset(shape) + static_cast<__uint128_t>(shape.learners) * shape.slots *
                                  rounded(shape.slot_nbytes, kPage);
    if (total > std::numeric_limits<std::size_t>::max() / 2) return std::nullopt;
    return static_cast<std::size_t>(total);
}

void Segment::format(std::byte* base, const Shape& shape) noexcept {
    auto* header = new (base) Header{};
    header->shape = shape;
    for (std::uint64_t learner = 0; learner < shape.learners; ++learner)
        new (base + rounded(sizeof(Header), 64) + learner * sizeof(Lane)) Lane{};
    header->magic = kMagic;
}

const char* Segment::check(const std::byte* base, std::size_t nbytes) noexcept {
    if (nbytes < sizeof(Header)) return "it is shorter than a segment's header";
    const auto* header = reinterpret_cast<const Header*>(base);
    if (header->magic != kMagic) return "it does not begin as a segment does";
    const auto expected = Segment::nbytes(header->shape);
    if (!expected || *expected != nbytes) return "it has another size than its header says";
    return nullptr;
}

Segment::Segment(std::byte* base) noexcept
    : base_(base),
      header_(reinterpret_cast<Header*>(base)),
      lanes_(reinterpret_cast<Lane*>(base + rounded(sizeof(Header), 64))),
      shape_(header_->shape) {}

std::size_t Segment::weights_at() const noexcept { return weights_offset(shape()); }

std::size_t Segment::slot_at(std::uint64_t learner, std::uint64_t slot) const noexcept {
    return slots_offset(shape()) +
           (learner * shape().slots + slot) * rounded(shape().slot_nbytes, kPage);
}

std::optional<std::uint64_t> Segment::reserve(std::uint64_t learner, double limit_s) const noexcept {
    Lane& own = lane(learner);
    const std::uint64_t slots = shape().slots;
    const std::uint64_t pushed = own.pushed.load(std::memory_order_relaxed);
    const auto has_room = [&](std::memory_order order) { return pushed - own.taken.load(order) < slots; };
    for (int look = 0; look < kLooks; ++look) {
        if (has_room(std::memory_order_acquire)) return pushed % slots;
        pause();
    }
    const auto until = after(limit_s);
    do {
        const std::uint32_t seen = own.room.load(std::memory_order_acquire);
        own.awaits.store(1, std::memory_order_seq_cst);
        if (!has_room(std::memory_order_seq_cst)) sleep_while(own.room, seen, until);
        own.awaits.store(0, std::memory_order_relaxed);
        if (has_room(std::memory_order_acquire)) return pushed % slots;
    } while (Clock::now() < until);
    return std::nullopt;
}

void Segment::publish(std::uint64_t learner) const noexcept {
    Lane& own = lane(learner);
    own.pushed.store(own.pushed.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
    if (header_->dozing.load(std::memory_order_seq_cst) != 0) ring();
}

void Segment::ring() const noexcept {
    header_->bell.fetch_add(1, std::memory_order_release);
    wake(header_->bell);
}

std::optional<Segment::Ready> Segment::look(std::uint64_t last) const noexcept {
    const std::uint64_t learners = shape().learners;
    for (std::uint64_t step = 1; step <= learners; ++step) {
        const std::uint64_t learner = (last + step) % learners;
        const Lane& each = lane(learner);
        const std::uint64_t taken = each.taken.load(std::memory_order_relaxed);
        if (each.pushed.load(std::memory_order_seq_cst) != taken)
            return Ready{learner, taken % shape().slots};
    }
    return std::nullopt;
}

void Segment::beat() const noexcept { header_->beat.fetch_add(1, std::memory_order_relaxed); }

std::optional<Segment::Ready> Segment::next(std::uint64_t last, double limit_s) const noexcept {
    beat();
    for (int tries = 0; tries < kLooks; ++tries) {
        if (const auto ready = look(last)) return ready;
        pause();
    }
    const auto until = after(limit_s);
    do {
        const std::uint32_t seen = header_->bell.load(std::memory_order_acquire);
        header_->dozing.store(1, std::memory_order_seq_cst);
        auto ready = look(last);
        if (!ready) sleep_while(header_->bell, seen, until);
        header_->dozing.store(0, std::memory_order_relaxed);
        if (ready || (ready = look(last))) return ready;
        if (header_->closing.load(std::memory_order_acquire) != 0) return std::nullopt;
    } while (Clock::now() < until);
    return std::nullopt;
}

void Segment::rest(double limit_s) const noexcept {
    beat();
    const std::uint32_t seen = header_->bell.load(std::memory_order_acquire);
    if (header_->closing.load(std::memory_order_acquire) == 0)
        sleep_while(header_->bell, seen, after(limit_s));
}

void Segment::release(std::uint64_t learner) const noexcept {
    Lane& its = lane(learner);
    its.taken.store(its.taken.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
    if (its.awaits.load(std::memory_order_seq_cst) != 0) {
        its.room.fetch_add(1, std::memory_order_release);
        wake(its.room);
    }
}

void Segment::discard(std::uint64_t learner, std::uint64_t pushed) const noexcept {
    Lane& its = lane(learner);
    its.taken.store(pushed, std::memory_order_seq_cst);
    its.room.fetch_add(1, std::memory_order_release);
    wake(its.room);
}

bool Segment::begin_reading(std::uint64_t learner, double limit_s) const noexcept {
    Lane& own = lane(learner);
    const auto until = after(limit_s);
    for (;;) {
        own.reading.store(1, std::memory_order_seq_cst);
        const std::uint32_t writer = header_->writing.load(std::memory_order_seq_cst);
        if (writer == 0) return true;
        end_reading(learner);
        if (Clock::now() >= until) return false;
        sleep_while(header_->writing, writer, until);
    }
}

void Segment::end_reading(std::uint64_t learner) const noexcept {
    Lane& own = lane(learner);
    own.reading.store(0, std::memory_order_seq_cst);
    if (header_->writing.load(std::memory_order_seq_cst) != 0) wake(own.reading);
}

bool Segment::begin_writing(std::uint64_t who, double limit_s) const noexcept {
    const auto until = after(limit_s);
    const auto mine = static_cast<std::uint32_t>(who + 1);
    for (;;) {
        std::uint32_t holder = 0;
        if (header_->writing.compare_exchange_strong(holder, mine, std::memory_order_seq_cst)) break;
        if (holder == mine) break;
        if (Clock::now() >= until) return false;
        sleep_while(header_->writing, holder, until);
    }
    for (std::uint64_t learner = 0; learner < shape().learners; ++learner) {
        while (lane(learner).reading.load(std::memory_order_seq_cst) != 0) {
            if (Clock::now() >= until) {
                end_writing();
                return false;
            }
            sleep_while(lane(learner).reading, 1, until);
        }
    }
    return true;
}

void Segment::end_writing() const noexcept {
    header_->writing.store(0, std::memory_order_seq_cst);
    wake(header_->writing);
}

void Segment::release_dead(std::uint64_t who) const noexcept {
    if (who < shape().learners) {
        lane(who).reading.store(0, std::memory_order_seq_cst);
        wake(lane(who).reading);
    }
    auto its = static_cast<std::uint32_t>(who + 1);
    if (header_->writing.compare_exchange_strong(its, 0, std::memory_order_seq_cst))
        wake(header_->writing);
}

}  // namespace slipstream
