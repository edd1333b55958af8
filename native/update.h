#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace slipstream {

// Optimizers' updates of weights in place, from gradients as they lie in a slot.
//
// A slot begins with one word for each tensor, its form: kAbsent, kDense, or kRows + the number of
// rows that are not zero; then kSettings doubles for each parameter group, what its optimizer is
// set to. After that come the tensors, each at its own place and whole, and the numbers of rows. A
// row may be named twice: it counts once, since what was applied is zero then.

constexpr std::uint64_t kAbsent = 0, kDense = 1, kRows = 2;
constexpr std::size_t kSettings = 8;

// Adds rows of values to those of `out` that `ids` names, and notes their numbers. False, and nothing
// has changed, if `out` has no such row.
template <typename T>
bool add_rows(T* out, std::int64_t* numbers, std::size_t all, std::size_t width,
              const std::int64_t* ids, const T* values, std::size_t rows) noexcept;

enum class Rule {
    sgd,      // lr, momentum, dampening, weight decay, nesterov, maximize
    adam,     // lr, beta1, beta2, epsilon, weight decay, decoupled, maximize
    rmsprop,  // lr, alpha, epsilon, weight decay, momentum, centered, maximize
    adagrad,  // lr, lr decay, epsilon, weight decay, initial sum, maximize
};

struct Place {
    std::size_t weights_at;  // bytes from the beginning of the weights, and of an optimizer's memories
    std::size_t slot_at;     // bytes from the beginning of a slot
    std::size_t numbers_at;  // of the rows' numbers in a slot, as int64
    std::size_t count;       // values
    std::size_t width;       // values of a row; 0 where rows do not travel
    std::size_t group;
    bool is_double;
};

class Update {
  public:
    Update(Rule rule, std::vector<Place> places, std::size_t groups);

    std::size_t weights_nbytes() const noexcept { return weights_nbytes_; }
    std::size_t slot_nbytes() const noexcept { return slot_nbytes_; }
    std::size_t tensors() const noexcept { return places_.size(); }

    // What an optimizer remembers, each of the size of the weights, and its steps by tensor; zeros
    // at first. `third` is centered RMSprop's alone.
    struct Memory {
        std::byte *first, *second, *third;
        std::uint64_t* steps;
    };

    // Why the slot cannot be applied, and then nothing has changed; nullptr if it was. What came in
    // rows is all zeros afterwards.
    const char* apply(std::byte* weights, std::byte* slot, const Memory& memory);

  private:
    const char* take_and_check(const std::byte* slot);
    template <typename T>
    void one(const Place& place, std::byte* weights, std::byte* slot, std::size_t tensor,
             const double* settings, const Memory& memory, std::uint64_t& steps);

    Rule rule_;
    std::vector<Place> places_;
    std::size_t groups_, weights_nbytes_ = 0, slot_nbytes_ = 0;
    // Of the slot being applied: a copy, since whoever filled it could still write there.
    std::vector<std::uint64_t> forms_;
    std::vector<std::vector<std::int64_t>> numbers_;
};

}  // namespace slipstream
