#include "board.h"

#include <algorithm>

#include "futex.h"

namespace slipstream {

namespace {

constexpr std::size_t kLine = 64;

constexpr std::uint64_t kRound = 2 * Board::kSteps;  // the increment of a word with each round

constexpr std::size_t row_nbytes(std::uint64_t tensors) {
    return (tensors * sizeof(std::uint64_t) + kLine - 1) / kLine * kLine;
}

}  // namespace

std::optional<std::size_t> Board::nbytes(std::uint64_t workers, std::uint64_t tensors) noexcept {
    if (workers < 1 || workers > kMostWorkers || tensors < 1 || tensors > kMostTensors)
        return std::nullopt;
    return 2 * sizeof(Ring) + workers * sizeof(Note) + (workers + 1) * row_nbytes(tensors);
}

void Board::note(std::uint64_t worker, std::uint64_t round, std::uint64_t number) const {
    note_of(worker).numbers[round % 2].store(number, std::memory_order_relaxed);
}

std::uint64_t Board::noted(std::uint64_t worker, std::uint64_t round) const {
    return note_of(worker).numbers[round % 2].load(std::memory_order_relaxed);
}

void Board::publish(std::uint64_t row, std::uint64_t tensor, std::uint64_t round, bool present,
                    std::uint64_t step) const {
    const std::uint64_t told = (round + 1) * kRound + step % kSteps * 2 + present;
    word(row, tensor).store(told, std::memory_order_release);
    Ring& rung = ring(row == workers_ || row == 0 ? results : contributions);
    rung.moves.fetch_add(1, std::memory_order_seq_cst);
    if (rung.sleepers.load(std::memory_order_seq_cst) != 0) wake(rung.moves);
}

std::optional<bool> Board::published(std::uint64_t row, std::uint64_t tensor,
                                     std::uint64_t round) const {
    const std::uint64_t found = word(row, tensor).load(std::memory_order_acquire);
    if (found / kRound < round + 1) return std::nullopt;
    return found % 2 != 0;
}

std::uint64_t Board::step(std::uint64_t row, std::uint64_t tensor) const {
    return word(row, tensor).load(std::memory_order_acquire) / 2 % kSteps;
}

std::vector<std::uint64_t> Board::arrived(std::uint64_t round,
                                          const std::vector<std::uint64_t>& tensors) const {
    std::vector<std::uint64_t> found;
    for (const std::uint64_t tensor : tensors) {
        bool all = true;
        for (std::uint64_t row = 1; all && row < workers_; ++row)
            all = word(row, tensor).load(std::memory_order_acquire) / kRound >= round + 1;
        if (all) found.push_back(tensor);
    }
    return found;
}

std::uint32_t Board::bell(Bell which) const {
    return ring(which).moves.load(std::memory_order_seq_cst);
}

void Board::sleep(Bell which, std::uint32_t seen, double limit_s) const {
    Ring& rung = ring(which);
    rung.sleepers.fetch_add(1, std::memory_order_seq_cst);
    sleep_while(rung.moves, seen, after(limit_s));
    rung.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

Board::Ring& Board::ring(Bell which) const {
    return *reinterpret_cast<Ring*>(base_ + which * sizeof(Ring));
}

Board::Note& Board::note_of(std::uint64_t worker) const {
    return *reinterpret_cast<Note*>(base_ + 2 * sizeof(Ring) + worker * sizeof(Note));
}

std::atomic<std::uint64_t>& Board::word(std::uint64_t row, std::uint64_t tensor) const {
    std::byte* rows = base_ + 2 * sizeof(Ring) + workers_ * sizeof(Note);
    return *reinterpret_cast<std::atomic<std::uint64_t>*>(rows + row * row_nbytes(tensors_) +
                                                          tensor * sizeof(std::uint64_t));
}

}  // namespace slipstream
